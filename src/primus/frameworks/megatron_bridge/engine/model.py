"""A model that Megatron-Bridge builds from its description in transformers, and its weights in hub names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from primus.config.exports.hugging_face import format_model_config
from primus.config.schema import Trainer
from primus.errors import UnfitError, UsageError
from primus.frameworks.megatron.engine.config import (
    VOCABULARY_DIVISOR,
    build_fixed_values,
    collect_values,
    compute_padded_vocab_size,
    find_vocabulary_divisor,
)
from primus.frameworks.megatron.engine.model import build_layers, exclude_padding
from primus.frameworks.megatron_bridge.settings import BridgeSettings
from primus.session.ranks.engine_errors import find_reason

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader


class ReaderSource(StateSource):
    """Weights of primus as Megatron-Bridge reads those of a folder of Hugging Face.

    Args:
        weights: In hub names.
        num_rows: Rows of the weights with a row for each token; zeros pad them, which Megatron-Bridge does not.
    """

    def __init__(self, weights: WeightReader, num_rows: int) -> None:
        self._weights, self._names, self._num_rows = weights, sorted(weights.list_tensors()), num_rows

    def get_all_keys(self) -> list[str]:
        return self._names

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        return {key: self._read(key) for key in keys}

    def _read(self, name: str) -> Tensor:
        tensor = self._weights.read(name)
        missing = self._num_rows - len(tensor) if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 0
        return nn.functional.pad(tensor, (0, 0, 0, missing)) if missing > 0 else tensor


class BridgedModel:
    """The part of a model that this process holds, and its translation to hub names.

    Args:
        trainer: The experiment's module.
        settings: Those of Megatron-Bridge alone.
        device: Of this process.
        extra: Fields of the model's configuration that the user sets.
        uses_transformer_engine: Whether its layers are used.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: BridgeSettings,
        device: torch.device,
        extra: Mapping[str, Any],
        uses_transformer_engine: bool,
    ) -> None:
        self.bridge, self.config = open_provider(trainer, settings)
        _configure(self.config, trainer, device, extra, uses_transformer_engine)
        self.module: nn.Module = self.config.provide(
            pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
        )
        exclude_padding(self.module, trainer.model.vocab_size)
        self._num_rows = compute_padded_vocab_size(trainer)
        if device.type == "cuda":
            self.module.cuda(device)

    def load_weights(self, weights: WeightReader) -> None:
        """Copy weights in hub names into this process's part.

        Raises:
            UsageError: The model is of a recipe, which has no hub names.
        """
        if self.bridge is None:
            raise UsageError(
                "load: weights cannot be loaded into a model of a recipe",
                "set init: engine, and load a run's checkpoint",
            )
        source = SimpleNamespace(
            state=StateDict(ReaderSource(weights, self._num_rows)),
            config=self.bridge.hf_pretrained,
            model_name_or_path="the experiment's weights",
        )
        self.bridge._model_bridge.load_weights_hf_to_megatron(source, [self.module])


def open_provider(trainer: Trainer, settings: BridgeSettings) -> tuple[AutoBridge | None, Any]:
    """The translation of a model, and Megatron-Bridge's provider of it; a model of a recipe has no translation.

    Raises:
        UnfitError: The recipe is not installed.
        UsageError: Megatron-Bridge does not know the model.
    """
    if settings.recipe and settings.flavor:
        return None, find_recipe(settings.recipe, settings.flavor)().model
    from transformers import AutoConfig

    values = json.loads(format_model_config(trainer.model).text)
    try:
        bridge = AutoBridge.from_hf_config(AutoConfig.for_model(values.pop("model_type"), **values))
    except ValueError as error:
        raise UsageError(
            f"megatron-bridge does not know the model: {find_reason(error)}", "choose another framework"
        ) from error
    return bridge, bridge.to_megatron_provider(load_weights=False)


def find_recipe(module: str, function: str) -> Callable[[], Any]:
    """The function of a recipe, of Megatron-Bridge or of another installed package.

    Raises:
        UnfitError: There is none.
    """
    for name in (f"megatron.bridge.recipes.{module}", module):
        try:
            found: Callable[[], Any] | None = getattr(importlib.import_module(name), function, None)
        except ModuleNotFoundError as error:
            if error.name and not name.startswith(error.name):
                raise
            continue
        if found is not None:
            return found
    raise UnfitError(
        f"recipe: {module}: no installed module has the function {function}",
        "install the package of the recipe next to Megatron-Bridge, or choose a model that transformers has",
    )


def _configure(
    config: Any, trainer: Trainer, device: torch.device, extra: Mapping[str, Any], uses_transformer_engine: bool
) -> None:
    """Set what the experiment says of the training, not of the model."""
    values = collect_values(trainer, "transformer", except_group="model")
    values |= build_fixed_values(trainer, device.type == "cuda")
    values |= {
        "autocast_dtype": values["params_dtype"],
        "seq_length": trainer.training.seq_length,
        "moe_grouped_gemm": uses_transformer_engine and config.num_moe_experts is not None,
        "moe_aux_loss_coeff": trainer.model.moe_aux_loss_coeff,
        "cross_entropy_loss_fusion": uses_transformer_engine,
        "perform_initialization": True,
        "should_pad_vocab": True,
        VOCABULARY_DIVISOR: find_vocabulary_divisor(trainer),
        "_pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        **extra,
    }
    for name, value in values.items():
        setattr(config, name, value)
    if not uses_transformer_engine:
        config.transformer_layer_spec = partial(build_layers, use_transformer_engine=False)
    config.finalize()
