"""Intervals hold the true value as often as they say; warm-up is found where it is."""

from __future__ import annotations

import math
import random
from statistics import fmean, median

import pytest

from primus.statistics import (
    _fit_autoregression,
    bootstrap_interval,
    bootstrap_ratio,
    choose_block_length,
    compare_series_means,
    compute_excess_probability,
    compute_mad,
    compute_quantile,
    compute_t_quantile,
    estimate_series_mean,
    find_steady_window,
    predict_ratio,
    thin_series,
)

TRIALS = 120
RESAMPLES = 200


def generate_series(rng: random.Random, n: int, correlation: float) -> list[float]:
    """Normal values around 1 with a spread of 2 %, each correlated with the one before."""
    value, found = rng.gauss(0, 1), []
    for _ in range(n):
        value = correlation * value + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        found.append(1 + 0.02 * value)
    return found


def test_mad_and_quantiles_match_values_computed_by_hand() -> None:
    assert compute_mad([1, 1, 2, 2, 4, 6, 9]) == 1
    assert compute_quantile([10, 20, 30, 40], 0.5) == 25
    assert compute_quantile([10, 20, 30, 40], 0.05) == pytest.approx(11.5)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (200, 1.972)]
)
def test_t_quantiles_match_the_printed_table(freedom: int, quantile: float) -> None:
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, two-sided 95 %.
    assert compute_t_quantile(0.975, freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize("n", [8, 30])
def test_interval_of_a_median_covers_it_in_95_percent_of_skewed_samples(n: int) -> None:
    rng = random.Random(n)
    truth = math.exp(0)  # the median of a log-normal distribution
    samples = [[rng.lognormvariate(0, 0.3) for _ in range(n)] for _ in range(TRIALS)]
    hits = sum(bootstrap_interval(sample, resamples=RESAMPLES).contains(truth) for sample in samples)
    assert 0.9 * TRIALS <= hits <= 0.995 * TRIALS


def test_interval_of_a_ratio_of_medians_covers_it() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(TRIALS):
        a, b = ([center * rng.lognormvariate(0, 0.1) for _ in range(20)] for center in (6.18, 6.0))
        found = bootstrap_ratio(a, b, resamples=RESAMPLES)
        assert found.estimate == pytest.approx(median(a) / median(b))
        hits += found.contains(1.03)
    assert 0.9 * TRIALS <= hits <= 0.995 * TRIALS


@pytest.mark.parametrize("statistic", [median, fmean])
def test_blocks_keep_the_coverage_of_an_autocorrelated_series(statistic: object) -> None:
    assert callable(statistic)
    rng = random.Random(4)
    series = [generate_series(rng, 100, 0.6) for _ in range(TRIALS)]
    blocks, single = (
        sum(bootstrap_interval(each, statistic, block=block, resamples=RESAMPLES).contains(1.0) for each in series)
        for block in (None, 1)
    )
    assert blocks >= 0.84 * TRIALS
    assert single < 0.8 * TRIALS, "independent resampling would claim too much, or the test has no power"


def test_block_length_grows_with_the_autocorrelation() -> None:
    rng = random.Random(5)
    lengths = [choose_block_length(generate_series(rng, 400, correlation)) for correlation in (0.0, 0.5, 0.9)]
    assert lengths[0] <= 6 < lengths[1] < lengths[2] <= 100
    assert choose_block_length([1.0] * 50) == 1


@pytest.mark.parametrize(
    ("n", "correlation", "length"),
    [(400, 0.0, 1.672), (400, 0.5, 7.635), (400, 0.7, 10.672), (400, 0.9, 25.554), (150, 0.0, 1.14), (150, 0.7, 6.547)],
)
def test_block_length_is_twice_that_of_politis_and_white(n: int, correlation: float, length: float) -> None:
    # arch 8.0.0 (bashtage/arch), optimal_block_length(...)["circular"], of the same series
    assert choose_block_length(generate_series(random.Random(5), n, correlation)) == round(2 * length)


def test_stalls_do_not_hide_the_autocorrelation() -> None:
    rng = random.Random(11)
    stalling = [value * (1.5 if rng.random() < 0.03 else 1) for value in generate_series(rng, 300, 0.9)]
    assert choose_block_length(stalling) > 8


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.85])
def test_the_error_of_a_mean_of_a_series_includes_its_autocorrelation(correlation: float) -> None:
    rng, n = random.Random(31), 150
    found = [estimate_series_mean(generate_series(rng, n, correlation)) for _ in range(TRIALS)]
    # Of an autoregressive series with one weight r the mean varies as that of n (1 - r) / (1 + r) independent values.
    true_error = 0.02 / math.sqrt(n * (1 - correlation) / (1 + correlation))
    assert median(each.error for each in found) == pytest.approx(true_error, rel=0.15)
    reach = [compute_t_quantile(0.975, max(1, int(each.freedom))) * each.error for each in found]
    covered = sum(abs(each.mean - 1) <= r for each, r in zip(found, reach, strict=True))
    assert covered >= 0.9 * TRIALS


