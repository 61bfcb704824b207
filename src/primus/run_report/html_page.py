"""The report of a run as a single HTML page with pictures."""

from __future__ import annotations

from collections.abc import Iterator

from primus.report import page, table
from primus.report.charts import draw_area_chart, draw_line_chart, draw_share_bar
from primus.report.page import Html
from primus.run_report.report import NO_CHANGES, RunReport, RunTable, list_change_rows, list_key_figures, list_tables
from primus.traces.memory import MEMORY_CATEGORIES, MemoryReport
from primus.traces.report import TraceReport

MIB = 1 << 20


def format_html(report: RunReport) -> str:
    """The page."""
    item = report.facts.summary
    created = f"created {table.format_time(item.created)}"
    return page.format_page(f"Run {item.id}", list(_build_sections(report)), f"{item.name}, {created}")


def _build_sections(report: RunReport) -> Iterator[tuple[str, Html]]:
    facts = report.facts
    notes = [page.make_paragraph(f"Note: {note}") for note in facts.notes]
    limit = page.make_paragraph(Html(f"<b>What limits it:</b> {page.escape(report.limit)}"))
    yield "Summary", page.join_fragments(limit, *notes, page.make_table(["", ""], list_key_figures(report)))
    changes = list_change_rows(report)
    yield (
        "Changes",
        page.make_table(["change", "reason", "gain", "basis"], changes) if changes else page.make_paragraph(NO_CHANGES),
    )
    if facts.points:
        losses = [("training", [(point.step, point.loss) for point in facts.points])]
        if facts.evaluations:
            losses.append(("evaluation", [(point.step, point.loss) for point in facts.evaluations]))
        rates = [("tokens/s", [(point.step, point.tokens_per_s) for point in facts.points])]
        yield (
            "Curves",
            page.join_fragments(
                draw_line_chart("Loss", losses, "loss", "step"),
                draw_line_chart("Throughput", rates, "tokens/s", "step"),
            ),
        )
    pictures = _draw_pictures(report)
    for each in list_tables(report):
        yield each.title, page.join_fragments(*pictures.get(each.title, ()), _make_table(each))
    if report.trace is not None and report.trace.memory is not None:
        yield "Memory of the profiled steps", _make_memory(report.trace.memory)


def _draw_pictures(report: RunReport) -> dict[str, tuple[Html, ...]]:
    """Pictures by the title of the table that follows them."""
    found: dict[str, tuple[Html, ...]] = {}
    if report.facts.time:
        parts = [(part.what, part.seconds) for part in report.facts.time]
        found["Time of the run"] = (draw_share_bar("Wall time", parts),)
    if report.trace is not None:
        found["Time of the profiled steps"] = (draw_share_bar("Timeline", _list_timeline_parts(report.trace)),)
        kinds = [(row.category, row.time_us) for row in report.trace.breakdown.categories]
        title = next(each.title for each in list_tables(report) if each.title.endswith("by category"))
        found[title] = (draw_share_bar("Sum of durations", kinds),)
    return found


def _list_timeline_parts(trace: TraceReport) -> list[tuple[str, float]]:
    found = trace.breakdown
    parts = [
        ("computation", found.computation_us),
        ("exposed communication", found.exposed_communication_us),
        ("exposed copies", found.exposed_copy_us),
        ("waiting for data", found.idle.data_us),
        ("host", found.idle.host_us),
        ("launched, waiting", found.idle.kernel_us),
        ("unknown", found.idle.unknown_us),
    ]
    return [(name, value) for name, value in parts if value > 0]


def _make_table(each: RunTable) -> Html:
    found = page.make_table(each.header, each.rows, each.right)
    return page.join_fragments(found, page.make_paragraph(each.text)) if each.text else found


def _make_memory(memory: MemoryReport) -> Html:
    samples = [(each.time_us / 1e3, [size / MIB for size in each.bytes_by_category]) for each in memory.samples]
    owners = [
        [row.owner, row.category, f"{row.count:,}", table.format_size(row.bytes)] for row in memory.owners[:NUM_OWNERS]
    ]
    return page.join_fragments(
        draw_area_chart(f"Memory of the {memory.device}", MEMORY_CATEGORIES, samples, "MiB"),
        page.make_paragraph(f"Peak: {table.format_size(memory.peak_bytes)}; the largest owners at the peak:"),
        *([page.make_paragraph(f"{memory.note.capitalize()}.")] if memory.note else []),
        page.make_table(["allocated by", "category", "count", "size"], owners, [2, 3]),
    )


NUM_OWNERS = 12
