"""The only actor: performs a plan on this node and says how its processes ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import structs

from primus import process
from primus.errors import EXIT_FAILED, PrimusError, UnfitError
from primus.interpreter import without_empty_python_path
from primus.launch.plan import LaunchPlan
from primus.launch.supervision import heartbeats
from primus.launch.supervision.attempt_monitor import AttemptMonitor
from primus.launch.supervision.attempt_result import NodeResult
from primus.machine import oom
from primus.machine.oom import OomKills
from primus.redaction import redact_file
from primus.runs import events
from primus.runs.attempt import LAUNCHER_VARIABLE
from primus.runs.files import write_json, write_text
from primus.runs.store import RankFailure, Run

POLL_S = 0.05
TORCHRUN = "torch.distributed.run"
OF_ONE_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that torchrun sets for each of several workers; those of a launcher around us mislead a single one."""
MARK = "PRIMUS_ATTEMPT"
"""Variable by which all processes of an attempt on a node are found, whatever became of those between."""
LEFT_TO_US = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of schedulers and terminals that the agent ignores; a lone worker, until it listens, the first of them."""
FOR_THE_AGENT = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
"""The agent leaves signals to us, who tell the ranks themselves and end it afterwards; of its own accord it gives ranks
30 s from a signal on, less than a checkpoint may take. Ranks whose sibling has failed get 2 s to end, so that it can
say who failed before we end it (torch/distributed/elastic/multiprocessing/api.py)."""


def run_worker_processes(
    plan: LaunchPlan,
    run: Run,
    number: int,
    environ: Mapping[str, str],
    after_start: Callable[[], None],
    guard: AttemptMonitor,
) -> NodeResult:
    """Start the plan's processes as attempt `number` of `run`, wait for their end, and leave none behind.

    Args:
        plan: What is started.
        run: The run folder.
        number: The attempt.
        environ: Variables under those of the plan.
        after_start: Called once the processes are starting, for work that need not delay them.
        guard: Asked while they run.

    Raises:
        PrimusError: The processes cannot be started.
    """
    folder = run.attempt_folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    _link_logs(run, plan, number)
    for path, text in plan.files.items():
        write_text(Path(path), text)
    mark = f"{run.id}.{number}.{os.getpid()}.{os.urandom(4).hex()}"
    kills = oom.read_oom_kills()
    child = _start_processes(plan, run, dict(environ) | {MARK: mark})
    returncode: int | None = None
    try:
        after_start()
        while (returncode := child.poll()) is None and not guard.is_over(time.monotonic()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
    finally:
        if returncode != 0:  # after a good end what a worker has left behind on purpose may stay
            process.end_program(child, mark=f"{MARK}={mark}")
    _redact_logs(run, plan, number)
    return _make_node_result(returncode, run, plan, number, guard, kills)


def _start_processes(plan: LaunchPlan, run: Run, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Standard output stays ours for rank 0; standard error, where only engines speak, goes to launch.log."""
    if TORCHRUN in plan.argv and importlib.util.find_spec("torch") is None:
        raise UnfitError(
            "several processes are started by torchrun, which comes with PyTorch",
            "./primus-cli setup installs it, or pip install '.[native]' in a checkout",
        )
    env = without_empty_python_path({**environ, **{name: variable.value for name, variable in plan.env.items()}})
    for name in OF_ONE_RANK:
        env.pop(name, None)
    if TORCHRUN in plan.argv:
        env = FOR_THE_AGENT | env
    env[LAUNCHER_VARIABLE] = str(os.getpid())
    with launch_log(run, plan).open("ab") as log:
        try:
            return subprocess.Popen(
                plan.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(_prepare_child, LEFT_TO_US if TORCHRUN in plan.argv else LEFT_TO_US[:1]),
            )
        except OSError as error:
            raise PrimusError(f"{plan.argv[0]}: cannot be started: {error.strerror}") from None


def launch_log(run: Run, plan: LaunchPlan) -> Path:
    """Where the launcher of this node, and its engine, speak; nodes may share the folder."""
    node = plan.layout.node_rank if plan.layout else 0
    return run.directory / "logs" / (f"launch.node_{node}.log" if node else "launch.log")


