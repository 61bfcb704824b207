"""The report of a comparison as a self-contained page, and its pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median

from primus.comparison.report.cell_results import ComparisonCell
from primus.comparison.report.comparison_report import CellPair, CellReport, ComparisonReport
from primus.comparison.report.tables import (
    ComparisonTable,
    describe_ratio,
    list_answers,
    list_checks,
    list_report_tables,
)
from primus.comparison.results.result import ComparisonResult
from primus.report import page
from primus.report.charts import NUM_COLORS, draw_line_chart
from primus.report.page import Html
from primus.report.point_charts import (
    ChartPoint,
    PlacedPoint,
    ValuePair,
    draw_interval_chart,
    draw_paired_dots,
    draw_scatter,
)
from primus.report.table import format_number

BADGES = {"fair": "ok", "not shown": "unknown", "unfair": "fail"}
HIGHEST_STEP = 3.0
"""Steps are drawn up to this multiple of the slowest cell's median: the first one compiles, and would hide the rest."""
SECTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Summary": ((), ("Cells", "Pairs")),
    "Speed": (("throughput", "pairs", "scaling"), ()),
    "Fairness": ((), ()),
    "Steps": (("steps",), ("Slow steps",)),
    "Losses": (("loss_tokens", "loss_time"), ("Losses with other seeds",)),
    "Memory and efficiency": (("memory", "mfu", "energy"), ("Efficiency", "Not measured")),
    "Published results": ((), ("Published results",)),
    "Problems": ((), ()),
    "What was compared": ((), ()),
}
"""Pictures and tables of each section of the page, after what is only there."""
Cells = Mapping[str, ComparisonCell]
Curve = Sequence[tuple[float, float | None]]


def format_comparison_page(report: ComparisonReport, cells: Cells) -> str:
    """The page; `cells` has the results of each label, whose steps the curves show."""
    pictures = dict(draw_comparison_pictures(report, cells))
    tables = {each.title.partition(" (")[0].partition(":")[0]: each for each in list_report_tables(report)}
    before = {
        "Summary": page.join_fragments(*_make_answers(report), _explain_ratios(report)),
        "Fairness": page.join_fragments(*map(_make_verdict, report.pairs)),
        "Problems": _make_table(tables["Problems"]) if "Problems" in tables else "",
        "What was compared": _make_provenance(report),
    }
    sections = []
    for title, (drawn, named) in SECTIONS.items():
        parts = [before.get(title, ""), _select_pictures(pictures, *drawn), *_make_tables(tables, *named)]
        sections.append((title, page.join_fragments(*filter(None, parts))))
    hosts = sorted({host for cell in report.cells for host in cell.hosts})
    shared = [sorted({getattr(cell, part) for cell in report.cells}) for part in ("platform", "model")]
    common = [names[0] for names in shared if len(names) == 1 and names[0]]
    subtitle = ", ".join([f"{len(report.cells)} cells", *common]) + (f" on {', '.join(hosts)}" if hosts else "")
    return page.format_page(f"Comparison {report.name}", [each for each in sections if each[1]], subtitle)


def draw_comparison_pictures(report: ComparisonReport, cells: Cells) -> Iterator[tuple[str, Html]]:
    """Name and picture of everything that there are numbers for."""
    kinds = {cell.label: index for index, cell in enumerate(report.cells)}
    yield from _draw_throughput(report, kinds)
    yield from _draw_pairs(report)
    yield from _draw_scaling(report)
    yield from _draw_steps(report, cells)
    yield from _draw_losses(cells)
    yield from _draw_efficiency(report, kinds)


def _draw_throughput(report: ComparisonReport, kinds: Mapping[str, int]) -> Iterator[tuple[str, Html]]:
    points = []
    for cell in report.cells:
        found = cell.statistics.tokens_per_s_per_device if cell.statistics else None
        if cell.speed and not cell.utilization.problem:
            points.append(
                ChartPoint(
                    label=cell.label,
                    value=cell.speed,
                    low=found.low if found else None,
                    high=found.high if found else None,
                    kind=kinds[cell.label],
                    note=f"[{format_number(found.low)}, {format_number(found.high)}]" if found else "average",
                )
            )
    points += [
        ChartPoint(label=each.label, value=each.tokens_per_s_per_device, kind=len(kinds), is_hollow=True,
                   note="published")
        for each in report.published
    ]  # fmt: skip
    if points:
        yield "throughput", draw_interval_chart("Throughput of a device, with 95 % intervals", "tokens/s", points)


