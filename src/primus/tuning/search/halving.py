"""Successive halving: many short trials first, longer ones for the best (Jamieson and Talwalkar, AISTATS 2016)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from primus.tuning.search.grid import Settings
from primus.tuning.search.trial import TrialResult

STEP_FACTOR = 3
KEPT_SHARE = 1 / 4
"""Three rungs of n/9, n/3 and n steps then cost less than a third of all candidates at n steps."""
FEWEST_STEPS = 6

MeasureAll = Callable[[Sequence[Settings], int], Sequence[TrialResult]]
"""Measures candidates for a number of steps, in any order; gives their results in the order of the candidates."""


def list_rungs(steps: int, num_rungs: int) -> list[int]:
    """Steps of the trials of each rung, rising to `steps`."""
    return [max(min(FEWEST_STEPS, steps), steps // STEP_FACTOR**level) for level in reversed(range(num_rungs))]


def search_best(candidates: Sequence[Settings], rungs: Sequence[int], measure_all: MeasureAll) -> list[TrialResult]:
    """Results of the last rung, the best first.

    Args:
        candidates: The first one is the experiment as written, which takes part in every rung.
        rungs: See `list_rungs`.
        measure_all: Measures the candidates of a rung.
    """
    alive = list(candidates)
    results: list[TrialResult] = []
    for number, steps in enumerate(rungs):
        measured = list(zip(alive, measure_all(alive, steps), strict=True))
        ordered = sorted(measured, key=lambda pair: pair[1].rank)
        results = [result for _, result in ordered]
        if number + 1 < len(rungs):
            kept = max(1, math.ceil(KEPT_SHARE * len(candidates) * KEPT_SHARE**number))
            best = [settings for settings, result in ordered if result.state == "done"][:kept]
            alive = [candidates[0], *(settings for settings in best if settings != candidates[0])]
    return results
