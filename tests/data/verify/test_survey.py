from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.megatron.indexed_dataset import HEADER, MAGIC, IndexedTokens, IndexedWriter, bin_path, idx_path
from primus.data.verify import survey
from primus.data.verify.survey import PERCENTILES
from primus.errors import UsageError

WriteTokens = Callable[[str, Sequence[Sequence[int]]], Path]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any))
def test_lengths_are_counted_exactly(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    prefix = tmp_path_factory.mktemp("lengths") / "x"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for length in lengths:
            writer.add_document(np.ones(length, dtype=np.int64))
        writer.commit()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "COUNTED_LENGTHS", 8)
        found = survey.survey_tokens(IndexedTokens(prefix), None).lengths
    expected = sorted(lengths)
    places = [max(1, round(percent / 100 * len(expected))) - 1 for percent in PERCENTILES]
    assert list(found.percentiles.values()) == [expected[place] for place in places]
    assert found.mean == pytest.approx(np.mean(lengths))
    for bar in found.histogram:
        inside = [length for length in lengths if bar.first <= length <= bar.last]
        assert (bar.count, bar.weight) == (len(inside), sum(inside))
    assert sum(bar.count for bar in found.histogram) == len(lengths)


def test_frequent_tokens_of_a_small_file_are_exact(write_tokens: WriteTokens) -> None:
    found = survey.survey_tokens(IndexedTokens(write_tokens("x", [[5, 5, 5, 7], [7, 9, 5]])), None)
    assert [(each.token, round(each.share, 3)) for each in found.frequent] == [(5, 0.571), (7, 0.286), (9, 0.143)]
    assert (found.counted_tokens, found.tokens, found.distinct_tokens) == (7, 7, 3)


def test_frequent_tokens_of_a_large_file_are_of_evenly_spread_parts(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "CHUNK_TOKENS", 10)
    monkeypatch.setattr(survey, "COUNTED_TOKENS", 50)
    found = survey.survey_tokens(IndexedTokens(write_tokens("x", [[part] * 10 for part in range(20)])), None)
    assert found.tokens == 200 and found.counted_tokens == 50
    assert sorted(each.token for each in found.frequent) == [0, 4, 8, 12, 16]


def test_a_document_is_all_of_its_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_batch(np.array([1, 2, 3, 4, 5]), np.array([2, 1, 2]), np.array([False, True, True]))
        writer.commit()
    file = IndexedTokens(tmp_path / "x")
    assert [survey.decode_document(file, number, None).ids for number in (0, 1)] == [[1, 2, 3], [4, 5]]
    with pytest.raises(UsageError, match="document 2 does not exist"):
        survey.decode_document(file, 2, None)


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    def peak_mib(documents: int) -> float:
        """Memory that a survey adds to a process of its own."""
        prefix = tmp_path / f"of_{documents}"
        numbers = np.arange(documents + 1)
        header = HEADER.pack(MAGIC, 1, 8, documents, documents + 1)
        arrays = np.full(documents, 5, "<i4"), (10 * numbers[:-1]).astype("<i8"), numbers.astype("<i8")
        idx_path(prefix).write_bytes(header + b"".join(array.tobytes() for array in arrays))
        with bin_path(prefix).open("wb") as file:
            file.truncate(10 * documents)
        code = (
            "import sys\nfrom pathlib import Path\n"
            "from primus.data.megatron.indexed_dataset import IndexedTokens\n"
            "from primus.data.verify.survey import survey_tokens\n"
            "lines = lambda: open('/proc/self/status').readlines()\n"
            "memory = lambda: int(next(line for line in lines() if 'VmHWM' in line).split()[1]) / 1024\n"
            "before = memory()\nsurvey_tokens(IndexedTokens(Path(sys.argv[1])), None)\nprint(memory() - before)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(prefix)], capture_output=True, text=True, timeout=120)
        return float(done.stdout)

    few, many = peak_mib(4_000_000), peak_mib(10_000_000)  # whose index has 200 MB
    assert many < few + 30
