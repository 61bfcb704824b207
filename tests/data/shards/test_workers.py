from __future__ import annotations

import mmap
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from primus.data.readers.shard import FilePart, Shard
from primus.data.shards import workers
from primus.data.shards.shard_queue import ShardOutput, ShardQueue, open_shard_queue
from primus.data.shards.workers import ShardProgress
from primus.errors import PrimusError, UsageError


class ActFacts(Struct):
    process: int


@dataclass
class Act:
    """A stage that does what the path of a shard's part says."""

    identity: Any = "act"

    def start(self) -> None:
        """Nothing to load."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Do it."""
        output.facts = ActFacts(os.getpid())
        output.path("txt").write_text(str(shard.index))
        output.add_counts(documents=2)
        action = shard.parts[0].file
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "bad":
            output.record_bad(f"shard {shard.index}", "bad")
        if action == "refuse":
            raise UsageError("bad input", "correct it")
        if action == "fail":
            raise ZeroDivisionError("a mistake of ours")
        if action == "grow":
            # New pages: the allocator could use memory that the parent had freed before the fork.
            memory = mmap.mmap(-1, 160 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.write(b"x" * len(memory))
            kept.append(memory)


kept: list[mmap.mmap] = []


def queue(folder: Path, *actions: str) -> ShardQueue:
    return open_shard_queue(
        Act(), [Shard(index, (FilePart(action),), 10) for index, action in enumerate(actions)], folder
    )


def test_processes_do_what_one_does(tmp_path: Path) -> None:
    shown: list[int] = []

    def show(progress: ShardProgress) -> None:
        shown.append(progress.done_bytes)

    here = workers.run(queue(tmp_path / "here", *["pass"] * 8), 0, "x")
    there = workers.run(queue(tmp_path / "there", *["pass"] * 8), 2, "x", show)
    assert [row.files for row in there] == [row.files for row in here]
    assert [row.shard for row in there] == list(range(8))
    assert os.getpid() not in {row.read_facts(ActFacts).process for row in there}
    assert shown[-1] == 80


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    one = queue(tmp_path, *["pass"] * 4)
    done = one.process_shard(one.shards[2])
    assert done
    counted: list[dict[str, int]] = []
    rows = workers.run(queue(tmp_path, *["pass"] * 4), 0, "x", lambda progress: counted.append(dict(progress.counts)))
    assert rows[2] == done
    assert counted[-1] == {"documents": 6}


def test_a_killed_worker_ends_the_run_and_keeps_what_is_done(tmp_path: Path) -> None:
    one = queue(tmp_path, "pass", "kill")
    with pytest.raises(PrimusError, match=r"a worker process was killed by SIGKILL") as caught:
        workers.run(one, 1, "x")
    assert "fewer --workers" in caught.value.hint
    assert [shard.index for shard in queue(tmp_path, "pass", "kill").list_remaining()] == [1]


def test_what_a_worker_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bad input") as caught:
        workers.run(queue(tmp_path, "pass", "refuse", "pass"), 2, "x")
    assert caught.value.hint == "correct it"


def test_what_all_processes_left_out_together_is_counted(tmp_path: Path) -> None:
    one, other = (replace(queue(tmp_path, "bad", "bad"), max_bad=1) for _ in range(2))

    def somebody_else_does_the_second(progress: ShardProgress) -> None:
        if not other.find_result(other.shards[1]):
            other.process_shard(other.shards[1])

    with pytest.raises(PrimusError, match="shard 1: bad"):
        workers.run(one, 0, "x", somebody_else_does_the_second)


def test_a_mistake_in_a_worker_keeps_its_trace(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*a mistake of ours"):
        workers.run(queue(tmp_path, "fail"), 1, "x")


def test_a_worker_that_has_grown_is_replaced(tmp_path: Path) -> None:
    rows = workers.run(queue(tmp_path, "grow", "pass", "pass"), 1, "x")
    processes = [row.read_facts(ActFacts).process for row in rows]
    assert processes[0] != processes[1] == processes[2]
