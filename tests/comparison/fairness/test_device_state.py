"""Clocks, power and throttling: a healthy pair of recorded telemetry passes each rule, a planted one fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs
from tests.comparison.fair_results import START, make_result

from primus.comparison.fairness.check import FairnessCheck
from primus.comparison.fairness.evidence import collect_evidence
from primus.comparison.fairness.verdict import judge_pair
from primus.comparison.results.result import ComparisonResult, LoadSample, ResultDevice, ResultLoad

FIRST_END, LAST_END = START + 1.2, START + 6.6
"""The steps of a result run between these times, after the first one."""
IDLE = {"device_clock_mhz": [210.0], "device_power_w": [21.0]}
BUSY = {"device_clock_mhz": [1507.0], "device_power_w": [314.0], "throttled": ["sw_power_cap"]}
"""A GeForce RTX 3090 with a limit of 315 W: sw_power_cap in 161 of 162 busy samples, 1,500 to 1,515 MHz, 314 W, no
thermal limit in any sample (ashalliants/ninfer-3090#72)."""


def make_result_with(samples: Sequence[LoadSample], name: str = "NVIDIA GeForce RTX 3090") -> ComparisonResult:
    info = ResultDevice(device_count=1, device_name=name, software_stack="cuda")
    load = ResultLoad(samples=list(samples), other_cpu_share=0.0)
    return structs.replace(make_result(), platform="nvd", gpu_info=info, load=load)


def sample_steps(**values: Any) -> list[LoadSample]:
    """Idle samples before and after the steps, and busy ones while they run."""
    times = [START - 3, START + 2, START + 3, START + 4, START + 5, LAST_END + 4]
    return [
        LoadSample(time=time, **(BUSY | values if FIRST_END < time < LAST_END else IDLE))  # type: ignore[arg-type]
        for time in times
    ]


def find_check(rule: str, *samples: Sequence[LoadSample]) -> FairnessCheck:
    sides = [collect_evidence(make_result_with(each), name) for each, name in zip(samples, "ab", strict=True)]
    return next(check for check in judge_pair(*sides, "identical").checks if check.rule == rule)


def test_a_full_load_at_its_power_limit_is_fair_by_every_rule() -> None:
    healthy = sample_steps(), sample_steps(device_clock_mhz=[1500.0])
    sides = [collect_evidence(make_result_with(each), name) for each, name in zip(healthy, "ab", strict=True)]
    verdict = judge_pair(*sides, "identical")
    assert verdict.status == "fair"
    judged = {check.rule: check.judgement for check in verdict.checks}
    assert (judged["clocks"], judged["throttling"], judged["power limit"]) == ("same", "same", "same")


def test_a_device_that_idled_before_or_after_the_steps_has_no_other_clock() -> None:
    idle = LoadSample(time=START - 1, **IDLE)  # type: ignore[arg-type]
    many_idle = [*[structs.replace(idle, time=START - second) for second in range(1, 9)], *sample_steps()]
    assert find_check("clocks", sample_steps(), many_idle).judgement == "same"
    after = [structs.replace(idle, time=LAST_END + second) for second in range(1, 9)]
    assert find_check("clocks", sample_steps(), [*sample_steps(), *after]).judgement == "same"


def test_the_first_step_which_compiles_is_no_full_load() -> None:
    compiling = LoadSample(time=START + 0.5, device_clock_mhz=[300.0], throttled=["sw_thermal_slowdown"])
    for rule in ("clocks", "throttling"):
        assert find_check(rule, sample_steps(), [compiling, *sample_steps()]).judgement == "same"


@pytest.mark.parametrize("reason", ["hw_thermal_slowdown", "hw_power_brake_slowdown", "socket_thermal", "cpu thermal"])
def test_heat_and_faults_while_steps_run_are_unfair_and_named(reason: str) -> None:
    hot = sample_steps()
    hot[2] = structs.replace(hot[2], throttled=["sw_power_cap", reason])
    check = find_check("throttling", sample_steps(), hot)
    assert (check.judgement, check.b) == ("unfair", reason)
    assert "b was throttled" in check.reason


def test_a_limit_that_a_tool_does_not_name_is_no_throttling() -> None:
    """amd-smi printed THROTTLED in all 11 idle and 39 busy samples of a Radeon AI PRO R9700 (rocm-systems#11781)."""
    unnamed = sample_steps(throttled=["throttled"], device_clock_mhz=[2350.0], device_power_w=[225.0])
    assert find_check("throttling", unnamed, unnamed).judgement == "same"


def test_another_clock_below_the_power_limit_is_unfair_and_at_the_limit_the_work_explains_it() -> None:
    free = sample_steps(throttled=[], device_clock_mhz=[1695.0])
    locked = sample_steps(throttled=[], device_clock_mhz=[1400.0])
    assert find_check("clocks", free, locked).judgement == "unfair"
    assert find_check("clocks", free, sample_steps()).judgement == "irrelevant"
    # A prefill at the same limit: 1,635 to 1,650 MHz (the same source).
    assert find_check("clocks", sample_steps(device_clock_mhz=[1642.0]), sample_steps()).judgement == "irrelevant"


def test_the_mean_clock_of_several_devices_sees_one_that_is_slow() -> None:
    eight = sample_steps(throttled=[], device_clock_mhz=[1980.0] * 8)
    slow = sample_steps(throttled=[], device_clock_mhz=[1980.0] * 7 + [1005.0])
    assert find_check("clocks", eight, slow).judgement == "unfair"
    unread = sample_steps(throttled=[], device_clock_mhz=[1980.0] * 7 + [None])
    assert find_check("clocks", eight, unread).judgement == "same"


def test_another_power_limit_is_unfair_also_where_only_the_power_at_the_limit_is_known() -> None:
    known = sample_steps(device_power_limit_w=[700.0]), sample_steps(device_power_limit_w=[500.0])
    assert find_check("power limit", *known).judgement == "unfair"
    assert find_check("power limit", known[0], known[0]).judgement == "same"
    drawn = sample_steps(), sample_steps(device_power_w=[280.0])
    assert find_check("power limit", *drawn).judgement == "unfair"
    light = sample_steps(throttled=[], device_power_w=[120.0])
    assert find_check("power limit", sample_steps(), light).judgement == "not shown", "it is below its limit"


def test_devices_of_other_models_have_clocks_and_limits_of_their_own() -> None:
    sides = [
        collect_evidence(make_result_with(sample_steps(device_power_limit_w=[limit], throttled=[]), name), name)
        for name, limit in (("NVIDIA H100 80GB HBM3", 700.0), ("NVIDIA B200", 1000.0))
    ]
    judged = {check.rule: check.judgement for check in judge_pair(*sides, "identical").checks}
    assert (judged["power limit"], judged["clocks"]) == ("irrelevant", "irrelevant")


def test_without_a_sample_while_steps_ran_nothing_is_known() -> None:
    before = [LoadSample(time=START - 5, **BUSY)]  # type: ignore[arg-type]
    assert find_check("clocks", sample_steps(), before).judgement == "not shown"
    assert find_check("throttling", sample_steps(), before).judgement == "not shown"
