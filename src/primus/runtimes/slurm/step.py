"""Run a step with srun in the foreground, and pass signals to its tasks.

srun kills all tasks on SIGTERM, SIGHUP and a second Ctrl-C within a second, and prints the state of the tasks on the
first Ctrl-C (srun(1), SIGNALS). It therefore runs in its own session, out of reach of the terminal's signals, and
Slurm sends them to the tasks of the step. The tasks are the launchers of the nodes:

    signal to this process     effect
    SIGINT, SIGTERM, SIGHUP    Slurm sends the same signal to all tasks: they save, and exit with 128 + signal
    a second one               Slurm sends it again: the launchers kill their workers
    a third one                SIGTERM to srun, which kills the remaining tasks
    SIGUSR1, SIGUSR2           srun passes them on

A step that is not allocated yet has nothing to save: srun withdraws its request. If the controller does not respond,
srun itself still reaches the tasks: they get SIGUSR1, on which they save as before a preemption.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial

from primus.errors import EXIT_OK, PrimusError
from primus.launch import foreground
from primus.launch.foreground import Child
from primus.launch.run_remote import conclude_remote
from primus.launch.signals import INSISTS_AFTER_S
from primus.messages import Say
from primus.process import set_parent_death_signal
from primus.runs.store import Run, RunMetadata, State
from primus.runtime import RemoteLaunch
from primus.runtimes.slurm import queries, step_errors
from primus.runtimes.slurm.options import find_option_value, parse

QUERY_LIMIT_S = 10.0
"""Time that the controller has for a query about the step; a user who has pressed Ctrl-C waits for it."""
DELIVERY_LIMIT_S = 15.0
"""Time for which a signal is sent again to a step whose tasks are still starting; Slurm rejects it until then."""
RETRY_S = 0.5
ARRIVAL_S = 0.3
"""Difference between the delivery times of two signals; the launchers take signals that are closer than
INSISTS_AFTER_S for one."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_step(remote: RemoteLaunch, run: Run | None, environ: Mapping[str, str], say: Say) -> int:
    """Run srun until it exits; gives the exit code of the run, or of srun without a run.

    Raises:
        PrimusError: srun cannot be started.
        SubmissionRejected: Slurm does not accept the request.
    """
    has_terminal = find_option_value(parse(remote.request.runtimes[0].words).slurm_options, "pty") is not None
    before = run.read_metadata() if run else None
    # Signals go to srun itself if the step has a terminal: it then handles Ctrl-C as users of `srun --pty` expect.
    relay = SignalRelay(environ, say)
    with tempfile.TemporaryFile() as errors:
        code = foreground.run_in_foreground(
            remote.plan.argv,
            environ,
            has_terminal=has_terminal,
            deliver=foreground.send_signal if has_terminal else relay.relay_signal,
            # When this process is killed, srun passes the warning on: its tasks save and exit.
            prepare=None if has_terminal else partial(set_parent_death_signal, signal.SIGUSR1),
            errors=None if has_terminal else errors,
        )
        error = step_errors.read_first_error(errors)
    reason = f"srun exited with code {code}"
    state: State | None = None
    # A signal explains the exit code, unless the run ended successfully before the signal took effect.
    if relay.first is not None and code != EXIT_OK:
        code = 128 + relay.first if relay.is_withdrawn or run is not None else code
        reason, state = signal.Signals(relay.first).name, "interrupted"
    if run is not None and before is not None and code != EXIT_OK and relay.first is None:
        _check_accepted(run, before, remote.plan.argv, environ)
    if error and state is None and code != EXIT_OK:
        reason, state = f"{error} ({reason})", "failed"
        code = step_errors.choose_exit_code(code, error) if run is not None else code
    return conclude_remote(run, before, code, reason, state=state)