def test_the_autoregression_of_a_series_with_two_weights_is_found() -> None:
    rng = random.Random(5)
    values = [0.0, 0.0]
    for _ in range(4000):
        values.append(1.2 * values[-1] - 0.6 * values[-2] + rng.gauss(0, 1))
    weights, rest = _fit_autoregression(values)
    assert weights == pytest.approx([1.2, -0.6], abs=0.05)
    assert rest == pytest.approx(1, abs=0.05)


def test_values_that_alternate_have_a_smaller_error_and_equal_ones_have_none() -> None:
    alternating = generate_series(random.Random(32), 150, -0.7)
    assert estimate_series_mean(alternating).error < 0.6 * 0.02 / math.sqrt(150)
    assert estimate_series_mean([2.0] * 20).error == 0.0
    independent = estimate_series_mean(generate_series(random.Random(2), 400, 0.0))
    # Without weights the error is that of a mean, and its degrees of freedom those of a variance.
    assert independent.error == pytest.approx(0.02 / math.sqrt(400), rel=0.1)
    assert independent.freedom == pytest.approx(400, rel=0.01)
    assert compare_series_means([2.0] * 20, [[1.0] * 20])[:3] == pytest.approx((2.0, 2.0, 2.0))


def test_the_same_values_give_the_same_interval() -> None:
    values = generate_series(random.Random(6), 40, 0.3)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0, 2.0, 0.95)


def test_warm_up_is_cut_where_it_ends_and_stalls_are_kept() -> None:
    rng = random.Random(7)
    for _ in range(50):
        steady = generate_series(rng, 100, 0.4)
        steady[60] = 9.0
        decaying = [1 + 2 * math.exp(-step / 3) + rng.gauss(0, 0.02) for step in range(15)]
        window = find_steady_window([30.0, *decaying, *steady])
        assert window.is_steady
        assert 8 <= window.start <= 35


def test_a_series_that_never_settles_is_not_steady() -> None:
    rng = random.Random(8)
    rising = [1 + 0.01 * step + rng.gauss(0, 0.01) for step in range(60)]
    assert find_steady_window(rising) == (30, False)
    assert find_steady_window([5.0] * 30) == (0, True)
    assert find_steady_window([1.0, 2.0]) == (0, True)


def test_prediction_from_several_runs_allows_for_their_spread() -> None:
    rng = random.Random(9)
    hits = 0
    for _ in range(1000):
        *earlier, new = (rng.lognormvariate(0.5, 0.02) for _ in range(5))
        hits += predict_ratio(new, earlier).contains(1.0)
    assert 0.93 <= hits / 1000 <= 0.97
    found = predict_ratio(2.2, [2.0, 2.002, 1.998])
    # Student's t of 2 degrees of freedom, 4.303, by the spread of 0.1 % and sqrt(1 + 1/3)
    assert found[:3] == pytest.approx((1.1, 1.1 * math.exp(-0.00497), 1.1 * math.exp(0.00497)), rel=1e-5)


def test_permutations_allow_for_rare_stalls() -> None:
    calm, stalling = [1.0] * 60, [1.0] * 60
    for step in (7, 22, 41, 53):
        stalling[step] = 3.0
    assert bootstrap_ratio(stalling, calm, fmean, level=0.9).low > 1
    assert compute_excess_probability(stalling, calm, fmean, block=1) == pytest.approx(1 / 16, abs=0.03)
    rng = random.Random(10)
    slow, fast = ([center + rng.gauss(0, 0.02) for _ in range(60)] for center in (1.05, 1.0))
    assert compute_excess_probability(slow, fast, fmean) < 0.01
    assert compute_excess_probability(fast, slow, fmean) > 0.99


def test_long_series_are_thinned_to_the_limit() -> None:
    assert thin_series([1, 2, 3, 4, 5, 6, 7], fmean, limit=3) == [2, 5]
    assert thin_series([1, 2, 3], fmean, limit=3) == [1, 2, 3]
