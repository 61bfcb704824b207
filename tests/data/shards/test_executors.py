"""Shards are done once and give the same bytes, by processes of this machine or by tasks of a real Ray."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.stages import Capitals, shards_of
from primus.data.shards import executors, shard_queue, workers
from primus.data.shards.executors import Executor
from primus.data.shards.shard_queue import ShardQueue
from primus.data.shards.workers import ShardProgress
from primus.errors import PrimusError, UsageError

TEXT = b"the quick brown fox jumps over the lazy dog " * 50
NUM_SHARDS = 8
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ray_variables() -> Iterator[dict[str, str]]:
    """The environment of a Ray of two processors, started once."""
    ray = pytest.importorskip("ray")
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = str(TESTS)  # where Ray's processes find the stage
    try:
        with executors._connect_ray(ray, {}, 2):
            yield dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def ray(ray_variables: dict[str, str]) -> None:
    """Ray starts further processes with the variables of this one, which are restored after each test."""
    os.environ.update(ray_variables)


@pytest.fixture(params=["local", "ray"])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "ray":
        request.getfixturevalue("ray")
    name: Executor = request.param
    return name


def board_of(folder: Path, max_bad: int = 0, **stage: object) -> ShardQueue:
    (folder / "notes").mkdir(exist_ok=True)
    (folder / "text").write_bytes(TEXT)
    stage_of = Capitals(folder / "notes", **stage)  # type: ignore[arg-type]
    return shard_queue.open_shard_queue(
        stage_of, shards_of(folder / "text", -(-len(TEXT) // NUM_SHARDS)), folder / "work", max_bad
    )


def begun(queue: ShardQueue) -> dict[int, int]:
    assert isinstance(queue.stage, Capitals)
    return queue.stage.begun()


ONCE = dict.fromkeys(range(NUM_SHARDS), 1)


def test_without_ray_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--executor ray needs ray") as caught:
        executors.run(board_of(tmp_path), "ray", 1, "capitals")
    assert "pip install" in caught.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:none"])
def test_a_cluster_that_is_not_there_is_said_at_once(address: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        address = address.format(port=closed.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(UsageError, match="cannot reach a Ray cluster") as caught:
            executors.run(board_of(tmp_path), "ray", 1, "capitals", environ={"RAY_ADDRESS": address})
    assert address in caught.value.problem
    assert time.monotonic() - began < 30


def test_all_shards_are_done_once_and_told(executor: Executor, tmp_path: Path) -> None:
    queue, seen = board_of(tmp_path), list[ShardProgress]()
    rows = executors.run(queue, executor, 2, "capitals", seen.append)
    assert b"".join(queue.result_file(row, "bin").read_bytes() for row in rows) == TEXT.upper()
    assert begun(queue) == ONCE
    assert (seen[-1].counts, seen[-1].done_bytes) == ({"documents": NUM_SHARDS}, seen[-1].total_bytes)
    assert executors.run(queue, executor, 2, "capitals") == rows
    assert begun(queue) == ONCE, "what is done is not done again"


def test_what_is_wrong_with_a_shard_is_said_as_the_stage_says_it(executor: Executor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shard 3 is bad") as caught:
        executors.run(board_of(tmp_path, fails_at=3), executor, 2, "capitals")
    assert caught.value.hint == "mend it"
    rows = executors.run(board_of(tmp_path), executor, 2, "capitals")
    assert len(rows) == NUM_SHARDS, "the rest of the work goes on where it was"


def test_what_all_shards_leave_out_together_is_limited(executor: Executor, tmp_path: Path) -> None:
    with pytest.raises(PrimusError, match="bad document 6 of at most 5"):
        executors.run(board_of(tmp_path, max_bad=5, leaves_out=1), executor, 2, "capitals")


def test_a_shard_whose_ray_worker_is_killed_is_done_by_another_one(ray: None, tmp_path: Path) -> None:
    queue = board_of(tmp_path, dies_at=2)
    rows = executors.run(queue, "ray", 2, "capitals")
    assert b"".join(queue.result_file(row, "bin").read_bytes() for row in rows) == TEXT.upper()
    assert begun(queue) == ONCE | {2: 2}
    assert not list(queue.folder.glob("*.tmp.*"))


def test_ray_and_processes_beside_it_share_the_work(ray: None, tmp_path: Path) -> None:
    queue, other = board_of(tmp_path, pause_s=0.05), board_of(tmp_path, pause_s=0.05)
    beside = threading.Thread(target=workers.run, args=(other, 1, "capitals"))
    beside.start()
    rows = executors.run(queue, "ray", 1, "capitals")
    beside.join()
    assert len(rows) == NUM_SHARDS
    assert begun(queue) == ONCE
