"""Who does the shards of a board: processes of this machine, or the tasks of a Ray cluster.

Either way a shard is claimed through the board's folder, so that whoever runs the same command beside this one, on any
machine and with any executor, shares the work.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import primus
from primus.data.readers.shard import Shard
from primus.data.shards import shard_queue, workers
from primus.data.shards.shard_queue import ShardQueue, ShardResult
from primus.data.shards.workers import ShardProgress, Show
from primus.errors import PrimusError, UsageError
from primus.process import count_usable_cpus

Executor = Literal["local", "ray"]

RETRIES = 3
"""Of a shard whose Ray worker, or its node, has died; what a stage says of its input is final."""
MAX_CALLS = 64
"""Shards after which a process of Ray ends and another takes its place: caches of libraries grow."""
AHEAD = 2
"""Tasks handed to Ray for each of its processors: some always wait, which is what an autoscaler looks for."""
CONNECT_LIMIT_S = 5.0
STORE_BYTES = 100 << 20
"""Of the object store of a Ray that is started here: what goes through it are the rows of shards."""


def run(
    board: ShardQueue,
    executor: Executor,
    num_workers: int | None,
    name: str,
    show: Show = lambda progress: None,
    environ: Mapping[str, str] | None = None,
) -> list[ShardResult]:
    """Do all shards of a board, beside anybody else who does them too.

    Args:
        board: The shards.
        executor: ``local`` starts processes of this machine; ``ray`` makes each shard a task of the Ray cluster that
            $RAY_ADDRESS names, or of a Ray that is started here for it.
        num_workers: Processes, or tasks at the same time; None for as many as there are processors.
        name: What is being done, for the progress.
        show: Receives the progress.
        environ: Variables of this process; its own by default.

    Returns:
        The rows of all shards, in order; fewer where somebody else has finished the whole and removed the folder.

    Raises:
        UsageError: Ray is asked for and not installed, or its cluster is not reached.
        PrimusError: A shard failed or a worker was killed; what is done stays.
    """
    if executor == "local":
        count = count_usable_cpus() if num_workers is None else num_workers
        return workers.run(board, count, name, show)
    ray = _import_ray()
    with _connect_ray(ray, os.environ if environ is None else environ, num_workers):
        return _RayExecutor(ray, board, num_workers, name, show).run()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--executor ray needs ray ({error})", 'pip install "ray>=2.40", on each node') from None
    return ray


@contextmanager
def _connect_ray(ray: Any, environ: Mapping[str, str], num_workers: int | None) -> Iterator[None]:
    """Within the block this process talks to Ray; a connection that was there before stays.

    Raises:
        UsageError: The cluster is not reached.
    """
    if ray.is_initialized():
        yield
        return
    address = environ.get("RAY_ADDRESS")
    if address:
        _check_reachable(address)
    else:
        os.environ.update(_make_private_environment(environ))
    own = {"num_cpus": num_workers, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        ray.init(
            address=address or "local", logging_level="ERROR", log_to_driver=False, **({} if address else own),
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError) as error:
        raise _explain_unreachable(address, str(error)) from None
    try:
        yield
    finally:
        ray.shutdown()


def _make_private_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a Ray that is for this process alone: it tells nobody, and nobody else may give it work."""
    own = {} if "RAY_USAGE_STATS_ENABLED" in environ else {"RAY_USAGE_STATS_ENABLED": "0"}
    if any(name.startswith("RAY_AUTH_") for name in environ):
        return own
    return own | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}  # else it writes one into the home folder


def _check_reachable(address: str) -> None:
    """Try the port, where the address names one: Ray itself tries for minutes.

    Raises:
        UsageError: Nobody answers.
    """
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = place.hostname, place.port
        if host and port:
            socket.create_connection((host, port), timeout=CONNECT_LIMIT_S).close()
    except (OSError, ValueError) as error:
        raise _explain_unreachable(address, str(error)) from None


def _explain_unreachable(address: str | None, problem: str) -> UsageError:
    first = next(iter(problem.strip().splitlines()), "no answer")
    if not address:
        return UsageError(f"Ray cannot be started here: {first}", "use --executor local")
    return UsageError(
        f"$RAY_ADDRESS {address}: no Ray cluster is reached: {first}",
        "set it to HOST:PORT of its head node, or to auto on a node of the cluster, and RAY_AUTH_MODE=token where the"
        " cluster wants its token; without it Ray is started here",
    )


@dataclass(frozen=True)
class _RayTaskResult:
    """What the task of a shard has to say."""

    row: ShardResult | None = None
    """None where another process holds the shard or has done it."""
    problem: PrimusError | None = None
    blind_host: str = ""
    """The node, where it does not see the folder."""


