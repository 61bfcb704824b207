"""How an experiment would scale: speed, memory, communication, failures and checkpoints for numbers of nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct, structs

from primus.config.schema import Trainer
from primus.prediction.device_rates import DeviceRates
from primus.prediction.step_layout import StepLayout, build_layout
from primus.prediction.step_memory import GIB, StepMemory, find_largest, predict_memory
from primus.prediction.step_time import predict_step

DAY_S = 86400.0
FAILURES_PER_DEVICE_DAY = 4.7e-4
"""Unexpected interruptions: 419 in 54 days of 16,384 H100 (Llama 3, arXiv:2407.21783, section 3.3.4)."""
SAVE_GB_PER_S = 1.0
"""Written by one device to shared storage, where no save time is measured (assumed)."""
STORAGE_GB_PER_S = 200.0
"""Written by all devices together (assumed)."""
RESTART_S = 600.0
"""From a failure to the first new step, without the work that is done again (assumed)."""


class ScalingPoint(Struct, frozen=True, kw_only=True):
    """The prediction for one number of nodes."""

    nodes: int
    devices: int
    layout: str
    global_batch: int
    tokens_per_step: int
    seconds: float
    tokens_per_s: float
    """Of all devices."""
    tokens_per_s_per_device: float
    efficiency: float
    """Speed of a device over that at the first number of nodes."""
    mfu: float | None
    communication: float
    """Share of the step in which devices wait for collectives."""
    bubble: float
    """Share of the step that pipeline stages wait."""
    memory_gib: float
    fits: bool | None
    failures_per_day: float
    save_s: float
    checkpoint_interval_s: float
    """The best one (Daly 2006)."""
    checkpoint_interval_steps: int
    useful: float
    """Share of the time that is left after saving, lost work and restarts."""


class ScalingRequest(Struct, frozen=True, kw_only=True):
    """What to predict."""

    trainer: Trainer
    rates: DeviceRates
    devices_of_node: int
    failures_per_device_day: float = FAILURES_PER_DEVICE_DAY
    save_s: float | None = None
    """Measured time of a save that training waits for."""
    keeps_batch: bool = False
    """Whether the global batch stays, so that each replica has fewer micro batches; else the batch grows."""


def predict_scaling(request: ScalingRequest, nodes: Sequence[int]) -> list[ScalingPoint]:
    """A point for each number of nodes.

    Raises:
        UsageError: The layout or the batch does not divide over the devices.
    """
    points: list[ScalingPoint] = []
    first: StepLayout | None = None
    for number in nodes:
        layout = _lay_out(request, number, first)
        first = first or layout
        points.append(_predict_point(request, number, layout, points[0] if points else None))
    return points


def _lay_out(request: ScalingRequest, nodes: int, first: StepLayout | None) -> StepLayout:
    devices = nodes * request.devices_of_node
    trainer = request.trainer
    if first is None or request.keeps_batch:
        return build_layout(trainer, devices)
    training = structs.replace(trainer.training, global_batch_size=None)
    layout = build_layout(structs.replace(trainer, training=training), devices)
    return structs.replace(layout, global_batch=first.micro_batches * first.micro_batch * layout.data)


def _predict_point(request: ScalingRequest, nodes: int, layout: StepLayout, first: ScalingPoint | None) -> ScalingPoint:
    spec, rates = request.trainer.model, request.rates
    time, memory = predict_step(spec, layout, rates), find_largest(predict_memory(spec, layout))
    failures = request.failures_per_device_day * layout.devices
    save_s = request.save_s if request.save_s is not None else _estimate_save(memory, layout)
    between = DAY_S / failures
    interval = find_checkpoint_interval(save_s, between)
    limit = rates.memory_bytes
    return ScalingPoint(
        nodes=nodes,
        devices=layout.devices,
        layout=layout.format_settings(),
        global_batch=layout.global_batch,
        tokens_per_step=time.tokens,
        seconds=time.seconds,
        tokens_per_s=time.tokens / time.seconds,
        tokens_per_s_per_device=time.tokens_per_s_per_device,
        efficiency=time.tokens_per_s_per_device / first.tokens_per_s_per_device if first else 1.0,
        mfu=time.mfu,
        communication=time.communication_share,
        bubble=time.terms["bubble"] / time.seconds,
        memory_gib=memory.total / GIB,
        fits=None if limit is None else memory.total <= limit,
        failures_per_day=failures,
        save_s=save_s,
        checkpoint_interval_s=interval,
        checkpoint_interval_steps=max(1, round(interval / time.seconds)),
        useful=find_useful_share(interval, save_s, between),
    )


def _estimate_save(memory: StepMemory, layout: StepLayout) -> float:
    """Seconds in which the devices write weights and optimizer state; replicas write a part each."""
    shared = 1 if layout.sharding == "full" else layout.data
    held = memory.weights / shared + memory.optimizer / (layout.data if layout.sharding == "none" else 1)
    return max(held / SAVE_GB_PER_S, held * layout.devices / STORAGE_GB_PER_S) / 1e9


def find_checkpoint_interval(save_s: float, between_failures_s: float) -> float:
    """Seconds of training between saves that lose the least time.

    Daly, A higher order estimate of the optimum checkpoint interval (2006), equation 37; Young's sqrt(2 save between)
    (1974) is its first term.
    """
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = save_s / (2 * between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def find_useful_share(interval_s: float, save_s: float, between_failures_s: float) -> float:
    """Share of the time in which new steps are taken.

    A save after each interval; each failure loses half of an interval with its save, on average, and a restart.
    """
    saving = interval_s / (interval_s + save_s)
    lost = ((interval_s + save_s) / 2 + RESTART_S) / between_failures_s
    return max(0.0, saving * (1 - min(1.0, lost)))
