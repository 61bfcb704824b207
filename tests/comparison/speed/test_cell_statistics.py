"""Numbers of cells: warm-up, intervals, differences, slow steps with their causes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec import structs
from tests.comparison.fair_results import TOKENS, make_result

from primus.comparison.results.result import ComparisonResult, ResultLoad, StepInterruption
from primus.comparison.speed.cell_statistics import (
    compare_times,
    find_time_to_loss,
    find_warm_up,
    select_steady_times,
    summarize_cell,
)


def steady(runs: list[ComparisonResult]) -> list[dict[int, float]]:
    warm_up, _ = find_warm_up(runs)
    return [select_steady_times(run, warm_up) for run in runs]


def test_warm_up_is_found_and_excluded_after_each_restart_and_profiled_steps_too() -> None:
    run = make_result()
    warm_up, _ = find_warm_up([run])
    assert 3 <= warm_up <= 15
    restarted = structs.replace(run, steps=structs.replace(run.steps, first_of_attempt=[1, 31], profiled=[50]))
    kept = select_steady_times(restarted, 5)
    assert set(range(1, 61)) - set(kept) == {1, 2, 3, 4, 5, 31, 32, 33, 34, 35, 50}


def test_speed_is_the_median_and_the_mean_rate_counts_slow_steps() -> None:
    run = make_result()
    times = [1.0 if n == 40 else time for n, time in zip(run.steps.number, run.steps.time_s, strict=True)]
    slow = structs.replace(
        run,
        steps=structs.replace(run.steps, time_s=times),
        interruptions=[StepInterruption(kind="checkpoint", step=39)],
    )
    found = summarize_cell([slow], 10, is_steady=True)
    assert found is not None and found.tokens_per_s is not None and found.tokens_per_s_per_device is not None
    assert found.step_s.low < found.step_s.value < found.step_s.high
    assert found.tokens_per_s.value == pytest.approx(TOKENS / found.step_s.value)
    assert found.tokens_per_s_per_device.value == pytest.approx(found.tokens_per_s.value / 2)
    kept = list(select_steady_times(slow, 10).values())
    assert found.mean_tokens_per_s == pytest.approx(TOKENS * len(kept) / sum(kept))
    assert [(each.step, each.cause) for each in found.slow_steps] == [(40, "checkpoint")]
    unexplained = summarize_cell([structs.replace(slow, interruptions=[])], 10, is_steady=True)
    assert unexplained is not None and unexplained.slow_steps[0].cause == "not explained"
    loaded = structs.replace(slow, interruptions=[], load=ResultLoad(other_cpu_share=0.4))
    found = summarize_cell([loaded], 10, is_steady=True)
    assert found is not None and "other processes, which took 40% of the machine" in found.slow_steps[0].cause


def test_tokens_by_cpu_time_are_those_of_a_process_and_of_runs_on_cpus_only() -> None:
    runs = [make_result(seed=seed) for seed in range(3)]
    runs = [structs.replace(run, steps=structs.replace(run.steps, cpu_time_s=[9.0] * 10 + [0.2] * 50)) for run in runs]
    found = summarize_cell(runs, 10, is_steady=True)
    assert found is not None and found.tokens_per_cpu_s is not None
    assert found.tokens_per_cpu_s.value == pytest.approx(TOKENS / 2 / 0.2)
    found = summarize_cell([structs.replace(run, platform="amd") for run in runs], 10, is_steady=True)
    assert found is not None and found.tokens_per_cpu_s is None


def test_a_difference_is_shown_between_runs_only_where_the_interval_excludes_1() -> None:
    a, b, slower = ([make_result(name, seed=seed, step_s=step_s) for seed in range(3)]
                    for name, step_s in (("a", 0.1), ("b", 0.1), ("c", 0.103)))  # fmt: skip
    same, other = compare_times(steady(a), steady(b)), compare_times(steady(a), steady(slower))
    assert same is not None and other is not None
    assert not same.is_difference and "no difference shown" in same.describe()
    assert other.is_difference and other.low > 1
    assert other.value == pytest.approx(1.03, abs=0.015)
    for percent in range(30):  # the interval that is shown is the one that decides
        slower = [make_result("c", seed=seed + 3, step_s=0.1 + percent / 5000) for seed in range(3)]
        found = compare_times(steady(a), steady(slower))
        assert found is not None and found.is_difference == (not found.low <= 1 <= found.high)


def test_runs_that_agree_by_chance_do_not_show_a_difference_below_the_usual_spread() -> None:
    rng = random.Random(3)

    def simulate(speeds: Sequence[float]) -> list[dict[int, float]]:
        return [{step: speed * (1 + 0.01 * rng.gauss(0, 1)) for step in range(1, 101)} for speed in speeds]

    # Equal to 0.1 % within each cell: the spread of six runs alone would show any difference.
    found = compare_times(simulate([0.1, 0.1001, 0.1]), simulate([0.1005, 0.1006, 0.1005]))
    assert found is not None and found.value > 1.003 and not found.is_difference
    found = compare_times(simulate([0.1, 0.1001, 0.1]), simulate([0.103, 0.1031, 0.103]))
    assert found is not None and found.is_difference
    # The spread of runs still counts where it is larger than that of the steps.
    found = compare_times(simulate([0.1, 0.104, 0.096]), simulate([0.103, 0.107, 0.099]))
    assert found is not None and not found.is_difference


def test_one_run_of_each_cell_shows_no_difference_that_the_spread_of_runs_explains() -> None:
    a, little, much = ([make_result("a", step_s=step_s)] for step_s in (0.1, 0.101, 0.104))
    found = compare_times(steady(a), steady(little))
    assert found is not None and 1.005 < found.value < 1.015 and not found.is_difference
    found = compare_times(steady(a), steady(much))
    assert found is not None and found.is_difference
    assert compare_times(steady(a), [{1: 0.1}]) is None


def test_a_ratio_without_a_difference_says_what_it_cannot_show_and_how_many_runs_would() -> None:
    rng = random.Random(8)

    def simulate(count: int, factor: float = 1.0) -> list[dict[int, float]]:
        speeds = [0.1 * factor * rng.lognormvariate(0, 0.02) for _ in range(count)]
        return [{step: speed * (1 + 0.01 * rng.gauss(0, 1)) for step in range(1, 101)} for speed in speeds]

    few = compare_times(simulate(3), simulate(3))
    assert few is not None and not few.is_difference
    assert few.smallest_difference > 0.03 and few.more_runs is not None
    assert f"cannot show less than {few.smallest_difference:.1%}, {few.more_runs} more runs of each" in few.describe()
    assert 5 <= few.more_runs <= 25, "a spread of 2 % takes about 14 runs of each cell"
    found = [compare_times(simulate(16), simulate(16, 1.03)) for _ in range(20)]
    assert sum(each is not None and each.is_difference for each in found) >= 16
    noisy = structs.replace(few, smallest_difference=649664.7)
    assert "cannot show less than a factor of two" in noisy.describe()
    one = compare_times(simulate(1), simulate(1))
    assert one is not None and one.more_runs == 2 and one.smallest_difference >= 0.015


def test_time_to_a_loss_is_that_of_the_mean_of_ten_losses() -> None:
    run = make_result()
    reached = find_time_to_loss(run, 5.8)
    assert reached is not None
    steps = round(reached[1] / TOKENS)
    assert reached[0] == pytest.approx(sum(time or 0 for time in run.steps.time_s[:steps]))
    assert sum(loss or 0 for loss in run.steps.loss[steps - 10 : steps]) / 10 <= 5.8
    assert find_time_to_loss(run, 1.0) is None
