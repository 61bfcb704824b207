"""Time of a call, measured by the device's clock."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from msgspec import Struct, structs

from primus.machine.measurements import Timing
from primus.statistics import bootstrap_interval, compute_mad, compute_quantile, thin_series

SHORTEST_SAMPLE_S = 50e-6
"""Samples shorter than this are batched: the clock of events resolves 0.5 microseconds (CUDA runtime API,
cudaEventElapsedTime), which is 1 % of it, and an event of HIP can give 0."""
MAX_CALLS = 1024
MOST_QUEUED = 512
"""Maximum number of samples with pending events; about 20,000 pairs exhaust the event pools of drivers. At this number
the older half is read while the device works on the other half."""
SETTLED_WITHIN = 0.02
"""Relative difference of successive warm-up medians below which times are steady."""
ROUND = 5
"""Calls of one warm-up round; a call that takes longer than the warm-up is a round by itself."""
LONG_CALL_S = 0.1
"""A call from which on a single one says how many fit into the measurement."""
NARROW_CALLS, NARROW_S = 100, 1.0
"""Samples, or seconds of them, before the interval of the median is looked at for the first time."""
TURNS = 10
"""Rounds of a measurement that takes turns with another one: each sees the machine at the same times."""
MAX_RESAMPLED, RESAMPLES = 1000, 500
"""Samples after thinning, and resamples: an interval then takes 0.1 s, and its bounds vary by a tenth of its width."""


class Effort(Struct, frozen=True, kw_only=True):
    """Duration of warm-up and measurement: a number of calls or a time, whichever is reached first."""

    warm_up_calls: int = 50
    warm_up_s: float = 1.0
    longest_warm_up_s: float = 10.0
    """Limit of the warm-up if times do not become steady."""
    calls: int = 100
    measure_s: float = 1.0
    fewest_calls: int = 20
    """Minimum, even if it takes longer than `measure_s`."""
    precision: float | None = None
    """Relative width of the median's 95 % confidence interval at which sampling ends before `measure_s`; None samples
    for the whole time."""


LONG_ENOUGH = Effort()
"""One second after the warm-up, for tests that do not heat a device."""
FULL = Effort(measure_s=10.0, calls=20_000)
"""Ten seconds back to back, after which clocks and temperature are those of training."""
QUICK = Effort(warm_up_calls=5, warm_up_s=0.05, longest_warm_up_s=0.15, calls=30, measure_s=0.2, fewest_calls=3)


def limit_effort(effort: Effort, limit_s: float) -> Effort:
    """`effort` with warm-up and samples limited to a quarter of a time limit each."""
    return structs.replace(
        effort,
        longest_warm_up_s=min(effort.longest_warm_up_s, limit_s / 4),
        measure_s=min(effort.measure_s, limit_s / 4),
    )


class Clock(Protocol):
    """Marks points in time in a device's work queue."""

    def record_mark(self) -> object:
        """Put a mark into the queue without waiting."""

    def compute_seconds(self, begin: object, end: object) -> float:
        """Seconds between two reached marks; may be 0."""

    def wait(self, mark: object) -> None:
        """Wait until the device reaches a mark."""

    def synchronize(self) -> None:
        """Wait until the queue is empty."""


class HostClock:
    """Clock of a synchronous device: the CPU."""

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
    """Clock of a device with a work queue: CUDA and HIP."""

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


class MeasuredDevice(NamedTuple):
    """A device, and with what effort its figures are measured."""

    device: torch.device
    clock: Clock
    effort: Effort
    cache_bytes: int
    """Size of the last-level cache, which operands must exceed."""
    max_bytes: int
    """Limit of the memory for operands."""


def create_clock(device: torch.device) -> Clock:
    """The clock of `device`."""
    return EventClock(device) if device.type == "cuda" else HostClock()


def measure_call(
    call: Callable[[], object],
    clock: Clock,
    effort: Effort,
    before: Callable[[], object] | None = None,
    beside: Callable[[], object] | None = None,
) -> Timing:
    """Time `call` after a warm-up; sampling never waits for the device, so that its queue is never empty.

    Args:
        before: Called before each call outside of the measured time, such as a flush of the cache.
        beside: Another measurement, which takes turns with this one.
    """
    is_settled, last_s = _warm_up(call, clock, effort)
    calls, sample_s = 1, last_s
    if last_s < LONG_CALL_S:
        calls, sample_s = _choose_calls_a_sample(call, clock) if before is None else (1, _time_one(call, clock))
    sampled = _SampledCall(call, clock, calls, before)
    samples, wall_s = _take_until_narrow(sampled, effort, sample_s, beside)
    # HIP events may report 0 for short intervals; one such sample makes the minimum and percentiles meaningless.
    if min(samples) <= 0:  # the clock did not advance: only the time of the whole loop is known
        samples = [wall_s / len(samples)] * len(samples)
    wall_call_s = None if before else wall_s / (len(samples) * calls)
    return summarize_samples([sample / calls for sample in samples], calls, wall_call_s, is_settled)


class _SampledCall(NamedTuple):
    """What a sample times: a number of calls, after what is not timed."""

    call: Callable[[], object]
    clock: Clock
    calls: int = 1
    before: Callable[[], object] | None = None


