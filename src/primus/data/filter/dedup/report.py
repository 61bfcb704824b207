"""The report of `data dedup`: duplicates, clusters and samples."""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec import Struct

from primus.data.filter.dedup.minhash import estimate_similarity
from primus.data.filter.dedup.recipe import VERSION, DedupRecipe
from primus.data.filter.report import FilterReport, ReportSample, ReportTable

EXCERPT = 400
BEFORE = 80
"""Characters of a sample that are shown, and how many of them precede the first difference."""

SHOWN = 100
"""Maximum characters of a text in a warning."""


class DuplicateSample(Struct, frozen=True, kw_only=True):
    """A removed document, and the kept one of its cluster."""

    kept: str
    """File and line."""
    removed: str
    """File and line."""
    similarity: float
    """Estimated Jaccard similarity of their shingles; below the threshold if other documents connect them."""
    kept_text: str
    """The beginning of the text."""
    removed_text: str
    """The beginning of the text."""


class DescribedDocument(Struct, frozen=True, kw_only=True):
    """A document that the report may show."""

    where: str
    """File and line."""
    text: str
    """The beginning of the text."""
    minima: list[int]
    """Its signature, as documents are compared."""
    minima_with_numbers: list[int]
    """Its signature with numbers by value."""


class LargeCluster(Struct, frozen=True, kw_only=True):
    """A suspiciously large cluster: its documents may differ in parts that are not compared."""

    documents: int
    """Number of documents, of which one was kept."""
    share: float
    """Share of all documents."""
    sample: DuplicateSample
    """The kept document and a removed one."""
    similarity_with_numbers: float
    """Similarity of the two if numbers are compared by value."""


class DedupReport(FilterReport, frozen=True, kw_only=True):
    """Counts and samples of removed duplicates."""

    version: int = VERSION
    """Version of the signatures."""
    recipe: DedupRecipe
    """Settings."""
    words: str
    """Definition of a word."""
    threshold: float | None
    """Jaccard similarity at which about two thirds of the pairs are found; None for the exact method."""
    removed_exact: int
    """Documents that equal an earlier one."""
    removed_near: int
    """Near-duplicates of an earlier document."""
    clusters: int
    """Groups of documents of which one was kept."""
    sizes: list[tuple[int, int]]
    """Sizes of clusters, each with the number of clusters."""
    kept_bytes: int
    """UTF-8 bytes of the kept documents."""
    removed_bytes: int
    """UTF-8 bytes of the removed documents."""
    samples: list[DuplicateSample] = msgspec.field(default_factory=list)
    """Some removed documents."""
    large: list[LargeCluster] = msgspec.field(default_factory=list)
    """Clusters of more than a tenth of the documents."""

    @property
    def title(self) -> str:
        """Heading of the pages."""
        return f"Deduplication ({self.recipe.method})"

    def list_notes(self) -> list[str]:
        """The numbers of removed documents, and the probability of finding duplicates."""
        share = 100 * (self.documents - self.kept) / max(self.documents, 1)
        kept = f"{self.documents:,} documents, {self.kept:,} kept, {share:.1f} % removed"
        found = f"{self.removed_exact:,} exact and {self.removed_near:,} near-duplicates in {self.clusters:,} clusters"
        lines = [f"{kept}: {found}"]
        if self.threshold is not None:
            recipe = self.recipe
            chances = ", ".join(
                f"{similarity:.2f}: {recipe.estimate_probability(similarity):.1%}"
                for similarity in (0.5, self.threshold, 0.9)
            )
            lines.append(
                f"MinHash of {recipe.bands} bands x {recipe.rows} rows over {recipe.ngram}-word shingles;"
                f" probability to find a pair, by similarity: {chances}"
            )
        return lines

    def list_warnings(self) -> list[str]:
        """A warning for each suspiciously large cluster."""
        return [_format_warning(self, cluster) for cluster in self.large]

    def list_tables(self) -> list[ReportTable]:
        """Amounts and cluster sizes."""
        text_bytes = self.kept_bytes + self.removed_bytes
        amounts = [
            ("documents", f"{self.documents:,}", f"{self.kept:,}"),
            ("bytes of text", f"{text_bytes:,}", f"{self.kept_bytes:,}"),
        ]
        sizes = [(_format_range(low, high), f"{count:,}") for low, high, count in _group_sizes(self.sizes)]
        return [
            ReportTable(title="Amounts", header=("", "in", "out"), rows=amounts, right=(1, 2), brief=False),
            ReportTable(title="Cluster sizes", header=("documents", "clusters"), rows=sizes, right=(1,), brief=False),
        ]

    def list_samples(self) -> list[ReportSample]:
        """Removed documents, each next to the kept one."""
        shown = []
        for sample in self.samples:
            kept, removed = _cut_excerpts(sample.kept_text, sample.removed_text)
            title = f"{sample.removed}: similarity {sample.similarity:.2f}"
            shown.append(ReportSample(title=title, texts=((f"Kept, {sample.kept}", kept), ("Removed", removed))))
        return shown

    def collect_settings(self) -> object:
        """The recipe, as JSON."""
        return {**msgspec.to_builtins(self.recipe), "words": self.words}


def build_large_cluster(
    documents: int, share: float, kept: DescribedDocument, removed: DescribedDocument
) -> LargeCluster:
    """Build a large cluster from a kept document and a removed one."""
    with_numbers = (np.array(each.minima_with_numbers) for each in (kept, removed))
    return LargeCluster(
        documents=documents,
        share=round(share, 4),
        sample=build_sample(kept, removed),
        similarity_with_numbers=round(estimate_similarity(*with_numbers), 3),
    )


def _format_warning(report: DedupReport, cluster: LargeCluster) -> str:
    sample = cluster.sample
    one, other = (" ".join(text.split())[:SHOWN] for text in _cut_excerpts(sample.kept_text, sample.removed_text))
    if sample.kept_text == sample.removed_text:
        difference = "both texts are equal"
    elif report.recipe.normalize_numbers and cluster.similarity_with_numbers < sample.similarity:
        difference = (
            f"numbers compare as equal: by their values the similarity is {cluster.similarity_with_numbers:.2f},"
            f" not {sample.similarity:.2f}; use --no-normalize-numbers to compare the values"
        )
    else:
        difference = f"their similarity is {sample.similarity:.2f}"
    return (
        f"warning: {cluster.documents:,} of {report.documents:,} documents ({cluster.share:.0%}) form one cluster,"
        f" of which one was kept; {difference}. Kept, {sample.kept}: {one!r}; removed, {sample.removed}: {other!r}"
    )


def build_sample(kept: DescribedDocument, removed: DescribedDocument) -> DuplicateSample:
    """Build a sample from a kept document and a removed one."""
    return DuplicateSample(
        kept=kept.where,
        removed=removed.where,
        similarity=round(estimate_similarity(np.array(kept.minima), np.array(removed.minima)), 3),
        kept_text=kept.text,
        removed_text=removed.text,
    )


def _format_range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low:,} to {high:,}"


def _group_sizes(sizes: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Group the sizes into 2, 3 to 4, 5 to 8 and so on, without empty groups."""
    counts: dict[int, int] = {}
    for size, count in sizes:
        power = (size - 1).bit_length()
        counts[power] = counts.get(power, 0) + count
    return [((1 << power >> 1) + 1, 1 << power, counts[power]) for power in sorted(counts)]


def _cut_excerpts(one: str, other: str) -> tuple[str, str]:
    """Cut both texts at their first difference, or at the start if they are equal."""
    same = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, same - BEFORE)
    return one[start : start + EXCERPT], other[start : start + EXCERPT]
