from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primus.data.megatron.indexed_dataset import HEADER, MAGIC, IndexedTokens, IndexedWriter, bin_path, idx_path
from primus.data.training import packing
from primus.data.training.masks import split_inputs_and_targets
from primus.data.training.mock import MockDataset
from primus.data.training.packing import PackedDataset
from primus.errors import PrimusError, UsageError

WriteTokens = Callable[[str, Sequence[Sequence[int]]], Path]

END = 999


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of these lengths, each of which begins with its number and ends with END."""
    return [[number, *range(100, 98 + length), END][:length] for number, length in enumerate(lengths)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 40), min_size=3, max_size=90),
    seq_length=st.integers(1, 16),
    seed=st.integers(0, 2**32),
    block=st.sampled_from([1, 4, 512]),
    block_tokens=st.sampled_from([1, 7, 100, 1 << 18]),
    window=st.sampled_from([2, 16, 16384]),
)
def test_an_epoch_has_every_token_once_but_for_a_tail(
    write_tokens: WriteTokens,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    seq_length: int,
    seed: int,
    block: int,
    block_tokens: int,
    window: int,
) -> None:
    lengths = [*lengths, seq_length + 1]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "BLOCK", block)
        patch.setattr(packing, "BLOCK_TOKENS", block_tokens)
        patch.setattr(packing, "BLOCKS_OF_WINDOW", 1)
        patch.setattr(packing, "WINDOW", window)
        patch.setattr(packing, "MAPPED_POINTERS", 2 * block)
        values = iter(range(10**6))
        documents = [[next(values) % 1000 for _ in range(length)] for length in lengths]
        dataset = PackedDataset(IndexedTokens(write_tokens("x", documents)), seq_length, seed)
        total = sum(lengths)
        count = dataset.samples_per_epoch
        assert count == (total - 1) // seq_length
        for epoch in (0, 1):
            seen = Counter(token for index in range(count) for token in dataset[epoch * count + index][:-1].tolist())
            everything = Counter(token for document in documents for token in document)
            assert not seen - everything
            assert sum((everything - seen).values()) == total - count * seq_length <= seq_length


def test_the_stream_is_whole_documents_one_after_the_other(write_tokens: WriteTokens) -> None:
    lengths = [3 + number % 17 for number in range(800)]
    documents = numbered(lengths)
    dataset = PackedDataset(IndexedTokens(write_tokens("x", documents)), 1, seed=3)
    stream = [int(token) for token in dataset._read_stream(0, 0, dataset.num_tokens)]
    whole = {tuple(document) for document in documents}
    start = 0
    order = []
    for position, token in enumerate(stream):
        if token == END:
            assert tuple(stream[start : position + 1]) in whole
            order.append(stream[start])
            start = position + 1
    assert sorted(order) == list(range(800))
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 20


def test_a_sample_overlaps_the_next_by_the_target_of_its_last_token(write_tokens: WriteTokens) -> None:
    dataset = PackedDataset(IndexedTokens(write_tokens("x", numbered([10] * 30))), 8, seed=3)
    first, second = (dataset._read_stream(0, start, 9) for start in (0, 8))
    assert first[-1] == second[0]
    assert dataset[0].dtype == np.int64
    assert dataset[0].shape == (9,)


def test_a_sample_depends_on_data_seed_and_number_only(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("x", numbered([20] * 200))
    one, again, other = (PackedDataset(IndexedTokens(prefix), 16, seed) for seed in (5, 5, 6))
    for index in (977, 3, 0, 10**9, 3):
        assert np.array_equal(one[index], again[index])
    assert not all(np.array_equal(one[index], other[index]) for index in range(20))


def test_each_epoch_has_its_own_order(write_tokens: WriteTokens) -> None:
    documents = np.random.default_rng(0).integers(0, 999, (200, 20)).tolist()
    dataset = PackedDataset(IndexedTokens(write_tokens("x", documents)), 7, seed=5)
    count = dataset.samples_per_epoch
    first, second = ([dataset[epoch * count + index].tolist() for index in range(count)] for epoch in (0, 1))
    assert first != second
    assert sum(sample in first for sample in second) < count / 5  # documents of 20 tokens are cut at 7 places


def test_the_order_of_samples_never_changes(write_tokens: WriteTokens) -> None:
    dataset = PackedDataset(IndexedTokens(write_tokens("x", numbered([5] * 40))), 4, seed=1234)
    assert [dataset[index].tolist() for index in (0, 1, 60)] == [
        [999, 32, 100, 101, 102],
        [102, 999, 11, 100, 101],
        [999, 27, 100, 101, 102],
    ]


def write_index(prefix: Path, lengths: Sequence[int]) -> Path:
    """A token file of zeros that takes no room, of documents of these lengths."""
    pointers = 2 * (np.cumsum(lengths) - lengths)
    header = HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1)
    arrays = np.array(lengths, "<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
    idx_path(prefix).write_bytes(header + b"".join(array.tobytes() for array in arrays))
    with bin_path(prefix).open("wb") as file:
        file.truncate(2 * int(np.sum(lengths)))
    return prefix


@pytest.mark.parametrize(
    ("mean_tokens", "seq_length"), [(400, 4096), (400, 128), (4000, 4096), (100_000, 4096), (2_000_000, 4096)]
)
def test_sixteen_steps_take_their_documents_from_many_places(tmp_path: Path, mean_tokens: int, seq_length: int) -> None:
    tokens = 3_000_000_000 if mean_tokens > 400 else 300_000_000
    lengths = np.random.default_rng(1).integers(mean_tokens // 2, 3 * mean_tokens // 2, tokens // mean_tokens)
    dataset = PackedDataset(IndexedTokens(write_index(tmp_path / "x", lengths)), seq_length, seed=1)
    sequences = [dataset.find_pieces(sample)[0].sequence for sample in range(0, 16 * 1024, 8)]
    twentieths = np.bincount(np.array(sequences) * 20 // len(lengths), minlength=20)
    assert twentieths.min() > 0.1 * len(sequences) / 20
    assert twentieths.max() < 3 * len(sequences) / 20


def test_blocks_are_complete_at_so_many_documents_or_tokens(tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).choice([1, 300, 3000, 500_000], 20_000, p=[0.5, 0.3, 0.19, 0.01])
    lengths[:6000] = 100
    dataset = PackedDataset(
        IndexedTokens(write_index(tmp_path / "x", lengths)), 64, seed=1, sequences=range(7, len(lengths))
    )
    starts, sizes = dataset._block_starts, dataset._block_sizes
    assert starts[0] == 7
    assert starts[-1] == 20_000
    assert sizes.tolist() == [int(lengths[one:other].sum()) for one, other in pairwise(starts)]
    assert np.diff(starts).max() == packing.BLOCK
    assert set(range(7, 20_000, packing.BLOCK)) <= set(starts.tolist())
    longest = [int(lengths[one:other].max()) for one, other in pairwise(starts)]
    assert all(size <= packing.BLOCK_TOKENS + most for size, most in zip(sizes.tolist(), longest, strict=True))
    assert (np.diff(starts)[:11] == packing.BLOCK).all()


def test_a_range_of_sequences_stays_within_itself(write_tokens: WriteTokens) -> None:
    documents = [[number] * 10 for number in range(100)]
    dataset = PackedDataset(IndexedTokens(write_tokens("x", documents)), 4, seed=1, sequences=range(90, 98))
    seen = {token for index in range(dataset.samples_per_epoch) for token in dataset[index].tolist()}
    assert seen <= set(range(90, 98))
    assert dataset.num_tokens == 80


def test_fewer_tokens_than_a_sequence_are_an_error(write_tokens: WriteTokens) -> None:
    with pytest.raises(UsageError, match="30 tokens in 3 documents are fewer than one sequence of 64"):
        PackedDataset(IndexedTokens(write_tokens("x", numbered([10] * 3))), 64)


def test_a_token_outside_the_vocabulary_is_an_error_and_not_an_index_out_of_range(write_tokens: WriteTokens) -> None:
    dataset = PackedDataset(IndexedTokens(write_tokens("x", numbered([10] * 30))), 64, vocab_size=500)
    with pytest.raises(PrimusError, match="token id 999 is outside the model's vocabulary of 500"):
        dataset[0]
    tokens = dataset.tokens
    with pytest.raises(PrimusError, match="token id 999 is outside the model's vocabulary of 999"):
        PackedDataset(tokens, 64, vocab_size=999)[0]
    assert PackedDataset(tokens, 64, vocab_size=1000)[0].max() == 999


def test_a_negative_token_is_an_error(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.int32)) as writer:
        writer.add_document(np.array([5] * 40))
        writer.commit()
    content = bytearray(bin_path(tmp_path / "x").read_bytes())
    content[40:44] = b"\xff" * 4
    bin_path(tmp_path / "x").write_bytes(content)
    with pytest.raises(PrimusError, match="token id -1 is outside"):
        PackedDataset(IndexedTokens(tmp_path / "x"), 39, vocab_size=10)[0]


def test_a_length_that_contradicts_its_pointers_is_noticed_when_its_block_is_read(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("x", numbered([10] * 30))
    content = bytearray(idx_path(prefix).read_bytes())
    content[34 + 4 * 7] = 9
    idx_path(prefix).write_bytes(content)
    dataset = PackedDataset(IndexedTokens(prefix), 64)
    with pytest.raises(PrimusError, match="sequence 7 does not end where the next one begins"):
        dataset[0]


@pytest.mark.parametrize("mapped", [2, 64])
def test_pointers_that_are_not_in_order_are_refused_before_a_sample_is_read(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch, mapped: int
) -> None:
    monkeypatch.setattr(packing, "BLOCK", 2)
    monkeypatch.setattr(packing, "MAPPED_POINTERS", mapped)
    prefix = write_tokens("x", numbered([10] * 12))
    content = bytearray(idx_path(prefix).read_bytes())
    # Sequence 6, the first of a block, moves into the bytes of sequence 1: no sequence lies beyond the file.
    struct.pack_into("<q", content, HEADER.size + 4 * 12 + 8 * 6, 22)
    idx_path(prefix).write_bytes(content)
    with pytest.raises(PrimusError, match=r"x.idx: corrupt, its pointers are not in order"):
        PackedDataset(IndexedTokens(prefix), 4)


def test_mock_samples_are_random_and_repeat(write_tokens: WriteTokens) -> None:
    mock = MockDataset(vocab_size=50, seq_length=1000, seed=1)
    assert np.array_equal(mock[7], MockDataset(50, 1000, 1)[7])
    assert not np.array_equal(mock[7], mock[8])
    assert set(mock[7].tolist()) == set(range(50))


def test_the_position_after_an_end_of_document_is_left_out_of_the_loss() -> None:
    batch = np.array([[5, 9, 0, 7, 8], [0, 1, 2, 3, 0]])
    inputs, targets = split_inputs_and_targets(batch, masked_input=0)
    assert inputs.tolist() == [[5, 9, 0, 7], [0, 1, 2, 3]]
    assert targets.tolist() == [[9, 0, -100, 8], [-100, 2, 3, 0]]
    assert split_inputs_and_targets(batch)[1].tolist() == [[9, 0, 7, 8], [1, 2, 3, 0]]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=1200),
    seq_length=st.integers(1, 50),
    few=st.sampled_from([1, 2, 32]),
    index=st.integers(0, 10**6),
)
def test_the_pieces_of_a_sample_are_its_tokens(
    write_tokens: WriteTokens,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    seq_length: int,
    few: int,
    index: int,
) -> None:
    values = iter(range(10**6))
    documents = [[next(values) % 1000 for _ in range(length)] for length in [*lengths, 0, seq_length + 1, 0]]
    tokens = IndexedTokens(write_tokens("x", documents))
    with monkeypatch.context() as patch:
        patch.setattr(packing, "FEW_PIECES", few)
        dataset = PackedDataset(tokens, seq_length, seed=index, sequences=range(len(lengths) // 2, len(documents)))
        pieces = dataset.find_pieces(index)
        found = [
            token
            for piece in pieces
            for token in documents[piece.sequence][piece.first_token : piece.first_token + piece.tokens]
        ]
        assert found == dataset[index].tolist()
        assert all(piece.tokens > 0 and piece.prefix == tokens.prefix for piece in pieces)
        for one, after in pairwise(pieces):
            assert after.first_token == 0
            assert one.first_token + one.tokens == len(documents[one.sequence])
