"""What follows the end of an attempt is decided by a table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.launch.plan import RestartPolicy
from primus.launch.supervision.restart_policy import (
    FAILURES,
    MAX_WITHOUT_PROGRESS,
    AttemptResult,
    RestartDecision,
    count_failures,
    decide_restart,
)

MANY = RestartPolicy(max_restarts=100, backoff_s=30)


def ends(*told: str | AttemptResult, **common: Any) -> list[AttemptResult]:
    """Ends in order: `failed`, or `failed@20` where checkpoint 20 is the newest."""
    found = []
    for number, each in enumerate(told):
        if isinstance(each, str):
            kind, _, step = each.partition("@")
            each = AttemptResult(attempt=number, kind=kind, step=int(step) if step else None, **common)  # type: ignore[arg-type]
        found.append(each)
    return found


@pytest.mark.parametrize(
    ("told", "action", "delay_s"),
    [
        (["done"], "finish", 0),
        (["failed@1", "done"], "finish", 0),
        (["interrupted@5"], "stop", 0),
        (["preempted@5"], "restart", 0),
        (["failed"], "restart", 30),
        (["hang"], "restart", 30),
        (["failed", "failed"], "restart", 60),
        (["failed", "failed", "failed"], "stop", 0),
        (["failed", "failed", "failed@10"], "restart", 30),
        (["failed@10", "failed@10", "failed@10"], "restart", 120),
        (["failed@10", "failed@10", "failed@10", "failed@10"], "stop", 0),
        (["failed@10", "failed@20", "failed@30", "failed@40", "failed@50"], "restart", 30),
        (["failed", "preempted", "failed"], "restart", 60),
        (["failed@10", "failed@10", "preempted@20", "failed@20"], "restart", 30),
        (["preempted"] * 50, "restart", 0),
    ],
)
def test_each_row_of_the_table_has_its_action_and_its_back_off(told: list[str], action: str, delay_s: float) -> None:
    found = decide_restart(MANY, ends(*told))
    assert (found.action, found.delay_s) == (action, delay_s)


def test_without_restarts_a_failure_is_the_end_and_says_how_to_ask_for_them() -> None:
    found = decide_restart(RestartPolicy(), ends("failed@3"))
    assert found == RestartDecision(action="stop", reason="restarts are off; set --max-restarts to enable them")


def test_restarts_are_used_up_where_there_is_no_progress_and_given_back_where_there_is() -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=1)
    assert decide_restart(policy, ends("failed@1")).action == "restart"
    assert decide_restart(policy, ends("failed@1", "failed@1")).reason == "the only restart is used"
    assert decide_restart(policy, ends("failed@1", "failed@2")).action == "restart"


def test_three_attempts_without_a_newer_checkpoint_are_the_end_everywhere() -> None:
    found = decide_restart(MANY, ends("failed", "hang", "failed"))
    assert (found.action, found.is_final) == ("stop", True)
    assert found.reason == "no progress: 3 attempts in a row wrote no newer checkpoint"


def test_a_failure_that_comes_again_is_not_tried_again() -> None:
    found = decide_restart(MANY, ends("failed", action="stop"))
    assert (found.action, found.is_final) == ("stop", True)


@pytest.mark.parametrize(
    "told",
    [
        [AttemptResult(attempt=0, kind="lost node", hosts=("b",))],
        [AttemptResult(attempt=0, kind="failed", action="exclude", hosts=("b",))],
        [AttemptResult(attempt=0, kind="hang", hosts=("b",)), AttemptResult(attempt=1, kind="hang", hosts=("b",))],
    ],
)
def test_a_bad_node_is_left_out_where_another_can_be_had(told: list[AttemptResult]) -> None:
    assert decide_restart(MANY, told, can_exclude=True).exclude == ("b",)
    assert decide_restart(MANY, told, can_exclude=True).action == "restart"
    without = decide_restart(MANY, told)
    assert (without.action, without.is_final) == ("stop", False)
    assert without.reason == "b should be excluded, and no other node is available"


def test_a_node_that_hangs_once_stays_and_one_that_was_left_out_stays_out() -> None:
    lost, hung = (
        AttemptResult(attempt=0, kind="lost node", hosts=("b",), step=5),
        AttemptResult(attempt=1, kind="hang", hosts=("c",)),
    )
    assert decide_restart(MANY, [lost, hung], can_exclude=True).exclude == ("b",)
    assert decide_restart(MANY, [hung]).action == "restart"
    preempted = AttemptResult(attempt=2, kind="preempted")
    assert decide_restart(MANY, [lost, hung, preempted], can_exclude=True).exclude == ("b",)


def test_a_node_that_hangs_again_after_progress_is_left_out_but_stops_nothing() -> None:
    told = [AttemptResult(attempt=n, kind="hang", hosts=("b",), step=10 * n + 10) for n in range(2)]
    assert decide_restart(MANY, told, can_exclude=True).exclude == ("b",)
    assert decide_restart(MANY, told).action == "restart"


END = st.builds(
    AttemptResult,
    attempt=st.just(0),
    kind=st.sampled_from(["failed", "hang", "lost node", "preempted"]),
    action=st.sampled_from(["retry", "retry", "exclude", "stop"]),
    hosts=st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
    step=st.none() | st.integers(0, 50),
)


@given(st.lists(END, min_size=1, max_size=12), st.integers(0, 5), st.booleans())
def test_whatever_happened_the_limits_hold(told: list[AttemptResult], max_restarts: int, can_exclude: bool) -> None:
    policy = RestartPolicy(max_restarts=max_restarts, backoff_s=10)
    found = decide_restart(policy, told, can_exclude=can_exclude)
    used, barren = count_failures(told)
    if told[-1].kind == "preempted":
        assert (found.action, found.delay_s) == ("restart", 0)
    elif found.action == "restart":
        assert 1 <= used <= max_restarts and barren < MAX_WITHOUT_PROGRESS
        assert 10 <= found.delay_s <= 10 * 2**6
        assert told[-1].action != "stop"
    assert can_exclude or not found.exclude
    assert found.reason


@given(st.lists(END, min_size=1, max_size=12), st.integers(0, 12))
def test_preemptions_are_never_counted(told: list[AttemptResult], place: int) -> None:
    newest = max((end.step for end in told[:place] if end.step is not None), default=None)
    more = [*told[:place], AttemptResult(attempt=0, kind="preempted", step=newest), *told[place:]]
    if any(end.kind in FAILURES for end in told):
        assert count_failures(more) == count_failures(told)


@given(st.integers(1, 30))
def test_a_job_that_never_saves_ends_after_three_attempts(max_restarts: int) -> None:
    policy, told = RestartPolicy(max_restarts=max_restarts), ends("failed")
    while decide_restart(policy, told).action == "restart":
        told.append(AttemptResult(attempt=len(told), kind="failed"))
    assert len(told) == min(max_restarts + 1, MAX_WITHOUT_PROGRESS)
