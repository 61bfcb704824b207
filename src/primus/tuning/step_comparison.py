"""Judges steps of one run that used tuned kernels and others that did not, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from primus.errors import PrimusError
from primus.statistics import bootstrap_interval
from primus.tuning.product_table import TUNED_STEPS, StepComparison

FEWEST_GROUPS = 5
SKIPPED_GROUPS = 1
"""The first steps also contain initializations."""


def compare_step_times(times_s: Sequence[float], experiment: str, created: float) -> StepComparison:
    """The ratio of the times of tuned steps to those of the others, with its interval.

    A group of steps gives one ratio, in which a steady drift of the machine's speed cancels out.

    Args:
        times_s: Of all steps from the first one, tuned by the pattern of `is_tuned_step`.
        experiment: Name of the experiment.
        created: Seconds since the epoch.

    Raises:
        PrimusError: There are too few steps.
    """
    size = len(TUNED_STEPS)
    groups = [times_s[start : start + size] for start in range(SKIPPED_GROUPS * size, len(times_s) - size + 1, size)]
    if len(groups) < FEWEST_GROUPS:
        raise PrimusError(
            f"{len(times_s)} steps are {len(groups)} groups of {size}; a comparison needs {FEWEST_GROUPS}",
            f"take at least {size * (FEWEST_GROUPS + SKIPPED_GROUPS)}: --steps",
        )
    ratios = []
    for group in groups:
        tuned = sum(time_s for time_s, is_tuned in zip(group, TUNED_STEPS, strict=True) if is_tuned)
        ratios.append(tuned / (sum(group) - tuned))
    interval = bootstrap_interval(ratios, median, block=None)
    return StepComparison(
        experiment=experiment,
        created=created,
        num_steps=len(groups) * size,
        ratio=interval.estimate,
        low=interval.low,
        high=interval.high,
    )
