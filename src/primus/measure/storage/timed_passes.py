"""Rates of passes that time themselves: files, data, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue
from primus.errors import PrimusError
from primus.measure.network.rank_groups import read_first_line
from primus.measure.timing import compute_median_interval, summarize_samples
from primus.report.benchmark_table import format_case

FEWEST_PASSES = 3


class PassAmount(NamedTuple):
    """What is counted in each pass."""

    amount: float
    unit: str
    """Unit of the rate; the amount is in it without its `/s`."""
    convention: str


def measure_passes(
    context: BenchmarkContext,
    case: dict[str, CaseValue],
    run_pass: Callable[[], float],
    counted: PassAmount,
    *,
    longest_s: float,
    most_passes: int = 10_000,
) -> BenchmarkRow:
    """The row of passes that each return their seconds.

    The first pass is not a sample: it creates what later passes reuse.
    """
    context.wait_for_all(f"waiting for all ranks before {format_case(case)}")
    with context.limit_time(format_case(case)):
        try:
            run_pass()
            samples = _repeat_passes(run_pass, longest_s, most_passes, context.precision)
        except (OSError, RuntimeError, ValueError, MemoryError, PrimusError) as error:
            return BenchmarkRow(case=case, rank=context.rank, problem=read_first_line(error))
    timing = summarize_samples(samples)
    low_s, high_s = timing.interval_s or (timing.median_s, timing.median_s)
    return BenchmarkRow(
        case=case,
        rank=context.rank,
        value=counted.amount / timing.median_s,
        unit=counted.unit,
        interval=(counted.amount / high_s, counted.amount / low_s),
        timing=timing,
        convention=counted.convention,
    )


def _repeat_passes(run_pass: Callable[[], float], longest_s: float, most_passes: int, precision: float) -> list[float]:
    started = time.monotonic()
    samples: list[float] = []
    while len(samples) < most_passes:
        samples.append(run_pass())
        if len(samples) < FEWEST_PASSES:
            continue
        # The interval is looked at when the number of samples has doubled: it costs more than a short pass.
        is_power = len(samples) & (len(samples) - 1) == 0
        low, high = compute_median_interval(samples) if is_power and len(samples) > 8 else (0.0, float("inf"))
        if time.monotonic() - started >= longest_s or high - low <= precision * sorted(samples)[len(samples) // 2]:
            break
    return samples
