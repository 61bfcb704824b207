"""The settings in force of a run of Megatron, read from its model, its optimizer, its groups and its first step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from primus.config.schema import Trainer
from primus.frameworks.megatron.backend_settings import read_settings as read_known_settings
from primus.frameworks.megatron.engine.config import VOCABULARY_DIVISOR, compute_padded_vocab_size
from primus.session.settings.settings_in_force import APPLIED_NORM, LiveSetting, explain_settings
from primus.session.settings.torch_settings import StepWatch, measure_applied_norm, read_torch_settings

ARGUMENTS = "megatron.training.global_vars"
"""Module of Megatron-LM that has its arguments, which megatron-core alone lacks."""
FACTS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "bias_activation_fusion",
         "apply_rope_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion", "cpu_offloading")  # fmt: skip
"""Fields of the model's configuration that change the speed of a step."""


def read_settings(
    model: DistributedDataParallel, optimizer: Any, config: TransformerConfig, trainer: Trainer, watch: StepWatch
) -> list[LiveSetting]:
    """The settings that the objects of Megatron have after the step that `watch` saw.

    Args:
        model: This process's part.
        optimizer: Of `get_megatron_optimizer`.
        config: That the layers of the model read.
        trainer: What the experiment asks for.
        watch: Saw the first step.
    """
    optimizers = list_inner_optimizers(optimizer)
    found = {each.key: each.value for each in read_torch_settings(model, optimizers, watch)}
    found.setdefault("bf16", config.params_dtype is torch.bfloat16)
    found.setdefault("recompute_activations", config.recompute_granularity == "full")
    found |= {name: _simplify(getattr(config, name)) for name in FACTS}
    found |= {
        "attention": _simplify(config.attention_backend),
        "fp8": config.fp8,
        "clip_grad": optimizer.config.clip_grad,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    if found["tensor_model_parallel_size"] > 1:
        found["sequence_parallel"] = config.sequence_parallel
    if parallel_state.get_data_parallel_world_size() > 1:  # else there is nothing to shard
        found["use_distributed_optimizer"] = isinstance(optimizer, DistributedOptimizer) or any(
            isinstance(each, DistributedOptimizer) for each in getattr(optimizer, "chained_optimizers", [])
        )
    if torch.distributed.get_world_size() == 1:  # else an optimizer may have a part of the gradient
        found[APPLIED_NORM] = measure_applied_norm(optimizers)
    if found.get("vocab_rows"):
        found["vocab_rows"] *= found["tensor_model_parallel_size"]  # those of all processes
    objects = {
        "transformer": config,
        "ddp": model.ddp_config,
        "optimizer": optimizer.config,
        "vocabulary": _find_vocabulary_divisor(trainer, found.get("vocab_rows")),
    }
    live = [LiveSetting(key=key, value=value) for key, value in found.items()]
    return [*explain_settings(live, dict(_list_reasons(trainer))), *_read_backend_settings(trainer, objects)]


def list_inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch, Apex or Transformer Engine inside of Megatron's, which may be chained."""
    return [each.optimizer for each in getattr(optimizer, "chained_optimizers", [optimizer]) if each.optimizer]


def _read_backend_settings(trainer: Trainer, objects: Mapping[str, Any]) -> Iterator[LiveSetting]:
    """What `backend_args` asks for, as the configuration objects have it that the model and the optimizer read."""
    known, arguments = read_known_settings(), _find_arguments()
    for name, asked in trainer.backend_args.items():
        if name in known:
            target, _, field = known[name].field.partition(".")
            value, needs = getattr(objects[target], field, None), known[name].needs
            yield LiveSetting(
                key=name,
                value=_simplify(value),
                reason=f"needs {needs.replace('_', ' ')}" if needs and value != asked else "",
            )
        elif hasattr(arguments, name):
            yield LiveSetting(key=name, value=_simplify(getattr(arguments, name)))
        elif asked is not None:
            yield LiveSetting(key=name, value=None, reason="an argument of Megatron-LM's own training")


def _find_vocabulary_divisor(trainer: Trainer, rows: int | None) -> SimpleNamespace:
    """The divisor that was asked for if the embedding has its rows; else the largest one that gives those it has."""
    is_asked = rows in (None, compute_padded_vocab_size(trainer))
    divisor = trainer.backend_args.get(VOCABULARY_DIVISOR)
    return SimpleNamespace(divisor=divisor if is_asked else (rows or 0) // trainer.parallel.tensor_model_parallel_size)


def _find_arguments() -> Any:
    """The arguments of Megatron-LM, after it has validated and changed them; None with megatron-core alone."""
    module = sys.modules.get(ARGUMENTS)
    return getattr(module, "_GLOBAL_ARGS", None)  # Megatron-Bridge imports the module without parsing arguments


def _simplify(value: Any) -> Any:
    """A value as it is written in YAML; a text where Megatron has a choice is no choice to it, and stays a text."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    # Such as a layout of pipeline stages, which is asked for as a text and parsed.
    return list(value) if isinstance(value, tuple) else str(value)


def _list_reasons(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Why Megatron may have another value than the key asks for."""
    granularity = trainer.backend_args.get("recompute_granularity")
    if granularity:
        yield "recompute_activations", f"recompute_granularity: {granularity}"
    if trainer.parallel.context_parallel_size > 1:
        yield "seq_length", "context parallelism gives each process a part of the sequence"
