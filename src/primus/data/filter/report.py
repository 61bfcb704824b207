"""The report of a filter job: counts of all filters, formatted as text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from primus.data.megatron.manifest import FileFacts, InputFacts
from primus.data.shards.shard_queue import BadItem
from primus.report import page
from primus.report.markdown import format_markdown_table
from primus.report.page import Html
from primus.report.table import format_table


class ReportTable(Struct, frozen=True, kw_only=True):
    """A table of a report."""

    title: str
    """Heading on the pages."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()
    """Right-aligned columns."""
    brief: bool = True
    """Whether the summary on the terminal contains the table."""


class ReportSample(Struct, frozen=True, kw_only=True):
    """A removed document, as shown on the pages."""

    title: str
    """Where the document is and why it was removed."""
    texts: Sequence[tuple[str, str]]
    """Texts side by side, each with its heading."""


class FilterReport(Struct, frozen=True, kw_only=True):
    """Counts of all filters. The report is written last: if it exists, all files of the result exist."""

    primus: str
    """Version of the package that wrote it."""
    identity: str
    """Hash of the recipe and of all settings that change the result."""
    inputs: list[InputFacts]
    """Files or dataset of the input."""
    documents: int
    """Documents with text."""
    kept: int
    """Written documents."""
    empty: int = 0
    """Documents without text, skipped."""
    bad: list[BadItem] = []
    """Bad documents, skipped."""
    files: dict[str, FileFacts] = {}
    """Written files, by name."""

    @property
    def input_text(self) -> str:
        """The inputs as given."""
        return ", ".join(each.path for each in self.inputs)

    @property
    def title(self) -> str:
        """Heading of the pages."""
        return "Filtered documents"

    def list_notes(self) -> list[str]:
        """Sentences that precede the tables."""
        return []

    def list_warnings(self) -> list[str]:
        """Sentences about results that the user should check."""
        return []

    def list_tables(self) -> list[ReportTable]:
        """The counts."""
        return []

    def list_samples(self) -> list[ReportSample]:
        """Some of the removed documents."""
        return []

    def draw_chart(self) -> Html | None:
        """A chart for the HTML page; None if the filter has none."""
        return None

    def collect_settings(self) -> object:
        """The recipe, as JSON."""
        return None


def format_summary(report: FilterReport) -> str:
    """The counts as lines of text for the terminal."""
    tables = [format_table(each.header, each.rows, right=each.right) for each in report.list_tables() if each.brief]
    lines = "\n".join([*_list_skipped(report), *report.list_warnings()])
    return "\n\n".join(part for part in ("\n".join(report.list_notes()), *tables, lines) if part)


def format_pages(report: FilterReport) -> dict[str, str]:
    """The whole report as a page of Markdown and of HTML, by suffix."""
    return {"md": _format_markdown(report), "html": _format_html(report)}


def _list_skipped(report: FilterReport) -> list[str]:
    lines = []
    if report.empty:
        lines.append(f"skipped {report.empty:,} documents without text")
    if report.bad:
        lines.append(f"skipped {len(report.bad):,} bad documents, first: {report.bad[0].where}")
    return lines


def _list_sentences(report: FilterReport) -> list[str]:
    return [*report.list_notes(), *_list_skipped(report), *report.list_warnings()]


def _list_all_tables(report: FilterReport) -> list[ReportTable]:
    bad = [(item.where, item.reason) for item in report.bad]
    tables = report.list_tables()
    return [*tables, ReportTable(title="Bad documents", header=("where", "reason"), rows=bad)] if bad else tables


def _format_markdown(report: FilterReport) -> str:
    parts = [f"# {report.title}\n", f"Input: {report.input_text}\n", *(f"{line}\n" for line in _list_sentences(report))]
    for table in _list_all_tables(report):
        parts += [f"## {table.title}\n", format_markdown_table(table.header, table.rows, table.right), ""]
    parts.append("## Samples\n")
    for sample in report.list_samples():
        parts.append(f"### {sample.title}\n")
        for heading, text in sample.texts:
            parts += [f"{heading}:\n", *(f"    {line}" for line in text.splitlines()), ""]
    return "\n".join([*parts, "## Recipe\n", "```json", _format_settings(report), "```", ""])


def _format_html(report: FilterReport) -> str:
    sections: list[tuple[str, object]] = [
        ("", page.join_fragments(*map(page.make_paragraph, _list_sentences(report)))),
        *((each.title, page.make_table(each.header, each.rows, right=each.right)) for each in _list_all_tables(report)),
    ]
    if chart := report.draw_chart():
        sections.insert(1, ("Chart", chart))
    samples = [page.make_details(each.title, _format_texts(each)) for each in report.list_samples()]
    sections.append(("Samples", page.join_fragments(*samples) if samples else "No document was removed."))
    sections.append(("Recipe", page.make_element("pre", _format_settings(report))))
    return page.format_page(report.title, sections, report.input_text)


def _format_texts(sample: ReportSample) -> Html:
    headings, texts = zip(*sample.texts, strict=True)
    return page.make_table(headings, [[page.make_element("pre", text) for text in texts]])


def _format_settings(report: FilterReport) -> str:
    return msgspec.json.format(msgspec.json.encode(report.collect_settings()), indent=2).decode()
