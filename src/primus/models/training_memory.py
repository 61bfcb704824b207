"""A lower bound of the device memory that training needs: weights, gradients and optimizer state, no activations."""

from __future__ import annotations

import math

from msgspec import Struct

from primus.config.schema import Trainer
from primus.machine.facts import MachineFacts
from primus.models.counts import count_parameters

GIB = 2**30
SMALL_BYTES = 4 * GIB
"""Need below which no machine is read: any that trains has more."""
ADAM_BYTES = 14
"""Of a parameter: a master weight and two moments of AdamW in fp32, and a gradient of 2 bytes at least."""
FULL_BYTES = 16
"""The same with weights and gradients in fp32."""
WEIGHT_BYTES = 2
"""Of a parameter that is not trained, or whose optimizer the engine keeps elsewhere or in fewer bits."""
_SMALLER_STATE = ("offload", "precision_aware", "exp_avg", "main_params_dtype", "main_grads_dtype", "fp8_param", "peft")
"""Parts of names of engine settings that shrink what is kept on the device."""
_OWN_DTYPE = "training.dtype"


class MemoryNeed(Struct, frozen=True, kw_only=True):
    """What training keeps of a model, at least."""

    parameters: int
    total_bytes: int
    """Of all devices together, each value once."""
    device_bytes: int | None
    """Of one device where the layout does not shard over the data-parallel processes; None where it does."""


class MemoryFit(Struct, frozen=True, kw_only=True):
    """How a need compares with a machine."""

    need: MemoryNeed
    nodes: int
    devices_of_node: int
    device_memory_bytes: int
    """Memory of one device, or of the host."""
    device: str

    @property
    def fits(self) -> bool:
        need, memory = self.need, self.device_memory_bytes
        each = need.device_bytes or 0
        return each <= memory and need.total_bytes <= self.nodes * self.devices_of_node * memory

    def format_problem(self) -> str:
        """Why it does not fit."""
        need, memory = self.need, self.device_memory_bytes
        number = self.nodes * self.devices_of_node
        text = (
            f"weights, gradients and optimizer state of {need.parameters / 1e9:.3g}B parameters need at least"
            f" {need.total_bytes / GIB:,.1f} GiB; {number} x {self.device} have {number * memory / GIB:,.1f} GiB"
        )
        if need.device_bytes is not None and need.device_bytes > memory:
            text += f", and each device needs {need.device_bytes / GIB:,.1f} GiB of its {memory / GIB:,.1f} GiB"
        return text

    def format_remedy(self) -> str:
        """What would fit."""
        need, memory = self.need, self.device_memory_bytes
        if need.device_bytes is not None and need.device_bytes > memory:
            return "shard it: use_distributed_optimizer: true, or larger model-parallel sizes"
        return f"use at least {math.ceil(need.total_bytes / memory):,} such devices, or a smaller model"


def estimate_need(trainer: Trainer) -> MemoryNeed:
    """What training keeps on devices at least; activations, buffers and what an engine adds come on top."""
    count = count_parameters(trainer.model)
    parameters = count.total_parameters
    each = _count_bytes(trainer)
    layout = trainer.parallel
    shards = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    dense = parameters - count.experts
    device = dense / shards + count.experts / (shards * layout.expert_model_parallel_size)
    is_sharded = layout.use_distributed_optimizer
    return MemoryNeed(
        parameters=parameters,
        total_bytes=parameters * each,
        device_bytes=None if is_sharded else int(device * each),
    )


def _count_bytes(trainer: Trainer) -> int:
    """Bytes of a parameter on a device, at least."""
    keys = [key for key, value in _flatten(trainer.backend_args) if value not in (None, False, "none")]
    if any(part in key for key in keys for part in _SMALLER_STATE) or _OWN_DTYPE in keys:
        return WEIGHT_BYTES
    return ADAM_BYTES if trainer.training.bf16 else FULL_BYTES


def _flatten(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in values.items():
        found += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def compare_with_machine(need: MemoryNeed, facts: MachineFacts, nodes: int = 1) -> MemoryFit | None:
    """The need against the devices of a machine, or its host memory without devices; None where that is not known."""
    sizes = [device.memory_bytes for device in facts.devices if device.memory_bytes]
    if facts.devices:
        if len(sizes) < len(facts.devices):
            return None
        name, memory, number = str(facts.model or "GPU"), max(sizes), len(sizes)
    else:
        known = [each for each in (facts.memory.total_bytes, facts.memory.limit_bytes) if each]
        if not known:
            return None
        name, memory, number = "CPU", min(known), 1
    return MemoryFit(need=need, nodes=nodes, devices_of_node=number, device_memory_bytes=memory, device=name)
