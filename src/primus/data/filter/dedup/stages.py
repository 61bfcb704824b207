"""The stages after the keys: pairs of documents with equal keys, clusters of pairs, and the kept documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from primus.data.filter.dedup import minhash, normalized_words
from primus.data.filter.dedup.clusters import connect_documents
from primus.data.filter.dedup.key_files import KeyFile, Keys, read_keys
from primus.data.filter.dedup.matches import divide_key_space, match_keys
from primus.data.filter.dedup.recipe import DedupRecipe
from primus.data.filter.dedup.report import DescribedDocument
from primus.data.filter.whole_documents import DocumentReader
from primus.data.readers import TextDocument
from primus.data.readers.shard import FilePart, Shard
from primus.data.shards.document_writer import SUFFIX, open_writer
from primus.data.shards.shard_queue import ShardOutput
from primus.errors import PrimusError

PAIRS = "pairs"
FIRSTS = "firsts"
PAIR_BYTES = 16
PAIRS_AT_A_TIME = 1 << 20
NUMBERS_AT_A_TIME = 1 << 22
LARGE_SHARE, FEWEST_OF_LARGE = 0.1, 10
"""Minimum share and number of documents of a cluster that causes a warning."""
MOST_LARGE = int(1 / LARGE_SHARE)
SAMPLES = 20
EXACT_SAMPLES = 4
CANDIDATES = 400
SAMPLE_CHARACTERS = 1500


def list_match_shards(num_bands: int, ranges: int, num_documents: int) -> list[Shard]:
    """List one shard for each band and range of keys; the last band is that of the exact hashes."""
    # Band by band, so that the files of the exact hashes are the last ones (`pipeline.run`).
    places = [(band, index) for band in range(num_bands + 1) for index in range(ranges)]
    size = 8 * num_documents // ranges
    return [
        Shard(number, (FilePart(f"band {band}", index, index + 1),), size)
        for number, (band, index) in enumerate(places)
    ]


def find_band(shard: Shard, ranges: int) -> int:
    """Band of a shard of `list_match_shards`."""
    return shard.index // ranges


@dataclass
class MatchStage:
    """Writes the pairs of documents with an equal key."""

    identity: Any
    files: Sequence[KeyFile]
    """Keys of all documents."""
    ranges: int
    """Number of ranges of keys in each band."""

    def start(self) -> None:
        """Nothing to load."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Match one range of one band."""
        band = find_band(shard, self.ranges)
        first, last = divide_key_space(self.ranges)[shard.index % self.ranges]
        with output.path(PAIRS).open("wb") as file:
            for pairs in match_keys(self._read_band_keys(band, first, last)):
                file.write(pairs.tobytes())
                output.add_counts(pairs=len(pairs))

    def _read_band_keys(self, band: int, first: int, last: int) -> Iterator[Keys]:
        for file in self.files:
            yield from read_keys(file, band, first, last)


class ClusterFacts(Struct, frozen=True, kw_only=True):
    """What the stage states about all documents, which it names by their numbers."""

    sizes: list[tuple[int, int]]
    """Sizes of clusters, each with the number of clusters."""
    samples: list[tuple[int, int]]
    """The kept and the removed document of each sample."""
    large: list[tuple[int, int, int]]
    """The kept document, the size and a removed document of each large cluster."""

    def list_samples(self) -> frozenset[int]:
        """Documents that the report describes."""
        clusters = ((kept, removed) for kept, _, removed in self.large)
        return frozenset(number for pair in (*self.samples, *clusters) for number in pair)


class KeepFacts(Struct, frozen=True, kw_only=True):
    """What the stage states about a shard, besides counts."""

    samples: dict[int, DescribedDocument]
    """The documents that the report describes, by number."""