def _process_shard(boxed: list[Any], shard: Shard) -> _RayTaskResult:
    """What a task of Ray does; the reference to the board is boxed, so that Ray leaves it one."""
    try:
        board = _fetch_queue(boxed[0])
        if not board.folder.is_dir():
            return _RayTaskResult(blind_host=socket.gethostname())
        return _RayTaskResult(row=board.process_shard(shard))
    except PrimusError as error:
        return _RayTaskResult(problem=error)


@functools.lru_cache(maxsize=1)
def _fetch_queue(reference: Any) -> ShardQueue:
    """The board, ready to work: loaded once in each of Ray's processes, not for each shard."""
    import ray

    board: ShardQueue = ray.get(reference)
    board.stage.start()
    return board


class _RayExecutor:
    """The shards of a board as tasks of Ray, and what has become of them."""

    def __init__(self, ray: Any, board: ShardQueue, num_workers: int | None, name: str, show: Show) -> None:
        self._ray = ray
        self._board = board
        self._num_workers = num_workers
        self._show = show
        self._sizes = {shard.index: shard.bytes for shard in board.shards}
        found = board.list_results()
        done_bytes = sum(self._sizes[row.shard] for row in found)
        self._progress = ShardProgress(name, sum(self._sizes.values()), done_bytes)
        self._bad = [item for row in found for item in row.bad]
        options = {
            "num_cpus": 1,
            "max_retries": RETRIES,
            "max_calls": MAX_CALLS,
            "runtime_env": {"env_vars": _build_python_path()},
        }
        self._task = ray.remote(**options)(_process_shard)
        self._boxed = [ray.put(replace(board, shards=()))]

    def run(self) -> list[ShardResult]:
        """All shards; those that others hold are waited for."""
        shard_queue.check_bad(self._bad, self._board.max_bad)
        deadline = time.monotonic() + workers.PATIENCE_S
        while left := self._board.list_remaining():
            self._process_round(left)
            if left := self._board.list_remaining():
                if time.monotonic() > deadline:
                    raise PrimusError(
                        f"{self._board.folder}: another process still holds {len(left)} shards", "stop it first"
                    )
                time.sleep(workers.POLL_S)
        rows = self._board.list_results()
        shard_queue.check_bad([item for row in rows for item in row.bad], self._board.max_bad)
        return rows

    def _process_round(self, shards: list[Shard]) -> None:
        """Each of `shards` once; no task outlives a failure."""
        waiting = iter(shards)
        tasks: dict[Any, Shard] = {}
        try:
            self._start_tasks(tasks, waiting)
            while tasks:
                ready, _ = self._ray.wait(list(tasks), timeout=workers.SHOW_EVERY_S)
                for task in ready:
                    self._take_result(task, tasks.pop(task))
                self._start_tasks(tasks, waiting)
                self._show(self._progress)
        finally:
            for task in tasks:
                self._ray.cancel(task, force=True)

    def _start_tasks(self, tasks: dict[Any, Shard], waiting: Iterator[Shard]) -> None:
        """Hand more shards to Ray, as many as it can use."""
        limit = self._num_workers or AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        while len(tasks) < limit and (shard := next(waiting, None)):
            tasks[self._task.remote(self._boxed, shard)] = shard

    def _take_result(self, task: Any, shard: Shard) -> None:
        """What a task has come to.

        Raises:
            PrimusError: The shard failed, or it was left out too much.
        """
        try:
            told: _RayTaskResult = self._ray.get(task)
        except self._ray.exceptions.RayTaskError:
            raise  # an error of ours, with its trace
        except self._ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PrimusError(
                f"shard {shard.index}: its Ray worker died {RETRIES + 1} times: {reason}",
                "run the same command again, with fewer --workers if memory is short; finished shards are kept",
            ) from None
        if told.problem:
            raise told.problem
        if told.blind_host and self._board.folder.is_dir():
            raise PrimusError(
                f"{told.blind_host}: does not see {self._board.folder}",
                "put the output on a file system that all nodes of the Ray cluster share",
            )
        if told.row:
            self._progress.done_bytes += self._sizes[told.row.shard]
            self._progress.add_counts(told.row.counts)
            self._bad += told.row.bad
            shard_queue.check_bad(self._bad, self._board.max_bad)


def _build_python_path() -> dict[str, str]:
    """Variables by which Ray's workers find this code, which they see as this process does."""
    source = str(Path(primus.__file__).parents[1])
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != source]
    return {"PYTHONPATH": os.pathsep.join([source, *others])}
