"""What a cleaning has done, for programs and for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from primus.data.filter.job import TextReport
from primus.data.megatron.manifest import FileFacts
from primus.report import page
from primus.report.page import Html
from primus.report.table import format_number, format_table

SAMPLES = 5
"""Removed documents that are shown for each rule."""
BAR_WIDTH = 420
BAR_HEIGHT = 22


class RemovedSample(Struct, frozen=True, kw_only=True):
    """A document that a rule removed."""

    order: int
    """A hash of its place in the input: the samples are those with the smallest, whoever did which shard."""
    where: str
    """File and line."""
    rule: str
    reason: str
    """The threshold that was not met."""
    value: float | str
    """What was measured."""
    limit: float | str | None
    """What the recipe asks for."""
    text: str
    """The beginning of the text."""

    @property
    def why(self) -> str:
        """Reason, value and limit in words."""
        value = self.value if isinstance(self.value, str) else format_number(self.value)
        asked = "" if self.limit is None else f", limit {_format_limit(self.limit)}"
        return f"{self.reason}: {value}{asked}"


class RuleRemovals(Struct, frozen=True, kw_only=True):
    """What one threshold of a rule has removed."""

    rule: str
    reason: str
    documents: int
    characters: int


class CleanReport(TextReport, frozen=True, kw_only=True):
    """What the rules removed and changed."""

    version: int
    """Of the rules."""
    recipe: str
    """Name or path of the recipe."""
    fingerprint: str
    """Hash of its rules, thresholds and definition of a word."""
    content: dict[str, Any]
    """All of these."""
    kept: int
    characters: int
    """Of the documents that have text."""
    kept_characters: int
    kept_words: int
    """Words of the documents that were kept, by the recipe's definition; those of the others need not be known."""
    empty: int
    """Documents without text, left out."""
    removed: list[RuleRemovals] = msgspec.field(default_factory=list)
    """By rule and reason, in the order of the recipe."""
    edits: dict[str, int] = msgspec.field(default_factory=dict)
    """What rules changed in documents, such as lines that they dropped."""
    samples: list[RemovedSample] = msgspec.field(default_factory=list)
    """Some that were removed."""
    removed_files: dict[str, FileFacts] = msgspec.field(default_factory=dict)
    """What was removed, by name, where that was asked for."""


def add_removed(rules: Sequence[str], shards: Iterable[Sequence[RuleRemovals]]) -> list[RuleRemovals]:
    """The sums over shards, in the order of the rules, the largest first within one."""
    documents, characters = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in (each for shard in shards for each in shard):
        documents[each.rule, each.reason] += each.documents
        characters[each.rule, each.reason] += each.characters
    order = sorted(documents, key=lambda key: (rules.index(key[0]), -documents[key], key[1]))
    return [
        RuleRemovals(rule=rule, reason=reason, documents=documents[rule, reason], characters=characters[rule, reason])
        for rule, reason in order
    ]


