"""The report of `data clean`: removals and changes by rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from primus.data.filter.cleaning.recipe import RecipeContent
from primus.data.filter.report import FilterReport, ReportSample, ReportTable
from primus.data.megatron.manifest import FileFacts
from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.page import Html
from primus.report.table import format_number

SAMPLES = 5
"""Maximum samples of removed documents for each rule."""
GREEN = 2
"""A color of charts."""


class RemovedSample(Struct, frozen=True, kw_only=True):
    """A removed document."""

    order: int
    """Hash of its place in the input. The documents with the smallest hashes are the samples, for any sharding."""
    where: str
    """File and line."""
    rule: str
    reason: str
    """Threshold that was not met."""
    value: float | str
    """Measured value."""
    limit: float | str | None
    """Limit in the recipe."""
    text: str
    """Start of the text."""

    @property
    def why(self) -> str:
        """Reason, value and limit in words."""
        value = self.value if isinstance(self.value, str) else format_number(self.value)
        asked = "" if self.limit is None else f", limit {_format_limit(self.limit)}"
        return f"{self.reason}: {value}{asked}"


class RuleRemovals(Struct, frozen=True, kw_only=True):
    """Documents that one threshold of a rule removed."""

    rule: str
    reason: str
    documents: int
    characters: int


class CleanReport(FilterReport, frozen=True, kw_only=True):
    """Removals and changes by rule."""

    version: int
    """Version of the rules."""
    recipe: str
    """Name or path of the recipe."""
    fingerprint: str
    """Hash of its rules, thresholds and definition of a word."""
    content: RecipeContent
    """Its rules, thresholds and definition of a word."""
    characters: int
    """Characters of the documents with text."""
    kept_characters: int
    """Characters of the written documents."""
    kept_words: int
    """Words of the written documents, as defined by the recipe; words of the others are not always counted."""
    removed: list[RuleRemovals] = msgspec.field(default_factory=list)
    """Removals by rule and reason, in the order of the recipe."""
    edits: dict[str, int] = msgspec.field(default_factory=dict)
    """Numbers of changes in documents, such as dropped lines."""
    samples: list[RemovedSample] = msgspec.field(default_factory=list)
    """Some removed documents."""
    removed_files: dict[str, FileFacts] = msgspec.field(default_factory=dict)
    """Files of the removed documents, by name, with `keep_removed`."""

    @property
    def title(self) -> str:
        """Heading of the pages."""
        return f"Cleaning by {self.recipe}"

    def list_tables(self) -> list[ReportTable]:
        """Amounts, removals by rule, and edits."""
        total = max(self.documents, 1)
        removed = [
            (each.rule, each.reason, f"{each.documents:,}", f"{100 * each.documents / total:.2f} %")
            for each in self.removed
        ]
        edits = [(what, f"{amount:,}") for what, amount in self.edits.items()]
        header = ("rule", "removed for", "documents", "share")
        tables = [
            ReportTable(title="Amounts", header=("", "in", "out", "kept"), rows=self._list_amounts(), right=(1, 2, 3)),
            ReportTable(title="Removed", header=header, rows=removed, right=(2, 3)),
            ReportTable(title="Changed", header=("changed", ""), rows=edits, right=(1,)),
        ]
        return [table for table in tables if table.rows]

    def list_samples(self) -> list[ReportSample]:
        """Some removed documents, by rule."""
        return [
            ReportSample(title=f"{each.rule}, {each.where}", texts=((each.why, each.text),)) for each in self.samples
        ]

    def collect_settings(self) -> RecipeContent:
        """The recipe."""
        return self.content

    def draw_chart(self) -> Html:
        """A bar of the removed documents for each rule, and one of the kept documents."""
        by_rule = Counter[str]()
        for each in self.removed:
            by_rule[each.rule] += each.documents
        bars = [ChartBar(name, count, f"{count:,}") for name, count in by_rule.items()]
        return draw_bar_chart("Documents", [*bars, ChartBar("kept", self.kept, f"{self.kept:,}", color=GREEN)])

    def _list_amounts(self) -> list[tuple[str, str, str, str]]:
        amounts = [
            (what, f"{before:,}", f"{after:,}", f"{100 * after / max(before, 1):.1f} %")
            for what, before, after in (
                ("documents", self.documents, self.kept),
                ("characters", self.characters, self.kept_characters),
            )
        ]
        return [*amounts, ("words", "", f"{self.kept_words:,}", "")]


def add_removed(rules: Sequence[str], shards: Iterable[Sequence[RuleRemovals]]) -> list[RuleRemovals]:
    """Sum the removals over shards, in the order of the rules; for each rule the largest first."""
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
    """Choose up to `SAMPLES` samples of each rule."""
    chosen: dict[str, list[RemovedSample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.order):
        of_rule = chosen.setdefault(sample.rule, [])
        if len(of_rule) < SAMPLES:
            of_rule.append(sample)
    return [sample for of_rule in chosen.values() for sample in of_rule]


def _format_limit(limit: float | str) -> str:
    return limit if isinstance(limit, str) else format_number(limit)
