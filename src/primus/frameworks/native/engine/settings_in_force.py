"""The settings in force of a run of native, read from its model, its optimizer and its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from primus.frameworks.native.engine.adapters import Adapter
from primus.frameworks.native.engine.gradient_norm import compute_gradient_norm
from primus.frameworks.native.engine.layers import Linear
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.optimizer import HostOptimizer, name_optimizer
from primus.frameworks.native.engine.recompute import ActivationMemory
from primus.frameworks.native.engine.step import Trainable
from primus.session.settings.settings_in_force import APPLIED_NORM, LiveSetting, explain_settings
from primus.session.settings.torch_settings import (
    StepWatch,
    find_applied_gradients,
    is_model_compiled,
    is_state_sharded,
    read_torch_settings,
)


def read_settings(
    trainable: Trainable, optimizer: torch.optim.Optimizer, watch: StepWatch, reasons: Mapping[str, str]
) -> list[LiveSetting]:
    """The settings that model and optimizer have after the step that `watch` saw, with `reasons` by key."""
    found = {each.key: each for each in read_torch_settings(trainable.model, [optimizer], watch)}
    activations = trainable.model.activations
    if activations is not None and activations.num_layers is not None:
        # What the step shows names their number, which is a setting of its own here.
        found.pop("recompute_activations", None)
    for key, value in _read_own_objects(trainable, optimizer):
        # What the step has shown outranks the flag that asked for it.
        found.setdefault(key, LiveSetting(key=key, value=value))
    return explain_settings(list(found.values()), reasons)


def _read_own_objects(trainable: Trainable, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    model = trainable.model
    layout = model.layout
    yield "compile", is_model_compiled(model, trainable.loss)
    activations = model.activations or ActivationMemory()
    yield "recompute_activations", activations.granularity == "full"
    yield "recompute_granularity", activations.granularity
    yield "cpu_offloading", activations.is_offloaded
    yield "optimizer", name_optimizer(optimizer)
    yield "fp16", model.compute_dtype is torch.float16
    yield "main_params_dtype", {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(next(model.parameters()).dtype)
    yield "optimizer_cpu_offload", isinstance(optimizer, HostOptimizer)
    yield "bf16", model.compute_dtype is torch.bfloat16
    formats = {each.float8 for each in model.modules() if isinstance(each, Linear) and each.float8 is not None}
    yield "fp8", next(("e4m3" if each.forward == each.backward else "hybrid" for each in formats), None)
    yield "loss_chunk_size", model.loss_settings.chunk
    yield "tensor_model_parallel_size", layout.tensor.size
    yield "context_parallel_size", layout.context.size
    yield "pipeline_model_parallel_size", layout.pipeline.size
    yield "num_virtual_stages_per_pipeline_rank", len(model.stage.groups)
    yield "expert_model_parallel_size", layout.expert.size
    yield "sequence_parallel", layout.sequence_parallel
    if layout.data.size > 1:  # else there is nothing to shard
        yield "use_distributed_optimizer", is_state_sharded(model)
    yield APPLIED_NORM, _measure_applied_norm(model, optimizer)
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    kind = "lora" if adapters and adapters[0].length_F is None else "dora"
    yield "peft", kind if adapters else "none"
    if adapters:
        yield "peft_dim", adapters[0].down_RD.shape[0]
        rank = adapters[0].down_RD.shape[0]
        is_root = model.adapters is not None and model.adapters.peft_rslora
        yield "peft_alpha", round(adapters[0].scale * (math.sqrt(rank) if is_root else rank))
        yield "peft_rslora", is_root
        yield "peft_dropout", adapters[0].dropout


def _measure_applied_norm(model: Transformer, optimizer: torch.optim.Optimizer) -> float | None:
    """Norm of the gradient that AdamW got in its only step so far; every process must call it."""
    applied = find_applied_gradients([optimizer])
    if not applied or isinstance(optimizer, HostOptimizer):  # whose gradients are those of its copies
        return None
    own = {name: weight for name, weight in model.place_weights().items() if weight.tensor in applied}
    gradients = [weight.place(applied[weight.tensor]) for name, weight in own.items() if not model.is_copy(name)]
    return float(compute_gradient_norm(gradients, model.layout.pipeline))
