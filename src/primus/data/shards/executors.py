"""Run the shards of a queue in processes of this machine or as tasks of a Ray cluster.

With both executors a shard is claimed through the folder of the queue. Several processes that run the same command
therefore share the work, on any machine and with any executor.
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
"""Retries of a shard whose Ray worker or node has died. Errors that a stage raises are not retried."""
MAX_CALLS = 64
"""Shards after which Ray replaces a worker process: caches of tokenizer libraries grow."""
AHEAD = 2
"""Tasks submitted for each CPU of the cluster. Pending tasks keep the CPUs busy and trigger an autoscaler."""
CONNECT_LIMIT_S = 5.0
"""Time limit of the connection to the head node; a reachable host answers within a round trip."""
STORE_BYTES = 100 << 20
"""Size of the object store of a local Ray instance, which holds only the shard queue and shard results."""


def run(
    queue: ShardQueue,
    executor: Executor,
    num_workers: int | None,
    name: str,
    show: Show = lambda progress: None,
    environ: Mapping[str, str] | None = None,
) -> list[ShardResult]:
    """Process all shards of a queue. Other processes may process the same queue.

    Args:
        queue: The shard queue.
        executor: ``local`` starts processes of this machine; ``ray`` submits each shard as a task to the Ray cluster at
            $RAY_ADDRESS, or to a local Ray instance that this function starts.
        num_workers: Number of processes or concurrent tasks; None for one per CPU.
        name: Name of the work, for the progress display.
        show: Receives the progress.
        environ: Environment variables; by default those of this process.

    Returns:
        The results of all shards, in order; fewer if another process has published the output and removed the folder.

    Raises:
        UsageError: Ray is requested and not installed, or its cluster cannot be reached.
        PrimusError: A shard failed or a worker was killed; finished shards are kept.
    """
    if executor == "local":
        count = count_usable_cpus() if num_workers is None else num_workers
        return workers.run(queue, count, name, show)
    ray = _import_ray()
    with _connect_ray(ray, os.environ if environ is None else environ, num_workers):
        return _RayExecutor(ray, queue, num_workers, name, show).run()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"--executor ray needs ray ({error})", 'pip install "ray>=2.40", on each node') from None
    return ray


@contextmanager
def _connect_ray(ray: Any, environ: Mapping[str, str], num_workers: int | None) -> Iterator[None]:
    """Connect this process to Ray for the duration of the block.

    Raises:
        UsageError: The cluster cannot be reached.
    """
    if ray.is_initialized():  # a connection of the caller stays open after the block
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
    """Variables of a private Ray instance: it sends no usage statistics and accepts no work from other processes."""
    own = {} if "RAY_USAGE_STATS_ENABLED" in environ else {"RAY_USAGE_STATS_ENABLED": "0"}
    if any(name.startswith("RAY_AUTH_") for name in environ):
        return own
    return own | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}  # without it, Ray writes a token to the home folder


def _check_reachable(address: str) -> None:
    """Connect to the port of the address once, if it has one: Ray itself retries for minutes.

    Raises:
        UsageError: The connection fails.
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
        f"$RAY_ADDRESS {address}: cannot reach a Ray cluster: {first}",
        "set it to HOST:PORT of its head node, or to auto on a node of the cluster, and RAY_AUTH_MODE=token where the"
        " cluster wants its token; without it Ray is started here",
    )


@dataclass(frozen=True)
class _RayTaskResult:
    """Result of a Ray task."""

    shard_result: ShardResult | None = None
    """None if another process holds the shard or has finished it."""
    problem: PrimusError | None = None
    blind_host: str = ""
    """Host name of the node, if it does not see the folder of the queue."""


def _process_shard(boxed: list[Any], shard: Shard) -> _RayTaskResult:
    """Ray task of one shard.

    The reference to the queue is in a list: Ray resolves references that are direct arguments, so that each task would
    deserialize the queue again.
    """
    try:
        queue = _fetch_queue(boxed[0])
        if not queue.folder.is_dir():
            return _RayTaskResult(blind_host=socket.gethostname())
        return _RayTaskResult(shard_result=queue.process_shard(shard))
    except PrimusError as error:  # returned, not raised: Ray would wrap it into its own exception type
        return _RayTaskResult(problem=error)


