"""Run the shards of a queue in processes of this machine.

The parent starts the workers and reads their messages, one pipe a worker: ``counts`` and ``row`` for shards, then
``problem`` (a PrimusError) or ``failure`` (a traceback), then the end of the pipe. Workers claim shards by the locks of
the queue; the parent assigns none.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from primus.data.shards import shard_queue
from primus.data.shards.shard_queue import ShardQueue, ShardResult
from primus.errors import PrimusError

GROWTH_BYTES = 128 << 20
"""Memory of its own at which a process ends after a shard and another takes its place: caches of libraries grow."""

SHOW_EVERY_S = 0.2
"""Interval of the progress display, in which a person still sees steady movement."""
GRACE_S = 5.0
"""Time for a worker to exit after SIGTERM before SIGKILL; a worker has nothing to save, so that it exits at once."""
POLL_S = 0.2
"""Interval of the look for shards that other processes finish; each look reads one folder."""
PATIENCE_S = 24 * 3600.0
"""Longest wait for shards that another process holds: a shard of 32 MB takes minutes, a stopped process forever."""


@dataclass
class ShardProgress:
    """How far the shards of a stage are."""

    stage: str
    """What is being done."""
    total_bytes: int
    """Size of all shards."""
    done_bytes: int = 0
    """Size of those that are done, of which those of an earlier start."""
    counts: dict[str, int] = field(default_factory=dict)
    """Sums over what this process and its workers did."""

    def add_counts(self, counts: dict[str, int]) -> None:
        """Add to the counts."""
        for name, amount in counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount


Show = Callable[[ShardProgress], None]


def run(board: ShardQueue, workers: int, name: str, show: Show = lambda progress: None) -> list[ShardResult]:
    """Do all shards of a board in `workers` processes, beside any other process that does them too.

    Args:
        board: The shards.
        workers: Processes to start; 0 works in this process.
        name: What is being done, for the progress.
        show: Receives the progress, several times a second at most.

    Returns:
        The rows of all shards, in order; fewer where somebody else has finished the whole and removed the folder.

    Raises:
        PrimusError: A shard failed, a worker was killed, or too much was bad; what is done stays.
    """
    sizes = {shard.index: shard.bytes for shard in board.shards}
    found = board.list_results()
    progress = ShardProgress(name, sum(sizes.values()), sum(sizes[row.shard] for row in found))
    bad = [item for row in found for item in row.bad]
    shard_queue.check_bad(bad, board.max_bad)

    def add_result(row: ShardResult) -> None:
        progress.done_bytes += sizes[row.shard]
        bad.extend(row.bad)
        shard_queue.check_bad(bad, board.max_bad)

    if len(found) < len(board.shards):
        board.stage.start()
        deadline = time.monotonic() + PATIENCE_S
        while left := board.list_remaining():
            if workers:
                _run_processes(board, min(workers, len(left)), progress, add_result, show)
            else:
                _run_in_process(board, progress, add_result, show)
            _wait_for_others(board, deadline)
    rows = board.list_results()
    shard_queue.check_bad([item for row in rows for item in row.bad], board.max_bad)
    return rows


def _wait_for_others(board: ShardQueue, deadline: float) -> None:
    """Give processes elsewhere a moment where all that is left is theirs."""
    if left := board.list_remaining():
        if time.monotonic() > deadline:
            raise PrimusError(f"{board.folder}: another process still holds {len(left)} shards", "stop it first")
        time.sleep(POLL_S)


def _run_in_process(
    board: ShardQueue, progress: ShardProgress, add_result: Callable[[ShardResult], None], show: Show
) -> None:
    def report(counts: dict[str, int]) -> None:
        progress.add_counts(counts)
        show(progress)

    def accept_result(row: ShardResult) -> bool:
        add_result(row)
        return False

    shard_queue.process_shards(board, report, accept_result)


@dataclass
class _Worker:
    process: Any
    messages: Connection


def _run_processes(
    board: ShardQueue, count: int, progress: ShardProgress, add_result: Callable[[ShardResult], None], show: Show
) -> None:
    with _manage_workers() as team:
        for _ in range(count):
            team.append(_start_worker(board))
        shown = 0.0
        while team:
            for ready in wait([worker.messages for worker in team], timeout=SHOW_EVERY_S):
                worker = next(each for each in team if each.messages is ready)
                if _receive_message(worker, progress, add_result):
                    continue
                team.remove(worker)
                if _needs_replacement(worker):
                    team.append(_start_worker(board))
            if time.monotonic() - shown > SHOW_EVERY_S:
                show(progress)
                shown = time.monotonic()
        show(progress)


def _receive_message(worker: _Worker, progress: ShardProgress, add_result: Callable[[ShardResult], None]) -> bool:
    """Take one message of a worker; false where there are no more."""
    try:
        kind, value = worker.messages.recv()
    except EOFError:
        return False
    if kind == "counts":
        progress.add_counts(value)
    elif kind == "row":
        add_result(value)
    elif kind == "problem":
        error, problem, hint = value
        raise error(problem, hint)
    else:
        raise RuntimeError(f"a worker failed:\n{value}")
    return True


RETIRED_EXIT_CODE = 17
"""Exit code of a worker whose place another one is to take."""


def _needs_replacement(worker: _Worker) -> bool:
    """Whether a worker that says no more wants a successor.

    Raises:
        PrimusError: It was killed.
    """
    worker.process.join(GRACE_S)
    code = worker.process.exitcode
    if code in (0, RETIRED_EXIT_CODE):
        return bool(code)
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
    raise PrimusError(
        f"a worker process {how}, perhaps for lack of memory",
        "run the same command again, with fewer --workers if memory is short; finished shards are kept",
    )


@contextmanager
def _manage_workers() -> Iterator[list[_Worker]]:
    """Workers, of which none outlives the block."""
    team: list[_Worker] = []
    try:
        yield team
    finally:
        # All workers get SIGTERM before the parent waits for any of them: the grace period passes once, not per worker.
        for worker in team:
            worker.process.terminate()
        deadline = time.monotonic() + GRACE_S
        for worker in team:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _start_worker(board: ShardQueue) -> _Worker:
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods and os.name == "posix" else None)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run_worker, args=(board, sending), daemon=True)
    process.start()
    sending.close()  # else the parent would hold the pipe open, and never read the end of it
    return _Worker(process, receiving)


def _run_worker(board: ShardQueue, messages: Connection) -> None:
    """What a worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        board.stage.start()
        own = psutil.Process()
        before = _private_bytes(own)

        def send_result(row: ShardResult) -> bool:
            messages.send(("row", row))
            return _private_bytes(own) - before > GROWTH_BYTES

        complete = shard_queue.process_shards(board, lambda counts: messages.send(("counts", counts)), send_result)
    except PrimusError as error:
        messages.send(("problem", (type(error), error.problem, error.hint)))
        complete = True
    except Exception:  # noqa: BLE001 - it goes to the parent, which raises it
        messages.send(("failure", traceback.format_exc()))
        complete = True
    messages.close()
    os._exit(
        0 if complete else RETIRED_EXIT_CODE
    )  # libraries' threads that were copied half by fork must not be joined


def _private_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss) - int(getattr(process.memory_info(), "shared", 0))


def _end_with_parent() -> None:
    """A killed parent leaves no orphan that works on."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
