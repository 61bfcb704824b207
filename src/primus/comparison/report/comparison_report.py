"""The report of a comparison as a value: cells in numbers, pairs with their verdicts, and ratios of fair pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, structs

from primus.comparison.fairness.check import ComparisonClass
from primus.comparison.fairness.evidence import collect_evidence
from primus.comparison.fairness.fact_checks import MOST_LOAD
from primus.comparison.fairness.loss_curves import LossCurve, LossSpread, estimate_loss_spread
from primus.comparison.fairness.verdict import PairVerdict, judge_pair, merge_verdicts
from primus.comparison.folder.archive import SkippedFile
from primus.comparison.report.cell_results import ComparisonCell
from primus.comparison.report.published_results import PublishedResult
from primus.comparison.results.result import ComparisonResult
from primus.comparison.speed.cell_statistics import (
    MIN_STEPS,
    CellStatistics,
    RatioEstimate,
    compare_times,
    find_time_to_loss,
    find_tokens_per_step,
    find_warm_up,
    select_steady_times,
    summarize_cell,
)
from primus.comparison.speed.efficiency import (
    DevicePrice,
    UtilizationEstimate,
    compute_cost_per_million_tokens,
    compute_joules_per_million_tokens,
    estimate_utilization,
    find_price,
)
from primus.comparison.speed.turn_ratio import compare_turns, group_by_turn


class ReportOptions(Struct, frozen=True, kw_only=True):
    """What the reader wants to know."""

    allow_unfair: bool = False
    """Whether pairs that are not fair get a ratio, with the reason."""
    prices: Sequence[DevicePrice] = ()
    target_loss: float | None = None
    published: Sequence[PublishedResult] = ()


class CellReport(Struct, frozen=True, kw_only=True):
    """A cell in numbers; None where its results do not have them."""

    label: str
    platform: str
    framework: str
    model: str
    settings_class: str
    device: str
    devices: int | None
    hosts: list[str]
    precision: str
    versions: dict[str, str]
    statistics: CellStatistics | None
    average_tokens_per_s_per_device: float | None
    """Speed that the file states, where it has no times of steps; it has no interval."""
    utilization: UtilizationEstimate
    memory_gb: float | None
    """Largest peak of a device in 10^9 bytes."""
    joules_per_million_tokens: float | None
    cost_per_million_tokens: float | None
    price: DevicePrice | None
    seconds_to_loss: float | None
    """Training time until the target loss."""
    tokens_to_loss: float | None
    final_loss: float | None
    seeds: list[int]
    """Seeds of its runs."""
    loss_spread: LossSpread | None
    """Spread of the losses of its runs with different seeds."""
    problems: list[str]
    """Reasons why runs failed or why its speed is impossible or doubtful, and values that are missing."""

    @property
    def speed(self) -> float | None:
        """Tokens/s of a device."""
        found = self.statistics.tokens_per_s_per_device if self.statistics else None
        return found.value if found else self.average_tokens_per_s_per_device


class CellPair(Struct, frozen=True, kw_only=True):
    """Two cells of one model and one class."""

    a: str
    b: str
    verdict: PairVerdict
    ratio: RatioEstimate | None
    """Speed of A divided by that of B; None if no fair ratio exists."""
    refusal: str
    """The reason why the ratio is missing or not fair."""

    @property
    def speeds(self) -> tuple[float, float] | None:
        """Tokens/s of a device of each cell in the steps that the ratio compares."""
        return (1 / self.ratio.times[0], 1 / self.ratio.times[1]) if self.ratio else None


class ComparisonReport(Struct, frozen=True, kw_only=True):
    """A whole comparison."""

    name: str
    cells: list[CellReport]
    pairs: list[CellPair]
    published: list[PublishedResult]
    """Published results of the models that were measured."""
    skipped: list[str]
    """Files that are not results."""
    target_loss: float | None


def build_comparison_report(
    cells: Mapping[str, ComparisonCell], skipped: Sequence[SkippedFile], options: ReportOptions
) -> ComparisonReport:
    """The report of the cells with these labels."""
    reports = {label: _summarize(label, cell, options) for label, cell in cells.items()}
    models = {cell.model for cell in cells.values()}
    results = [result for cell in cells.values() for result in (*cell.runs, *cell.failed)]
    names = dict.fromkeys(result.cell.comparison for result in results if result.cell.comparison)
    return ComparisonReport(
        name=", ".join(names) or "comparison",
        cells=list(reports.values()),
        pairs=list(_compare_pairs(cells, reports, allow_unfair=options.allow_unfair)),
        published=[each for each in options.published if each.model in models],
        skipped=[f"{each.file}: {each.reason}" for each in skipped],
        target_loss=options.target_loss,
    )


def _summarize(label: str, cell: ComparisonCell, options: ReportOptions) -> CellReport:
    warm_up, is_steady = find_warm_up(cell.runs)
    statistics = summarize_cell(cell.runs, warm_up, is_steady=is_steady)
    first = (cell.runs or cell.failed)[0]
    average = None if statistics else first.performance_metrics.tokens_per_second_per_gpu
    rate = statistics.tokens_per_s_per_device if statistics else None
    speed = rate.value if rate else average
    utilization = estimate_utilization(first, speed)
    price = find_price(options.prices, cell.device)
    reached = _find_times_to_loss(cell.runs, options.target_loss)
    return CellReport(
        label=label,
        platform=cell.platform,
        framework=cell.framework,
        model=cell.model,
        settings_class=cell.settings_class,
        device=cell.device,
        devices=cell.devices,
        hosts=sorted({run.machine.host for run in cell.runs if run.machine.host}),
        precision=first.precision or str(first.settings.get("precision", "")),
        versions=first.versions,
        statistics=statistics,
        average_tokens_per_s_per_device=average,
        utilization=utilization,
        memory_gb=max(filter(None, map(_find_peak_memory, cell.runs)), default=None),
        joules_per_million_tokens=compute_joules_per_million_tokens(cell.runs, warm_up),
        cost_per_million_tokens=compute_cost_per_million_tokens(price, speed) if price and speed else None,
        price=price,
        seconds_to_loss=reached[0] if reached else None,
        tokens_to_loss=reached[1] if reached else None,
        final_loss=next((loss for loss in reversed(first.steps.loss) if loss is not None), None),
        seeds=sorted({seed for run in cell.runs if isinstance(seed := run.settings.get("seed"), int)}),
        loss_spread=_estimate_spread(cell),
        problems=[*_list_problems(cell, statistics, utilization), *_list_missing_prices(cell, price, options)],
    )


def _find_times_to_loss(runs: Sequence[ComparisonResult], target: float | None) -> tuple[float, float] | None:
    """The middle run's time; None unless all runs reach the loss."""
    found = [find_time_to_loss(run, target) for run in runs] if target is not None else []
    reached = sorted(each for each in found if each is not None)
    return reached[len(reached) // 2] if reached and len(reached) == len(found) else None


def _find_peak_memory(run: ComparisonResult) -> float | None:
    return run.memory_metrics.peak_memory_allocated_gb or run.memory_metrics.peak_memory_reserved_gb


def _list_problems(
    cell: ComparisonCell, statistics: CellStatistics | None, utilization: UtilizationEstimate
) -> list[str]:
    problems = [f"{run.state}: {run.reason or 'without steps'}" for run in cell.failed]
    problems += [note for run in cell.runs for note in run.notes]
    if cell.runs and statistics is None:
        has_times = any(run.steps.time_s for run in cell.runs)
        lack = f"fewer than {MIN_STEPS} steps after the warm-up" if has_times else "the times of steps are not stated"
        problems.append(f"{lack}: no interval")
    elif statistics is not None and not statistics.is_steady:
        problems.append("the speed of a run still changes in its second half")
    problems += [text for text in (utilization.problem, utilization.doubt) if text]
    for run in cell.runs:
        if (others := run.load.other_cpu_share or 0.0) > MOST_LOAD:
            problems.append(
                f"run {run.cell.repetition}: other processes took {others:.0%} of the machine: its speed is not that of"
                " the cell alone; `compare run --repeat-disturbed` runs it again"
            )
    return list(dict.fromkeys(problems))


def _list_missing_prices(cell: ComparisonCell, price: DevicePrice | None, options: ReportOptions) -> list[str]:
    if price is not None or not options.prices or not cell.device:
        return []
    listed = ", ".join(dict.fromkeys(each.device for each in options.prices))
    return [f"no price is given for {cell.device}; there are prices for {listed}"]


def _compare_pairs(
    cells: Mapping[str, ComparisonCell], reports: Mapping[str, CellReport], *, allow_unfair: bool
) -> Iterator[CellPair]:
    """All pairs of cells with runs that have the same model and class."""
    for (a, ours), (b, theirs) in itertools.combinations(cells.items(), 2):
        if ours.runs and theirs.runs and (ours.model, ours.settings_class) == (theirs.model, theirs.settings_class):
            ours, theirs = _match_seeds(ours, theirs), _match_seeds(theirs, ours)
            verdict = _judge_cells(a, ours, b, theirs)
            problem = reports[a].utilization.problem or reports[b].utilization.problem
            reasons = [problem] if problem else verdict.list_reasons()
            ratio = None
            if not problem and (verdict.status == "fair" or allow_unfair):
                ratio = _compare_speeds(ours, theirs)
                if ratio is None:
                    lack = f"fewer than {MIN_STEPS} common steps after the warm-up, or steps of unknown batch size"
                    reasons = [lack, *reasons]
            refusal = "; ".join(reasons)
            yield CellPair(a=a, b=b, verdict=verdict, ratio=ratio, refusal=refusal)


def _judge_cells(a: str, ours: ComparisonCell, b: str, theirs: ComparisonCell) -> PairVerdict:
    """The worst verdict of all runs, each with one of the same seed; of the first two runs, if no seed is common."""
    chosen: ComparisonClass = "tuned" if ours.settings_class == "tuned" else "identical"
    spreads = [spread for spread in map(_estimate_spread, (ours, theirs)) if spread]
    spread = min(spreads, key=lambda each: each.mean, default=None)
    pairs = []
    for seed in dict.fromkeys(run.settings.get("seed") for run in ours.runs):
        sides = [[run for run in cell.runs if run.settings.get("seed") == seed] for cell in (ours, theirs)]
        # Of unequal numbers of runs, the last one of the fewer meets the rest of the others.
        numbers = range(max(map(len, sides)) if all(sides) else 0)
        pairs += [tuple(side[min(number, len(side) - 1)] for side in sides) for number in numbers]
    verdicts = [
        judge_pair(collect_evidence(run, a), collect_evidence(other, b), chosen, spread)
        for run, other in pairs or [(ours.runs[0], theirs.runs[0])]
    ]
    return merge_verdicts(verdicts)


def _match_seeds(cell: ComparisonCell, other: ComparisonCell) -> ComparisonCell:
    """The cell with the runs whose seed the other has too; with all, if none is common."""
    seeds = [run.settings.get("seed") for run in other.runs]
    runs = [run for run in cell.runs if run.settings.get("seed") in seeds]
    return structs.replace(cell, runs=runs or cell.runs)


def _estimate_spread(cell: ComparisonCell) -> LossSpread | None:
    """How much the losses of runs with different seeds differ."""
    curves: dict[object, LossCurve] = {}
    for run in cell.runs:
        curves.setdefault(run.settings.get("seed"), run.steps.pair_values(run.steps.loss))
    return estimate_loss_spread(list(curves.values()))


def _compare_speeds(ours: ComparisonCell, theirs: ComparisonCell) -> RatioEstimate | None:
    """The ratio on common steps after the longer warm-up of both, of tokens by device and time."""
    warm_up = max(find_warm_up(ours.runs)[0], find_warm_up(theirs.runs)[0])
    sides, turns = [], []
    for cell in (ours, theirs):
        tokens = find_tokens_per_step(cell.runs)
        if tokens is None:
            return None
        runs = [_scale_times(run, warm_up, tokens, cell.devices or 1) for run in cell.runs]
        sides.append([run for run in runs if run])
        turns.append(
            [
                group_by_turn(run.cell.turn_group, run.steps.pair_values(run.steps.turn), times)
                for run, times in zip(cell.runs, runs, strict=True)
            ]
        )
    return compare_turns(turns[0], turns[1]) or compare_times(sides[0], sides[1])


def _scale_times(run: ComparisonResult, warm_up: int, tokens: float, devices: int) -> dict[int, float]:
    """Device seconds of a token at each steady step, so that batch sizes and numbers of devices cancel."""
    counts = run.steps.pair_values(run.steps.tokens)
    times = select_steady_times(run, warm_up)
    return {step: time * devices / (counts.get(step) or tokens) for step, time in times.items()}
