"""Whether a job is restarted is decided by a table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.launch.supervision.restart_policy import (
    FAILURES,
    MAX_WITHOUT_PROGRESS,
    AttemptResult,
    RestartDecision,
    count_failures,
    decide_restart,
)
from primus.plan import RestartPolicy

MANY = RestartPolicy(max_restarts=100, backoff_s=30)


def make_results(*results: str | AttemptResult, **common: Any) -> list[AttemptResult]:
    """Results in order: `failed`, or `failed@20` where checkpoint 20 is the newest."""
    found = []
    for number, each in enumerate(results):
        if isinstance(each, str):
            kind, _, step = each.partition("@")
            each = AttemptResult(attempt=number, kind=kind, step=int(step) if step else None, **common)  # type: ignore[arg-type]
        found.append(each)
    return found


@pytest.mark.parametrize(
    ("results", "action", "delay_s"),
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
def test_each_row_of_the_table_has_its_action_and_its_back_off(results: list[str], action: str, delay_s: float) -> None:
    found = decide_restart(MANY, make_results(*results))
    assert (found.action, found.delay_s) == (action, delay_s)


def test_without_restarts_a_failure_stops_the_job_and_names_the_option() -> None:
    found = decide_restart(RestartPolicy(), make_results("failed@3"))
    assert found == RestartDecision(action="stop", reason="restarts are off; set --max-restarts to enable them")


def test_progress_resets_the_number_of_restarts() -> None:
    policy = RestartPolicy(max_restarts=1, backoff_s=1)
    assert decide_restart(policy, make_results("failed@1")).action == "restart"
    assert decide_restart(policy, make_results("failed@1", "failed@1")).reason == "the only restart is used"
    assert decide_restart(policy, make_results("failed@1", "failed@2")).action == "restart"


def test_three_attempts_without_a_newer_checkpoint_stop_the_job_for_every_scheduler() -> None:
    found = decide_restart(MANY, make_results("failed", "hang", "failed"))
    assert (found.action, found.is_final) == ("stop", True)
    assert found.reason == "no progress: 3 attempts in a row wrote no newer checkpoint"


def test_a_failure_that_needs_operator_action_is_not_retried() -> None:
    found = decide_restart(MANY, make_results("failed", action="stop"))
    assert (found.action, found.is_final) == ("stop", True)


@pytest.mark.parametrize(
    "results",
    [
        [AttemptResult(attempt=0, kind="lost node", hosts=("b",))],
        [AttemptResult(attempt=0, kind="failed", action="exclude", hosts=("b",))],
        [AttemptResult(attempt=0, kind="hang", hosts=("b",)), AttemptResult(attempt=1, kind="hang", hosts=("b",))],
    ],
)
def test_a_bad_node_is_excluded_if_another_is_available(results: list[AttemptResult]) -> None:
    assert decide_restart(MANY, results, can_exclude=True).exclude == ("b",)
    assert decide_restart(MANY, results, can_exclude=True).action == "restart"
    without = decide_restart(MANY, results)
    assert (without.action, without.is_final) == ("stop", False)
    assert without.reason == "b should be excluded, and no other node is available"


def test_a_node_that_hangs_once_stays_and_an_excluded_node_stays_excluded() -> None:
    lost, hung = (
        AttemptResult(attempt=0, kind="lost node", hosts=("b",), step=5),
        AttemptResult(attempt=1, kind="hang", hosts=("c",)),
    )
    assert decide_restart(MANY, [lost, hung], can_exclude=True).exclude == ("b",)
    assert decide_restart(MANY, [hung]).action == "restart"
    preempted = AttemptResult(attempt=2, kind="preempted")
    assert decide_restart(MANY, [lost, hung, preempted], can_exclude=True).exclude == ("b",)


def test_a_node_that_hangs_again_after_progress_is_excluded_but_does_not_stop_the_job() -> None:
    results = [AttemptResult(attempt=n, kind="hang", hosts=("b",), step=10 * n + 10) for n in range(2)]
    assert decide_restart(MANY, results, can_exclude=True).exclude == ("b",)
    assert decide_restart(MANY, results).action == "restart"


END = st.builds(
    AttemptResult,
    attempt=st.just(0),
    kind=st.sampled_from(["failed", "hang", "lost node", "preempted"]),
    action=st.sampled_from(["retry", "retry", "exclude", "stop"]),
    hosts=st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
    step=st.none() | st.integers(0, 50),
)


@given(st.lists(END, min_size=1, max_size=12), st.integers(0, 5), st.booleans())
def test_limits_hold_for_any_history(results: list[AttemptResult], max_restarts: int, can_exclude: bool) -> None:
    policy = RestartPolicy(max_restarts=max_restarts, backoff_s=10)
    found = decide_restart(policy, results, can_exclude=can_exclude)
    used, without_progress = count_failures(results)
    if results[-1].kind == "preempted":
        assert (found.action, found.delay_s) == ("restart", 0)
    elif found.action == "restart":
        assert 1 <= used <= max_restarts and without_progress < MAX_WITHOUT_PROGRESS
        assert found.delay_s == 10 * 2 ** (used - 1)
        assert results[-1].action != "stop"
    assert can_exclude or not found.exclude
    assert found.reason


@given(st.lists(END, min_size=1, max_size=12), st.integers(0, 12))
def test_preemptions_are_never_counted(results: list[AttemptResult], place: int) -> None:
    newest = max((end.step for end in results[:place] if end.step is not None), default=None)
    more = [*results[:place], AttemptResult(attempt=0, kind="preempted", step=newest), *results[place:]]
    if any(end.kind in FAILURES for end in results):
        assert count_failures(more) == count_failures(results)


@given(st.integers(1, 30))
def test_a_job_that_never_saves_stops_after_three_attempts(max_restarts: int) -> None:
    policy, results = RestartPolicy(max_restarts=max_restarts), make_results("failed")
    while decide_restart(policy, results).action == "restart":
        results.append(AttemptResult(attempt=len(results), kind="failed"))
    assert len(results) == min(max_restarts + 1, MAX_WITHOUT_PROGRESS)


def test_an_attempt_without_a_checkpoint_does_not_make_the_old_one_count_as_progress_again() -> None:
    # 20 was written by the first attempt; the second found no checkpoint folder, the third resumed from 20 again.
    assert count_failures(make_results("failed@20", "failed", "failed@20")) == (3, 2)
    assert count_failures(make_results("failed@20", "failed", "failed@21")) == (1, 0)
