"""What a deduplication has done, for programs and for people."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from primus.data.filter.dedup.minhash import estimate_similarity
from primus.data.filter.dedup.recipe import VERSION, DedupRecipe
from primus.data.filter.job import TextReport
from primus.report import page

EXCERPT = 400
BEFORE = 80
"""Characters that are shown of a sample, of which before the first difference."""

SHOWN = 100
"""Characters of a text in a warning."""


class DuplicateSample(Struct, frozen=True, kw_only=True):
    """A document that was removed, and the one that was kept for it."""

    kept: str
    """File and line."""
    removed: str
    """File and line."""
    similarity: float
    """Estimated Jaccard similarity of their shingles; less than the threshold where others connect them."""
    kept_text: str
    """The beginning of the text."""
    removed_text: str
    """The beginning of the text."""


class LargeCluster(Struct, frozen=True, kw_only=True):
    """A cluster that has so many documents that it may be none: what differs in them may not have been compared."""

    documents: int
    """Documents in it, of which one was kept."""
    share: float
    """Of all documents."""
    sample: DuplicateSample
    """The one that was kept, and one that was removed."""
    similarity_with_numbers: float
    """Similarity of the two where numbers are compared as they are."""


class DedupReport(TextReport, frozen=True, kw_only=True):
    """What was found and removed."""

    version: int = VERSION
    """Of the signatures."""
    recipe: DedupRecipe
    """Settings."""
    words: str
    """Definition of a word."""
    threshold: float | None
    """Jaccard similarity at which about two thirds are found; None where only equal documents are."""
    kept: int
    """Documents that were written."""
    removed_exact: int
    """Documents that equal an earlier one."""
    removed_near: int
    """Documents that are like an earlier one."""
    empty: int
    """Documents without text, left out."""
    clusters: int
    """Groups of documents of which one was kept."""
    sizes: list[tuple[int, int]]
    """Sizes of clusters, and how many there are of each."""
    kept_bytes: int
    """UTF-8 of the documents that were written."""
    removed_bytes: int
    """UTF-8 of those that were not."""
    samples: list[DuplicateSample] = msgspec.field(default_factory=list)
    """Some that were removed."""
    large: list[LargeCluster] = msgspec.field(default_factory=list)
    """Clusters of more than a tenth of the documents."""


def build_large_cluster(documents: int, share: float, kept: dict[str, Any], removed: dict[str, Any]) -> LargeCluster:
    """A large cluster and two samples of it, as `primus.data.filter.dedup.stages.describe_document` gives them."""
    with_numbers = (np.array(each["minima_with_numbers"]) for each in (kept, removed))
    return LargeCluster(
        documents=documents,
        share=round(share, 4),
        sample=build_sample(kept, removed),
        similarity_with_numbers=round(estimate_similarity(*with_numbers), 3),
    )


def list_warnings(report: DedupReport) -> list[str]:
    """What is to be said of clusters that may be too large."""
    return [_format_warning(report, cluster) for cluster in report.large]


def _format_warning(report: DedupReport, cluster: LargeCluster) -> str:
    sample = cluster.sample
    one, other = (" ".join(text.split())[:SHOWN] for text in _cut_excerpts(sample.kept_text, sample.removed_text))
    if sample.kept_text == sample.removed_text:
        difference = "the text is the same"
    elif report.recipe.normalize_numbers and cluster.similarity_with_numbers < sample.similarity:
        difference = (
            f"numbers count as equal, and without that the similarity of these two is"
            f" {cluster.similarity_with_numbers:.2f}, not {sample.similarity:.2f}: --no-normalize-numbers compares them"
        )
    else:
        difference = f"the similarity of these two is {sample.similarity:.2f}"
    return (
        f"warning: {cluster.documents:,} of {report.documents:,} documents ({cluster.share:.0%}) are one cluster,"
        f" of which one was kept; {difference}. Kept, {sample.kept}: {one!r}; removed, {sample.removed}: {other!r}"
    )


def build_sample(kept: dict[str, Any], removed: dict[str, Any]) -> DuplicateSample:
    """A sample of what `primus.data.filter.dedup.stages.describe_document` gave for two documents."""
    return DuplicateSample(
        kept=kept["where"],
        removed=removed["where"],
        similarity=round(estimate_similarity(np.array(kept["minima"]), np.array(removed["minima"])), 3),
        kept_text=kept["text"],
        removed_text=removed["text"],
    )


def format_summary(report: DedupReport) -> str:
    """The counts in a few lines."""
    share = 100 * (report.documents - report.kept) / max(report.documents, 1)
    kept = f"{report.documents:,} documents, {report.kept:,} kept, {share:.1f} % removed"
    copies = f"{report.removed_exact:,} exact and {report.removed_near:,} near copies"
    lines = [f"{kept}: {copies} in {report.clusters:,} clusters"]
    if report.threshold is not None:
        recipe = report.recipe
        lines.append(
            f"MinHash of {recipe.bands} bands x {recipe.rows} rows over {recipe.ngram}-word shingles:"
            f" a pair of similarity {report.threshold:.2f} is found with "
            f"{recipe.estimate_probability(report.threshold):.0%},"
            f" of 0.90 with {recipe.estimate_probability(0.9):.1%}, of 0.50 with {recipe.estimate_probability(0.5):.1%}"
        )
    if report.empty:
        lines.append(f"left out {report.empty:,} documents without text")
    if report.bad:
        lines.append(f"left out {len(report.bad):,} bad documents, the first of them {report.bad[0].where}")
    lines += list_warnings(report)
    return "\n".join(lines)


def format_markdown(report: DedupReport) -> str:
    """The whole as a page."""
    return "\n".join(
        [
            f"# Deduplication ({report.recipe.method})\n",
            *(f"{line}.\n" for line in format_summary(report).splitlines()),
            *_format_html_table("kept", f"{report.kept:,} documents, {report.kept_bytes / 1e6:,.1f} MB of text"),
            *_format_html_row(
                "removed", f"{report.documents - report.kept:,} documents, {report.removed_bytes / 1e6:,.1f} MB"
            ),
            *_format_html_row("input", report.input_text),
            *_format_html_row("words", report.words),
            *_format_html_row("seed", str(report.recipe.seed)),
            "\n## Sizes of clusters\n",
            *_format_html_table("size", "clusters"),
            *(
                line
                for low, high, count in _group_sizes(report.sizes)
                for line in _format_html_row(_format_range(low, high), f"{count:,}")
            ),
            "\n## Samples\n",
            *(line for sample in report.samples for line in _format_sample(sample)),
            *(["\n## Bad documents\n"] if report.bad else []),
            *(f"- {item.where}: {item.reason}" for item in report.bad),
            "",
        ]
    )


def format_html(report: DedupReport) -> str:
    """The whole as a page of HTML, samples side by side."""
    amounts = [
        ("documents", f"{report.documents:,}", f"{report.kept:,}"),
        ("bytes of text", f"{report.kept_bytes + report.removed_bytes:,}", f"{report.kept_bytes:,}"),
    ]
    sizes = [(_format_range(low, high), f"{count:,}") for low, high, count in _group_sizes(report.sizes)]
    samples = [
        page.make_details(
            f"{sample.removed}: similarity {sample.similarity:.2f}",
            page.make_table(
                (f"kept: {sample.kept}", "removed"),
                [[page.make_element("pre", text) for text in _cut_excerpts(sample.kept_text, sample.removed_text)]],
            ),
        )
        for sample in report.samples
    ]
    sections: list[tuple[str, object]] = [
        ("", page.join_fragments(*map(page.make_paragraph, format_summary(report).splitlines()))),
        ("Amounts", page.make_table(("", "in", "out"), amounts, right=(1, 2))),
        ("Sizes of clusters", page.make_table(("documents", "clusters"), sizes, right=(1,))),
        ("Samples", page.join_fragments(*samples) if samples else "nothing was removed"),
    ]
    if report.bad:
        bad = [(item.where, item.reason) for item in report.bad]
        sections.append(("Bad documents", page.make_table(("where", "reason"), bad)))
    settings = [(name, str(getattr(report.recipe, name))) for name in DedupRecipe.__struct_fields__]
    sections.append(("Recipe", page.make_table(("setting", "value"), [*settings, ("words", report.words)])))
    return page.format_page(f"Deduplication ({report.recipe.method})", sections, report.input_text)


def _format_html_table(name: str, value: str) -> list[str]:
    return [f"| {name} | {value} |", "|---|---|"]


def _format_html_row(name: str, value: str) -> list[str]:
    return [f"| {name} | {value} |"]


def _format_range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low:,} to {high:,}"


def _group_sizes(sizes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Clusters of 2, of 3 to 4, of 5 to 8 and so on, where there are any."""
    counts: dict[int, int] = {}
    for size, count in sizes:
        power = (size - 1).bit_length()
        counts[power] = counts.get(power, 0) + count
    return [((1 << power >> 1) + 1, 1 << power, counts[power]) for power in sorted(counts)]


def _format_sample(sample: DuplicateSample) -> list[str]:
    kept, removed = _cut_excerpts(sample.kept_text, sample.removed_text)
    return [
        f"### {sample.removed}: similarity {sample.similarity:.2f}\n",
        f"Kept, {sample.kept}:\n",
        *(f"    {line}" for line in kept.splitlines()),
        "\nRemoved:\n",
        *(f"    {line}" for line in removed.splitlines()),
        "",
    ]


def _cut_excerpts(one: str, other: str) -> tuple[str, str]:
    """Of both the place where they begin to differ, or the beginning of equal ones."""
    same = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, same - BEFORE)
    return one[start : start + EXCERPT], other[start : start + EXCERPT]
