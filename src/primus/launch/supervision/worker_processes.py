"""Starts the processes of an attempt on this node, waits until they have ended, and reports how.

A single rank is a child of this process; several are children of the elastic agent (primus.elastic_agent), which is.
Three mechanisms leave no process behind: the child gets SIGKILL when this process dies (prctl), a rank kills itself
when its parent or launcher is gone (primus.runs.attempt), and at the end everything with the `MARK` of the attempt in
its environment is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from primus import process
from primus.errors import EXIT_FAILED, PrimusError, UnfitError
from primus.interpreter import drop_empty_python_path
from primus.launch.run_folder import find_launch_log
from primus.launch.supervision import heartbeats
from primus.launch.supervision.agent_report import AGENT, AgentReport, RankExit, read_agent_report
from primus.launch.supervision.attempt_monitor import AttemptMonitor
from primus.launch.supervision.attempt_result import NodeResult
from primus.machine.cluster import RANK_VARIABLES, ClusterLayout, find_node_name
from primus.machine.host.kernel_counters import OomKills, describe_oom, read_oom_kills
from primus.package_files import PROGRAM
from primus.plan import LaunchPlan
from primus.redaction import redact_file
from primus.runs import events
from primus.runs.attempt import LAUNCHER_VARIABLE
from primus.runs.files import write_json, write_text
from primus.runs.store import RankFailure, Run

POLL_S = 0.05
"""Time between two looks of the monitor: it bounds how late a message of another node is handled."""
MARK = "PRIMUS_ATTEMPT"
"""Variable by which all processes of an attempt on a node are found, even if processes in between have ended."""


class WorkerProcesses:
    """The processes of attempt `number` of `run` on this node, which start here and do not outlive the context.

    Raises:
        PrimusError: They cannot be started.
    """

    def __init__(self, plan: LaunchPlan, run: Run, number: int, environ: Mapping[str, str]) -> None:
        run.attempt_folder(number).mkdir(parents=True, exist_ok=True)
        _link_logs(run, plan, number)
        for path, text in plan.files.items():
            write_text(Path(path), text)
        self._plan, self._run, self._number = plan, run, number
        self._mark = f"{run.id}.{number}.{os.getpid()}.{os.urandom(4).hex()}"
        self._child = _start_processes(plan, run, dict(environ) | {MARK: self._mark})
        self._kills = read_oom_kills()  # counters only grow: kills of this attempt are the difference
        self._returncode: int | None = None

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        if self._returncode != 0:  # a successful rank may leave a program running on purpose
            process.end_program(self._child, mark=f"{MARK}={self._mark}")

    def wait(self, monitor: AttemptMonitor) -> None:
        """Wait until they have ended, or `monitor` decides that they must be killed."""
        while (code := self._child.poll()) is None and not monitor.is_over(time.monotonic()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(POLL_S)
        self._returncode = code

    def make_result(self, monitor: AttemptMonitor) -> NodeResult:
        """How they ended, after the context."""
        _redact_logs(self._run, self._plan, self._number)
        return _make_node_result(self._returncode, self._run, self._plan, self._number, monitor, self._kills)


def _start_processes(plan: LaunchPlan, run: Run, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the plan's program. Rank 0 shares our standard output; standard error, which the agent uses, is a log."""
    if AGENT in plan.argv and importlib.util.find_spec("torch") is None:
        raise UnfitError(
            "the agent that starts several processes comes with PyTorch, which is not installed",
            f"run {PROGRAM} setup",
        )
    inherited = {name: value for name, value in environ.items() if name not in RANK_VARIABLES}
    env = drop_empty_python_path(inherited | {name: variable.value for name, variable in plan.env.items()})
    env[LAUNCHER_VARIABLE] = str(os.getpid())  # by which a rank detects that its launcher has exited
    with _find_log(run, plan).open("ab") as log:
        try:
            return subprocess.Popen(
                plan.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which then lets the ranks save
                preexec_fn=_prepare_child,
            )
        except OSError as error:
            raise PrimusError(f"{plan.argv[0]}: cannot be started: {error.strerror}") from None


def _find_log(run: Run, plan: LaunchPlan) -> Path:
    return find_launch_log(run, plan.layout.node_rank if plan.layout else 0)


