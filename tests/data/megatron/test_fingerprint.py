from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from primus.data.megatron import fingerprint
from primus.data.megatron.fingerprint import Fingerprint, fingerprint_prefixes
from primus.data.megatron.indexed_dataset import IndexedWriter

WriteTokens = Callable[[str, Sequence[Sequence[int]]], Path]

streams = st.lists(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), min_size=1, max_size=3), min_size=1, max_size=12
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that a few tokens make many of them."""
    monkeypatch.setattr(fingerprint, "CHUNK_TOKENS", 8)
    monkeypatch.setattr(fingerprint, "CHUNK_DOCUMENTS", 4)
    monkeypatch.setattr(fingerprint, "RANGE_TOKENS", 16)


def of_documents(
    documents: Sequence[Sequence[Sequence[int]]],
    batch: int = 1000,
    dtype: str = "int64",
    feed: Fingerprint | None = None,
) -> str:
    """Fingerprint of documents of sequences, fed `batch` sequences at a time."""
    feed = feed or Fingerprint()
    sequences = [sequence for document in documents for sequence in document]
    ends = [index == len(document) - 1 for document in documents for index in range(len(document))]
    for start in range(0, len(sequences), batch):
        chunk = sequences[start : start + batch]
        feed.add_sequences(
            np.array([token for sequence in chunk for token in sequence], dtype=dtype),
            np.array([len(sequence) for sequence in chunk], dtype=np.int32),
            np.array(ends[start : start + batch], dtype=np.bool_),
        )
    return feed.compute_fingerprint()


@settings(max_examples=100, deadline=None)
@given(documents=streams, batch=st.integers(1, 9), cut=st.integers(0, 12))
def test_batches_shards_sequences_and_token_types_do_not_matter(
    documents: list[list[list[int]]], batch: int, cut: int
) -> None:
    expected = of_documents(documents)
    assert of_documents(documents, batch) == expected
    assert of_documents(documents, batch, "uint32") == expected
    joined = [[[token for sequence in document for token in sequence]] for document in documents]
    assert of_documents(joined, batch) == expected
    feed = Fingerprint()
    of_documents(documents[:cut], feed=feed)
    assert of_documents(documents[cut:], feed=feed) == expected


@settings(max_examples=100, deadline=None)
@given(first=streams, second=streams)
def test_streams_that_differ_have_other_fingerprints(
    first: list[list[list[int]]], second: list[list[list[int]]]
) -> None:
    plain = [[list(chain(*document)) for document in documents] for documents in (first, second)]
    assume(plain[0] != plain[1])
    assert of_documents(first) != of_documents(second)


@pytest.mark.parametrize(
    "other", [[[1, 2, 3], [4]], [[1, 2], [4, 3]], [[1, 2], [3, 4], []], [[], [1, 2], [3, 4]], [[1, 2, 3, 4]]]
)
def test_order_borders_and_empty_documents_count(other: list[list[int]]) -> None:
    assert of_documents([[each] for each in other]) != of_documents([[[1, 2]], [[3, 4]]])


@settings(max_examples=25, deadline=None)
@given(documents=streams.filter(lambda documents: all(any(document) for document in documents)), cut=st.integers(1, 11))
def test_files_have_the_fingerprint_of_their_stream_however_they_are_split(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("split")

    def write(name: str, part: list[list[list[int]]], dtype: str) -> Path:
        with IndexedWriter(folder / name, np.dtype(dtype)) as writer:
            for document in part:
                for index, sequence in enumerate(document):
                    writer.add_batch(
                        np.array(sequence, int), np.array([len(sequence)]), np.array([index == len(document) - 1])
                    )
            writer.commit()
        return folder / name

    expected = of_documents(documents)
    parts = [part for part in (documents[:cut], documents[cut:]) if part]
    assert fingerprint_prefixes([write("whole", documents, "int32")]) == expected
    assert fingerprint_prefixes([write(str(index), part, "int64") for index, part in enumerate(parts)]) == expected


def test_several_processes_find_the_same(write_tokens: WriteTokens) -> None:
    prefixes = [write_tokens(f"x{part}", [[part + token for token in range(37)]] * 3) for part in range(4)]
    assert fingerprint_prefixes(prefixes, workers=2) == fingerprint_prefixes(prefixes)


def test_a_stream_that_ends_within_a_document_has_no_fingerprint() -> None:
    feed = Fingerprint()
    feed.add_sequences(np.array([1, 2]), np.array([1, 1]), np.array([True, False]))
    with pytest.raises(ValueError, match="no end"):
        feed.compute_fingerprint()


def test_the_caller_may_use_its_memory_again() -> None:
    feed, buffer = Fingerprint(), np.empty(3, dtype=np.int64)
    for start in range(0, 12, 3):
        buffer[:] = range(start, start + 3)
        feed.add_sequences(buffer, np.array([3]), np.array([True]))
    assert feed.compute_fingerprint() == of_documents([[[start, start + 1, start + 2]] for start in range(0, 12, 3)])


def test_pieces_tell_which_part_of_a_stream_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "MAX_PIECES", 4)
    before, after = np.arange(100), np.arange(100)
    after[70] = 3

    def pieces(tokens: np.ndarray) -> list[str]:
        feed = Fingerprint()
        feed.add_tokens(tokens)
        digits = feed.compute_pieces()
        return [digits[start : start + 16] for start in range(0, len(digits), 16)]

    old, new = pieces(before), pieces(after)
    size = 8 * fingerprint.count_chunks_in_piece(13)
    assert (len(old), size) == (4, 32)
    assert [index for index in range(4) if old[index] != new[index]] == [70 // size]


def test_the_fingerprint_of_a_known_stream_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    documents = [[list(range(300_000))], [[7] * 70_000]]
    assert of_documents(documents, batch=1) == "xxh3:7081d07aa52ec7c74072cf4ec8ad1c25"