def _check_accepted(run: Run, before: RunMetadata, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Find out whether srun failed because Slurm does not accept the request at all.

    Raises:
        SubmissionRejected: It does not. The run folder, in which no node has written anything, is then removed.
    """
    now = run.read_metadata()
    if (now.attempts, now.outcome) != (before.attempts, before.outcome) or (run.directory / "logs").exists():
        return
    # srun has the same exit codes for a rejected request and a failed task.
    answer = queries.run_query([argv[0], "--test-only", *argv[1:]], environ, QUERY_LIMIT_S)
    if answer.code:
        problem = re.sub(r"(?m)^(srun: )?(error|allocation failure): ", "", answer.err).replace("\n", "; ")
        raise queries.make_rejection("step", problem, answer.code)


class SignalRelay:
    """Passes the signals of a launcher on to the tasks of its step.

    Args:
        environ: Variables of Slurm's commands.
        say: Prints a line for the user.
    """

    def __init__(self, environ: Mapping[str, str], say: Say) -> None:
        self.first: int | None = None
        """The first signal that stops the run."""
        self.is_withdrawn = False
        """Whether the step was cancelled before it had any task."""
        self._environ, self._say = environ, say
        self._num_received = 0
        self._received_at = self._delivered_at = 0.0

    def relay_signal(self, child: Child, number: int) -> None:
        """Pass on a signal that this process has received."""
        if number not in STOP_SIGNALS:
            foreground.send_signal(child, number)
            return
        now = time.monotonic()
        if self._num_received and now - self._received_at < INSISTS_AFTER_S:  # the same event, delivered twice
            return
        self.first = self.first or number
        # Called from `run_in_foreground` between two polls, never from a handler, so that it may run commands of Slurm.
        self._num_received, self._received_at = self._num_received + 1, now
        if self._num_received == 2:  # the launchers compare the arrival times of both signals
            time.sleep(max(0.0, self._delivered_at + INSISTS_AFTER_S + ARRIVAL_S - now))
        if self._num_received > 2:
            self._say("killing the remaining tasks of the step")
            foreground.send_signal(child, signal.SIGTERM)
            return
        self._signal_tasks(child, number)

    def _signal_tasks(self, child: Child, number: int) -> None:
        name = signal.Signals(number).name
        try:
            step = self._signal_step(child, name)
        except PrimusError as error:
            self._say(f"{error.problem}; sending SIGUSR1 through srun instead of {name}: the tasks save and exit")
            foreground.send_signal(child, signal.SIGUSR1)
            return
        if step is None:
            # srun treats SIGTERM before the allocation as a withdrawal of its request.
            self.is_withdrawn = True
            self._say(f"{name}: no task has started yet; the request for nodes is withdrawn")
            foreground.send_signal(child, signal.SIGTERM)
        elif self._num_received == 1:
            self._say(f"{name}: step {step} saves and exits; send it again to exit without saving")
        else:
            self._say(f"{name}: step {step} exits without saving; send it again to kill it")

    def _signal_step(self, child: Child, name: str) -> str | None:
        """Send the signal `name` to the tasks; gives the id of their step, None if there is none or srun has exited.

        Raises:
            PrimusError: Slurm does not respond, or does not deliver the signal.
        """
        deadline = time.monotonic() + DELIVERY_LIMIT_S
        problem = ""
        while child.poll() is None:
            # Looked up for every attempt: the step gets its id only when its nodes are allocated.
            step = find_step(child.pid, self._environ)
            if step is None:
                return None
            command = ["scancel", f"--signal={name.removeprefix('SIG')}", step]
            answer = queries.run_query(command, self._environ, QUERY_LIMIT_S)
            # scancel may print an error and still exit with 0.
            if answer.code == 0 and "error" not in answer.err:
                self._delivered_at = time.monotonic()
                return step
            problem = answer.err or f"scancel exited with code {answer.code}"
            if time.monotonic() > deadline:
                raise PrimusError(problem)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(RETRY_S)
        return None


def find_step(pid: int, environ: Mapping[str, str]) -> str | None:
    """Id of the step that srun, process `pid` of this host, has started; None if it has started none.

    Raises:
        PrimusError: Slurm does not respond.
    """
    answer = queries.run_query(["scontrol", "--oneliner", "show", "step"], environ, QUERY_LIMIT_S)
    if answer.code != 0 and "No job steps" not in answer.out + answer.err:
        raise PrimusError(f"scontrol does not respond: {answer.err or answer.code}")
    # A user may have several srun processes on several login nodes: host and process id identify this one.
    host = os.uname().nodename.partition(".")[0]
    for line in answer.out.splitlines():
        values = dict(re.findall(r"(StepId|SrunHost:Pid)=(\S+)", line))
        where, _, number = values.get("SrunHost:Pid", "").rpartition(":")
        if number == str(pid) and where.partition(".")[0] == host:
            return values.get("StepId")
    return None