def _prepare_child() -> None:
    """Have the child ignore SIGUSR1, and die with its launcher (prctl(2)).

    Schedulers send SIGUSR1, the warning before a time limit, to all processes of a job. The agent does not handle it,
    and a rank does so only once it runs; both would die of it. Ranks get the signal again from their launcher.
    No process may outlive the launcher: the same command, typed again, continues the run at once.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    process.set_parent_death_signal()


def _link_logs(run: Run, plan: LaunchPlan, number: int) -> None:
    """Point logs/rank_N.log of this node's ranks to the newest attempt's."""
    shape = plan.layout
    first, count = (shape.node_rank * shape.nproc, shape.nproc) if shape else (0, 1)
    for rank in range(first, first + count):
        link = run.directory / "logs" / f"rank_{rank}.log"
        temporary = link.with_name(f".{link.name}.tmp.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"attempt_{number}/rank_{rank}.log")
        os.replace(temporary, link)  # atomic: a user may be following the log


def _make_node_result(
    returncode: int | None, run: Run, plan: LaunchPlan, number: int, monitor: AttemptMonitor, kills: OomKills
) -> NodeResult:
    """Build the result of the attempt on this node.

    Args:
        returncode: Of the program that was started; None if the launcher killed it.
        run: The run folder.
        plan: What was started.
        number: The attempt.
        monitor: What was observed meanwhile.
        kills: The kernel's counters of out-of-memory kills before the attempt.
    """
    report = _read_report(returncode, plan, run.attempt_folder(number))
    if returncode == 0:  # a profiler that has started the agent may end well when the agent does not
        returncode = next((each.exit_code for each in report.exits if each.exit_code), int(bool(report.error)))
    failures = []
    if returncode != 0:
        failures = _find_failures(report, run, number, monitor, kills)
    if returncode and not failures and not report.signal:
        failures = [_make_agent_failure(returncode, report, run, plan)]
    # Ranks that saved and exited well because the agent was signaled: an interruption, not a failure.
    is_agent_signaled = bool(report.signal) and not failures
    if returncode is None:
        returncode = -signal.SIGKILL
    return NodeResult(
        host=find_node_name(),
        returncode=0 if is_agent_signaled else returncode,
        failures=tuple(failures),
        interruption=_read_interruption(run, number) or report.signal or None,
    )


def _read_report(returncode: int | None, plan: LaunchPlan, folder: Path) -> AgentReport:
    """The agent's report; a single rank is our own child, whose exit code the kernel reports."""
    shape = plan.layout or ClusterLayout(nproc=1)
    if AGENT in plan.argv:
        return read_agent_report(folder, shape.node_rank)
    if not returncode:
        return AgentReport()
    return AgentReport(exits=(RankExit(rank=shape.node_rank, exit_code=returncode, last_alive=time.time()),))


def _find_failures(
    report: AgentReport, run: Run, number: int, monitor: AttemptMonitor, kills: OomKills
) -> list[RankFailure]:
    """Failures of this node's ranks: as a rank reports itself, else by its exit code, else by its missing process."""
    folder = run.attempt_folder(number)
    exits = {each.rank: each for each in report.exits}
    failures = heartbeats.read_failures(folder, {*monitor.read_heartbeats(), *exits})
    codes: dict[int, int | None] = {rank: each.exit_code for rank, each in exits.items()}
    if not exits:  # the agent was killed before it saw a rank end; otherwise it stopped the other ranks itself
        codes = dict.fromkeys(monitor.dead)
    for rank in codes.keys() - {failure.rank for failure in failures}:
        if codes[rank] == 0 and rank not in monitor.dead:
            continue
        # Peers fail some milliseconds after a rank dies; the last time it was alive sorts it before them.
        times = [monitor.dead.get(rank, math.inf), exits[rank].last_alive if rank in exits else math.inf]
        failure = _add_out_of_memory(_make_failure(rank, codes[rank], min(times), run, number), kills)
        failures.append(failure)
        with contextlib.suppress(PrimusError):  # a full disk: the outcome names the failure as well
            write_json(folder / f"rank_{rank}.error.json", failure)
    return failures


def _make_agent_failure(returncode: int, report: AgentReport, run: Run, plan: LaunchPlan) -> RankFailure:
    """The failure of the agent itself, with which all its ranks end."""
    shape = plan.layout or ClusterLayout(nproc=1)
    reason = f"failed: {report.error}" if report.error else _describe_exit(returncode)
    return RankFailure(
        rank=shape.node_rank * shape.nproc,
        host=find_node_name(),
        time=time.time(),
        problem=f"the elastic agent of node {shape.node_rank} {reason}",
        log=str(_find_log(run, plan).relative_to(run.directory)),
        exit_code=EXIT_FAILED if returncode > 0 else 128 - returncode,
    )


def _redact_logs(run: Run, plan: LaunchPlan, number: int) -> None:
    """Remove secrets from the logs of this node: libraries in C write past the redaction of Python's streams."""
    shape = plan.layout
    first, count = (shape.node_rank * shape.nproc, shape.nproc) if shape else (0, 1)
    logs = [run.attempt_folder(number) / f"rank_{rank}.log" for rank in range(first, first + count)]
    for log in (*logs, _find_log(run, plan)):
        redact_file(log)


def _read_interruption(run: Run, number: int) -> str | None:
    """Signal for which the trainer stopped, if that was its last event in this attempt."""
    last = None
    for event in events.read_events(run.events):
        if event["kind"] in ("interrupted", "run_started"):
            last = event
    is_this = last is not None and last["kind"] == "interrupted" and last.get("attempt", number) == number
    return last.get("signal", "SIGTERM") if last is not None and is_this else None


def _add_out_of_memory(failure: RankFailure, before: OomKills) -> RankFailure:
    """A failure by SIGKILL, with the kernel's out-of-memory kills since `before`."""
    if failure.exit_code != 128 + signal.SIGKILL:
        return failure
    reason = describe_oom(before, read_oom_kills())
    return structs.replace(failure, problem=f"{failure.problem}, {reason}") if reason else failure


def _make_failure(rank: int, code: int | None, when: float, run: Run, number: int) -> RankFailure:
    """The failure of a rank without a message; `code` is None if the end of its process was not observed."""
    log = f"logs/attempt_{number}/rank_{rank}.log"
    if not (run.directory / log).exists():
        log = "logs/launch.log"
    problem = f"rank {rank} died without a message" if code is None else f"rank {rank} {_describe_exit(code)}"
    exit_code = EXIT_FAILED if code is None or code >= 0 else 128 - code
    return RankFailure(rank=rank, host=find_node_name(), time=when, problem=problem, log=log, exit_code=exit_code)


def _describe_exit(code: int) -> str:
    """Describe the end of a process, from its exit code as `subprocess` gives it."""
    if code >= 0:
        return f"exited with code {code} and no message"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}"
