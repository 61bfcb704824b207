from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from primus.data.filter.dedup import key_files
from primus.data.filter.dedup.key_files import BlockWriter, KeyFile, read_keys


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_ranges_of_keys_are_read_back_with_the_numbers_of_their_documents(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_files, "BLOCK_DOCUMENTS", block)
    keys = np.random.default_rng(block).integers(0, 50, (5, 20), dtype=np.uint64)
    with (tmp_path / "keys").open("wb") as file:
        writer = BlockWriter(file)
        for some in np.split(keys, [4, 5, 5, 17], axis=1):
            writer.add_keys(some)
        writer.flush()
    assert sum(writer.sizes) == 20 and max(writer.sizes) <= block
    stored = KeyFile(tmp_path / "keys", writer.sizes, 1000, num_bands=3)
    for band in range(4):
        found = [
            (int(key), int(document), None if some.rest is None else int(some.rest[index]))
            for some in read_keys(stored, band, 10, 30)
            for index, (key, document) in enumerate(zip(some.keys, some.documents, strict=True))
        ]
        expected = [
            (int(keys[band, at]), 1000 + at, int(keys[4, at]) if band == 3 else None)
            for at in range(20)
            if 10 <= keys[band, at] <= 30
        ]
        assert sorted(found, key=str) == sorted(expected, key=str)
    assert len(next(read_keys(stored, 0, 0, (1 << 64) - 1))) == writer.sizes[0]


def test_a_shard_without_documents_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    assert list(read_keys(KeyFile(tmp_path / "keys", [], 0, 14), 0, 0, 9)) == []
