"""The numbers of a cell from the steps of its runs, and the ratio of two cells, with intervals.

A cell is one platform, framework, model and class of settings; its runs are repetitions. Its speed is the median of
its steps after the warm-up. The ratio of two cells compares their typical steps: means without outliers, which are more
precise than medians. With three or more runs on each side, its interval comes from the runs, since steps of one run are
correlated and share what the run was lucky in; with fewer, from a model of the correlation of steps, which does not
know the spread between runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, median

from msgspec import Struct

from primus.comparison.fairness.fact_checks import MOST_LOAD
from primus.comparison.results.result import ComparisonResult
from primus.machine.tools.vitals import NORMAL_LIMITS
from primus.statistics import (
    MAX_CORRELATED,
    Interval,
    bootstrap_interval,
    bootstrap_ratio,
    clip_outliers,
    compare_series_means,
    compute_quantile,
    compute_t_quantile,
    estimate_series_mean,
    find_steady_window,
    thin_series,
)

RUNS_FOR_SPREAD = 3
"""Runs of each cell from which their spread is estimated; the t quantile of two is 12.7."""
USUAL_RUN_SPREAD = 0.005
"""Spread of the speed of equal runs, relative: ten runs of MLPerf 5.1 on one machine lie within 0.26 %."""
EXPECTED_WEIGHT = 2
"""Degrees of freedom of the spread that is expected; three and three runs have four."""
SMALLEST_DIFFERENCE = 0.015
"""With fewer runs, smaller differences may be one run's luck: half of the 3 % that must be found, as in `runs gate`."""
MIN_STEPS = 10
"""Fewest steps after the warm-up that give a speed."""
LEVEL = 0.95
"""Confidence level of the intervals of a cell."""
RATIO_LEVEL = 0.98
"""Confidence level of the interval of a ratio, which excludes 1 if there is a difference: at 95 %, one of twenty equal
pairs differs."""
TARGET_DIFFERENCE = 0.03
"""Difference that a comparison should show; a report without one says how many more runs that takes."""
POWER = 0.9
"""Share of comparisons that show a difference which they are said to show."""
MOST_MORE_RUNS = 50
MANY = 1000
"""Degrees of freedom of an error that is known from many steps."""
SLOW_FACTOR = 1.5
"""A step is slow above this multiple of the median."""
MOST_SLOW_STEPS = 20


class SlowStep(Struct, frozen=True, kw_only=True):
    """A step that took far longer than the median."""

    run: str
    step: int
    time_s: float
    cause: str
    """`not explained` if the run did nothing else at that time."""