def _draw_pairs(report: ComparisonReport) -> Iterator[tuple[str, Html]]:
    pairs = [
        ValuePair(label=_label_pair(pair), a=pair.speeds[0], b=pair.speeds[1], note=describe_ratio(pair))
        for pair in report.pairs
        if pair.speeds is not None
    ]
    if pairs:
        yield "pairs", draw_paired_dots("Pairs: A by B", "tokens/s of a device", ("A", "B"), pairs)


def _label_pair(pair: CellPair) -> str:
    """Both names; the class that is part of both stands once."""
    common = f" ({pair.verdict.comparison_class})"
    if pair.a.endswith(common) and pair.b.endswith(common):
        return f"{pair.a.removesuffix(common)} / {pair.b}"
    return f"{pair.a} / {pair.b}"


def _draw_scaling(report: ComparisonReport) -> Iterator[tuple[str, Html]]:
    """Throughput over the number of devices, of frameworks that were measured with several."""
    groups: dict[tuple[str, str, str], list[CellReport]] = {}
    for cell in report.cells:
        if cell.devices and cell.speed and not cell.utilization.problem:
            groups.setdefault((cell.framework, cell.model, cell.device), []).append(cell)
    scaled = [group for group in groups.values() if len({cell.devices for cell in group}) > 1]
    points = [
        PlacedPoint(label=cell.label, x=float(cell.devices or 0), y=(cell.speed or 0) * (cell.devices or 0), kind=kind)
        for kind, group in enumerate(scaled)
        for cell in group
    ]
    if points:
        yield "scaling", draw_scatter("Scaling", "devices", "tokens/s", points, joined=True)


def _draw_steps(report: ComparisonReport, cells: Cells) -> Iterator[tuple[str, Html]]:
    warm_ups = {cell.label: cell.statistics.warm_up_steps for cell in report.cells if cell.statistics}
    shown = {label: cell for label, cell in cells.items() if cell.runs and any(cell.runs[0].steps.time_s)}
    for suffix, title, group in _group_cells(shown):
        runs = {label: cell.runs[0] for label, cell in group.items()}
        highest = HIGHEST_STEP * max(median(filter(None, run.steps.time_s)) for run in runs.values())
        curves = [
            (label, [(float(step), time and min(time, highest) * 1e3) for step, time in _pair_columns(run, "time_s")])
            for label, run in runs.items()
        ]
        first, warm_up = min(points[0][0] for _, points in curves), max(warm_ups.get(label, 0) for label in runs)
        shade = (first, first + warm_up, f"longest warm-up: {warm_up} steps") if warm_up else None
        heading = f"Time of each step of the first run{title}, cut at {format_number(highest * 1e3)} ms"
        yield f"steps{suffix}", draw_line_chart(heading, curves, "ms", "step", shade=shade)


def _draw_losses(cells: Cells) -> Iterator[tuple[str, Html]]:
    shown = {
        label: cell
        for label, cell in cells.items()
        if cell.runs and any(loss is not None for loss in cell.runs[0].steps.loss)
    }
    for suffix, title, group in _group_cells(shown):
        over_tokens: list[tuple[str, Curve]] = []
        over_time: list[tuple[str, Curve]] = []
        for label, cell in group.items():
            steps = cell.runs[0].steps
            tokens = accumulate(count or 0.0 for count in steps.tokens)
            seconds = accumulate(time or 0.0 for time in steps.time_s)
            over_tokens.append((label, list(zip(tokens, steps.loss, strict=False))))
            over_time.append((label, list(zip(seconds, steps.loss, strict=False))))
        yield f"loss_tokens{suffix}", draw_line_chart(f"Loss over tokens{title}", over_tokens, "loss", "tokens")
        yield f"loss_time{suffix}", draw_line_chart(f"Loss over training time{title}", over_time, "loss", "s")


