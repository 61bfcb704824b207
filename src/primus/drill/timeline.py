"""What the events of a run say about a fault: when it was detected, who is blamed, when training went on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct, structs

from primus.drill.fault_kinds import FaultKind
from primus.runs.events import Event

TAIL_STEPS = 3
"""Steps after the last one before the fault that a recovered run takes: they have losses that nothing repeats."""
COMPARED = ("loss", "grad_norm")


class FaultTimeline(Struct, frozen=True, kw_only=True):
    """The course of a fault; times are in seconds since the epoch, None for what did not happen."""

    detected_at: float | None = None
    went_on_at: float | None = None
    """End of the first step of the next attempt; of a fault without a restart, when the run was as before."""
    steps_lost: int | None = None
    last_step: int = 0
    """Last step before the ranks ended."""
    blamed_rank: int | None = None
    blamed_hosts: tuple[str, ...] = ()
    reason: str = ""
    is_over: bool = False
    """Whether enough steps were taken after it."""


class StepEquality(Struct, frozen=True, kw_only=True):
    """Losses and gradient norms of a run against the undisturbed one, step by step."""

    num_before: int
    """Steps before the fault that both have."""
    num_equal_before: int
    num_after: int
    num_equal_after: int
    largest_difference: float
    """Relative, of the loss, over all steps."""

    @property
    def is_equal(self) -> bool:
        """Whether all are equal bit by bit, and there are some after the fault."""
        return self.num_after > 0 and self.num_after == self.num_equal_after and self.is_deterministic

    @property
    def is_deterministic(self) -> bool:
        """Whether the steps before the fault are equal: if not, the training does not repeat itself."""
        return self.num_before == self.num_equal_before


class ReferenceTimes(Struct, frozen=True, kw_only=True):
    """What the undisturbed run measures."""

    steps: int
    step_s: float
    """Median."""
    longest_step_s: float
    """Longest time between two steps, with its checkpoint or evaluation."""
    stall_s: float
    """Median of the time that training waits for a checkpoint."""
    save_s: float
    """Median of the time from the start of a checkpoint until it is complete."""
    saved_steps: tuple[int, ...]


def read_fault_timeline(events: Sequence[Event], kind: FaultKind, planted_at: float | None) -> FaultTimeline:
    """Follow the events of a run from the fault on.

    Args:
        events: In their order.
        kind: The fault.
        planted_at: When it was planted; None while another node has not reported it.
    """
    since = planted_at if planted_at is not None else -math.inf
    found = next(
        (i for i, each in enumerate(events) if each["kind"] in kind.detected_by and since <= each["time"]),
        None,
    )
    if found is None:
        return FaultTimeline(last_step=_find_last_step(events))
    detected, before, after = events[found], events[:found], events[found + 1 :]
    blamed = _find_blame(kind, events[found:])
    timeline = FaultTimeline(
        detected_at=detected["time"],
        last_step=_find_last_step(before),
        blamed_rank=blamed.get("rank") if isinstance(blamed.get("rank"), int) else None,
        blamed_hosts=tuple(blamed.get("hosts") or filter(None, [blamed.get("host")])),
        reason=str(blamed.get("problem") or blamed.get("reason") or ""),
    )
    if kind.restarts:
        return follow_restart(timeline, after)
    return _follow_continuation(timeline, kind, detected, after)


def follow_restart(timeline: FaultTimeline, after: Sequence[Event]) -> FaultTimeline:
    """`timeline` with the attempt that starts in the events `after` the detection."""
    # Steps that were reported late belong to the old attempt.
    start = next((i for i, each in enumerate(after) if each["kind"] == "run_started"), None)
    last = max(timeline.last_step, _find_last_step(after[:start]))
    if start is None:
        return structs.replace(timeline, last_step=last)
    steps = [each for each in after[start:] if each["kind"] == "step"]
    return structs.replace(
        timeline,
        last_step=last,
        steps_lost=max(0, last - int(after[start].get("step", 0))),
        went_on_at=steps[0]["time"] if steps else None,
        is_over=bool(steps) and steps[-1]["step"] >= last + TAIL_STEPS,
    )


def _follow_continuation(
    timeline: FaultTimeline, kind: FaultKind, detected: Event, after: Sequence[Event]
) -> FaultTimeline:
    """`timeline` of a fault that ends no rank: steps go on, and a checkpoint that failed is followed by a later one."""
    end: Event | None = detected
    if kind.name == "fill-disk":
        saved = (each for each in after if each["kind"] == "checkpoint_saved" and each["step"] > detected["step"])
        end = next(saved, None)
    if end is None:
        return timeline
    steps = [each for each in after if each["kind"] == "step" and each["time"] >= end["time"]]
    went_on_at = steps[0]["time"] if steps else None
    return structs.replace(timeline, went_on_at=went_on_at, steps_lost=0, is_over=len(steps) >= TAIL_STEPS)


def _find_blame(kind: FaultKind, events: Sequence[Event]) -> Event:
    """The event that names the rank or node that is at fault: the later of two knows more about a lost node."""
    if kind.name in ("drop-network", "kill-node"):
        lost = (each for each in events if each["kind"] == "attempt_ended")
        return next(lost, events[0])
    return events[0]


def _find_last_step(events: Sequence[Event]) -> int:
    return max((each["step"] for each in events if each["kind"] == "step"), default=0)


def compare_losses(reference: Mapping[int, Event], events: Sequence[Event], planted_at: float | None) -> StepEquality:
    """Compare the steps of a run before and after its fault with those of the reference.

    Args:
        reference: The step events of the undisturbed run, by step.
        events: Those of the run.
        planted_at: When the fault was planted; None if it was not.
    """
    split = planted_at if planted_at is not None else math.inf
    pairs = [(each, reference[each["step"]]) for each in events if each["kind"] == "step" and each["step"] in reference]
    before = [_is_equal(*pair) for pair in pairs if pair[0]["time"] < split]
    after = [_is_equal(*pair) for pair in pairs if pair[0]["time"] >= split]
    return StepEquality(
        num_before=len(before),
        num_equal_before=sum(before),
        num_after=len(after),
        num_equal_after=sum(after),
        largest_difference=max((_compute_difference(*pair) for pair in pairs), default=0.0),
    )


def _is_equal(a: Event, b: Event) -> bool:
    return all(a.get(name) == b.get(name) for name in COMPARED)


def _compute_difference(a: Event, b: Event) -> float:
    one, other = a.get("loss"), b.get("loss")
    if not isinstance(one, (int, float)) or not isinstance(other, (int, float)):
        return 0.0 if one == other else math.inf
    return abs(one - other) / max(abs(other), 1e-30)


def measure_reference(events: Sequence[Event]) -> ReferenceTimes | None:
    """The times of the undisturbed run; None if it took fewer than two steps."""
    steps = [each for each in events if each["kind"] == "step"]
    if len(steps) < 2:
        return None
    saves = [each for each in events if each["kind"] == "checkpoint_saved"]
    gaps = [b["time"] - a["time"] for a, b in itertools.pairwise(steps)]
    return ReferenceTimes(
        steps=len(steps),
        step_s=median(each["step_time_s"] for each in steps[1:]),
        longest_step_s=max(gaps),
        stall_s=median(each["wait_s"] for each in saves) if saves else 0.0,
        save_s=median(each["time_s"] for each in saves) if saves else 0.0,
        saved_steps=tuple(each["step"] for each in saves),
    )