def choose_samples(samples: Iterable[RemovedSample]) -> list[RemovedSample]:
    """Up to `SAMPLES` of each rule."""
    chosen: dict[str, list[RemovedSample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.order):
        of_rule = chosen.setdefault(sample.rule, [])
        if len(of_rule) < SAMPLES:
            of_rule.append(sample)
    return [sample for of_rule in chosen.values() for sample in of_rule]


def format_summary(report: CleanReport) -> str:
    """The counts as tables of text."""
    lines = [format_table(("", "in", "out", "kept"), _list_amounts(report), right=(1, 2, 3))]
    if report.removed:
        rows = [(each.rule, each.reason, f"{each.documents:,}", _format_share(each, report)) for each in report.removed]
        lines += ["", format_table(("rule", "removed for", "documents", "share"), rows, right=(2, 3))]
    if report.edits:
        rows_of_edits = [(what, f"{amount:,}") for what, amount in report.edits.items()]
        lines += ["", format_table(("changed", ""), rows_of_edits, right=(1,))]
    return "\n".join([*lines, *_list_skipped(report)])


def format_markdown(report: CleanReport) -> str:
    """The whole as a page of Markdown."""
    parts = [
        f"# Cleaning by {report.recipe}\n",
        "```",
        format_summary(report),
        "```",
        "\n## Samples of what was removed\n",
    ]
    for sample in report.samples:
        parts += [f"### {sample.rule}, {sample.where}\n", f"{sample.why}\n"]
        parts += [*(f"    {line}" for line in sample.text.splitlines()), ""]
    if report.bad:
        parts += ["## Bad documents\n", *(f"- {item.where}: {item.reason}" for item in report.bad), ""]
    parts += ["## Recipe\n", "```json", _format_recipe(report), "```", ""]
    return "\n".join(parts)


def format_html(report: CleanReport) -> str:
    """The whole as a page of HTML."""
    rows = [(each.rule, each.reason, f"{each.documents:,}", _format_share(each, report)) for each in report.removed]
    samples = [
        page.make_details(f"{each.rule}: {each.where}: {each.why}", page.make_element("pre", each.text))
        for each in report.samples
    ]
    sections: list[tuple[str, object]] = [
        ("", page.make_table(("", "in", "out", "kept"), _list_amounts(report), right=(1, 2, 3))),
        (
            "Removed",
            page.join_fragments(
                _draw_chart(report), page.make_table(("rule", "for", "documents", "share"), rows, right=(2, 3))
            ),
        ),
        ("Samples", page.join_fragments(*samples) if samples else "nothing was removed"),
    ]
    if report.edits:
        edits = [(what, f"{amount:,}") for what, amount in report.edits.items()]
        sections.append(("Changed", page.make_table(("what", "number"), edits, right=(1,))))
    if report.bad:
        bad = [(item.where, item.reason) for item in report.bad]
        sections.append(("Bad documents", page.make_table(("where", "reason"), bad)))
    sections.append(("Recipe", page.make_element("pre", _format_recipe(report))))
    return page.format_page(f"Cleaning by {report.recipe}", sections, report.input_text)


def _list_amounts(report: CleanReport) -> list[tuple[str, str, str, str]]:
    amounts = [
        (what, f"{before:,}", f"{after:,}", f"{100 * after / max(before, 1):.1f} %")
        for what, before, after in (
            ("documents", report.documents, report.kept),
            ("characters", report.characters, report.kept_characters),
        )
    ]
    return [*amounts, ("words", "", f"{report.kept_words:,}", "")]


def _format_share(removed: RuleRemovals, report: CleanReport) -> str:
    return f"{100 * removed.documents / max(report.documents, 1):.2f} %"


def _list_skipped(report: CleanReport) -> list[str]:
    lines = []
    if report.empty:
        lines.append(f"left out {report.empty:,} documents without text")
    if report.bad:
        lines.append(f"left out {len(report.bad):,} bad documents, the first of them {report.bad[0].where}")
    return lines


def _format_recipe(report: CleanReport) -> str:
    return msgspec.json.format(msgspec.json.encode(report.content), indent=2).decode()


def _draw_chart(report: CleanReport) -> Html:
    """A bar for each rule and one for what was kept, by documents."""
    by_rule = Counter[str]()
    for each in report.removed:
        by_rule[each.rule] += each.documents
    bars = [*by_rule.items(), ("kept", report.kept)]
    largest = max(count for _, count in bars) or 1
    drawn = []
    for row, (name, count) in enumerate(bars):
        y, width = row * BAR_HEIGHT, max(1, BAR_WIDTH * count // largest)
        colour = "var(--ok)" if name == "kept" else "var(--accent)"
        drawn += [
            page.make_element("text", name, x="170", y=str(y + 15), style="text-anchor: end", fill="var(--ink)"),
            Html(f'<rect x="180" y="{y + 4}" width="{width}" height="{BAR_HEIGHT - 8}" rx="3" fill="{colour}"/>'),
            page.make_element("text", f"{count:,}", x=str(width + 188), y=str(y + 15), fill="var(--soft)"),
        ]
    size = f'viewBox="0 0 {BAR_WIDTH + 280} {len(bars) * BAR_HEIGHT}" width="{BAR_WIDTH + 280}" font-size="13"'
    return Html(f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(drawn)}</svg>')


def _format_limit(limit: float | str) -> str:
    return limit if isinstance(limit, str) else format_number(limit)
