"""How many steps the runs of a drill take before their faults."""

from __future__ import annotations

import pytest

from primus.drill.fault_kinds import KINDS
from primus.drill.lead import LONG_HANG_S, choose_hang_timeout_s, choose_save_interval


@pytest.mark.parametrize(
    ("remaining_s", "interval"),
    [
        pytest.param(1000, 8, id="there is time for all as asked"),
        pytest.param(300, 8, id="the last one has half of its duration to spare"),
        pytest.param(299, 7, id="not quite"),
        pytest.param(175, 3, id="well below"),
        pytest.param(20, 2, id="not all fit: the shortest, so that most do"),
    ],
)
def test_faults_come_after_fewer_steps_if_more_of_them_fit_so(remaining_s: float, interval: int) -> None:
    # Two runs that take 40 s and 10 s for each step of the interval: 120 s each for 8 of them.
    assert choose_save_interval(lambda steps: [40.0 + 10 * steps] * 2, 8, remaining_s) == interval


def test_a_drill_without_faults_keeps_the_interval() -> None:
    assert choose_save_interval(lambda steps: [], 8, 0.0) == 8


def test_slowed_steps_and_those_of_the_undisturbed_run_are_no_hang() -> None:
    assert choose_hang_timeout_s(15.0, KINDS["hang"]) == choose_hang_timeout_s(15.0, None) == 15.0
    assert choose_hang_timeout_s(15.0, KINDS["slow-rank"]) == choose_hang_timeout_s(None, None) == LONG_HANG_S
