"""Run the shards of a queue in processes of this machine.

The parent starts the workers and reads their messages from one pipe per worker: ``counts`` and ``result`` for shards,
then ``problem`` (a PrimusError) or ``failure`` (a traceback), then the end of the pipe. Workers claim shards
with the locks of the queue; the parent assigns none.

A worker exits with 0 if no shard is open or it has reported an error. It exits with `RETIRED_EXIT_CODE` if its memory
has grown by `GROWTH_BYTES`; the parent then starts a replacement. Any other exit is a failure. Only the parent stops
workers; a worker whose parent dies exits.
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
"""Growth of a worker's private memory after which it exits at the end of a shard and is replaced.

Caches of tokenizer libraries grow with the text. The limit is above the one in `primus.data.tokenizers.fast`, at which
the fast tokenizer drops its own cache, so that a worker is replaced only if that does not help.
"""

SHOW_EVERY_S = 0.2
"""Interval of the progress display: often enough that it looks continuous."""
GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL for a worker. A worker has nothing to save and normally exits at once."""
POLL_S = 0.2
"""Interval of the check for shards that other processes finish; each check reads one folder."""
PATIENCE_S = 24 * 3600.0
"""Longest wait for shards that another process holds. A shard of 32 MB takes minutes; a stopped process never ends."""


@dataclass
class ShardProgress:
    """Progress of a stage."""

    stage: str
    """Name of the work, for display."""
    total_bytes: int
    """Size of all shards in bytes."""
    done_bytes: int = 0
    """Size of the finished shards in bytes, including those of an earlier run."""
    counts: dict[str, int] = field(default_factory=dict)
    """Sums of the counts of this process and its workers."""

    def add_counts(self, counts: dict[str, int]) -> None:
        """Add to the counts."""
        for name, amount in counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount


Show = Callable[[ShardProgress], None]


def run(queue: ShardQueue, workers: int, name: str, show: Show = lambda progress: None) -> list[ShardResult]:
    """Process all shards of a queue in `workers` processes. Other processes may process the same queue.

    Args:
        queue: The shard queue.
        workers: Number of processes to start; 0 runs in this process.
        name: Name of the work, for the progress display.
        show: Receives the progress, at most several times a second.

    Returns:
        The results of all shards, in order; fewer if another process has published the output and removed the folder.

    Raises:
        PrimusError: A shard failed, a worker was killed, or too many documents are invalid; finished shards are kept.
    """
    sizes = {shard.index: shard.bytes for shard in queue.shards}
    found = queue.list_results()
    progress = ShardProgress(name, sum(sizes.values()), sum(sizes[shard_result.shard] for shard_result in found))
    bad = [item for shard_result in found for item in shard_result.bad]
    shard_queue.check_bad(bad, queue.max_bad)

    def add_result(shard_result: ShardResult) -> None:
        progress.done_bytes += sizes[shard_result.shard]
        bad.extend(shard_result.bad)
        shard_queue.check_bad(bad, queue.max_bad)

    if len(found) < len(queue.shards):
        queue.stage.start()  # before the fork: workers share the pages of the loaded tokenizer with this process
        deadline = time.monotonic() + PATIENCE_S
        # A round processes every shard that is open now. What remains is claimed by other processes, and becomes open
        # again when one of them dies, so the rounds continue until all shards are done or the folder is gone.
        while left := queue.list_remaining():
            if workers:
                _run_processes(queue, min(workers, len(left)), progress, add_result, show)
            else:
                _run_in_process(queue, progress, add_result, show)
            _wait_for_others(queue, deadline)
    shard_results = queue.list_results()
    # Each process has counted only the results that it found or made; the total of all processes is known here.
    shard_queue.check_bad([item for shard_result in shard_results for item in shard_result.bad], queue.max_bad)
    return shard_results


def _wait_for_others(queue: ShardQueue, deadline: float) -> None:
    """Pause if all remaining shards are claimed by other processes."""
    if left := queue.list_remaining():
        if time.monotonic() > deadline:
            raise PrimusError(
                f"{queue.folder}: another process is still working on {len(left)} shards", "stop it first"
            )
        time.sleep(POLL_S)


