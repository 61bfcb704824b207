"""The report of a layout as a page: memory over the step, and what computes beside what is exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from primus.prediction.layout_run import LayoutReport
from primus.prediction.layout_verdict import RankFit
from primus.prediction.rank_record import Exchange, MemoryParts, RankRecord
from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.charts import draw_area_chart
from primus.report.page import Html, format_page, join_fragments, make_badge, make_paragraph, make_table

GIB = 2**30
TERA = 1e12
PARTS = MemoryParts.__struct_fields__


def format_layout_page(report: LayoutReport) -> str:
    """The page: what fits, then each rank."""
    records, fit = report.records, report.fit
    title = f"Layout of {report.experiment}"
    subtitle = f"{report.framework} on {report.world_size} x {report.machine}, {report.nnodes} nodes; nothing was run"
    assumptions = dict.fromkeys(text for record in records for text in record.assumptions)
    sections: list[tuple[str, object]] = [("Memory", _make_overview(records, fit))]
    sections += [(f"Rank {record.rank} ({record.kind})", _describe_rank(record)) for record in records]
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


def _describe_rank(record: RankRecord) -> Html:
    peak, moments = record.peak, record.timeline
    samples = [
        (float(moment.operator), [getattr(moment.parts, name) / GIB for name in PARTS])
        for moment in sorted(moments, key=lambda each: each.operator)
    ]
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
    if samples:
        parts.append(draw_area_chart("Memory over the executed operators", PARTS, samples, "GiB", ""))
    parts.append(draw_bar_chart("Compute of a step, TFLOP", list(_list_work_bars(record))))
    if record.exchanges:
        parts.append(draw_bar_chart("Exchanges of a step, GiB", list(_list_exchange_bars(record))))
        parts.append(make_table(*_list_exchanges(record), (2, 5, 6)))
    return join_fragments(*parts)


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
