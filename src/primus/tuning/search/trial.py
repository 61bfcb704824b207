"""One trial: a short run with changed settings, and what it measured."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Literal

from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.runs import summary
from primus.runs.run_steps import is_rate, load_run_steps
from primus.runs.store import Run
from primus.statistics import bootstrap_interval, find_steady_window

FEWEST_STEPS = 3
"""Steady steps of a trial; fewer do not rank settings."""
LOSS = "loss"

State = Literal["done", "out of memory", "failed", "refused", "timed out"]


class TrialResult(Struct, frozen=True, kw_only=True):
    """The result of one trial."""

    settings: dict[str, str]
    """Settings of the trial; empty for the experiment as written."""
    steps: int
    state: State = "done"
    run: str = ""
    """Run folder, relative to the study."""
    value: float | None = None
    """The metric; for a loss the mean of the last tenth of the steps."""
    cost: float | None = None
    """The value so that less is better."""
    low: float | None = None
    high: float | None = None
    """95 % interval of the cost."""
    core_wait: float | None = None
    """Share of the time in which the threads of a trial on CPUs could run that they waited for a core."""
    reason: str = ""

    @property
    def rank(self) -> float:
        """The cost; infinite for a trial without one."""
        return math.inf if self.cost is None else self.cost

    def is_better(self, other: TrialResult) -> bool:
        """Whether the difference is beyond the noise of both."""
        if self.high is None:
            return False
        return other.low is None or self.high < other.low


def measure_run(run: Run, settings: dict[str, str], steps: int, metric: str) -> TrialResult:
    """The result of a run that has ended.

    Raises:
        UsageError: The run has no such metric.
    """
    state, reason = _find_trial_state(run)
    if state != "done":
        return TrialResult(settings=settings, steps=steps, state=state, reason=reason)
    taken = load_run_steps(run)
    if metric == LOSS:
        losses = [loss for loss in taken.columns[LOSS][-max(1, len(taken.steps) // 10) :] if loss is not None]
        if not losses or taken.columns[LOSS][-1] is None:
            return TrialResult(settings=settings, steps=steps, state="failed", reason="the loss is not finite")
        cost = fmean(losses)
        return TrialResult(settings=settings, steps=steps, value=cost, cost=cost, low=cost, high=cost)
    costs = [cost for attempt in taken.read_costs(metric) for cost in attempt][1:]
    steady = costs[find_steady_window(costs).start :]
    if len(steady) < FEWEST_STEPS:
        raise UsageError(f"a trial of {steps} steps has {len(steady)} steady steps", "increase --steps")
    interval = bootstrap_interval(steady, median, block=None)
    value = 1 / interval.estimate if is_rate(metric) else interval.estimate
    low, high = interval.low, interval.high
    return TrialResult(
        settings=settings,
        steps=steps,
        value=value,
        cost=interval.estimate,
        low=low,
        high=high,
        core_wait=taken.core_wait,
    )


def _find_trial_state(run: Run) -> tuple[State, str]:
    try:
        metadata = run.read_metadata()
    except PrimusError as error:
        return "failed", error.problem
    if summary.find_run_state(run, metadata) == "done":
        return "done", ""
    failure = metadata.outcome.first_failure
    reason = (failure.problem if failure else "") or metadata.outcome.reason or "no outcome"
    signature = failure.signature if failure else ""
    is_memory = "out-of-memory" in signature or "out of memory" in reason.lower()
    return ("out of memory" if is_memory else "failed"), reason.splitlines()[0]
