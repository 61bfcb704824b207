"""The result of a drill, as `--json` prints it and `drill.json` keeps it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from primus.drill.fault_kinds import FaultName
from primus.drill.goodput import GoodputEstimate
from primus.drill.timeline import ReferenceTimes, StepEquality

Restarter = Literal["", "launcher", "scheduler"]
CaseState = Literal["recovered", "not recovered", "not planted", "skipped"]


class FaultCase(Struct, frozen=True, kw_only=True):
    """One fault of a drill."""

    fault: FaultName
    state: CaseState
    reason: str = ""
    """Why it was skipped or not planted; else what the run recorded about its failure."""
    node: int | None = None
    """Node at which it was planted, by its number in the drill."""
    host: str = ""
    rank: int | None = None
    step: int | None = None
    """Last step before it."""
    detect_s: float | None = None
    """From the fault until the run recorded it."""
    restart_s: float | None = None
    """From then until the first step of the next attempt was taken; of a full disk, until the step after the next
    complete checkpoint; None where the ranks went on."""
    steps_lost: int | None = None
    """Steps that were taken again."""
    restarted_by: Restarter = ""
    """Who started the ranks again: `direct --max-restarts`, or the drill in the place of a scheduler."""
    blamed_rank: int | None = None
    blamed_hosts: tuple[str, ...] = ()
    is_blame_right: bool | None = None
    """Whether the run blames the node and rank at which it was planted; None where nobody was left to blame."""
    losses: StepEquality | None = None
    run: str = ""
    """Run folder."""


class OutageEstimate(Struct, frozen=True, kw_only=True):
    """From a failure until training goes on, in a job with the user's own limits instead of those of the drill."""

    seconds: float
    source: str
    """How it follows from the drill."""


class DrillResult(Struct, frozen=True, kw_only=True):
    """The result of a drill."""

    command: tuple[str, ...]
    started: float
    duration_s: float
    nnodes: int
    nproc: int
    hosts: tuple[str, ...]
    version: str
    reference: ReferenceTimes | None
    reference_run: str
    start_s: float | None
    """From the start of the undisturbed launch to the end of its first step."""
    hang_timeout_s: float | None
    """Of the drill."""
    cases: tuple[FaultCase, ...]
    outage: OutageEstimate | None
    failure_rate: float
    """Failures of a node in 1000 days."""
    failure_rate_source: str
    goodput: tuple[GoodputEstimate, ...]
    folder: str
    """Where the report, the logs and the runs are."""
    problem: str = ""
    """Why the drill ended early."""

    @property
    def is_passed(self) -> bool:
        """Whether a fault was planted, and each was recovered from, with the right blame and the undisturbed losses."""
        is_any_planted = any(case.state != "skipped" for case in self.cases)
        return not self.problem and is_any_planted and all(is_case_passed(case) for case in self.cases)


def is_case_passed(case: FaultCase) -> bool:
    """Whether a fault was skipped, or the run behaved as it should."""
    if case.state == "skipped":
        return True
    # Losses of a training that does not repeat itself even undisturbed prove nothing.
    is_equal = case.losses is not None and (case.losses.is_equal or not case.losses.is_deterministic)
    return case.state == "recovered" and case.is_blame_right is not False and is_equal
