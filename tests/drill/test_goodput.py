"""The goodput of a job whose nodes fail: against the limits that can be worked out by hand, and a simulation."""

from __future__ import annotations

import math
import random

import pytest

from primus.drill.goodput import DAY_S, compute_goodput, estimate_goodput, find_best_interval


def test_the_best_interval_is_near_that_of_young_where_failures_are_rare() -> None:
    assert find_best_interval(1e7, 10.0) == pytest.approx(math.sqrt(2 * 10.0 * 1e7), rel=0.01)


@pytest.mark.parametrize(("mtbf_s", "stall_s"), [(1e6, 5.0), (2e4, 30.0), (3000.0, 60.0)])
def test_no_other_interval_has_a_noticeably_higher_goodput(mtbf_s: float, stall_s: float) -> None:
    best = find_best_interval(mtbf_s, stall_s)
    goodput = compute_goodput(best, mtbf_s, stall_s, 200.0)
    others = (compute_goodput(best * 1.02**power, mtbf_s, stall_s, 200.0) for power in range(-150, 151))
    assert max(others) <= goodput * 1.002


def test_the_goodput_is_that_of_simulated_failures() -> None:
    random.seed(3)
    interval_s, mtbf_s, stall_s, outage_s = 600.0, 4000.0, 20.0, 150.0
    trained = passed = 0.0
    left = random.expovariate(1 / mtbf_s)
    for _ in range(200_000):
        need = interval_s + stall_s
        if left > need:
            left, passed, trained = left - need, passed + need, trained + interval_s
            continue
        passed, left = passed + left, random.expovariate(1 / mtbf_s)
        while left < outage_s:  # a failure in an outage begins it again
            passed, left = passed + left, random.expovariate(1 / mtbf_s)
        passed, left = passed + outage_s, left - outage_s
    assert compute_goodput(interval_s, mtbf_s, stall_s, outage_s) == pytest.approx(trained / passed, rel=0.01)


def test_more_nodes_fail_more_often_and_save_more_often() -> None:
    few, many = estimate_goodput((64, 4096), failures_per_1000_node_days=6.5, stall_s=10.0, outage_s=300.0, step_s=5.0)
    assert few.mtbf_s == pytest.approx(1000 * DAY_S / 6.5 / 64)
    assert few.mtbf_s == pytest.approx(64 * many.mtbf_s)
    assert few.interval_s > many.interval_s and few.goodput > many.goodput > 0
    assert many.interval_steps == round(many.interval_s / 5.0)
    assert few.goodput >= few.goodput_hourly


def test_a_job_that_fails_before_any_checkpoint_trains_nothing() -> None:
    (found,) = estimate_goodput((10**9,), failures_per_1000_node_days=6.5, stall_s=60.0, outage_s=600.0, step_s=1.0)
    assert found.goodput == 0.0