class SpeedEstimate(Struct, frozen=True, kw_only=True):
    """A number with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_interval(cls, found: Interval) -> SpeedEstimate:
        """The estimate and bounds of an interval."""
        return cls(value=found.estimate, low=found.low, high=found.high)

    def invert(self, factor: float) -> SpeedEstimate:
        """`factor` by this number."""
        return SpeedEstimate(value=factor / self.value, low=factor / self.high, high=factor / self.low)


class CellStatistics(Struct, frozen=True, kw_only=True):
    """The steps of a cell in numbers; None where its runs do not have it."""

    runs: int
    warm_up_steps: int
    """Steps that are excluded at the start of each attempt."""
    is_steady: bool
    """False if the speed of a run still changes in its second half."""
    steps: int
    """Steps of all runs that are counted."""
    step_s: SpeedEstimate
    tokens_per_s: SpeedEstimate | None
    tokens_per_s_per_device: SpeedEstimate | None
    tokens_per_cpu_s: SpeedEstimate | None
    """Tokens of a process by its CPU time, if the CPU trained. Other processes change it less than the speed; threads
    that wait by spinning count as well."""
    mean_tokens_per_s: float | None
    """Tokens by time: the harmonic mean, which slow steps lower."""
    p95_by_median: float
    """95th percentile of the steps by their median."""
    slow_share: float
    """Share of the time in slow steps."""
    slow_steps: list[SlowStep]
    """The slowest; at most `MOST_SLOW_STEPS`."""


class RatioEstimate(Struct, frozen=True, kw_only=True):
    """How many times as fast one cell is as another."""

    value: float
    low: float
    """Lower bound of the interval at `RATIO_LEVEL`."""
    high: float
    times: tuple[float, float]
    """Typical time of each cell in the compared steps, of which the ratio is made."""
    is_difference: bool
    """Whether a difference is shown."""
    method: str
    smallest_difference: float
    """Relative difference that such runs show in nine of ten cases."""
    more_runs: int | None = None
    """Further runs of each cell that show `TARGET_DIFFERENCE`; None if these do, or if they are too many."""

    def describe(self) -> str:
        """A sentence about the ratio."""
        numbers = f"{self.value:.3f} ({RATIO_LEVEL:.0%}: {self.low:.3f} to {self.high:.3f})"
        if self.is_difference:
            return numbers
        least = f"{self.smallest_difference:.1%}" if self.smallest_difference < 1 else "a factor of two"
        found = f"{numbers}: no difference shown; these runs cannot show less than {least}"
        if self.smallest_difference <= TARGET_DIFFERENCE:
            return found
        runs = f"{self.more_runs} more runs" if self.more_runs else f"more than {MOST_MORE_RUNS} further runs"
        return f"{found}, {runs} of each cell would show {TARGET_DIFFERENCE:.0%}"


def find_warm_up(runs: Sequence[ComparisonResult]) -> tuple[int, bool]:
    """The steps of the warm-up of the runs of a cell, and whether they become steady.

    It is found in the middle one of all attempts at each place: in a single series, slow noise looks like a warm-up.
    The first step, which may compile, is always part of it.
    """
    attempts = [[time / median(times) for time in times[1:]] for run in runs for times in _split_attempts(run)]
    if not attempts:
        return 1, True
    longest = max(map(len, attempts))
    middle = [median(times[place] for times in attempts if place < len(times)) for place in range(longest)]
    window = find_steady_window(middle)
    return 1 + window.start, window.is_steady


def select_steady_times(run: ComparisonResult, warm_up_steps: int) -> dict[int, float]:
    """The time of each step after the warm-up of its attempt, without profiled steps."""
    profiled, found = set(run.steps.profiled), {}
    starts = set(run.steps.first_of_attempt)
    position = 0
    for number, time in zip(run.steps.number, run.steps.time_s, strict=False):
        position = 0 if number in starts else position
        if position >= warm_up_steps and time and number not in profiled:
            found[number] = time
        position += 1
    return found


def find_tokens_per_step(runs: Sequence[ComparisonResult]) -> float | None:
    """Tokens of a step, from the steps themselves or from batch size and sequence length."""
    counts = [count for run in runs for count in run.steps.tokens if count]
    if counts:
        return median(counts)
    training = runs[0].training_config
    if training.global_batch_size and training.sequence_length:
        return float(training.global_batch_size * training.sequence_length)
    return None


def summarize_cell(runs: Sequence[ComparisonResult], warm_up_steps: int, *, is_steady: bool) -> CellStatistics | None:
    """The numbers of a cell; None if its runs have fewer than `MIN_STEPS` steps after the warm-up together.

    Args:
        runs: The runs of the cell.
        warm_up_steps: Steps to exclude at the start of each attempt.
        is_steady: Whether the steps after them are steady.
    """
    series = [(run, select_steady_times(run, warm_up_steps)) for run in runs]
    series = [(run, times) for run, times in series if times]
    everything = sorted(time for _, times in series for time in times.values())
    if len(everything) < MIN_STEPS:
        return None
    typical = median(everything)
    step_s = _estimate_step_time([list(times.values()) for _, times in series])
    tokens = find_tokens_per_step(runs)
    devices = next((run.gpu_info.device_count for run in runs if run.gpu_info.device_count), None)
    rate = step_s.invert(tokens) if tokens else None
    slow = [slow_step for run, times in series for slow_step in _list_slow_steps(run, times, SLOW_FACTOR * typical)]
    return CellStatistics(
        runs=len(series),
        warm_up_steps=warm_up_steps,
        is_steady=is_steady,
        steps=len(everything),
        step_s=step_s,
        tokens_per_s=rate,
        tokens_per_s_per_device=step_s.invert(tokens / devices) if tokens and devices else None,
        tokens_per_cpu_s=_estimate_cpu_rate(series, tokens / devices) if tokens and devices else None,
        mean_tokens_per_s=tokens / fmean(everything) if tokens else None,
        p95_by_median=compute_quantile(everything, 0.95) / typical,
        slow_share=sum(each.time_s for each in slow) / sum(everything),
        slow_steps=sorted(slow, key=lambda each: -each.time_s)[:MOST_SLOW_STEPS],
    )


def compare_times(a: Sequence[Mapping[int, float]], b: Sequence[Mapping[int, float]]) -> RatioEstimate | None:
    """How many times as fast `a` is as `b`, on the steps that all runs have; None if these are too few.

    Args:
        a: Time of each step after the warm-up, of each run of the one cell.
        b: The same of the other cell.
    """
    common = set.intersection(*(set(run) for run in (*a, *b))) if a and b else set()
    if len(common) < MIN_STEPS:
        return None
    ours, theirs = ([[run[step] for step in sorted(common)] for run in runs] for runs in (a, b))
    typical = [[clip_outliers(run, MAX_CORRELATED) for run in runs] for runs in (ours, theirs)]
    num_runs = min(len(ours), len(theirs))
    if num_runs >= RUNS_FOR_SPREAD:
        return _compare_runs(typical[0], typical[1])
    found = compare_series_means([time for run in typical[1] for time in run], typical[0], level=RATIO_LEVEL)
    is_large = abs(math.log(found.estimate)) > math.log(1 + SMALLEST_DIFFERENCE)
    error = math.log(found.high / found.low) / 2 / NormalDist().inv_cdf((1 + RATIO_LEVEL) / 2)
    smallest = find_smallest_difference(error, MANY)
    return RatioEstimate(
        value=found.estimate,
        low=found.low,
        high=found.high,
        times=_average_runs(typical),
        is_difference=is_large and not found.contains(1),
        method=(
            f"from steps of {len(ours)} and {len(theirs)} runs; differences below {SMALLEST_DIFFERENCE:.1%} are not"
            f" told from the spread between runs, which takes {RUNS_FOR_SPREAD} runs of each cell"
        ),
        smallest_difference=max(SMALLEST_DIFFERENCE, smallest),
        more_runs=RUNS_FOR_SPREAD - num_runs,
    )


def _compare_runs(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> RatioEstimate:
    """The ratio from the means of runs: the wider of a bootstrap over runs and Student's interval of logarithms.

    Resampling three runs never leaves their range, which holds the median of all runs in three of four cases only. The
    spread of three and three runs is known badly as well, but much of it is the noise of the steps, which is known from
    hundreds of them. So the variance of a run is that of the runs, averaged with the one that the steps and a usual
    spread between runs give, weighted by degrees of freedom (Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004, with a fixed
    weight). Whatever the spread between runs really is, no more than 6 % of equal pairs differ at a level of 98 %.
    """
    means = [[fmean(run) for run in runs] for runs in (ours, theirs)]
    logs = [[math.log(time) for time in times] for times in means]
    freedom = len(ours) + len(theirs) - 2
    squares = sum((value - fmean(values)) ** 2 for values in logs for value in values)
    series = [estimate_series_mean(run) for run in (*ours, *theirs)]
    expected = fmean((each.error / each.mean) ** 2 for each in series) + USUAL_RUN_SPREAD**2
    variance = (squares + EXPECTED_WEIGHT * expected) / (freedom + EXPECTED_WEIGHT)
    error = math.sqrt(variance * (1 / len(ours) + 1 / len(theirs)))
    center = fmean(logs[1]) - fmean(logs[0])
    resampled = bootstrap_ratio(means[1], means[0], fmean, block=1, level=RATIO_LEVEL)
    reach = compute_t_quantile((1 + RATIO_LEVEL) / 2, freedom + EXPECTED_WEIGHT) * error
    low, high = min(resampled.low, math.exp(center - reach)), max(resampled.high, math.exp(center + reach))
    return RatioEstimate(
        value=resampled.estimate,
        low=low,
        high=high,
        times=_average_runs((ours, theirs)),
        is_difference=not low <= 1 <= high,
        method=f"from {len(ours)} and {len(theirs)} runs",
        smallest_difference=find_smallest_difference(error, freedom + EXPECTED_WEIGHT),
        more_runs=count_more_runs(variance, min(len(ours), len(theirs))),
    )


def find_smallest_difference(error: float, freedom: int) -> float:
    """The difference that a comparison shows with a probability of `POWER`; `error` is that of the logarithm."""
    reach = compute_t_quantile((1 + RATIO_LEVEL) / 2, freedom)
    return math.expm1((reach + NormalDist().inv_cdf(POWER)) * error)


def count_more_runs(variance: float, num_runs: int) -> int | None:
    """Further runs of each cell that show `TARGET_DIFFERENCE`; `variance` is that of the logarithm of a run."""
    for more in range(1, MOST_MORE_RUNS + 1):
        total = num_runs + more
        freedom = 2 * total - 2 + EXPECTED_WEIGHT
        if find_smallest_difference(math.sqrt(2 * variance / total), freedom) <= TARGET_DIFFERENCE:
            return more
    return None


def _average_runs(sides: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    ours, theirs = (fmean(fmean(run) for run in runs) for runs in sides)
    return ours, theirs


def _estimate_step_time(series: Sequence[Sequence[float]]) -> SpeedEstimate:
    if len(series) >= RUNS_FOR_SPREAD:
        return SpeedEstimate.from_interval(bootstrap_interval([median(run) for run in series], median, level=LEVEL))
    pooled = thin_series([time for run in series for time in run], median)
    return SpeedEstimate.from_interval(bootstrap_interval(pooled, median, block=None, level=LEVEL))


def _estimate_cpu_rate(
    series: Sequence[tuple[ComparisonResult, Mapping[int, float]]], tokens: float
) -> SpeedEstimate | None:
    found = []
    for run, times in series:
        cpu = run.steps.pair_values(run.steps.cpu_time_s)
        found.append([value for step in times if run.platform == "cpu" and (value := cpu.get(step))])
    return _estimate_step_time(found).invert(tokens) if all(found) else None


def _split_attempts(run: ComparisonResult) -> list[list[float]]:
    """The times of the steps of each attempt."""
    starts, found = set(run.steps.first_of_attempt), [[]]  # type: ignore[var-annotated]
    for number, time in zip(run.steps.number, run.steps.time_s, strict=False):
        if number in starts and found[-1]:
            found.append([])
        if time:
            found[-1].append(time)
    return [times for times in found if len(times) > 1]


def _list_slow_steps(run: ComparisonResult, times: Mapping[int, float], limit: float) -> list[SlowStep]:
    name = run.run or run.cell.name
    return [
        SlowStep(run=name, step=step, time_s=time, cause=_find_cause(run, step))
        for step, time in times.items()
        if time > limit
    ]


def _find_cause(run: ComparisonResult, step: int) -> str:
    """What else the run did around a step."""
    kinds = [each.kind for each in run.interruptions if each.step in (step - 1, step)]
    ended = run.steps.pair_values(run.steps.ended).get(step)
    times = run.steps.pair_values(run.steps.time_s)
    if ended is not None:
        begin = ended - (times.get(step) or 0.0)
        samples = [sample for sample in run.load.samples if begin <= sample.time <= ended]
        faults = [reason for sample in samples for reason in sample.throttled if reason not in NORMAL_LIMITS]
        kinds += [f"throttling ({reason})" for reason in faults]
    data = run.steps.pair_values(run.steps.data_time_s).get(step) or 0.0
    if data > 0.5 * (times.get(step) or math.inf):
        kinds.append("waiting for data")
    others = run.load.other_cpu_share or 0.0
    if not kinds and others > MOST_LOAD:
        kinds.append(f"perhaps other processes, which took {others:.0%} of the machine during the run")
    return ", ".join(dict.fromkeys(kinds)) or "not explained"


def find_time_to_loss(run: ComparisonResult, target: float, window: int = 10) -> tuple[float, float] | None:
    """Seconds of training and tokens until the mean of `window` losses is at most `target`; None if it never is."""
    seconds = tokens = 0.0
    recent: list[float] = []
    columns = zip(run.steps.loss, run.steps.time_s, run.steps.tokens, strict=False)
    for loss, time, count in columns:
        seconds, tokens = seconds + (time or 0.0), tokens + (count or 0.0)
        recent = [*recent, loss if loss is not None else math.inf][-window:]
        if len(recent) == window and fmean(recent) <= target:
            return seconds, tokens
    return None
