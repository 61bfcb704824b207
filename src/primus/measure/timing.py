"""How long a call takes, by the device's clock."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from msgspec import Struct, structs

from primus.machine.measurements import Timing

SHORTEST_SAMPLE_S = 50e-6
"""Samples shorter than this are batched: the clock of events resolves 0.5 microseconds (CUDA runtime API,
cudaEventElapsedTime), which is 1 % of it, and an event of HIP can give 0."""
MAX_CALLS = 1024
MOST_QUEUED = 512
"""Samples whose marks are kept at a time: drivers have pools of events, which some 20,000 pairs exhaust. Where so many
are queued the older half is read, while the device works on the other."""
SETTLED_WITHIN = 0.02
"""Medians of successive warm-up rounds that differ less are steady."""
ROUND = 5
"""Calls of one warm-up round."""


class Effort(Struct, frozen=True, kw_only=True):
    """How long to warm up and to measure: a number of calls or a time, whichever is reached first."""

    warm_up_calls: int = 50
    warm_up_s: float = 1.0
    longest_warm_up_s: float = 10.0
    """Where the times do not settle, until then."""
    calls: int = 100
    measure_s: float = 1.0
    fewest_calls: int = 20
    """Even where they take longer than `measure_s`."""


LONG_ENOUGH = Effort()
"""A second after the warm-up, for what does not heat a device."""
FULL = Effort(measure_s=10.0, calls=20_000)
"""Ten seconds back to back, after which clocks and temperature are what training sees."""
QUICK = Effort(warm_up_calls=5, warm_up_s=0.05, longest_warm_up_s=0.15, calls=30, measure_s=0.2, fewest_calls=3)


def limit_effort(effort: Effort, limit_s: float) -> Effort:
    """`effort`, no longer than a quarter of a time limit each for the warm-up and the samples."""
    return structs.replace(
        effort,
        longest_warm_up_s=min(effort.longest_warm_up_s, limit_s / 4),
        measure_s=min(effort.measure_s, limit_s / 4),
    )


class Clock(Protocol):
    """Marks moments in a device's queue of work."""

    def record_mark(self) -> object:
        """A moment, put into the queue without waiting."""

    def compute_seconds(self, begin: object, end: object) -> float:
        """Time between two marks that were waited for; may be 0."""

    def wait(self, mark: object) -> None:
        """Wait until the device has come to a mark."""

    def synchronize(self) -> None:
        """Wait until the queue is empty."""


class HostClock:
    """For devices that work while they are called: the CPU."""

    def record_mark(self) -> object:
        return time.perf_counter()

    def compute_seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin

    def wait(self, mark: object) -> None:
        return

    def synchronize(self) -> None:
        return


class EventClock:
    """For devices with a queue: CUDA and HIP."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record_mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def compute_seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1e3

    def wait(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def create_clock(device: torch.device) -> Clock:
    """The clock that `device` is timed by."""
    return EventClock(device) if device.type == "cuda" else HostClock()


def measure_call(call: Callable[[], object], clock: Clock, effort: Effort) -> Timing:
    """Time `call` after a warm-up; no sample waits for the device, which always has more work in its queue."""
    is_settled = _warm_up(call, clock, effort)
    calls, sample_s = _calls_a_sample(call, clock)
    num_samples = max(effort.fewest_calls, min(effort.calls, math.ceil(effort.measure_s / sample_s)))
    samples, wall_s = _take_samples(call, clock, num_samples, calls)
    if min(samples) <= 0:  # a clock that stood still: the whole loop is the only time there is
        samples = [wall_s / num_samples] * num_samples
    return summarise_samples([sample / calls for sample in samples], calls, wall_s / (num_samples * calls), is_settled)


def summarise_samples(
    samples_s: Sequence[float], calls: int = 1, wall_s: float | None = None, is_settled: bool = True
) -> Timing:
    """What is told of times of single calls; p5 and p95 lie between samples."""
    ordered = sorted(samples_s)
    median = statistics.median(ordered)
    return Timing(
        n=len(ordered),
        calls=calls,
        median_s=median,
        p5_s=compute_percentile(ordered, 5),
        p95_s=compute_percentile(ordered, 95),
        min_s=ordered[0],
        max_s=ordered[-1],
        mad_s=statistics.median([abs(sample - median) for sample in ordered]),
        wall_s=wall_s,
        is_settled=is_settled,
    )


def compute_percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of sorted values do not exceed, linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _warm_up(call: Callable[[], object], clock: Clock, effort: Effort) -> bool:
    """Call until times are steady; whether they became so."""
    begun, calls, before_s = time.perf_counter(), 0, math.inf
    while True:
        median_s = statistics.median(_take_samples(call, clock, ROUND, 1)[0])
        calls += ROUND
        is_settled = abs(median_s - before_s) <= SETTLED_WITHIN * median_s
        before_s, spent_s = median_s, time.perf_counter() - begun
        is_warm = calls >= effort.warm_up_calls or spent_s >= effort.warm_up_s
        if (is_warm and is_settled) or spent_s >= effort.longest_warm_up_s:
            return is_settled


def _calls_a_sample(call: Callable[[], object], clock: Clock) -> tuple[int, float]:
    """Calls that together take long enough for the clock, and how long they take."""
    calls = 1
    while True:
        samples, wall_s = _take_samples(call, clock, 3, calls)
        if min(samples) >= SHORTEST_SAMPLE_S:
            return calls, min(samples)
        if calls >= MAX_CALLS:
            return calls, wall_s / 3
        calls *= 2


def _take_samples(call: Callable[[], object], clock: Clock, num_samples: int, calls: int) -> tuple[list[float], float]:
    """Seconds of `num_samples` times `calls` calls, and of everything by the host's clock."""
    begun = time.perf_counter()
    found: list[float] = []
    queued: deque[tuple[object, object]] = deque()
    for _ in range(num_samples):
        begin = clock.record_mark()
        for _ in range(calls):
            call()
        queued.append((begin, clock.record_mark()))
        if len(queued) == MOST_QUEUED:
            clock.wait(queued[MOST_QUEUED // 2 - 1][1])
            found += [clock.compute_seconds(*queued.popleft()) for _ in range(MOST_QUEUED // 2)]
    clock.synchronize()
    wall_s = time.perf_counter() - begun
    return found + [clock.compute_seconds(begin, end) for begin, end in queued], wall_s