def _take_until_narrow(
    sampled: _SampledCall, effort: Effort, sample_s: float, beside: Callable[[], object] | None
) -> tuple[list[float], float]:
    """Samples, and the seconds of their loops; with a precision sampling ends when it is reached."""
    most = max(effort.fewest_calls, min(effort.calls, math.ceil(effort.measure_s / sample_s)))
    if effort.precision is None and beside is None:
        return _take_samples(sampled, most)
    samples: list[float] = []
    wall_s, started = 0.0, time.perf_counter()
    num_next = min(most, max(effort.fewest_calls, min(NARROW_CALLS, math.ceil(NARROW_S / sample_s))))
    most_next = max(1, math.ceil(most / TURNS)) if beside else most
    while True:
        num_next = min(num_next, most_next)
        if beside:
            beside()
        more, more_s = _take_samples(sampled, num_next)
        samples, wall_s = samples + more, wall_s + more_s
        spent_s = time.perf_counter() - started
        if len(samples) >= most or (spent_s >= effort.measure_s and len(samples) >= effort.fewest_calls):
            return samples, wall_s
        if effort.precision is not None and len(samples) >= effort.fewest_calls:
            low, high = compute_median_interval(samples)
            if high - low <= effort.precision * statistics.median(samples):
                return samples, wall_s
        # Doubling keeps the number of intervals, whose computation leaves the device idle, logarithmic.
        per_sample_s = spent_s / len(samples)
        num_next = max(
            1, min(len(samples), most - len(samples), math.ceil((effort.measure_s - spent_s) / per_sample_s))
        )


def _time_one(call: Callable[[], object], clock: Clock) -> float:
    samples, wall_s = _take_samples(_SampledCall(call, clock), 3)
    return min(samples) if min(samples) > 0 else wall_s / 3


def compute_median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median."""
    if len(samples) < 2:
        return min(samples), max(samples)
    thinned = thin_series(samples, statistics.median, MAX_RESAMPLED)
    interval = bootstrap_interval(thinned, resamples=RESAMPLES)
    return interval.low, interval.high


def summarize_samples(
    samples_s: Sequence[float], calls: int = 1, wall_s: float | None = None, is_settled: bool = True
) -> Timing:
    """Statistics of the times of single calls; p5 and p95 are interpolated."""
    ordered = sorted(samples_s)
    median = statistics.median(ordered)
    return Timing(
        n=len(ordered),
        calls=calls,
        median_s=median,
        p5_s=compute_quantile(ordered, 0.05),
        p95_s=compute_quantile(ordered, 0.95),
        min_s=ordered[0],
        max_s=ordered[-1],
        mad_s=compute_mad(ordered),
        interval_s=compute_median_interval(samples_s),
        wall_s=wall_s,
        is_settled=is_settled,
    )


def _warm_up(call: Callable[[], object], clock: Clock, effort: Effort) -> tuple[bool, float]:
    """Call until times are steady; returns whether they became steady, and the seconds of the last calls."""
    started, calls, before_s, size = time.perf_counter(), 0, math.inf, 1
    while True:
        samples, wall_s = _take_samples(_SampledCall(call, clock), size)
        median_s = statistics.median(samples)
        calls += size
        is_settled = abs(median_s - before_s) <= SETTLED_WITHIN * median_s
        before_s, spent_s = median_s, time.perf_counter() - started
        is_warm = calls >= effort.warm_up_calls or spent_s >= effort.warm_up_s
        # Both are required: clocks may be steady before a device is warm, and the limit ends a drifting warm-up.
        if (is_warm and is_settled) or spent_s >= effort.longest_warm_up_s:
            return is_settled, median_s
        size = ROUND if wall_s / size < effort.warm_up_s else 1


def _choose_calls_a_sample(call: Callable[[], object], clock: Clock) -> tuple[int, float]:
    """Number of calls that take long enough for the clock, and their seconds."""
    calls = 1
    while True:
        # Of three samples the shortest: the first one may include a lazy initialization.
        samples, wall_s = _take_samples(_SampledCall(call, clock, calls), 3)
        if min(samples) >= SHORTEST_SAMPLE_S:
            return calls, min(samples)
        # A clock that does not advance would double forever.
        if calls >= MAX_CALLS:
            return calls, wall_s / 3
        # Doubling needs few rounds, and overshoots the shortest sample by less than a factor of two.
        calls *= 2


def _take_samples(sampled: _SampledCall, num_samples: int) -> tuple[list[float], float]:
    """Seconds of each of `num_samples` samples, and of the whole loop by the host's clock."""
    call, clock, calls, before = sampled
    started = time.perf_counter()
    found: list[float] = []
    queued: deque[tuple[object, object]] = deque()
    for _ in range(num_samples):
        if before:
            before()
        begin = clock.record_mark()
        for _ in range(calls):
            call()
        queued.append((begin, clock.record_mark()))
        if len(queued) == MOST_QUEUED:
            # Wait for the older half only: the device keeps working on the other half meanwhile.
            clock.wait(queued[MOST_QUEUED // 2 - 1][1])
            found += [clock.compute_seconds(*queued.popleft()) for _ in range(MOST_QUEUED // 2)]
    clock.synchronize()
    wall_s = time.perf_counter() - started
    return found + [clock.compute_seconds(begin, end) for begin, end in queued], wall_s