@dataclass
class ClusterStage:
    """Writes, for each document, the number of the first document of its cluster."""

    identity: Any
    num_documents: int
    near: Sequence[Path]
    """Files of pairs of the bands."""
    exact: Sequence[Path]
    """Files of pairs of exact hashes."""

    def start(self) -> None:
        """Nothing to load."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Cluster all documents; there is a single shard."""
        # The file is int64 of all documents: `KeepStage` reads only the part of its shard.
        firsts = connect_documents(self.num_documents, read_pairs([*self.near, *self.exact]))
        output.path(FIRSTS).write_bytes(firsts.data)
        removed = np.concatenate([np.empty(0, np.int64), *_find_removed(firsts)])
        kept, sizes = np.unique(firsts[removed], return_counts=True)
        histogram = np.unique(sizes + 1, return_counts=True)
        output.add_counts(removed=len(removed), clusters=len(sizes))
        output.facts = ClusterFacts(
            sizes=[(int(size), int(count)) for size, count in zip(*histogram, strict=True)],
            samples=[(int(firsts[number]), int(number)) for number in self._choose_samples(removed)],
            large=self._find_large_clusters(firsts, removed, kept, sizes + 1),
        )

    def _find_large_clusters(
        self, firsts: np.ndarray, removed: np.ndarray, kept: np.ndarray, sizes: np.ndarray
    ) -> list[tuple[int, int, int]]:
        """The first document, the size, and a removed document of each large cluster; a near-duplicate if possible.

        Args:
            firsts: First document of the cluster of each document.
            removed: Documents that are not the first of their cluster.
            kept: First document of each cluster of several documents.
            sizes: Number of documents in each of these clusters.
        """
        smallest = max(FEWEST_OF_LARGE, LARGE_SHARE * self.num_documents)
        large = [index for index in np.argsort(-sizes, kind="stable")[:MOST_LARGE].tolist() if sizes[index] > smallest]
        found = []
        for index in large:
            members = removed[firsts[removed] == kept[index]]
            found.append((int(kept[index]), int(sizes[index]), self._choose_example(members)))
        return found

    def _choose_example(self, removed: np.ndarray) -> int:
        """Choose one of several removed documents; a near-duplicate if there is one."""
        some = np.array(self._choose_samples(removed))
        near = some[~self._are_exact(some)]
        chosen = near if len(near) else some
        return int(chosen[len(chosen) // 2])

    def _choose_samples(self, removed: np.ndarray) -> list[int]:
        """Choose removed documents from the whole input, most of them near-duplicates."""
        # Evenly spread and without random numbers, so that the report is the same for each run.
        some = removed[np.linspace(0, len(removed) - 1, min(len(removed), CANDIDATES)).astype(np.int64)]
        exact = self._are_exact(some)
        near = _choose_evenly(some[~exact], SAMPLES - min(EXACT_SAMPLES, int(exact.sum())))
        return sorted([*near, *_choose_evenly(some[exact], SAMPLES - len(near))])

    def _are_exact(self, numbers: np.ndarray) -> np.ndarray:
        """Whether each document equals an earlier one."""
        exact = np.zeros(len(numbers), bool)
        for pairs in read_pairs(self.exact):
            # The second number of a pair is the later document.
            exact |= np.isin(numbers, pairs[:, 1])
        return exact


def read_pairs(files: Sequence[Path]) -> Iterator[np.ndarray]:
    """Yield the pairs in files of `MatchStage`, int64 of pairs x 2."""
    for path in files:
        with path.open("rb") as file:
            while content := file.read(PAIR_BYTES * PAIRS_AT_A_TIME):
                yield np.frombuffer(content, np.int64).reshape(-1, 2)


def _find_removed(firsts: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(firsts), NUMBERS_AT_A_TIME):
        some = firsts[start : start + NUMBERS_AT_A_TIME]
        yield np.flatnonzero(some != np.arange(start, start + len(some))) + start


def _choose_evenly(numbers: np.ndarray, count: int) -> list[int]:
    places = np.linspace(0, len(numbers) - 1, min(len(numbers), count)).astype(np.int64)
    return [int(number) for number in numbers[places]]


@dataclass
class KeepStage:
    """Writes the first document of each cluster."""

    identity: Any
    recipe: DedupRecipe
    key: str
    """Field or column of the text."""
    text_documents: str
    """Unit that is a document in a .txt file."""
    firsts: Path
    """File of `ClusterStage`."""
    begin: Sequence[int]
    """Number of the first document of each shard, and the number of all documents."""
    samples: frozenset[int]
    """Documents that the report describes."""

    def start(self) -> None:
        """Nothing to load."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Write the kept documents of one shard."""
        begin, end = self.begin[shard.index], self.begin[shard.index + 1]
        first = np.fromfile(self.firsts, np.int64, end - begin, offset=8 * begin)
        kept = (first == np.arange(begin, end)).tolist()
        samples = {}
        reader = DocumentReader(self.key, self.text_documents, fields=True)
        removed_bytes = 0
        with open_writer(output.path(SUFFIX), self.key) as writer:
            for number, text in enumerate(self._read_same_documents(shard, reader, len(kept)), begin):
                if kept[number - begin]:
                    writer.write(text)
                else:
                    removed_bytes += len(text.text.encode())
                if number in self.samples:
                    samples[number] = describe_document(text, self.recipe)
        output.add_counts(kept=writer.documents, kept_bytes=writer.text_bytes, removed_bytes=removed_bytes)
        output.facts = KeepFacts(samples=samples)

    def _read_same_documents(self, shard: Shard, reader: DocumentReader, count: int) -> Iterator[TextDocument]:
        """Yield the documents of a shard, and check that their number has not changed.

        Raises:
            PrimusError: The number has changed.
        """
        read = 0
        # Documents are numbered by position. If the input changed after hashing, the numbers would select other
        # documents.
        for read, text in enumerate(reader.read(shard), 1):
            if read <= count:
                yield text
        if read != count:
            files = ", ".join(dict.fromkeys(part.file for part in shard.parts))
            raise PrimusError(
                f"{files}: changed while it was read", "run the command again when no process writes to it"
            )


def describe_document(text: TextDocument, recipe: DedupRecipe) -> DescribedDocument:
    """Describe a document for the report, with its signature for estimating similarities."""
    encoded = [text.text.encode()]
    as_compared, with_numbers = (
        minhash.compute_signatures(*normalized_words.hash_words(encoded, normalize), recipe)[0].tolist()
        for normalize in (recipe.normalize_numbers, False)
    )
    return DescribedDocument(
        where=text.where, text=text.text[:SAMPLE_CHARACTERS], minima=as_compared, minima_with_numbers=with_numbers
    )