@functools.lru_cache(maxsize=1)
def _fetch_queue(reference: Any) -> ShardQueue:
    """The queue with its stage started; loaded once in each Ray worker process, not once for each shard."""
    import ray

    queue: ShardQueue = ray.get(reference)
    queue.stage.start()
    return queue


class _RayExecutor:
    """Submits the shards of a queue as Ray tasks and collects their results; runs in the process of the command."""

    def __init__(self, ray: Any, queue: ShardQueue, num_workers: int | None, name: str, show: Show) -> None:
        self._ray = ray
        self._queue = queue
        self._num_workers = num_workers
        self._show = show
        self._sizes = {shard.index: shard.bytes for shard in queue.shards}
        found = queue.list_results()
        done_bytes = sum(self._sizes[shard_result.shard] for shard_result in found)
        self._progress = ShardProgress(name, sum(self._sizes.values()), done_bytes)
        self._bad = [item for shard_result in found for item in shard_result.bad]
        options = {
            "num_cpus": 1,
            "max_retries": RETRIES,
            "max_calls": MAX_CALLS,
            "runtime_env": {"env_vars": _build_python_path()},
        }
        self._task = ray.remote(**options)(_process_shard)
        # Each task receives its shard as an argument, so the list of all shards is not sent to every worker.
        self._boxed = [ray.put(replace(queue, shards=()))]

    def run(self) -> list[ShardResult]:
        """Process all shards, and wait for those that other processes hold."""
        shard_queue.check_bad(self._bad, self._queue.max_bad)
        deadline = time.monotonic() + workers.PATIENCE_S
        while left := self._queue.list_remaining():
            self._process_round(left)
            # What remains is claimed by other processes: submit it again until they finish or die.
            if left := self._queue.list_remaining():
                if time.monotonic() > deadline:
                    raise PrimusError(
                        f"{self._queue.folder}: another process is still working on {len(left)} shards", "stop it first"
                    )
                time.sleep(workers.POLL_S)
        shard_results = self._queue.list_results()
        shard_queue.check_bad(
            [item for shard_result in shard_results for item in shard_result.bad], self._queue.max_bad
        )
        return shard_results

    def _process_round(self, shards: list[Shard]) -> None:
        """Submit each of `shards` once; cancel the tasks in progress after a failure."""
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
                # Only `force` interrupts a task that runs native code. Its process exits, which releases the claim.
                self._ray.cancel(task, force=True)

    def _start_tasks(self, tasks: dict[Any, Shard], waiting: Iterator[Shard]) -> None:
        """Submit shards up to the limit of concurrent tasks."""
        # Asked again for each batch: an autoscaler changes the number of CPUs while the tasks run.
        limit = self._num_workers or AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        while len(tasks) < limit and (shard := next(waiting, None)):
            tasks[self._task.remote(self._boxed, shard)] = shard

    def _take_result(self, task: Any, shard: Shard) -> None:
        """Record the result of a finished task.

        Raises:
            PrimusError: The shard failed, or too many documents are skipped.
        """
        try:
            result: _RayTaskResult = self._ray.get(task)
        except self._ray.exceptions.RayTaskError:
            raise  # a defect in the stage, with its traceback
        except self._ray.exceptions.RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise PrimusError(
                f"shard {shard.index}: its Ray worker failed {RETRIES + 1} times: {reason}",
                "run the same command again, with fewer --workers if memory is short; finished shards are kept",
            ) from None
        if result.problem:
            raise result.problem
        # A missing folder has two meanings: the output is published, or the node does not mount the file system. The
        # first holds here too, the second does not.
        if result.blind_host and self._queue.folder.is_dir():
            raise PrimusError(
                f"{result.blind_host}: does not see {self._queue.folder}",
                "put the output on a file system that all nodes of the Ray cluster share",
            )
        if result.shard_result:
            self._progress.done_bytes += self._sizes[result.shard_result.shard]
            self._progress.add_counts(result.shard_result.counts)
            self._bad += result.shard_result.bad
            shard_queue.check_bad(self._bad, self._queue.max_bad)


def _build_python_path() -> dict[str, str]:
    """PYTHONPATH for Ray workers, which import this package from the same path as this process."""
    source = str(Path(primus.__file__).parents[1])
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != source]
    return {"PYTHONPATH": os.pathsep.join([source, *others])}