def _run_in_process(
    queue: ShardQueue, progress: ShardProgress, add_result: Callable[[ShardResult], None], show: Show
) -> None:
    def report(counts: dict[str, int]) -> None:
        progress.add_counts(counts)
        show(progress)

    def accept_result(shard_result: ShardResult) -> bool:
        add_result(shard_result)
        return False

    shard_queue.process_shards(queue, report, accept_result)


@dataclass
class _Worker:
    process: Any
    messages: Connection


def _run_processes(
    queue: ShardQueue, count: int, progress: ShardProgress, add_result: Callable[[ShardResult], None], show: Show
) -> None:
    with _manage_workers() as team:
        for _ in range(count):
            team.append(_start_worker(queue))
        shown = 0.0
        while team:
            # The timeout bounds the time between updates of the display; the work itself has no limit.
            for ready in wait([worker.messages for worker in team], timeout=SHOW_EVERY_S):
                worker = next(each for each in team if each.messages is ready)
                if _receive_message(worker, progress, add_result):
                    continue
                team.remove(worker)
                if _needs_replacement(worker):
                    team.append(_start_worker(queue))
            if time.monotonic() - shown > SHOW_EVERY_S:
                show(progress)
                shown = time.monotonic()
        show(progress)


def _receive_message(worker: _Worker, progress: ShardProgress, add_result: Callable[[ShardResult], None]) -> bool:
    """Receive one message of a worker; return False at the end of its pipe."""
    try:
        kind, value = worker.messages.recv()
    except EOFError:  # the worker has closed the pipe or died; messages sent before that have been received
        return False
    if kind == "counts":
        progress.add_counts(value)
    elif kind == "result":
        add_result(value)
    elif kind == "problem":
        error, problem, hint = value
        raise error(problem, hint)
    else:  # "failure": a defect in the worker, with its traceback
        raise RuntimeError(f"a worker failed:\n{value}")
    return True


RETIRED_EXIT_CODE = 17
"""Exit code of a worker that requests a replacement; differs from 0 (finished) and 1 (its parent has died)."""


def _needs_replacement(worker: _Worker) -> bool:
    """Whether a worker whose pipe has ended requests a replacement.

    Raises:
        PrimusError: The worker was killed.
    """
    worker.process.join(GRACE_S)  # a worker closes its pipe just before it exits, so this wait is short
    code = worker.process.exitcode
    if code in (0, RETIRED_EXIT_CODE):
        return bool(code)
    how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
    raise PrimusError(
        f"a worker process {how}, possibly out of memory",
        "run the same command again, with fewer --workers if memory is short; finished shards are kept",
    )


@contextmanager
def _manage_workers() -> Iterator[list[_Worker]]:
    """List of workers that are stopped at the end of the block, also after an error."""
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


def _start_worker(queue: ShardQueue) -> _Worker:
    # A forked worker starts in milliseconds and shares the memory of the loaded stage; spawn would load it again.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if "fork" in methods and os.name == "posix" else None)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run_worker, args=(queue, sending), daemon=True)
    process.start()
    # Later workers inherit the parent's descriptors. The pipe ends only when no process but the worker holds this end.
    sending.close()
    return _Worker(process, receiving)


def _run_worker(queue: ShardQueue, messages: Connection) -> None:
    """Main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent stops its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler that the parent has installed must not run here
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        queue.stage.start()
        own = psutil.Process()
        before = _read_private_bytes(own)  # after the start: only growth counts, not what the stage has loaded

        def send_result(shard_result: ShardResult) -> bool:
            messages.send(("result", shard_result))
            return _read_private_bytes(own) - before > GROWTH_BYTES

        complete = shard_queue.process_shards(queue, lambda counts: messages.send(("counts", counts)), send_result)
    except PrimusError as error:
        messages.send(("problem", (type(error), error.problem, error.hint)))
        complete = True
    except Exception:  # noqa: BLE001 - sent to the parent, which raises it
        messages.send(("failure", traceback.format_exc()))
        complete = True
    messages.close()
    # A normal exit would join threads of libraries that existed in the parent and were not copied by the fork.
    os._exit(0 if complete else RETIRED_EXIT_CODE)


def _read_private_bytes(process: psutil.Process) -> int:
    """Resident memory without the pages shared with other processes."""
    return int(process.memory_info().rss) - int(getattr(process.memory_info(), "shared", 0))


def _end_with_parent() -> None:
    """Exit when the parent dies: a worker of a killed command must not hold claims or write files."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
