"""Soak tests of one rank: host memory, a reference training, and a burn-in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from msgspec import structs

from primus.machine.measurements import BurnIn, MeasuredFigure, MeasurementPlan, RankResult, ReferenceTraining
from primus.measure.devices import memory, telemetry
from primus.measure.devices.device import find_array_bytes
from primus.measure.endurance import burn_in
from primus.measure.kernels import gemm
from primus.measure.kernels.gemm import Multiply
from primus.measure.timing import QUICK, Effort, HostClock, MeasuredDevice, create_clock, limit_effort
from primus.runs.attempt import Attempt

HOST_PATTERN_BYTES = 64 * 2**20
"""Maximum for a process on a CPU, since other programs use the host's memory as well."""
HOST_EFFORT = Effort(warm_up_calls=3, warm_up_s=0.5, longest_warm_up_s=2.0, calls=50, measure_s=2.0, fewest_calls=5)
TRAININGS = 2
"""Repetitions, which distinguish a device that is not reproducible from one that differs from the others."""

Train = Callable[[torch.device], tuple[str, float]]
"""Trains a small model deterministically; returns a digest of all losses and weights, and the last loss."""


TryKernels = Callable[[torch.device], list[tuple[str, str]]]
"""Tries fused kernels against float64; their names, and what is wrong with each, empty if it is right."""


class EnduranceWorkload(NamedTuple):
    """Computations of the tests; tests of this module replace them to simulate faulty devices."""

    train: Train | None = None
    try_kernels: TryKernels | None = None
    multiply: Multiply = gemm.multiply_matrices
    """The product of the burn-in."""


WORKLOAD = EnduranceWorkload()


class EnduranceContext(NamedTuple):
    """Context in which one rank runs the tests."""

    attempt: Attempt
    asked: MeasurementPlan
    device: torch.device
    num_local: int
    """Ranks of its node."""
    workload: EnduranceWorkload


def duration_s(name: str, asked: MeasurementPlan) -> float:
    """Duration of a test."""
    return asked.burn_in_s if name == "burn_in" else 0.0


def run(name: str, place: EnduranceContext, rank: RankResult, keep: Callable[[RankResult], None]) -> None:
    """Run one test; `keep` is called with the rank's results each time that they grow."""
    if name == "host_memory":
        keep(structs.replace(rank, figures=(*rank.figures, _measure_host_memory(place))))
    elif name == "quickstart":
        keep(structs.replace(rank, trainings=tuple(_run_training(place))))
    elif name == "burn_in":
        _run_burn_in(place, rank, keep)


def _measure_host_memory(place: EnduranceContext) -> MeasuredFigure:
    """The STREAM triad by all processes of the node concurrently, each with its share of the processors."""
    threads = max(1, len(os.sched_getaffinity(0)) // place.num_local)
    is_quick, host = place.asked.is_quick, torch.device("cpu")
    max_bytes = find_array_bytes(host, place.num_local, is_quick=is_quick)
    # Every process runs the triad at the same time: with all cores each, they would measure contention.
    with _limit_threads(threads):
        measured = MeasuredDevice(
            device=host,
            clock=HostClock(),
            effort=limit_effort(QUICK if is_quick else HOST_EFFORT, place.asked.timeout_s),
            cache_bytes=memory.read_host_cache_bytes(),
            max_bytes=max_bytes,
        )
        (figure,) = memory.run(measured, {"triad": memory.KERNELS["triad"]})
    return structs.replace(figure, test="host_triad", convention=f"{figure.convention}, {threads} threads")


@contextmanager
def _limit_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_training(place: EnduranceContext) -> Iterator[ReferenceTraining]:
    train = place.workload.train
    if train is None:
        return
    # The keys of both runs are equal, so different digests mean that this device is not reproducible.
    for _ in range(TRAININGS):
        with _limit_threads(1):  # the result of a sum on a CPU depends on the number of threads
            digest, loss = train(place.device)
            key = burn_in.build_comparable_key(place.device, 0, "reference training")
        yield ReferenceTraining(key=key, digest=digest, last_loss=loss if math.isfinite(loss) else None)


def _run_burn_in(place: EnduranceContext, rank: RankResult, keep: Callable[[RankResult], None]) -> None:
    attempt, asked = place.attempt, place.asked
    sampler = telemetry.create_sampler(attempt.local_rank, place.device.type, asked.burn_in_s)

    def on_window(result: BurnIn) -> None:
        # A heartbeat and a result for each window: a burn-in may be longer than the limit of the hang detector.
        attempt.beat("test", len(result.windows))
        keep(structs.replace(rank, burn_in=result, telemetry=sampler.summarize_telemetry() if sampler else ()))
        attempt.say(
            f"burn-in: {result.duration_s:.0f} of {asked.burn_in_s:.0f} s, {result.windows[-1].tflops:.4g} TFLOP/s, "
            f"{result.wrong_words + result.wrong_memory} wrong words"
        )

    # The sampler runs only during the burn-in, so that its samples are taken under load.
    with sampler or nullcontext(), _use_deterministic_kernels():
        burn_in.run(
            place.device,
            create_clock(place.device),
            burn_in.BurnInLoad(asked.gemm_size, asked.dtype, _count_pattern_bytes(place), place.workload.multiply),
            asked.burn_in_s,
            on_window=on_window,
            is_stopped=lambda: attempt.stop_signal is not None,
        )


@contextmanager
def _use_deterministic_kernels() -> Iterator[None]:
    """Avoids kernels whose result depends on timing, such as rocBLAS atomics (PyTorch, Reproducibility)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _count_pattern_bytes(place: EnduranceContext) -> int:
    found = find_array_bytes(place.device, place.num_local)
    return found if place.device.type == "cuda" else min(found, HOST_PATTERN_BYTES)
