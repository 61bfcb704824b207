"""What takes the memory of a training process, and which settings take less, for the message of a shortage."""

from __future__ import annotations

import resource
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs

from primus.config.schema import Trainer
from primus.config.source import format_yaml_value
from primus.frameworks.native.layout_settings import LayoutSettings
from primus.frameworks.native.support import read_own_settings
from primus.frameworks.native.training_settings import TrainingSettings
from primus.machine.probe import probe
from primus.models.counts import count_parameters
from primus.prediction.step_layout import build_layout
from primus.prediction.step_memory import GIB, predict_memory

ROOM = 0.95
"""Share of a device that settings which fit may take by this estimate."""
COMPONENTS = {
    "loss": "the output head and its loss",
    "experts": "the experts",
    "moe": "the router and the exchange of its tokens",
    "ops": "attention, norms and activations",
    "mla": "attention",
    "layers": "the layers",
    "optimizer": "the states of the optimizer",
    "compact_adam": "the states of the optimizer",
    "muon": "the states of the optimizer",
    "checkpoint": "the copy for a checkpoint",
    "model": "the layers",
    "pipeline": "the passes of the pipeline",
    "step": "weights, gradients or the backward pass",
}
"""What a module of this folder computes."""


class StepNeed(NamedTuple):
    """Bytes that a process keeps in a step, by this estimate."""

    weights: float
    gradients: float
    states: float
    activations: float

    def format(self) -> str:
        parts = (f"{name} {value / GIB:.3g}" for name, value in zip(self._fields, self, strict=True))
        return f"about {sum(self) / GIB:.3g} GiB ({', '.join(parts)})"


def explain_shortage(error: BaseException, trainer: Trainer, world: int, device: torch.device) -> tuple[str, str]:
    """What ran out of memory with the sizes of its parts, and up to three settings that would fit."""
    part = next((COMPONENTS[name] for name in _list_modules(error) if name in COMPONENTS), "the set-up")
    # The frames hold the tensors that fill the memory.
    traceback.clear_frames(error.__traceback__)
    need, limit = estimate_need(trainer, world, device.type), _read_limit(device)
    # What the estimate lacks: fragments of the allocator, libraries, other processes of the device.
    other = max(0.0, limit - sum(need))
    where = f"{part}; a step needs {need.format()} of {limit / GIB:.3g} GiB for each process"
    fits: dict[str, str] = {}
    for key, value, changed in list_smaller(trainer):
        size = sum(estimate_need(changed, world, device.type))
        if size + other < ROOM * limit:
            fits.setdefault(key, f"{key}: {value} ({size / GIB:.3g} GiB)")
    if not fits:
        return where, "no single setting fits: train on more processes with use_distributed_optimizer: true"
    return where, f"each of these fits by the same estimate: {'; '.join(list(fits.values())[:3])}"


def _list_modules(error: BaseException) -> list[str]:
    """Modules of this folder in which an error passed, the innermost first."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return [file.stem for file in reversed(files) if file.parent == Path(__file__).parent]


def _read_limit(device: torch.device) -> float:
    """Bytes that a process may use."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    memory, address_space = probe().memory, resource.getrlimit(resource.RLIMIT_AS)[0]
    known = [memory.total_bytes, memory.limit_bytes, address_space if address_space > 0 else None]
    return float(min(each for each in known if each))


def list_smaller(trainer: Trainer) -> Iterator[tuple[str, str, Trainer]]:
    """Keys with values that need less memory, and the experiment with them; what costs least speed comes first."""
    training, optimizer = trainer.training, trainer.optimizer.optimizer
    size, length = training.micro_batch_size, training.seq_length
    halves = [("training", "micro_batch_size", size >> power) for power in range(1, size.bit_length())]
    for group, key, value, is_possible in (
        *((*half, True) for half in halves),
        ("training", "recompute_activations", True, not training.recompute_activations),
        ("parallel", "use_distributed_optimizer", True, not trainer.parallel.use_distributed_optimizer),
        ("optimizer", "optimizer", "adamw_8bit", optimizer in ("adam", "adamw")),
        ("backend_args", "optimizer_cpu_offload", True, optimizer != "muon"),
        ("training", "seq_length", length // 2, length % 2 == 0),
    ):
        if is_possible:
            held = getattr(trainer, group)
            changed = held | {key: value} if isinstance(held, dict) else structs.replace(held, **{key: value})
            yield key, format_yaml_value(value), structs.replace(trainer, **{group: changed})


def estimate_need(trainer: Trainer, world: int, device: str) -> StepNeed:
    """What one of `world` processes keeps: weights and states of the settings, and the activations of a prediction."""
    settings, parallel = read_own_settings(trainer, TrainingSettings), trainer.parallel
    count, layout = count_parameters(trainer.model), read_own_settings(trainer, LayoutSettings)
    pipeline, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    experts = count.experts / (pipeline * parallel.expert_model_parallel_size)
    own = (count.total_parameters - count.experts) / (pipeline * tensor) + experts
    if parallel.use_distributed_optimizer:
        own = min(own, count.total_parameters / world * layout.num_distributed_optimizer_instances)
    width = 2 if settings.main_params_dtype == "bf16" else 4
    moments = {"sgd": width, "muon": width, "adamw_8bit": 2}.get(trainer.optimizer.optimizer, 2 * width)
    states = 0 if settings.optimizer_cpu_offload and device != "cpu" else own * moments
    stages = predict_memory(trainer.model, build_layout(trainer, world))
    return StepNeed(own * width, own * width, states, max(each.activations + each.working for each in stages))
