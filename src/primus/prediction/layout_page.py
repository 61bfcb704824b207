"""The report of a layout as a page: what fits, how fast it is, and what each rank does when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from primus.prediction.format_prediction import list_explanations, list_grounds, list_speeds
from primus.prediction.layout_run import LayoutReport
from primus.prediction.layout_speed import LayoutSpeed
from primus.prediction.layout_verdict import RankFit
from primus.prediction.rank_record import Exchange, MemoryParts, RankRecord
from primus.prediction.step_timeline import TimelinePass
from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.charts import draw_area_chart
from primus.report.lane_chart import LaneBar, draw_lane_chart
from primus.report.page import Html, format_page, join_fragments, make_badge, make_paragraph, make_table

GIB = 2**30
TERA = 1e12
PARTS = MemoryParts.__struct_fields__
LANE_KINDS = ("forward", "backward", "end", "hidden exchange", "exchange that is waited for")
"""Kinds of bars of a timeline: phases of a pass, then exchanges."""


def format_layout_page(report: LayoutReport) -> str:
    """The page: what fits, the time of a step, then each rank."""
    records, fit = report.records, report.fit
    title = f"Layout of {report.experiment}"
    subtitle = f"{report.framework} on {report.world_size} x {report.machine}, {report.nnodes} nodes; nothing was run"
    assumptions = dict.fromkeys(text for record in records for text in record.assumptions)
    sections: list[tuple[str, object]] = [("Memory", _make_overview(records, fit))]
    sections.append(("Time of a step", _describe_speed(report.speed)))
    timelines = {each.rank: each.passes for each in report.speed.timelines}
    sections += [
        (f"Rank {record.rank} ({record.kind})", _describe_rank(record, timelines.get(record.rank, ())))
        for record in records
    ]
    sections.append(("Assumptions", join_fragments(*map(make_paragraph, assumptions))))
    return format_page(title, sections, subtitle)


def _make_overview(records: Sequence[RankRecord], fit: Sequence[RankFit]) -> Html:
    judged = {each.rank: each for each in fit}
    header = ["rank", "layers", *PARTS, "peak GiB", "with allowances", "device", ""]
    rows = [
        [
            record.rank,
            len(record.layers),
            *(f"{getattr(record.peak.parts, name) / GIB:.2f}" for name in PARTS),
            f"{record.peak.parts.total / GIB:.2f}",
            *_format_fit(judged.get(record.rank)),
        ]
        for record in records
    ]
    return make_table(header, rows, tuple(range(1, len(header) - 1)))


def _format_fit(fit: RankFit | None) -> list[object]:
    if fit is None:
        return ["", "not known", make_badge("unknown", "not compared")]
    badge = make_badge("ok", "fits") if fit.fits else make_badge("fail", "does not fit")
    return [f"{fit.needed_bytes / GIB:.2f}", f"{fit.device_bytes / GIB:.2f}", badge]


def _describe_speed(speed: LayoutSpeed) -> Html:
    found = speed.prediction
    if found is None:
        return make_paragraph(f"Not predicted: {speed.problem}.")
    terms = sorted(found.terms.items(), key=lambda pair: -pair[1])
    bars = [
        ChartBar(name, seconds, f"{seconds:.3g} s, {seconds / found.seconds:.1%}") for name, seconds in terms if seconds
    ]
    header = ["collective", "ranks", "crosses nodes", "GB sent", "s", "s not hidden"]
    rows: list[list[object]] = [
        [
            each.name,
            each.size,
            "yes" if each.crosses else "no",
            f"{each.bytes_of_step / 1e9:,.3g}",
            f"{each.seconds:.3g}",
            f"{each.exposed_seconds:.3g}",
        ]
        for each in found.collectives
    ]
    return join_fragments(
        *map(make_paragraph, list_speeds(found)),
        draw_bar_chart(f"Where the time of the {found.slowest_stage} goes", bars),
        *([make_table(header, rows, (1, 3, 4, 5))] if rows else []),
        *(make_paragraph(text.strip()) for text in (*list_explanations(found), *list_grounds(found))),
    )


def _describe_rank(record: RankRecord, passes: Sequence[TimelinePass]) -> Html:
    peak = record.peak
    schedule = ""
    if record.num_stages > 1:
        schedule = (
            f" {record.schedule} with {record.in_flight} micro batches in flight; a stage waits {record.bubble:.1%} of"
            " the step if all take as long."
        )
    text = (
        f"{record.micro_batches} micro batches in a step.{schedule} The peak is in the {peak.phase} of micro batch"
        f" {peak.micro_batch}."
    )
    parts: list[object] = [make_paragraph(text)]
    if passes:
        last = passes[-1].end
        title = f"A step of {record.executed_micro_batches} of {record.micro_batches} micro batches, predicted"
        lanes = [("compute", _list_compute_bars(passes)), ("exchange", _list_exchange_lane(passes))]
        parts.append(draw_lane_chart(title, LANE_KINDS, lanes, last, "s"))
    if record.timeline:
        parts.append(draw_area_chart(*_draw_memory(record, passes)))
    parts.append(draw_bar_chart("Compute of a step, TFLOP", list(_list_work_bars(record))))
    if record.exchanges:
        parts.append(draw_bar_chart("Exchanges of a step, GiB", list(_list_exchange_bars(record))))
        parts.append(make_table(*_list_exchanges(record), (2, 5, 6)))
    return join_fragments(*parts)


def _list_compute_bars(passes: Sequence[TimelinePass]) -> list[LaneBar]:
    # What a pass waits for stands at its end: in a run it is between layers.
    return [
        LaneBar(each.start, each.end - each.exposed, LANE_KINDS.index(each.phase), each.phase)
        for each in passes
        if each.end - each.exposed > each.start
    ]


def _list_exchange_lane(passes: Sequence[TimelinePass]) -> list[LaneBar]:
    bars = []
    for each in passes:
        hidden = max(each.start, each.end - each.exchange)
        waits = each.end - each.exposed
        bars.append(LaneBar(hidden, max(hidden, waits), LANE_KINDS.index("hidden exchange"), "hidden exchange"))
        bars.append(LaneBar(waits, each.end, LANE_KINDS.index("exchange that is waited for"), "waited for"))
    return [bar for bar in bars if bar.end > bar.start]


def _draw_memory(
    record: RankRecord, passes: Sequence[TimelinePass]
) -> tuple[str, Sequence[str], list[tuple[float, list[float]]], str, str]:
    """What a chart of the memory takes: over seconds, or over operators where no time is predicted."""
    moments = sorted(record.timeline, key=lambda each: each.operator)
    marks = [each.operator for each in passes if each.operator is not None]
    if not marks:
        samples = [(float(each.operator), _list_parts(each.parts)) for each in moments]
        return "Memory over the executed operators", PARTS, samples, "GiB", ""
    ends = [*marks[1:], max(moments[-1].operator, marks[-1]) + 1]
    samples = []
    for each in moments:
        number = max(bisect_right(marks, each.operator) - 1, 0)
        share = (each.operator - marks[number]) / max(1, ends[number] - marks[number])
        begin, end = passes[number].start, passes[number].end
        samples.append((begin + max(0.0, share) * (end - begin), _list_parts(each.parts)))
    samples.append((passes[-1].end, _list_parts(record.kept)))
    return "Memory in the same seconds", PARTS, samples, "GiB", "s"


def _list_parts(parts: MemoryParts) -> list[float]:
    return [getattr(parts, name) / GIB for name in PARTS]


def _list_work_bars(record: RankRecord) -> Iterator[ChartBar]:
    for work in record.work:
        if work.flops:
            kind = work.kind.replace("_", " ")
            yield ChartBar(f"{kind}, {work.phase}", work.flops / TERA, f"{work.flops / TERA:,.1f}")


def _list_exchange_bars(record: RankRecord) -> Iterator[ChartBar]:
    totals: dict[tuple[str, str, bool], int] = {}
    for each in record.exchanges:
        key = (each.group, each.phase, each.crosses_nodes)
        totals[key] = totals.get(key, 0) + each.total_bytes
    for (group, phase, crosses), size in sorted(totals.items(), key=lambda pair: -pair[1]):
        where = "across nodes" if crosses else "in a node"
        yield ChartBar(f"{group}, {phase}, {where}", size / GIB, f"{size / GIB:,.2f}")


def _list_exchanges(record: RankRecord) -> tuple[list[str], list[list[object]]]:
    def order(each: Exchange) -> int:
        return -each.total_bytes

    header = ["exchange", "group", "ranks", "nodes", "in", "count", "GiB"]
    rows: list[list[object]] = [
        [
            each.operation.replace("_", " "),
            each.group.replace("_", " "),
            each.size,
            each.num_nodes,
            each.phase,
            f"{each.count:,}",
            f"{each.total_bytes / GIB:,.3f}",
        ]
        for each in sorted(record.exchanges, key=order)
    ]
    return header, rows
