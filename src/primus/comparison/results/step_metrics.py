"""Numbers of the steps of a run or a log, and the metrics that tprimat has of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from primus.comparison.results.result import Numbers, ResultPerformance, ResultSteps
from primus.runs.events import Event


def compute_performance(steps: ResultSteps, num_devices: int | None) -> ResultPerformance:
    """Means over the steps after the first; a run of one step uses that step."""
    times = _list_known(steps.time_s[1:]) or _list_known(steps.time_s)
    if not times or not all(map(math.isfinite, times)):
        return ResultPerformance(total_steps=len(steps.number))
    mean = fmean(times)
    tokens = _list_known(steps.tokens[1:]) or _list_known(steps.tokens)
    rate = fmean(tokens) / mean if tokens else None
    return ResultPerformance(
        total_steps=len(steps.number),
        total_time_seconds=sum(_list_known(steps.time_s)),
        avg_step_time_seconds=mean,
        min_step_time_seconds=min(times),
        max_step_time_seconds=max(times),
        steps_per_second=1 / mean,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / num_devices if rate and num_devices else None,
    )


def _list_known(values: Numbers) -> list[float]:
    return [value for value in values if value]


def list_finite(steps: Sequence[Event], field: str) -> list[float | None]:
    """A field of each step; None where it is not a finite number."""
    return [parse_finite(event.get(field)) for event in steps]


def parse_finite(value: Any) -> float | None:
    """A finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
