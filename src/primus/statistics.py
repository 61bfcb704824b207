"""Statistics of repeated timings: medians with intervals, warm-up, autocorrelation; without a numerical library."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from operator import mul
from statistics import NormalDist, fmean, median
from typing import NamedTuple

SEED = 20261122
"""Seed of all resampling: the same values give the same interval."""
NUM_RESAMPLES = 2000
"""The bounds of a 95 % interval are then the 50th value from each end."""
MAX_SERIES = 1024
"""Longest series that is resampled as it is; longer ones are thinned first, so that a run of any length takes
seconds."""
MAX_DEVIATIONS = 10.0
"""Warm-up detection clips values at this multiple of the median absolute deviation: one stall does not end a
warm-up."""
WARM_UP_GAIN = 0.25
"""Warm-up detection cuts off steps only if that makes the squared error smaller by this share: slow fluctuations look
like a warm-up, and a cut that fits them loses steps and makes the rest look too steady."""
MAX_CORRELATED = 4.0
"""The same for the autocorrelation; 2.7 standard deviations of normal values."""

MAX_ORDER = 10
"""Most weights of an autoregressive model."""

Statistic = Callable[[list[float]], float]


class Interval(NamedTuple):
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float
    level: float
    """Probability that the interval holds the true value, such as 0.95."""

    def contains(self, value: float) -> bool:
        """Whether `value` is compatible with the data."""
        return self.low <= value <= self.high


class SeriesMean(NamedTuple):
    """The mean of an autocorrelated series."""

    mean: float
    error: float
    """Standard error of the mean."""
    freedom: float
    """Degrees of freedom of the error; may be infinite."""


class SteadyWindow(NamedTuple):
    """The part of a series after its warm-up."""

    start: int
    """Index of the first steady value."""
    is_steady: bool
    """False if the series still changes in its second half; `start` is then its middle."""


def compute_mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median."""
    center = median(values)
    return median([abs(value - center) for value in values])