def _group_cells(cells: Cells) -> Iterator[tuple[str, str, Cells]]:
    """The cells of each picture with curves, with what its file and its title add: of more curves than there are
    colors, those of one model and class are drawn together."""
    groups: dict[tuple[str, str], dict[str, ComparisonCell]] = {}
    for label, cell in cells.items():
        place = (cell.model, cell.settings_class) if len(cells) > NUM_COLORS else ("", "")
        groups.setdefault(place, {})[label] = cell
    parts = [
        (" ".join(filter(None, place)), dict(list(group.items())[start : start + NUM_COLORS]))
        for place, group in groups.items()
        for start in range(0, len(group), NUM_COLORS)
    ]
    for number, (name, part) in enumerate(parts, 1):
        yield (f"_{number}", f", {name}" if name else "", part) if len(parts) > 1 else ("", "", part)


def _draw_efficiency(report: ComparisonReport, kinds: Mapping[str, int]) -> Iterator[tuple[str, Html]]:
    memory = [
        ChartPoint(label=cell.label, value=cell.memory_gb, kind=kinds[cell.label])
        for cell in report.cells
        if cell.memory_gb
    ]
    if memory:
        yield "memory", draw_interval_chart("Peak memory of a device", "GB", memory)
    shares = [
        ChartPoint(
            label=cell.label, value=100 * cell.utilization.causal, kind=kinds[cell.label],
            note=f"full: {cell.utilization.full:.1%}" if cell.utilization.full else "",
        )
        for cell in report.cells
        if cell.utilization.causal and not cell.utilization.problem
    ]  # fmt: skip
    if shares:
        yield "mfu", draw_interval_chart("MFU, causal attention", "%", shares, limit=(100.0, "dense peak"))
    energy = [
        PlacedPoint(label=cell.label, x=cell.joules_per_million_tokens, y=cell.speed, kind=kinds[cell.label])
        for cell in report.cells
        if cell.joules_per_million_tokens and cell.speed and not cell.utilization.problem
    ]
    if energy:
        yield "energy", draw_scatter("Speed and energy", "J per 10^6 tokens", "tokens/s", energy)


def _pair_columns(run: ComparisonResult, column: str) -> list[tuple[int, float | None]]:
    return list(zip(run.steps.number, getattr(run.steps, column), strict=False))


def _make_answers(report: ComparisonReport) -> Iterator[Html]:
    for sentence in list_answers(report):
        yield page.make_paragraph(page.make_element("strong", sentence))


def _explain_ratios(report: ComparisonReport) -> Html:
    fair = sum(pair.verdict.status == "fair" for pair in report.pairs)
    return page.make_paragraph(
        f"{fair} of {len(report.pairs)} pairs are fair. A pair has a ratio only if it is fair: the same tokens, initial"
        " weights, precision and settings, losses within the spread of seeds, and the same steps after the same"
        " warm-up. A fact that a side does not state is not shown, and not taken as equal."
    )


def _make_verdict(pair: CellPair) -> Html:
    found = list_checks(pair.verdict)
    status = pair.verdict.status
    title = Html(f"{page.make_badge(BADGES[status], status)} {page.escape(f'{pair.a} and {pair.b}')}")
    return page.make_details(title, page.make_table(found.header, found.rows))


def _make_tables(tables: Mapping[str, ComparisonTable], *names: str) -> Iterator[Html]:
    for name in names:
        if name in tables:
            found = tables[name]
            yield page.make_element("h3", found.title)
            yield _make_table(found)


def _make_table(found: ComparisonTable) -> Html:
    return page.make_table(found.header, found.rows, found.right)


def _select_pictures(pictures: Mapping[str, Html], *names: str) -> Html:
    """The pictures with these names, of which each may be several: `steps_1`, `steps_2`."""
    pattern = re.compile(rf"(?:{'|'.join(names)})(?:_\d+)?")
    return page.join_fragments(*(picture for name, picture in pictures.items() if pattern.fullmatch(name)))


def _make_provenance(report: ComparisonReport) -> Html:
    rows = [
        [
            cell.label,
            cell.settings_class,
            f"{cell.devices or '?'} x {cell.device}" if cell.device else "not stated",
            cell.precision or "not stated",
            ", ".join(f"{name} {version}" for name, version in cell.versions.items()) or "not stated",
        ]
        for cell in report.cells
    ]
    prices = [
        page.make_paragraph(
            f"Price of {price.device}: {price.per_device_hour:g} {price.currency} an hour, {price.source}, {price.date}"
        )
        for price in {cell.price.device: cell.price for cell in report.cells if cell.price}.values()
    ]
    return page.join_fragments(page.make_table(["cell", "class", "devices", "precision", "versions"], rows), *prices)
