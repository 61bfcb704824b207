"""What the events of a run say about a fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from primus.drill.fault_kinds import KINDS
from primus.drill.lead import estimate_outage, judge_blame
from primus.drill.result import FaultCase
from primus.drill.timeline import (
    TAIL_STEPS,
    compare_losses,
    measure_reference,
    read_fault_timeline,
)
from primus.plan import RestartPolicy

Event = dict[str, Any]
PLANTED_AT = 12.5


def steps(numbers: Iterable[int], at: float, **more: Any) -> list[Event]:
    """A step each second; the loss of a step is the same each time."""
    return [
        {"time": at + i, "kind": "step", "step": step, "loss": 1 / step, "grad_norm": 0.1 * step, "step_time_s": 1.0}
        | more
        for i, step in enumerate(numbers)
    ]


def killed_rank(resumed_at: int = 8, last: int = 12 + TAIL_STEPS) -> list[Event]:
    """A run whose rank 1 is killed after step 12, and that resumes."""
    return [
        {"time": 0.0, "kind": "run_started", "step": 0, "attempt": 0},
        *steps(range(1, 13), 1.0),
        {"time": 15.0, "kind": "failure", "rank": 1, "hosts": ["n2"], "problem": "rank 1 was killed by SIGKILL"},
        {"time": 15.1, "kind": "attempt_ended", "end": "failed", "hosts": ["n2"], "reason": "killed"},
        {"time": 20.0, "kind": "run_started", "step": resumed_at, "attempt": 1},
        *steps(range(resumed_at + 1, last + 1), 21.0),
    ]


def test_a_killed_rank_is_detected_blamed_and_its_steps_are_counted() -> None:
    found = read_fault_timeline(killed_rank(), KINDS["kill-rank"], PLANTED_AT)
    assert (found.detected_at, found.went_on_at) == (15.0, 21.0)
    assert (found.steps_lost, found.last_step, found.is_over) == (4, 12, True)
    assert judge_blame(KINDS["kill-rank"], found, 1, "n2", 2)
    assert judge_blame(KINDS["kill-rank"], found, 0, "n2", 2) is False
    assert judge_blame(KINDS["kill-rank"], found, 1, "n1", 2) is False


@pytest.mark.parametrize(("events", "is_over"), [(killed_rank(last=12), False), (killed_rank()[:15], False)])
def test_a_run_that_has_not_passed_its_fault_is_not_over(events: list[Event], is_over: bool) -> None:
    assert read_fault_timeline(events, KINDS["kill-rank"], PLANTED_AT).is_over is is_over


def test_what_happened_before_the_fault_is_not_its_detection() -> None:
    early = {"time": 3.0, "kind": "failure", "rank": 0, "hosts": ["n1"], "problem": "another one"}
    found = read_fault_timeline([early, *killed_rank()], KINDS["kill-rank"], PLANTED_AT)
    assert found.blamed_rank == 1


def test_a_lost_node_is_blamed_by_the_result_of_the_attempt() -> None:
    events = killed_rank()
    events[13] = {"time": 14.0, "kind": "hang", "rank": 1, "host": "n1", "problem": "no progress"}
    events[14] |= {"end": "lost node", "hosts": ["n2"], "reason": "n2 was lost"}
    found = read_fault_timeline(events, KINDS["drop-network"], PLANTED_AT)
    assert (found.detected_at, found.blamed_hosts, found.reason) == (14.0, ("n2",), "n2 was lost")
    assert judge_blame(KINDS["drop-network"], found, 1, "n2", 2)


def test_a_full_disk_is_over_with_the_next_complete_checkpoint() -> None:
    failed = {"time": 13.0, "kind": "checkpoint_failed", "step": 12, "problem": "step_12: No space left on device"}
    late = {"time": 13.1, "kind": "checkpoint_saved", "step": 8}
    saved = {"time": 17.5, "kind": "checkpoint_saved", "step": 16}
    events = [*steps(range(1, 13), 1.0), failed, late, *steps(range(13, 17), 14.0)]
    assert read_fault_timeline(events, KINDS["fill-disk"], PLANTED_AT).went_on_at is None
    found = read_fault_timeline([*events, saved, *steps(range(17, 21), 18.0)], KINDS["fill-disk"], PLANTED_AT)
    assert (found.detected_at, found.went_on_at, found.steps_lost, found.is_over) == (13.0, 18.0, 0, True)
    assert judge_blame(KINDS["fill-disk"], found, 0, "n1", 2)


def test_a_slow_rank_is_over_some_steps_after_its_report() -> None:
    slow = {"time": 40.0, "kind": "straggler", "rank": 1, "host": "n2", "ratio": 2.0}
    found = read_fault_timeline(
        [*steps(range(1, 38), 1.0), slow, *steps(range(38, 42), 41.0)], KINDS["slow-rank"], 12.5
    )
    assert (found.detected_at, found.blamed_rank, found.is_over) == (40.0, 1, True)
    assert judge_blame(KINDS["slow-rank"], found, 1, "n2", 2)


def test_equal_losses_are_equal_bit_by_bit() -> None:
    reference = {each["step"]: each for each in steps(range(1, 30), 1.0)}
    assert compare_losses(reference, killed_rank(), PLANTED_AT).is_equal
    events = killed_rank()
    events[-1]["loss"] *= 1 + 2**-52
    found = compare_losses(reference, events, PLANTED_AT)
    assert (found.num_after - found.num_equal_after, found.is_equal, found.is_deterministic) == (1, False, True)
    assert 0 < found.largest_difference < 1e-15


def test_a_training_that_differs_before_the_fault_does_not_repeat_itself() -> None:
    reference = {each["step"]: each for each in steps(range(1, 30), 1.0)}
    reference[3]["grad_norm"] += 1e-9
    assert not compare_losses(reference, killed_rank(), PLANTED_AT).is_deterministic


def test_a_run_without_a_step_after_the_fault_shows_nothing() -> None:
    reference = {each["step"]: each for each in steps(range(1, 30), 1.0)}
    assert not compare_losses(reference, steps(range(1, 13), 1.0), 100.0).is_equal


def test_the_reference_measures_steps_and_checkpoints() -> None:
    saves = [
        {"time": 4.5, "kind": "checkpoint_saved", "step": 4, "wait_s": 0.2, "time_s": 2.0},
        {"time": 8.5, "kind": "checkpoint_saved", "step": 8, "wait_s": 0.4, "time_s": 4.0},
    ]
    found = measure_reference([*steps(range(1, 9), 1.0), *saves, *steps([9], 12.0)])
    assert found is not None
    assert (found.step_s, found.longest_step_s, found.save_s, found.saved_steps) == (1.0, 4.0, 3.0, (4, 8))
    assert found.stall_s == pytest.approx(0.3)
    assert measure_reference(steps([1], 1.0)) is None


def test_the_outage_of_a_real_job_has_its_own_limits() -> None:
    cases = [
        FaultCase(fault="kill-rank", state="recovered", detect_s=3.0, restart_s=10.0, restarted_by="launcher"),
        FaultCase(fault="hang", state="recovered", detect_s=12.0, restart_s=11.0, restarted_by="launcher"),
        FaultCase(fault="kill-node", state="recovered", detect_s=3.0, restart_s=20.0, restarted_by="scheduler"),
        FaultCase(fault="fill-disk", state="recovered", detect_s=100.0, restart_s=100.0),
        FaultCase(fault="drop-network", state="skipped"),
    ]
    found = estimate_outage(cases, RestartPolicy(backoff_s=31.0, hang_timeout_s=610.0), 10.0)
    assert found is not None
    assert found.seconds == pytest.approx((43 + (23 + 600 + 30) + 23) / 3)
    assert "kill-rank 43 s, hang 653 s, kill-node 23 s" in found.source
    assert estimate_outage(cases[3:], RestartPolicy(), 10.0) is None
