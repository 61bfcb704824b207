"""A step of srun in the foreground, and what becomes of signals to its launcher.

srun takes SIGTERM and SIGHUP, and a second Ctrl-C within a second, for an order to kill every task, and a first Ctrl-C
for a question (srun(1), SIGNALS). So it runs in a session of its own, where it hears none of them, and Slurm sends them
to the tasks of its step. They are the launchers of the nodes, which save and end:

    signal to this process     what happens
    SIGINT, SIGTERM, SIGHUP    Slurm sends the same to all tasks: they save, and end with 128 + the signal
    a second one               the same once more: the launchers end their workers at once
    a third one                SIGTERM to srun, which kills what is left
    SIGUSR1, SIGUSR2           srun passes them on itself

A step that has not been allocated yet has nothing to save: srun gives up its request. Where the controller does not
answer, srun itself still reaches the tasks: they get SIGUSR1, for which they save as before a preemption.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from primus.errors import EXIT_OK, PrimusError
from primus.launch import foreground
from primus.launch.foreground import Child
from primus.launch.run_remote import RemoteLaunch, Say, conclude_remote
from primus.launch.signals import INSISTS_AFTER_S
from primus.runs.store import Run, State
from primus.runtimes.slurm import queries
from primus.runtimes.slurm.options import find_option_value, parse

ASKED_S = 10.0
"""Time that the controller has to answer a question about the step; a person waits for it."""
DELIVERY_LIMIT_S = 15.0
"""Time for which a signal is sent again to a step whose tasks are only being started, which Slurm refuses."""
RETRY_S = 0.5
ARRIVAL_S = 0.3
"""By how much longer one signal may take to its tasks than another."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_step(remote: RemoteLaunch, run: Run | None, environ: Mapping[str, str], say: Say) -> int:
    """Run srun until its end; gives the exit code of the run, where there is one.

    Raises:
        PrimusError: It cannot be started.
    """
    has_terminal = find_option_value(parse(remote.request.runtimes[0].words).slurm_options, "pty") is not None
    before = run.read_metadata() if run else None
    relay = SignalRelay(environ, say)
    code = foreground.run_in_foreground(
        remote.plan.argv,
        environ,
        has_terminal=has_terminal,
        deliver=foreground.send_signal if has_terminal else relay.relay_signal,
        prepare=None if has_terminal else _end_with_launcher,
    )
    reason = f"srun ended with exit code {code}"
    state: State | None = None
    if relay.first is not None and code != EXIT_OK:
        code = 128 + relay.first if relay.is_withdrawn or run is not None else code
        reason, state = signal.Signals(relay.first).name, "interrupted"
    return conclude_remote(run, before, code, reason, state=state)


def _end_with_launcher() -> None:
    """Have srun told when this process is killed (prctl(2)): it passes SIGUSR1 on, and its tasks save and end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG


class SignalRelay:
    """Passes the signals of a launcher on to the tasks of its step.

    Args:
        environ: Variables of Slurm's commands.
        say: For people.
    """

    def __init__(self, environ: Mapping[str, str], say: Say) -> None:
        self.first: int | None = None
        """The first signal that asks for the end."""
        self.is_withdrawn = False
        """Whether the step was given up before it had any task."""
        self._environ, self._say = environ, say
        self._num_asked = 0
        self._asked_at = self._told_at = 0.0

    def relay_signal(self, child: Child, number: int) -> None:
        """Pass on a signal, which was sent to this process."""
        if number not in ENDING:
            foreground.send_signal(child, number)
            return
        now = time.monotonic()
        if self._num_asked and now - self._asked_at < INSISTS_AFTER_S:  # the same event, by another way
            return
        self.first = self.first or number
        self._num_asked, self._asked_at = self._num_asked + 1, now
        if self._num_asked == 2:  # the launchers compare the times at which both arrive there
            time.sleep(max(0.0, self._told_at + INSISTS_AFTER_S + ARRIVAL_S - now))
        if self._num_asked > 2:
            self._say("killing what is left of the step")
            foreground.send_signal(child, signal.SIGTERM)
            return
        self._tell_tasks(child, number)

    def _tell_tasks(self, child: Child, number: int) -> None:
        name = signal.Signals(number).name
        try:
            step = self._signal_step(child, name)
        except PrimusError as error:
            self._say(f"{error.problem}; srun passes on SIGUSR1 instead of {name}: the tasks save and end")
            foreground.send_signal(child, signal.SIGUSR1)
            return
        if step is None:
            self.is_withdrawn = True
            self._say(f"{name}: nothing has started yet; the request for nodes is withdrawn")
            foreground.send_signal(child, signal.SIGTERM)
        elif self._num_asked == 1:
            self._say(f"{name}: step {step} saves and ends; once more: it ends at once")
        else:
            self._say(f"{name}: step {step} ends at once; once more: it is killed")

    def _signal_step(self, child: Child, name: str) -> str | None:
        """Id of the step whose tasks were sent the signal `name`; None where there is no step, or srun has ended.

        Raises:
            PrimusError: Slurm does not answer, or does not send it.
        """
        deadline = time.monotonic() + DELIVERY_LIMIT_S
        problem = ""
        while child.poll() is None:
            step = find_step(child.pid, self._environ)
            if step is None:
                return None
            said = queries.run_query(["scancel", f"--signal={name.removeprefix('SIG')}", step], self._environ, ASKED_S)
            if said.code == 0 and "error" not in said.err:
                self._told_at = time.monotonic()
                return step
            problem = said.err or f"scancel ended with exit code {said.code}"
            if time.monotonic() > deadline:
                raise PrimusError(problem)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(RETRY_S)
        return None


def find_step(pid: int, environ: Mapping[str, str]) -> str | None:
    """Id of the step that srun, process `pid` of this host, has begun; None where it has begun none.

    Raises:
        PrimusError: Slurm does not answer.
    """
    said = queries.run_query(["scontrol", "--oneliner", "show", "step"], environ, ASKED_S)
    if said.code != 0 and "No job steps" not in said.out + said.err:
        raise PrimusError(f"scontrol does not answer: {said.err or said.code}")
    host = os.uname().nodename.partition(".")[0]
    for line in said.out.splitlines():
        values = dict(re.findall(r"(StepId|SrunHost:Pid)=(\S+)", line))
        where, _, number = values.get("SrunHost:Pid", "").rpartition(":")
        if number == str(pid) and where.partition(".")[0] == host:
            return values.get("StepId")
    return None
