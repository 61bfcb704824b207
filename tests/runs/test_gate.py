"""The gate raises few false alarms, catches small slowdowns, and compares losses step by step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import structs

from primus.errors import PrimusError, UsageError
from primus.runs import gate
from primus.runs.run_steps import RunSteps

TRIALS = 20
MAX_ALARMS = 1
MIN_CAUGHT = 18


def generate_step_times(
    rng: random.Random, n: int = 150, slowdown: float = 0.0, correlation: float = 0.5
) -> list[float]:
    """Step times with warm-up, correlated noise of 2 %, stalls, and a speed that differs between runs by 0.3 %."""
    typical = 0.2 * rng.lognormvariate(0, 0.003) * (1 + slowdown)
    noise, found = 0.0, []
    for step in range(n):
        noise = correlation * noise + math.sqrt(1 - correlation**2) * rng.gauss(0, 0.02)
        warm_up = 4.0 if step == 0 else 0.5 * math.exp(-step / 2)
        stall = 1.5 if rng.random() < 0.02 else 1.0
        found.append(typical * (1 + noise + warm_up) * stall)
    return found


def make_steps(
    times: Sequence[float], run: str = "a", losses: Sequence[float | None] = (), **training: Any
) -> RunSteps:
    n = len(times)
    return RunSteps(
        run=run,
        name="night",
        created=0.0,
        machine="m",
        training={"parameters": 7, "seq_length": 64, "global_batch_size": 8, **training},
        versions={"torch": "2.13.0"},
        steps=list(range(1, n + 1)),
        starts=[0],
        columns={
            "tokens_per_s": [1000 / time for time in times],
            "step_time_s": list(times),
            "loss": list(losses) or [4.0 - 0.01 * step for step in range(n)],
        },
    )


def count_alarms(compare: Callable[[random.Random], gate.SpeedComparison]) -> int:
    rng = random.Random(13)
    return sum(compare(rng).verdict == "slower" for _ in range(TRIALS))


def count_slower(slowdown: float, metric: str = "tokens_per_s", **kind: Any) -> int:
    """How often runs that are slower by a share are found slower than runs of the same kind."""
    return count_alarms(
        lambda rng: gate.compare_speed(
            make_steps(generate_step_times(rng, slowdown=slowdown, **kind)),
            [make_steps(generate_step_times(rng, **kind))],
            metric,
            0.03,
        )
    )


def test_two_runs_of_the_same_speed_raise_at_most_one_alarm_in_20() -> None:
    assert count_slower(0.0) <= MAX_ALARMS


def test_a_slowdown_of_3_percent_is_caught_in_18_of_20() -> None:
    assert count_slower(0.03) >= MIN_CAUGHT


def test_strongly_correlated_steps_still_show_a_slowdown_and_raise_no_more_alarms() -> None:
    # 200 steps that are correlated by 0.85 hold as much as 16 independent ones.
    assert count_slower(0.0, "step_time_s", n=200, correlation=0.85) <= MAX_ALARMS
    assert count_slower(0.03, "step_time_s", n=200, correlation=0.85) >= MIN_CAUGHT - 1


def test_the_smallest_slowdown_that_is_named_is_caught_9_times_in_10_and_half_of_it_is_not() -> None:
    rng = random.Random(5)
    caught = [0, 0]
    for _ in range(20):
        times, base = (generate_step_times(rng) for _ in range(2))
        shown = gate.compare_speed(make_steps(times), [make_steps(base)], "step_time_s", 0.03).detectable
        assert 0.005 < shown < 0.03
        for number, part in enumerate((1.0, 0.5)):
            slow = make_steps([time * (1 + part * shown) for time in times])
            caught[number] += gate.compare_speed(slow, [make_steps(base)], "step_time_s", 0.001).verdict == "slower"
    assert caught[0] >= 15 > caught[1]


def test_stalls_that_may_be_chance_leave_the_answer_open() -> None:
    base = [0.2 + 0.001 * (step % 3) for step in range(60)]
    stalled = [time * (3.0 if 30 <= step < 33 else 1.0) for step, time in enumerate(base)]
    found = gate.compare_speed(make_steps(stalled), [make_steps(base)], "step_time_s", 0.03)
    assert found.verdict == "inconclusive"
    assert found.wanted_steps is None or found.wanted_steps > 60


def test_a_stall_in_every_tenth_step_is_a_slowdown_although_the_median_is_the_same() -> None:
    rng = random.Random(1)
    base, slow = ([0.2 * (1 + rng.gauss(0, 0.01)) for _ in range(120)] for _ in range(2))
    stalling = [time * (1.4 if step % 10 == 5 else 1.0) for step, time in enumerate(slow)]
    found = gate.compare_speed(make_steps(stalling), [make_steps(base)], "step_time_s", 0.03)
    assert found.verdict == "slower"
    assert abs(found.changes[0].change) < 0.01


def test_the_spread_of_several_baseline_runs_keeps_a_normal_run_from_an_alarm() -> None:
    rng = random.Random(2)

    def make(factor: float) -> RunSteps:
        return make_steps([0.2 * factor * (1 + rng.gauss(0, 0.002)) for _ in range(60)], run=f"run-{factor}")

    judged, baselines = make(1.03), [make(factor) for factor in (0.97, 1.0, 1.02, 0.98, 1.03)]
    assert gate.compare_speed(judged, baselines[:1], "step_time_s", 0.03).verdict == "slower"
    assert gate.compare_speed(judged, baselines, "step_time_s", 0.03).verdict != "slower"
    assert gate.compare_speed(make(1.2), baselines, "step_time_s", 0.03).verdict == "slower"


def test_a_run_that_is_too_noisy_for_an_answer_says_how_many_steps_it_needs_if_more_help() -> None:
    rng = random.Random(3)
    for spread, wants_more in ((0.08, True), (0.5, False)):
        runs = [make_steps([0.2 * rng.lognormvariate(0, spread) for _ in range(20)]) for _ in range(2)]
        found = gate.compare_speed(runs[0], runs[1:], "step_time_s", 0.03)
        assert found.verdict == "inconclusive"
        assert (found.wanted_steps is not None and found.wanted_steps > 40) == wants_more


def test_a_faster_run_is_faster() -> None:
    rng = random.Random(4)
    found = gate.compare_speed(
        make_steps(generate_step_times(rng, slowdown=-0.1)),
        [make_steps(generate_step_times(rng))],
        "tokens_per_s",
        0.03,
    )
    assert found.verdict == "faster"
    assert found.run_value > found.baseline_value


def test_a_slowdown_of_a_run_that_shared_its_cores_is_inconclusive() -> None:
    rng = random.Random(6)
    base, slow = make_steps(generate_step_times(rng)), make_steps(generate_step_times(rng, slowdown=0.5))
    shared = structs.replace(slow, core_wait=0.4)
    found = gate.compare_speed(shared, [base], "step_time_s", 0.03)
    assert (found.verdict, found.core_wait, found.wanted_steps) == ("inconclusive", 0.4, None)
    assert gate.compare_speed(structs.replace(slow, core_wait=0.02), [base], "step_time_s", 0.03).verdict == "slower"
    # A baseline that shared its cores was too slow: what is slower still is a slowdown.
    busy = structs.replace(base, core_wait=0.4)
    assert gate.compare_speed(slow, [busy], "step_time_s", 0.03).verdict == "slower"


def test_memory_is_judged_whatever_the_cores_did() -> None:
    def use(gib: float) -> RunSteps:
        steps = make_steps([0.2] * 60)
        memory = [gib * (1 + 0.0001 * (number % 3)) for number in range(60)]
        return structs.replace(steps, columns={**steps.columns, "memory_gib": memory}, core_wait=0.4)

    found = gate.compare_speed(use(11.0), [use(10.0)], "memory_gib", 0.03)
    assert (found.verdict, found.core_wait) == ("slower", None)


def test_warm_up_of_every_attempt_is_excluded() -> None:
    rng = random.Random(5)
    first, second = generate_step_times(rng, 60), generate_step_times(rng, 60)
    restarted = structs.replace(make_steps([*first, *second]), starts=[0, 60])
    steady = gate.select_steady_steps(restarted, "step_time_s")
    assert max(steady.costs) < 0.5
    assert steady.num_warm_up >= 4


def test_too_few_steps_and_metrics_that_measure_no_speed_are_one_message() -> None:
    run = make_steps([0.2] * 8)
    with pytest.raises(UsageError, match=r"7 steady steps after 1 of warm-up; the gate needs 10"):
        gate.compare_speed(run, [run], "tokens_per_s", 0.03)
    with pytest.raises(UsageError, match="did you mean 'tokens_per_s'"):
        gate.compare_speed(run, [run], "token_per_s", 0.03)
    with pytest.raises(UsageError, match="'loss' is neither a rate nor a cost"):
        gate.compare_speed(run, [run], "loss", 0.03)
    broken = make_steps([0.2] * 30)
    broken.columns["step_time_s"][12] = None
    with pytest.raises(PrimusError, match="step_time_s is missing or not positive at step 13"):
        gate.compare_speed(broken, [run], "step_time_s", 0.03)


def test_losses_are_compared_at_their_steps() -> None:
    times, losses = [0.2] * 5, [4.0, 3.0, 2.0, 1.5, 1.0]
    base = make_steps(times, "b", losses)
    assert gate.compare_losses(make_steps(times, "a", losses), base, 1e-3).is_equal
    changed = gate.compare_losses(make_steps(times, "a", [4.0, 3.0, 2.01, 1.5, 1.0]), base, 1e-3)
    assert (changed.first_above, changed.num_above, changed.largest_step) == (3, 1, 3)
    assert changed.largest == pytest.approx(0.01 / 2.01)
    broken = gate.compare_losses(make_steps(times, "a", [4.0, 3.0, 2.0, None, 1.0]), base, 1e-3)
    assert broken.not_finite == [4] and not broken.is_equal


def test_losses_of_other_data_are_not_compared() -> None:
    run, other = make_steps([0.2] * 5), make_steps([0.2] * 5, "b", global_batch_size=16)
    with pytest.raises(UsageError, match="global_batch_size is 8 in a, 16 in b"):
        gate.compare_losses(run, other, 1e-3)
    empty = make_steps([0.2] * 5, "b", [None] * 5)
    with pytest.raises(UsageError, match="no common step"):
        gate.compare_losses(run, empty, 1e-3)


@pytest.mark.parametrize(
    ("low", "change", "is_slowdown"), [(0.001, 0.02, True), (0.0, 0.02, False), (0.001, 0.015, False)]
)
def test_a_slowdown_has_an_interval_above_0_and_more_than_half_of_the_tolerance(
    low: float, change: float, is_slowdown: bool
) -> None:
    found = gate.CostChange(of=gate.TYPICAL, change=change, low=low, high=0.1)
    assert found.is_slowdown(0.03) is is_slowdown


def test_what_differs_between_two_runs_is_told_as_before_and_now() -> None:
    before = make_steps([0.2] * 3)
    now = structs.replace(before, training={**before.training, "seq_length": 128}, versions={"torch": "2.14.0"})
    assert gate.list_differences(now, before) == ["seq_length: 64 -> 128", "torch: 2.13.0 -> 2.14.0"]
    assert gate.list_differences(before, before) == []