def compute_quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of sorted values, `share` between 0 and 1, by linear interpolation."""
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def bootstrap_interval(
    values: Sequence[float],
    statistic: Statistic = median,
    *,
    block: int | None = 1,
    level: float = 0.95,
    resamples: int = NUM_RESAMPLES,
    seed: int = SEED,
) -> Interval:
    """Interval of a statistic by resampling.

    Args:
        values: At least two.
        statistic: For example `median` or `fmean`.
        block: Length of the blocks that are resampled together: 1 for independent values, None to choose it from the
            autocorrelation of a series such as the step times of one run.
        level: Confidence level.
        resamples: Number of resampled series.
        seed: Seed of the resampling.
    """
    length = choose_block_length(values) if block is None else block
    rng = random.Random(seed)
    found = sorted(statistic(_resample_blocks(values, length, rng)) for _ in range(resamples))
    return _cut_tails(statistic(list(values)), found, level, len(values) / length)


def bootstrap_ratio(
    numerator: Sequence[float],
    denominator: Sequence[float],
    statistic: Statistic = median,
    *,
    block: int | None = 1,
    level: float = 0.95,
    resamples: int = NUM_RESAMPLES,
) -> Interval:
    """Interval of the ratio of a statistic of two independent samples of positive values.

    The arguments are those of `bootstrap_interval`.
    """
    lengths = [choose_block_length(each) if block is None else block for each in (numerator, denominator)]
    rng = random.Random(SEED)
    found = sorted(
        statistic(_resample_blocks(numerator, lengths[0], rng))
        / statistic(_resample_blocks(denominator, lengths[1], rng))
        for _ in range(resamples)
    )
    blocks = min(len(numerator) / lengths[0], len(denominator) / lengths[1])
    return _cut_tails(statistic(list(numerator)) / statistic(list(denominator)), found, level, blocks)


def estimate_series_mean(values: Sequence[float]) -> SeriesMean:
    """Mean of a series such as the step times of a run, with an error that includes its autocorrelation.

    The series is modelled as autoregressive; the variance of the mean is the spectrum of that model at frequency 0 by
    the length (Berk, Annals of Statistics 2, 1974). A model uses all values, where blocks of a short series leave few
    independent ones: 150 values with a correlation of 0.85 make 4 blocks.

    Args:
        values: At least ten.
    """
    n, center = len(values), fmean(values)
    weights, noise = _fit_autoregression([value - center for value in values])
    total = sum(weights)
    # Subtracting the mean of n values biases the sum of the weights by -(1 + 3 total) / n (Marriott and Pope,
    # Biometrika 41, 1954, for one weight).
    total = min(total + (1 + 3 * max(0.0, total)) / n, 1 - 1 / n) if weights else 0.0
    variance = noise / (1 - total) ** 2 / n
    # The logarithm of the spectrum varies by the estimates of the noise, 2/n, and of the weights: for one weight r,
    # 4/n (1 + r) / (1 - r). That of chi-squared with f degrees of freedom varies by 2/f.
    spread = 2 / n + (4 / n * (1 + total) / (1 - total) if weights else 0.0)
    return SeriesMean(center, math.sqrt(variance), max(1.0, 2 / spread))


def compare_series_means(new: Sequence[float], old: Sequence[Sequence[float]], *, level: float = 0.95) -> Interval:
    """Interval of the ratio of the mean of one series to those of others, of positive values (Welch's test).

    Args:
        new: At least ten values.
        old: Series to compare with, whose means count alike.
        level: Confidence level.
    """
    found = [estimate_series_mean(values) for values in (new, *old)]
    shares = [1.0, *(1 / len(old) for _ in old)]
    parts = [(share * each.error / each.mean) ** 2 for share, each in zip(shares, found, strict=True)]
    distance = math.log(found[0].mean) - fmean(math.log(each.mean) for each in found[1:])
    total = sum(parts)
    if total == 0:
        return Interval(math.exp(distance), math.exp(distance), math.exp(distance), level)
    freedom = total**2 / sum(part**2 / each.freedom for part, each in zip(parts, found, strict=True))
    reach = compute_t_quantile((1 + level) / 2, max(1, math.floor(freedom))) * math.sqrt(total)
    return Interval(math.exp(distance), math.exp(distance - reach), math.exp(distance + reach), level)


def _fit_autoregression(centered: Sequence[float]) -> tuple[list[float], float]:
    """Weights of the values before each, and the variance of the rest.

    Burg's method; the number of weights is that with the least BIC (Schwarz, Annals of Statistics 6, 1978).
    """
    n = len(centered)
    power = sum(value * value for value in centered) / n
    best: tuple[float, list[float], float] = (n * math.log(power) if power else -math.inf, [], power)
    forward, backward = list(centered), list(centered)
    weights: list[float] = []
    for order in range(1, min(MAX_ORDER, n // 10) + 1):
        ahead, behind = forward[1:], backward[:-1]
        size = sum(a * a + b * b for a, b in zip(ahead, behind, strict=True))
        if size <= 0 or power <= 0:
            break
        reflection = 2 * sum(a * b for a, b in zip(ahead, behind, strict=True)) / size
        weights = [*(w - reflection * v for w, v in zip(weights, reversed(weights), strict=True)), reflection]
        forward = [a - reflection * b for a, b in zip(ahead, behind, strict=True)]
        backward = [b - reflection * a for a, b in zip(ahead, behind, strict=True)]
        power *= 1 - reflection * reflection
        if power <= 0:
            break
        score = n * math.log(power) + math.log(n) * order
        best = min(best, (score, weights, power))
    return best[1], best[2]


def compute_excess_probability(
    new: Sequence[float],
    old: Sequence[float],
    statistic: Statistic,
    *,
    block: int | None = None,
    resamples: int = NUM_RESAMPLES // 2,
    seed: int = SEED,
) -> float:
    """Probability that a statistic of `new` exceeds that of `old` as much by chance (one-sided permutation test).

    Blocks of both series are reassigned. Unlike the bootstrap this is right for rare events: four stalls in one of two
    runs have a probability of 1/16, although a resampled run without a stall never has one.

    Args:
        new: Values that may be larger.
        old: Values to compare with.
        statistic: For example `fmean`.
        block: Length of the blocks that stay together; None to choose it from the autocorrelation.
        resamples: Number of permutations.
        seed: Seed of the permutations.
    """
    length = max(map(choose_block_length, (new, old))) if block is None else block
    blocks = [values[first : first + length] for values in (new, old) for first in range(0, len(values), length)]
    observed = statistic(list(new)) - statistic(list(old))
    rng = random.Random(seed)
    count = 1
    for _ in range(resamples):
        rng.shuffle(blocks)
        values = [value for part in blocks for value in part]
        count += statistic(values[: len(new)]) - statistic(values[len(new) :]) >= observed
    return count / (resamples + 1)


def choose_block_length(values: Sequence[float]) -> int:
    """Block length for the bootstrap of an autocorrelated series: 1 for independent values.

    The rule of Politis and White for the circular bootstrap (Econometric Reviews 23, 2004, with the correction of
    Patton, Politis and White, 28, 2009).
    """
    n = len(values)
    if n < 8:
        return 1
    longest_lag = min(n // 2, math.ceil(math.sqrt(n)) + 10)
    # Stalls are most of the variance and independent of each other; unclipped, they hide the correlation of the rest.
    covariances = _compute_autocovariances(clip_outliers(values, MAX_CORRELATED), longest_lag)
    if covariances[0] <= 0:
        return 1
    # The first lag after which several correlations in a row are indistinguishable from 0.
    needed, limit = max(5, math.ceil(math.sqrt(math.log10(n)))), 2 * math.sqrt(math.log10(n) / n)
    small = [abs(covariance) < limit * covariances[0] for covariance in covariances]
    cutoff = next((lag for lag in range(longest_lag - needed) if all(small[lag + 1 : lag + 1 + needed])), longest_lag)
    bandwidth = min(2 * max(cutoff, 1), longest_lag)
    weights = [min(1.0, 2 * (1 - lag / bandwidth)) for lag in range(bandwidth + 1)]
    spectrum = covariances[0] + 2 * sum(w * c for w, c in zip(weights[1:], covariances[1:], strict=False))
    slope = 2 * sum(w * lag * c for lag, (w, c) in enumerate(zip(weights, covariances, strict=False)))
    if spectrum <= 0:
        return 1
    length: float = (1.5 * (slope / spectrum) ** 2 * n) ** (1 / 3)
    # Twice as long: that length is best for the variance, and intervals suffer more from blocks that are too short.
    return max(1, min(round(2 * length), math.ceil(n / 4)))


def find_steady_window(values: Sequence[float]) -> SteadyWindow:
    """Find where the warm-up of a series ends.

    The rule MSER (White, Simulation 69, 1997): the start that minimizes the squared standard error of the mean of the
    rest, within the first half; of nearly as good ones (`WARM_UP_GAIN`) the earliest. Outliers are clipped first.
    """
    n = len(values)
    if n < 4:
        return SteadyWindow(0, True)
    late = values[n // 2 :]
    center = median(late)
    deviations = [value - center for value in reversed(clip_outliers(values, MAX_DEVIATIONS, late))]
    sums = zip(accumulate(deviations), accumulate(map(mul, deviations, deviations)), range(1, n + 1), strict=True)
    errors = [
        max(squares - total * total / count, 0.0) / (count * count)
        for total, squares, count in islice(sums, n - n // 2 - 1, None)
    ]
    errors.reverse()
    best = min(range(len(errors)), key=errors.__getitem__)
    # A minimum in the last tenth of the allowed range says that the best cut may lie beyond it.
    if best > 0.45 * n:
        return SteadyWindow(n // 2, False)
    limit = errors[best] * (1 + WARM_UP_GAIN)
    return SteadyWindow(next(start for start, error in enumerate(errors) if error <= limit), True)


def thin_series(values: Sequence[float], statistic: Statistic, limit: int = MAX_SERIES) -> list[float]:
    """Replace each group of consecutive values by its statistic, so that at most `limit` values remain."""
    size = math.ceil(len(values) / limit)
    if size <= 1:
        return list(values)
    return [statistic(list(values[first : first + size])) for first in range(0, len(values) - size + 1, size)]


def predict_ratio(value: float, others: Sequence[float], *, level: float = 0.95) -> Interval:
    """Interval of the ratio of a new value to the typical one of earlier, equally noisy ones.

    A prediction interval of Student's t on logarithms: it contains 1 in `level` of all cases if the new value comes
    from the same distribution.

    Args:
        value: For example the median of a run.
        others: The same of two or more earlier runs.
        level: Confidence level.
    """
    logarithms = [math.log(other) for other in others]
    k, center = len(logarithms), fmean(logarithms)
    spread = math.sqrt(sum((each - center) ** 2 for each in logarithms) / (k - 1))
    reach = compute_t_quantile((1 + level) / 2, k - 1) * spread * math.sqrt(1 + 1 / k)
    distance = math.log(value) - center
    return Interval(math.exp(distance), math.exp(distance - reach), math.exp(distance + reach), level)


@functools.cache
def compute_t_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution; `share` is at least 0.5."""
    if freedom > 200:
        return NormalDist().inv_cdf(share)
    low, high = 0.0, 1.0
    while _integrate_t(high, freedom) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _integrate_t(middle, freedom) < share else (low, middle)
    return (low + high) / 2


def _integrate_t(t: float, freedom: int) -> float:
    """Probability below `t`, by the finite series in the angle (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term, total = (cosine if is_odd else 1.0), 0.0
    for factor in range(1 if is_odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (factor + 1) / (factor + 2)
    if is_odd:
        return 0.5 + (angle + sine * total) / math.pi
    return 0.5 + sine * total / 2


def _resample_blocks(values: Sequence[float], length: int, rng: random.Random) -> list[float]:
    """As many values in randomly chosen blocks; the series is a circle, so that each value is equally likely."""
    n = len(values)
    if length <= 1:
        return rng.choices(values, k=n)
    circle = [*values, *values[:length]]
    found: list[float] = []
    while len(found) < n:
        start = int(rng.random() * n)  # five times as fast as randrange
        found += circle[start : start + length]
    return found[:n]


def _cut_tails(estimate: float, ordered: Sequence[float], level: float, blocks: float) -> Interval:
    """The percentile interval, expanded for few independent blocks.

    Resampling k values underestimates their spread by sqrt((k-1)/k), and the normal tails of the percentiles are
    lighter than those of t (Hesterberg, The American Statistician 69, 2015, "expanded percentile interval").
    """
    freedom = max(1, math.floor(blocks) - 1)
    quantile = compute_t_quantile((1 + level) / 2, freedom) * math.sqrt((freedom + 1) / freedom)
    tail = NormalDist().cdf(-quantile)
    return Interval(estimate, compute_quantile(ordered, tail), compute_quantile(ordered, 1 - tail), level)


def clip_outliers(values: Sequence[float], deviations: float, typical: Sequence[float] | None = None) -> list[float]:
    """Values within `deviations` median absolute deviations of the median, both of `typical`."""
    typical = values if typical is None else typical
    center = median(typical)
    reach = deviations * max(compute_mad(typical), 1e-6 * abs(center))
    low, high = center - reach, center + reach
    return [low if value < low else high if value > high else value for value in values]


def _compute_autocovariances(values: Sequence[float], longest_lag: int) -> list[float]:
    center, n = fmean(values), len(values)
    centered = [value - center for value in values]
    return [sum(a * b for a, b in zip(centered, centered[lag:], strict=False)) / n for lag in range(longest_lag + 1)]
