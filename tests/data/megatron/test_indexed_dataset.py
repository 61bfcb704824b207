from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data import atomic
from primus.data.megatron import indexed_dataset
from primus.data.megatron.indexed_dataset import IndexedTokens, IndexedWriter, bin_path, choose_smallest_dtype, idx_path
from primus.errors import PrimusError, UsageError

WriteTokens = Callable[[str, Sequence[Sequence[int]]], Path]

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


def independent_reader(prefix: Path) -> tuple[list[list[int]], list[int]]:
    """Sequences and document borders, read with nothing but the format's description."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, count, borders = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    kind, width = {8: ("H", 2), 4: ("i", 4)}[code]
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    pointers = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    document_borders = struct.unpack_from(f"<{borders}q", index, 34 + 12 * count)
    assert len(index) == 34 + 12 * count + 8 * borders
    tokens = Path(f"{prefix}.bin").read_bytes()
    assert len(tokens) == sum(lengths) * width
    sequences = [
        list(struct.unpack_from(f"<{length}{kind}", tokens, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return sequences, list(document_borders)


document_lists = st.lists(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=3), min_size=1, max_size=20
).filter(lambda documents: any(sequence for document in documents for sequence in document))


@settings(max_examples=60, deadline=None)
@given(documents=document_lists, vocab_size=st.sampled_from([1000, 2**31 - 1]), batch=st.integers(1, 5))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], vocab_size: int, batch: int
) -> None:
    prefix = tmp_path_factory.mktemp("round_trip") / "x"
    sequences = [[token % vocab_size for token in sequence] for document in documents for sequence in document]
    ends = [index == len(document) - 1 for document in documents for index in range(len(document))]
    with IndexedWriter(prefix, choose_smallest_dtype(vocab_size)) as writer:
        for start in range(0, len(sequences), batch):
            chunk = sequences[start : start + batch]
            writer.add_batch(
                np.array([token for sequence in chunk for token in sequence], dtype=np.int64),
                np.array([len(sequence) for sequence in chunk]),
                np.array(ends[start : start + batch]),
            )
        writer.commit()
    borders = [0, *(index + 1 for index, end in enumerate(ends) if end)]
    assert independent_reader(prefix) == (sequences, borders)
    tokens = IndexedTokens(prefix)
    assert [tokens[index].tolist() for index in range(len(tokens))] == sequences
    assert tokens.borders.tolist() == borders
    assert (tokens.num_documents, tokens.num_tokens) == (len(documents), sum(map(len, sequences)))


def test_an_index_of_several_chunks_is_whole(write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "COPY_BYTES", 24)
    prefix = write_tokens("x", [[number] * (number % 4) for number in range(1, 30)])
    assert independent_reader(prefix) == ([[number] * (number % 4) for number in range(1, 30)], list(range(30)))


def test_a_vocabulary_below_65500_takes_two_bytes_a_token() -> None:
    assert [choose_smallest_dtype(size).name for size in (65499, 65500)] == ["uint16", "int32"]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_core_reads_the_same_tokens(tmp_path: Path) -> None:
    documents = {}
    for vocab_size in (1000, 100_000):
        texts = [[token * 7 % vocab_size for token in range(length)] for length in (5, 1, 1000, 30)]
        with IndexedWriter(tmp_path / f"{vocab_size}", choose_smallest_dtype(vocab_size)) as writer:
            for text in texts:
                writer.add_document(np.array(text))
            writer.commit()
        documents[str(tmp_path / f"{vocab_size}")] = texts
    program = (
        "import json, sys\n"
        "from megatron.core.datasets.indexed_dataset import IndexedDataset\n"
        "for prefix in sys.argv[1:]:\n"
        "    data = IndexedDataset(prefix)\n"
        "    read = [data[index].tolist() for index in range(len(data))]\n"
        "    print(json.dumps([read, data.document_indices.tolist(), data.get(2, 10, 5).tolist()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *documents], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    for line, texts in zip(done.stdout.splitlines()[-2:], documents.values(), strict=True):
        assert json.loads(line) == [texts, [0, 1, 2, 3, 4], texts[2][10:15]]


def damage_header(prefix: Path, position: int, value: bytes) -> None:
    content = bytearray(idx_path(prefix).read_bytes())
    content[position : position + len(value)] = value
    idx_path(prefix).write_bytes(content)


@pytest.mark.parametrize("kept", range(1, 34 + 12 * 4 + 8 * 5))
def test_an_index_truncated_anywhere_is_named(write_tokens: WriteTokens, kept: int) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    idx_path(prefix).write_bytes(idx_path(prefix).read_bytes()[:kept])
    with pytest.raises(UsageError, match="truncated") as caught:
        IndexedTokens(prefix)
    assert caught.value.problem.startswith(str(idx_path(prefix)))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("suffix", "change", "problem"),
    [
        (".idx", lambda content: b"", "empty"),
        (".idx", lambda content: b"PK" + content[2:], "not a Megatron index"),
        (".idx", lambda content: content + b"x", "too long"),
        (".idx", lambda content: content[:9] + struct.pack("<Q", 2) + content[17:], "version 2"),
        (".idx", lambda content: content[:17] + b"\x07" + content[18:], "type code 7"),
        (".idx", lambda content: content[:17] + b"\x63" + content[18:], "type code 99"),
        (".bin", lambda content: b"", "empty"),
        (".bin", lambda content: content[:-1], "truncated, 17 bytes instead of 18"),
        (".bin", lambda content: content + b"xx", "longer than its index says"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    write_tokens: WriteTokens, suffix: str, change: object, problem: str
) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    path = prefix.with_name(prefix.name + suffix)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UsageError, match=problem) as caught:
        IndexedTokens(prefix)
    assert str(path) in caught.value.problem


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(write_tokens: WriteTokens, suffix: str) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    prefix.with_name(prefix.name + suffix).unlink()
    with pytest.raises(UsageError, match=rf"{suffix}: no such file"):
        IndexedTokens(prefix)


def test_a_sequence_outside_the_bin_is_an_error_when_it_is_read(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    damage_header(prefix, 34, struct.pack("<i", 1000))
    with pytest.raises(PrimusError, match="lies outside"):
        IndexedTokens(prefix)[0]


def test_a_writer_that_does_not_commit_leaves_what_was_there(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    before = bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()
    with IndexedWriter(prefix, choose_smallest_dtype(1000)) as writer:
        writer.add_document(np.arange(100))
        writer.finish_files()
    assert (bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes()) == before
    assert sorted(file.name for file in prefix.parent.iterdir()) == ["x.bin", "x.idx"]


def test_a_crash_between_the_two_names_leaves_no_index_of_other_tokens(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_tokens("x", DOCUMENTS)
    publish = atomic.publish_file

    def crash(written: Path, path: Path) -> None:
        if path.suffix == ".idx":
            raise KeyboardInterrupt
        publish(written, path)

    monkeypatch.setattr(atomic, "publish_file", crash)
    with IndexedWriter(prefix, choose_smallest_dtype(1000)) as writer:
        writer.add_batch(np.arange(9), np.array([3, 0, 1, 5]), np.ones(4, dtype=np.bool_))
        with pytest.raises(KeyboardInterrupt):
            writer.commit()
    with pytest.raises(UsageError, match=r"x\.idx: no such file"):
        IndexedTokens(prefix)


def test_tokens_that_do_not_fit_the_type_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", choose_smallest_dtype(1000)) as writer, pytest.raises(ValueError, match="70000"):
        writer.add_document(np.array([1, 70000]))