def _prepare_child(ignored: Sequence[signal.Signals]) -> None:
    """Have the child ignore signals, and die with its launcher (prctl(2)).

    Nothing may linger: the same command may be typed again at once, and continue the run. Ranks listen as soon as they
    can; one that is not ready yet, and the agent, would die of a warning to all processes.
    """
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _link_logs(run: Run, plan: LaunchPlan, number: int) -> None:
    """Point logs/rank_N.log of this node's ranks to the newest attempt's."""
    shape = plan.layout
    first, count = (shape.node_rank * shape.nproc, shape.nproc) if shape else (0, 1)
    for rank in range(first, first + count):
        link = run.directory / "logs" / f"rank_{rank}.log"
        temporary = link.with_name(f".{link.name}.tmp.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"attempt_{number}/rank_{rank}.log")
        os.replace(temporary, link)


def _make_node_result(
    returncode: int | None, run: Run, plan: LaunchPlan, number: int, guard: AttemptMonitor, kills: OomKills
) -> NodeResult:
    """What has come of the attempt here; without `returncode` we have ended it ourselves.

    `kills` is what the kernel had killed for lack of memory before the attempt.
    """
    folder = run.attempt_folder(number)
    failures: list[RankFailure] = []
    silent: list[RankFailure] = []
    if returncode != 0:
        beats = guard.heartbeats
        failures = heartbeats.read_failures(folder, beats)
        told = {failure.rank for failure in failures}
        dead = {rank: when for rank, when in guard.dead.items() if rank not in told}
        codes = _read_agent_failures(run, plan, number)
        for rank, when in dead.items():  # a lone worker is our own child
            code = codes.get(beats[rank].local_rank) if TORCHRUN in plan.argv else returncode
            silent.append(_make_failure(rank, code, when, run, number))
        if returncode and not failures and not silent:
            silent = [_describe_silent_end(returncode, run, plan, number)]
        silent = [_add_out_of_memory(failure, kills) for failure in silent]
        for failure in silent:
            with contextlib.suppress(PrimusError):  # a full disk: the failure is told all the same
                write_json(folder / f"rank_{failure.rank}.error.json", failure)
        failures += silent
    return NodeResult(
        host=socket.gethostname(),
        returncode=-signal.SIGKILL if returncode is None else returncode,
        failures=tuple(failures),
        interruption=_read_interruption(run, number),
    )


def _redact_logs(run: Run, plan: LaunchPlan, number: int) -> None:
    """Remove secrets from what the processes of this node wrote to their logs past Python's streams."""
    shape = plan.layout
    first, count = (shape.node_rank * shape.nproc, shape.nproc) if shape else (0, 1)
    logs = [run.attempt_folder(number) / f"rank_{rank}.log" for rank in range(first, first + count)]
    for log in (*logs, launch_log(run, plan)):
        redact_file(log)


def _read_interruption(run: Run, number: int) -> str | None:
    """Signal that the trainer says it stopped for, where that was the last thing it did."""
    last = None
    for event in events.read_events(run.events):
        if event["kind"] in ("interrupted", "run_started"):
            last = event
    is_this = last is not None and last["kind"] == "interrupted" and last.get("attempt", number) == number
    return last.get("signal", "SIGTERM") if last is not None and is_this else None


_DEAD_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


def _describe_silent_end(returncode: int, run: Run, plan: LaunchPlan, number: int) -> RankFailure:
    """The failure of a rank that could not say why: it was killed, or did not even begin."""
    first = plan.layout.node_rank * plan.layout.nproc if plan.layout else 0
    said = _read_agent_failures(run, plan, number)
    local_rank, code = next(iter(said.items()), (0, returncode))
    return _make_failure(first + local_rank, code, time.time(), run, number)


def _read_agent_failures(run: Run, plan: LaunchPlan, number: int) -> dict[int, int]:
    """Exit codes by local rank that the agent has written down, that of the first failure first."""
    text = launch_log(run, plan).read_text(encoding="utf-8", errors="replace")
    found = _DEAD_RANK.findall(text.rpartition(f"] attempt {number} on ")[2])
    return {int(local_rank): int(code) for code, local_rank in reversed(found)}


def _add_out_of_memory(failure: RankFailure, before: OomKills) -> RankFailure:
    """A failure by SIGKILL, with what the kernel's counters say of it."""
    if failure.exit_code != 128 + signal.SIGKILL:
        return failure
    said = oom.describe_oom(before, oom.read_oom_kills())
    return structs.replace(failure, problem=f"{failure.problem}, {said}") if said else failure


def _make_failure(rank: int, code: int | None, when: float, run: Run, number: int) -> RankFailure:
    log = f"logs/attempt_{number}/rank_{rank}.log"
    failure = RankFailure(rank=rank, host=socket.gethostname(), time=when, problem="", log=log, exit_code=EXIT_FAILED)
    if code is None:
        return structs.replace(failure, problem=f"rank {rank} died without a message")
    if code >= 0:
        problem = f"rank {rank} ended with exit code {code} and no message"
        log = log if (run.directory / log).exists() else "logs/launch.log"
        return structs.replace(failure, problem=problem, log=log)
    name = signal.Signals(-code).name
    return structs.replace(failure, problem=f"rank {rank} was killed by {name}", exit_code=128 - code)
