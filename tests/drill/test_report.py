"""The report of a drill: as text, and as a page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

import browser
from primus.drill.goodput import RATE_SOURCE, estimate_goodput
from primus.drill.report import format_page, format_result
from primus.drill.result import DrillResult, FaultCase, OutageEstimate
from primus.drill.timeline import ReferenceTimes, StepEquality

EQUAL = StepEquality(num_before=12, num_equal_before=12, num_after=9, num_equal_after=9, largest_difference=0.0)
OTHER = structs.replace(EQUAL, num_equal_after=7, largest_difference=2e-7)
NOISY = structs.replace(OTHER, num_equal_before=3)
KILLED = FaultCase(
    fault="kill-rank",
    state="recovered",
    reason="rank 3 was killed by SIGKILL",
    node=1,
    host="n2",
    rank=3,
    step=12,
    detect_s=3.14,
    restart_s=21.5,
    steps_lost=4,
    restarted_by="launcher",
    blamed_rank=3,
    blamed_hosts=("n2",),
    is_blame_right=True,
    losses=EQUAL,
    run="/r",
)
RESULT = DrillResult(
    command=("train", "pretrain", "--config", "<b>.yaml"),
    started=1764259200.0,
    duration_s=312.0,
    nnodes=2,
    nproc=2,
    hosts=("n1", "n2"),
    version="0",
    reference=ReferenceTimes(
        steps=24, step_s=0.5, longest_step_s=0.9, stall_s=0.04, save_s=0.3, saved_steps=(8, 16, 24)
    ),
    reference_run="/r",
    start_s=9.0,
    hang_timeout_s=10.0,
    cases=(
        KILLED,
        structs.replace(KILLED, fault="hang", blamed_rank=0, is_blame_right=False, reason="rank 0: no progress"),
        FaultCase(fault="fill-disk", state="skipped", reason="name a folder"),
    ),
    outage=OutageEstimate(seconds=54.6, source="mean of kill-rank 55 s"),
    failure_rate=6.5,
    failure_rate_source=RATE_SOURCE,
    goodput=tuple(
        estimate_goodput((64, 4096), failures_per_1000_node_days=6.5, stall_s=0.04, outage_s=54.6, step_s=0.5)
    ),
    folder="/drilled",
)


def test_the_text_has_a_row_for_each_planted_fault_and_the_reason_of_the_others() -> None:
    text = format_result(RESULT)
    assert "kill-rank  recovered           3.1         21.5           4  launcher  right: rank 3  9 of 9 equal" in text
    assert "hang       wrong blame" in text and "wrong: rank 0" in text
    assert "skipped: fill-disk: name a folder" in text
    assert "1 of 2 faults recovered with the right blame and equal losses, 1 skipped" in text
    assert RATE_SOURCE in text and "mean of kill-rank 55 s" in text


@pytest.mark.parametrize(
    ("losses", "is_passed", "words"),
    [
        (EQUAL, True, "9 of 9 equal"),
        (OTHER, False, "7 of 9 equal, at most 2.0e-07 relative"),
        (NOISY, True, "differ before the fault, too"),
    ],
)
def test_losses_fail_a_drill_only_where_the_training_repeats_itself(
    losses: StepEquality, is_passed: bool, words: str
) -> None:
    result = structs.replace(RESULT, cases=(structs.replace(KILLED, losses=losses),))
    assert result.is_passed is is_passed
    assert words in format_result(result)


def test_a_drill_that_planted_nothing_or_ended_early_has_not_passed() -> None:
    assert not structs.replace(RESULT, cases=RESULT.cases[2:]).is_passed
    assert not structs.replace(RESULT, cases=(KILLED,), problem="node 1 did not report").is_passed
    assert structs.replace(RESULT, cases=(KILLED,)).is_passed


def test_the_right_rank_on_another_host_than_the_faults_is_named_with_both() -> None:
    elsewhere = structs.replace(KILLED, host="n3", blamed_hosts=("n0",), is_blame_right=False)
    text = format_result(structs.replace(RESULT, cases=(elsewhere,)))
    assert "wrong: rank 3 on n0, planted on n3" in text


def test_the_page_escapes_what_was_typed() -> None:
    page = format_page(RESULT)
    assert "&lt;b&gt;.yaml" in page and "<b>.yaml" not in page


def test_the_page_opens_in_a_browser_wide_and_on_a_phone(tmp_path: Path) -> None:
    file = tmp_path / "drill.html"
    file.write_text(format_page(RESULT))
    shown = browser.dom(file)
    assert "wrong: rank 0" in shown and "right: rank 3" in shown
    for size in ((1280, 900), (390, 1600)):
        assert browser.screenshot(file, tmp_path / f"{size[0]}.png", size).stat().st_size > 10_000
