"""Megatron-Bridge as an engine of the session: its model and adapters over the step of the framework `megatron`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.core import parallel_state, tensor_parallel
from torch import nn

from primus.checkpoint.folders import ADAPTER_FOLDER
from primus.checkpoint.formats.adapter import name_base
from primus.config.schema import Trainer
from primus.frameworks.megatron.engine import checkpoint
from primus.frameworks.megatron.engine.batches import BatchOptions
from primus.frameworks.megatron.engine.config import collect_values
from primus.frameworks.megatron.engine.driver import EngineParts, ExtraFields, MegatronEngine, wrap_model
from primus.frameworks.megatron_bridge.engine.model import BridgedModel
from primus.frameworks.megatron_bridge.engine.settings_in_force import add_adapter_settings
from primus.frameworks.megatron_bridge.settings import BridgeSettings
from primus.session.settings.settings_in_force import LiveSetting
from primus.session.start_weights import open_base_weights

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader

ADAPTER = ".adapter."
"""In the name of each weight of an adapter."""


class AdapterState:
    """The weights of the adapters alone, with the functions of a module that a checkpoint calls."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def sharded_state_dict(self, **options: Any) -> dict[str, object]:
        state = self._module.sharded_state_dict(**options)  # type: ignore[operator]
        return {name: value for name, value in state.items() if ADAPTER in name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict(state, strict=False)


class BridgeEngine(MegatronEngine):
    """Implements `primus.session.engine.Engine`.

    With adapters, the weights of the model are loaded before the adapters are added, also where a run resumes: its
    checkpoints have the adapters only.

    Args:
        trainer: The experiment's module.
        settings: Those of Megatron-Bridge alone.
        device: Of this process.
        global_batch_size: Sequences in one optimizer step.
        options: How examples and documents are treated.
        extra: Fields that the user sets.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: BridgeSettings,
        device: torch.device,
        global_batch_size: int,
        options: BatchOptions,
        extra: ExtraFields,
    ) -> None:
        parallel_state.initialize_model_parallel(**collect_values(trainer, "groups"))
        tensor_parallel.model_parallel_cuda_manual_seed(trainer.training.seed)
        self._bridged = BridgedModel(
            trainer, settings, device, extra.get("transformer", {}), options.uses_transformer_engine
        )
        self._adapters = _build_adapters(settings)
        if self._adapters is not None:
            if trainer.training.init != "engine" or trainer.checkpoint.load is not None:
                self._bridged.load_weights(open_base_weights(trainer))
            self._adapters([self._bridged.module], training=True)
        model, optimizer = wrap_model(trainer, self._bridged.module, self._bridged.config, extra)
        parts = EngineParts(model, optimizer, self._bridged.config, None)
        super().__init__(trainer, device, global_batch_size, options, parts)

    def load_weights(self, weights: WeightReader) -> None:
        """Copy weights in hub names into the model and the optimizer's masters."""
        if self._adapters is not None:
            return  # loaded before the adapters were added
        self._bridged.load_weights(weights)
        self._optimizer.reload_model_params()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random states; with adapters only these, also in the form of peft."""
        if self._adapters is None:
            super().save(folder)
            return
        checkpoint.save_checkpoint(folder, self._adapter_state, self._optimizer, self.num_steps)
        if self._bridged.bridge is not None:
            load, model = self.trainer.checkpoint.load, self.trainer.model
            self._bridged.bridge.save_hf_adapter(
                [self.gpt_model],
                folder / ADAPTER_FOLDER,
                self._adapters,
                # Megatron-Bridge writes no revision.
                base_model_name_or_path=name_base(load, folder / ADAPTER_FOLDER)[0] if load else model.hf_name,
                show_progress=False,
            )

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, also with another layout of processes."""
        if self._adapters is None:
            super().load(folder)
            return
        self.num_steps, _ = checkpoint.load_checkpoint(folder, self._adapter_state, self._optimizer)

    def read_settings(self) -> list[LiveSetting]:
        return add_adapter_settings(super().read_settings(), self.gpt_model)

    @property
    def _adapter_state(self) -> Any:
        return AdapterState(self.gpt_model)


def _build_adapters(settings: BridgeSettings) -> Any:
    if settings.peft == "none":
        return None
    kind = LoRA if settings.peft == "lora" else DoRA
    return kind(
        dim=settings.peft_dim,
        alpha=settings.peft_alpha,
        dropout=settings.peft_dropout,
        target_modules=list(settings.peft_target_modules),
    )
