from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from primus.data import atomic
from primus.data.readers import shard as shards
from primus.data.readers.shard import FilePart, Shard
from primus.data.shards import shard_queue
from primus.data.shards.shard_queue import ShardOutput, ShardQueue, open_shard_queue
from primus.errors import PrimusError


@dataclass
class Repeat:
    """A stage that writes the index of a shard into a file."""

    identity: Any = "repeat"
    during: Callable[[Shard, ShardOutput], None] = field(default=lambda shard, output: None)

    def start(self) -> None:
        """Nothing to load."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Write, then do what the test wants to happen meanwhile."""
        output.path("txt").write_text(str(shard.index) * 10)
        output.add_counts(written=1)
        self.during(shard, output)


def queue(folder: Path, stage: Repeat | None = None, num_shards: int = 3, max_bad: int = 0) -> ShardQueue:
    made = [Shard(index, (FilePart("a"),), 10) for index in range(num_shards)]
    return open_shard_queue(stage or Repeat(), made, folder, max_bad)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_shard_is_done_once_and_its_row_tells_what_it_gave(tmp_path: Path) -> None:
    one = queue(tmp_path)
    row = one.process_shard(one.shards[1])
    assert row
    assert (row.shard, row.counts, row.files["txt"].bytes) == (1, {"written": 1}, 10)
    assert shard_queue.compute_checksum(one.result_file(row, "txt")) == row.files["txt"].xxh3
    assert names(one.folder) == ["000001.json", "000001.txt"]
    again = queue(tmp_path)
    assert again.process_shard(again.shards[1]) is None
    assert [shard.index for shard in again.list_remaining()] == [0, 2]
    assert again.list_results() == [row]


def test_another_stage_never_finds_these_files(tmp_path: Path) -> None:
    one = queue(tmp_path)
    one.process_shard(one.shards[0])
    assert len(queue(tmp_path, Repeat(identity="other")).list_remaining()) == 3
    assert len(queue(tmp_path, num_shards=2).list_remaining()) == 2


def test_a_shard_whose_file_is_not_whole_is_left_to_do(tmp_path: Path) -> None:
    one = queue(tmp_path)
    row = one.process_shard(one.shards[0])
    assert row
    os.truncate(one.result_file(row, "txt"), 9)
    assert [shard.index for shard in queue(tmp_path).list_remaining()] == [0, 1, 2]
    (one.folder / "000000.json").write_text("{")
    assert queue(tmp_path).list_remaining()[0].index == 0


def test_a_shard_that_somebody_holds_is_passed_over(tmp_path: Path) -> None:
    one = queue(tmp_path)
    descriptor = atomic.try_acquire(one.folder / "000000.claim")
    assert descriptor
    assert one.process_shard(one.shards[0]) is None
    os.close(descriptor)
    assert one.process_shard(one.shards[0])


def test_a_shard_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(shard: Shard, output: ShardOutput) -> None:
        raise PrimusError("broken", "")

    one = queue(tmp_path, Repeat(during=fail))
    with pytest.raises(PrimusError, match="broken"):
        one.process_shard(one.shards[0])
    assert names(one.folder) == []


def test_what_a_killed_process_left_of_a_shard_is_swept(tmp_path: Path) -> None:
    one = queue(tmp_path)
    (one.folder / "000000.txt.tmp.1").touch()
    (one.folder / "0000001.txt.tmp.1").touch()
    one.process_shard(one.shards[0])
    assert names(one.folder) == ["000000.json", "000000.txt", "0000001.txt.tmp.1"]


def test_a_shard_that_was_done_until_it_could_be_claimed_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = queue(tmp_path), queue(tmp_path)
    claim = shard_queue._claim_shard

    def late(path: Path) -> AbstractContextManager[bool]:
        monkeypatch.setattr(shard_queue, "_claim_shard", claim)
        assert other.process_shard(other.shards[0])
        return claim(path)

    monkeypatch.setattr(shard_queue, "_claim_shard", late)
    assert one.process_shard(one.shards[0]) is None
    assert one.list_results() == other.list_results()


def test_the_work_is_over_where_somebody_has_removed_the_folder(tmp_path: Path) -> None:
    one = queue(tmp_path, Repeat(during=lambda shard, output: atomic.remove_folder(output.stem.parent)))
    assert one.process_shard(one.shards[0]) is None
    assert one.list_remaining() == []
    assert one.process_shard(one.shards[1]) is None
    assert names(tmp_path) == []


def test_more_bad_items_than_allowed_are_an_error_that_names_one(tmp_path: Path) -> None:
    def leave_out(shard: Shard, output: ShardOutput) -> None:
        output.record_bad("a:1", "odd")
        output.record_bad("a:2", "odd")

    allowed = queue(tmp_path / "two", Repeat(during=leave_out), max_bad=2)
    row = allowed.process_shard(allowed.shards[0])
    assert row
    assert [item.where for item in row.bad] == ["a:1", "a:2"]
    strict = queue(tmp_path / "one", Repeat(during=leave_out), max_bad=1)
    with pytest.raises(PrimusError, match=r"a:2: odd \(bad document 2 of at most 1\)"):
        strict.process_shard(strict.shards[0])


def test_a_forgotten_shard_is_done_again(tmp_path: Path) -> None:
    one = queue(tmp_path)
    row = one.process_shard(one.shards[0])
    assert row
    one.discard_result(row)
    assert one.process_shard(one.shards[0]) == row


def test_shards_are_as_many_as_keep_workers_busy() -> None:
    assert [shards.choose_shard_size(size << 20) for size in (1, 1000, 100_000)] == [
        4 << 20,
        (1000 << 20) // 64,
        32 << 20,
    ]
