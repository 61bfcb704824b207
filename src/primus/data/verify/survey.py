"""Summarizes token files: lengths of documents, frequent tokens, and single decoded documents."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from primus.data.megatron import manifest as manifests
from primus.data.megatron.fingerprint import CHUNK_TOKENS, read_document_lengths
from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.megatron.manifest import TokenFileManifest
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.verify import sample_checks
from primus.errors import UsageError
from primus.report.histogram import HistogramBar

COUNTED_LENGTHS = 1 << 20
"""Lengths up to here are counted in an array; longer documents, at least 2 MB each, are few."""

COUNTED_TOKENS = 64 * CHUNK_TOKENS
"""Tokens that are counted to find frequent ones: all of a small file, or evenly spread parts of a large one."""

COUNTED_IDS = 1 << 24
"""Ids from here on are damage (see `data verify`) and are not counted."""

PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
FREQUENT = 20
SHOWN_BAD = 5


class FrequentToken(Struct, frozen=True, kw_only=True):
    """A frequent token."""

    token: int
    """Token id."""
    text: str | None
    """Decoded text; None if the tokenizer is unknown."""
    share: float
    """Share of the counted tokens."""


class LengthStatistics(Struct, frozen=True, kw_only=True):
    """Lengths of documents in tokens."""

    mean: float
    percentiles: dict[int, int]
    """Exact length by percent of the documents."""
    histogram: list[HistogramBar]
    """Documents and tokens between powers of two."""


class TokenSurvey(Struct, kw_only=True):
    """Summary of a pair of token files."""

    prefix: str
    """Path without extension."""
    dtype: str
    bytes: int
    """Size of the .bin."""
    tokens: int
    documents: int
    sequences: int
    lengths: LengthStatistics
    frequent: list[FrequentToken]
    counted_tokens: int
    """Number of tokens that were counted for the frequent ones."""
    distinct_tokens: int
    """Number of different ids among the counted tokens."""
    manifest: TokenFileManifest | None
    bad: list[str] = []
    """The first skipped documents, each with the reason."""


class SurveyedDocument(Struct, frozen=True, kw_only=True):
    """One decoded document."""

    document: int
    """Number of the document."""
    ids: list[int]
    """Token ids of the document."""
    text: str | None
    """Decoded text; None if the tokenizer is unknown."""


def survey_tokens(file: IndexedTokens, tokenizer: Tokenizer | None) -> TokenSurvey:
    """Summarize a pair of token files.

    Raises:
        UsageError: The manifest is damaged, or differs from its files.
    """
    counts, distinct = _count_tokens(file)
    total = int(counts.sum())
    top = [int(token) for token in np.argsort(-counts, kind="stable")[:FREQUENT] if counts[token]]
    return TokenSurvey(
        prefix=str(file.prefix),
        dtype=file.dtype.name,
        bytes=file.num_tokens * file.dtype.itemsize,
        tokens=file.num_tokens,
        documents=file.num_documents,
        sequences=file.num_sequences,
        lengths=_measure_lengths(file),
        frequent=[
            FrequentToken(
                token=token,
                text=tokenizer.decode_valid([token]) if tokenizer else None,
                share=float(counts[token]) / max(1, total),
            )
            for token in top
        ],
        counted_tokens=total,
        distinct_tokens=distinct,
        manifest=manifests.read_manifest(file.prefix),
        bad=_list_bad_documents(file.prefix),
    )


def load_tokenizer(prefix: Path, name: str | None) -> Tokenizer | None:
    """The tokenizer of token files: the named one, or the copy in their folder; None if there is neither.

    Raises:
        PrimusError: The tokenizer is not that of the files, is damaged, or does not exist.
    """
    source, findings = sample_checks.find_tokenizer_source(
        prefix, manifests.read_manifest(prefix), sample_checks.load_asked_tokenizer(name)
    )
    if findings:
        raise UsageError(str(findings[0]), "give the tokenizer of the data with --tokenizer, or copy it again")
    return source.tokenizer


def choose_documents(file: IndexedTokens, number: int, seed: int) -> list[int]:
    """Draw documents at random; the seed determines them."""
    return random.Random(seed).sample(range(file.num_documents), min(number, file.num_documents))


def decode_document(file: IndexedTokens, number: int, tokenizer: Tokenizer | None) -> SurveyedDocument:
    """Decode one whole document.

    Raises:
        UsageError: The document does not exist.
        PrimusError: The index entry of the document is damaged.
    """
    if not 0 <= number < file.num_documents:
        raise UsageError(
            f"{file.prefix}: document {number:,} does not exist", f"there are {file.num_documents:,}, counted from 0"
        )
    first, last = file.borders[number : number + 2].tolist()
    ids = [token for sequence in range(first, last) for token in file[sequence].tolist()]
    return SurveyedDocument(document=number, ids=ids, text=tokenizer.decode_valid(ids) if tokenizer else None)


def _measure_lengths(file: IndexedTokens) -> LengthStatistics:
    counts = np.zeros(COUNTED_LENGTHS, dtype=np.int64)
    longer: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    for lengths in read_document_lengths(file):
        few = np.bincount(lengths[(lengths >= 0) & (lengths < COUNTED_LENGTHS)])
        counts[: len(few)] += few
        # Few documents are this long, so that their lengths need no array of counts.
        longer.append(lengths[lengths >= COUNTED_LENGTHS])
    short, number = np.flatnonzero(counts), counts[np.flatnonzero(counts)]
    rest, repeated = np.unique(np.concatenate(longer), return_counts=True)
    values, numbers = np.concatenate((short, rest)), np.concatenate((number, repeated))
    ends = np.cumsum(numbers)
    places = [max(1, round(percent / 100 * int(ends[-1]))) for percent in PERCENTILES]
    found = values[np.searchsorted(ends, places)].tolist()
    return LengthStatistics(
        mean=file.num_tokens / file.num_documents,
        percentiles=dict(zip(PERCENTILES, found, strict=True)),
        histogram=_build_histogram(values, numbers),
    )


def _build_histogram(values: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[HistogramBar]:
    """Documents and tokens between powers of two, from the shortest to the longest."""
    first, last = (int(value).bit_length() for value in (values[0], values[-1]))
    edges = [0 if power == 0 else 1 << power - 1 for power in range(first, last + 2)]
    bars = []
    for low, high in pairwise(edges):
        inside = (values >= low) & (values < high)
        documents, tokens = int(numbers[inside].sum()), int((values * numbers)[inside].sum())
        bars.append(HistogramBar(first=low, last=high - 1, count=documents, weight=tokens))
    return bars


def _count_tokens(file: IndexedTokens) -> tuple[NDArray[np.int64], int]:
    """Count each id in all tokens or in evenly spread chunks; also returns the number of different ids."""
    num_chunks = -(-file.num_tokens // CHUNK_TOKENS)
    # Every step-th chunk: at most COUNTED_TOKENS tokens, spread over the file.
    step = max(1, -(-file.num_tokens // COUNTED_TOKENS))
    counts = np.zeros(1, dtype=np.int64)
    for chunk in range(0, num_chunks, step):
        tokens = file.tokens[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS].astype(np.int64)
        found = np.bincount(tokens[(tokens >= 0) & (tokens < COUNTED_IDS)])
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    return counts, int(np.count_nonzero(counts))


def _list_bad_documents(prefix: Path) -> list[str]:
    path = prefix.with_name(prefix.name + ".bad.jsonl")
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        rows = [
            msgspec.json.decode(line, type=dict[str, object]) for line, _ in zip(lines, range(SHOWN_BAD), strict=False)
        ]
    return [f"{row.get('where')}: {row.get('reason')}" for row in rows]
