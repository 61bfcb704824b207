"""Supervise the steps of a batch job, on its first node.

The batch script becomes this process (`primus-cli jobs run-step`), so that Slurm's warning signal arrives here: with
`--signal=B:USR1@...` Slurm sends it to the batch shell alone. States of a job:

    running    srun has a step. SIGUSR1 is passed on to it (SIGTERM in an array): the launchers save and end.
    deciding   the step has ended. `restart_decision` says what follows.
    delayed    the job waits for its next step. SIGUSR1 ends the delay: the time limit leaves no room for another step.
    requeued   Slurm has queued the job again, and is about to end this process.

A job of a chain that ends before its run is done ends with code 0, and the next one resumes the run; one that ends the
run, or starts after its end, cancels the jobs behind it.

SIGTERM keeps its default action. `scancel` sends it to the tasks of the step as well, which save; a batch script that
outlived it would only delay the end of the job.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType

from msgspec import Struct

from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError
from primus.launch import foreground, progress_posts
from primus.launch.foreground import Child
from primus.launch.nodes.avoided_nodes import choose_listed_nodes, report_avoided_nodes
from primus.plan import RestartPolicy
from primus.runs.events import EventFollower
from primus.runs.store import Run
from primus.runs.unfit_nodes import read_unfit_nodes
from primus.runtimes.slurm import chain, progress, queries, restart_decision, script
from primus.runtimes.slurm.restart_decision import SlurmStepResult, StepDecision
from primus.runtimes.slurm.step_errors import StepLog

POLL_S = 0.2
"""Time between two looks at srun and the flag that SIGUSR1 sets; Slurm gives the job at least 30 s after the signal."""
EVENTS_POLL_S = 1.0
"""Time between two looks at the events of the run, which lie on a shared file system."""
SRUN_EXIT_LIMIT_S = 5.0
"""Time that srun has to end after the launchers have left. srun itself waits for the tasks of a lost node until Slurm
has noticed (SlurmdTimeout, 300 s by default: slurm.conf(5)); the other launchers know within seconds."""
KILL_AFTER_S = 2.0
"""Time between SIGTERM and SIGKILL to srun, whose tasks have all ended or are out of reach."""
REQUEUE_LIMIT_S = 600.0
"""Time in which Slurm ends a batch script whose job it has queued again."""


class BatchJob(Struct, frozen=True, kw_only=True):
    """Input of a batch job."""

    command: tuple[str, ...]
    """srun with its options and the launcher; the nodes are added here."""
    environ: Mapping[str, str]
    """Variables of the batch script."""
    run: Run | None = None
    """Run that the nodes record; None in a job array, whose jobs share their work and do not restart."""
    num_nodes: int | None = None
    """Nodes of each step; all of the job without spare nodes."""
    can_requeue: bool = False
    policy: RestartPolicy = RestartPolicy()

    @property
    def nodes_of_step(self) -> int:
        """Nodes of each step."""
        return self.num_nodes or int(self.environ["SLURM_JOB_NUM_NODES"])


def run_batch_job(job: BatchJob) -> int:
    """Run the job to its end; gives the exit code of the batch script.

    Raises:
        PrimusError: srun cannot be started, or this is not a batch job.
    """
    if "SLURM_JOB_ID" not in job.environ or not (job.num_nodes or "SLURM_JOB_NUM_NODES" in job.environ):
        raise PrimusError("jobs run-step: SLURM_JOB_ID is not set", "batch scripts call it; submit with slurm sbatch")
    # From here on a warning is recorded. Until here SIGUSR1 was ignored, so that it could not end the batch script.
    with BatchJobSupervisor(job).handle_warning() as supervisor:
        if job.run is None:
            return supervisor.run_array_step()
        comment = script.format_job_comment(str(job.run.directory))
        post = partial(progress.post_comment, job.environ["SLURM_JOB_ID"], comment, environ=job.environ)
        with progress_posts.post_progress(job.run, post, _say):
            return supervisor.run_steps(job.run)


class BatchJobSupervisor:
    """One batch job. Its methods run in the main thread; the signal handler only sets a flag."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._name = _format_job_name(job.environ)
        self._environ = _make_step_environment(job.environ)
        self._is_warned = False
        """Whether Slurm has sent the warning: the time limit or a preemption is near."""

    @contextlib.contextmanager
    def handle_warning(self) -> Iterator[BatchJobSupervisor]:
        """Treat SIGUSR1 as the warning while open; the batch script has ignored it until now."""

        def note(number: int, frame: FrameType | None) -> None:
            self._is_warned = True

        before = signal.signal(signal.SIGUSR1, note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGUSR1, before)

    def run_array_step(self) -> int:
        """Run the only step of a job of an array."""
        code = self._run_step((), signal.SIGTERM)
        # With code 0 the task has finished its shards in time, and a requeue would only repeat a check.
        return self._requeue(code) if code and self._is_warned else code

    def run_steps(self, run: Run) -> int:
        """Run steps until the run is done, cannot be continued here, or is queued again."""
        if chain.is_ended_before(run, self._job.environ["SLURM_JOB_ID"]):
            _say("the run is done since an earlier job of the chain: nothing to do")
            self._cancel_links(run)
            return EXIT_OK
        excluded = self._exclude_unfit_nodes(run, ())
        while True:
            log = StepLog()
            code = self._run_step(excluded, signal.SIGUSR1)
            try:
                # State `deciding`.
                error = log.find_first_error() if code else ""
                decision = self._decide(run, code, excluded, error)
            except (PrimusError, OSError) as error:  # such as a full disk: the step's own exit code is what is left
                _say(f"cannot decide what follows the step: {error}")
                return code or EXIT_FAILED
            _say(f"{decision.action}: {decision.reason}")
            if decision.action == "requeue":
                return self._requeue(code)
            if decision.action == "continue":
                return EXIT_OK
            if decision.action != "restart":
                self._cancel_links(run)
                return decision.exit_code
            # State `delayed`.
            self._wait_for_restart(decision.delay_s)
            if self._is_warned:  # no step can finish in the remaining time, and there is nothing to save
                return EXIT_OK if self._has_next_link(run) else self._requeue(code)
            excluded = self._exclude_unfit_nodes(run, decision.exclude)

    def _exclude_unfit_nodes(self, run: Run, excluded: tuple[str, ...]) -> tuple[str, ...]:
        """`excluded` with the nodes that became unfit since the submission, as far as spare nodes take their places."""
        nodes = queries.expand_node_list(self._environ.get("SLURM_JOB_NODELIST", ""))
        listed = read_unfit_nodes(self._environ)
        left = [node for node in nodes if node not in excluded]
        found = choose_listed_nodes(listed, left, self._job.nodes_of_step)
        report_avoided_nodes(found, run, _say)
        return (*excluded, *found.avoided)

    def _run_step(self, excluded: tuple[str, ...], warning: signal.Signals) -> int:
        """Run srun until its end; gives its exit code, 128 + N where signal N ended it."""
        if self._is_warned:  # before there was anything to save
            return 128 + warning
        job, number = self._job, str(self._job.nodes_of_step)
        without = f" without {', '.join(excluded)}" if excluded else ""
        _say(f"job {self._name} starts a step on {number} nodes{without}")
        program, *options = job.command
        # --overlap: the step before may still count as running on a node that is lost.
        nodes = [f"--nodes={number}", f"--ntasks={number}", "--overlap"]
        nodes += [f"--exclude={','.join(excluded)}"] if excluded else []
        # Created before srun starts, so that it reports events of this step only.
        follower = EventFollower(job.run.events) if job.run else None
        try:
            child = subprocess.Popen([program, *nodes, *options], env=self._environ, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise PrimusError(f"{program}: cannot be started: {error.strerror}") from None
        # srun stays in this process group: Slurm finds a job's processes by it with ProctrackType=proctrack/pgid.
        with child:
            code = self._watch_step(child, warning, follower)
        return code if code >= 0 else 128 - code

    def _watch_step(self, child: Child, warning: signal.Signals, follower: EventFollower | None) -> int:
        """Wait for srun: pass a warning on once, and end an srun that outlives its launchers."""
        is_passed_on = False  # a second SIGUSR1 has no further effect on the launchers
        next_look = time.monotonic()
        while (code := _wait_for_child(child, POLL_S)) is None:
            if self._is_warned and not is_passed_on:
                # Once only: the launchers take a second urgent signal as an order to stop without a checkpoint.
                is_passed_on = True
                _say(f"time limit or preemption signal received for job {self._name}: stopping the step")
                foreground.send_signal(child, warning)
            # Less often than srun is polled: each look reads from a shared file system.
            if follower and time.monotonic() >= next_look:
                next_look = time.monotonic() + EVENTS_POLL_S
                # Node 0 records `nodes_left` when the hooks of all nodes are done and all launchers have left.
                if any(event["kind"] == "nodes_left" for event in follower.read_new_events()):
                    return _end_srun(child)
        return code

    def _decide(self, run: Run, code: int, excluded: tuple[str, ...], error: str) -> StepDecision:
        step = SlurmStepResult(
            exit_code=code,
            error=error,
            num_nodes=self._job.nodes_of_step,
            is_warned=self._is_warned,
            excluded=excluded,
            has_workers=("--run", str(run.directory)) in itertools.pairwise(self._job.command),
            can_requeue=self._job.can_requeue,
            has_next_link=self._has_next_link(run),
            policy=self._job.policy,
        )
        return restart_decision.decide_after_step(run, step, self._environ)

    def _wait_for_restart(self, delay_s: float) -> None:
        deadline = time.monotonic() + delay_s
        # The handler sets the flag between two sleeps, so that a warning ends the delay within POLL_S.
        while not self._is_warned and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left_s))

    def _has_next_link(self, run: Run) -> bool:
        return bool(chain.find_next_links(run, self._job.environ["SLURM_JOB_ID"]))

    def _cancel_links(self, run: Run) -> None:
        """Cancel the jobs behind this one in its chain: the run is done, or cannot be continued."""
        links = chain.find_next_links(run, self._job.environ["SLURM_JOB_ID"])
        if not links:
            return
        answer = queries.run_query(["scancel", "--state=PENDING", *links], self._environ)
        end = "are cancelled" if answer.code == EXIT_OK else f"cannot be cancelled ({answer.err}) and end at once"
        _say(f"jobs {', '.join(links)} of the chain {end}")

    def _requeue(self, code: int) -> int:
        """Have Slurm queue the job again if requested; gives the exit code if Slurm does not."""
        if not self._job.can_requeue:
            return code or EXIT_FAILED
        # State `requeued`. Slurm keeps the job's id, so that the record of its submission stays valid.
        answer = queries.run_query(["scontrol", "requeue", self._job.environ["SLURM_JOB_ID"]], self._environ)
        if answer.code == EXIT_OK:
            time.sleep(REQUEUE_LIMIT_S)  # Slurm ends this process; a script that ends first would complete the job
        _say(f"Slurm did not requeue the job: {answer.err or answer.out.strip() or answer.code}")
        return code or EXIT_FAILED


def _make_step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of srun.

    With `sbatch --export=NONE` the steps would start without any variable (srun(1), SLURM_EXPORT_ENV). srun has not
    inherited --cpus-per-task since 22.05 (its release notes); SRUN_CPUS_PER_TASK is the replacement.
    """
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return {**environ, "SLURM_EXPORT_ENV": "ALL"} | ({"SRUN_CPUS_PER_TASK": cores} if cores else {})


def _wait_for_child(child: Child, limit_s: float) -> int | None:
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _end_srun(child: Child) -> int:
    """Wait for an srun whose launchers have left, then end it; gives its exit code."""
    # Three waits: until srun ends by itself, after SIGTERM, and after SIGKILL without a limit.
    for number, limit_s in ((None, SRUN_EXIT_LIMIT_S), (signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, None)):
        if number is not None:
            foreground.send_signal(child, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(limit_s)
    raise AssertionError("SIGKILL ends every process")


def _format_job_name(environ: Mapping[str, str]) -> str:
    """The job as squeue(1) shows it: ``11``, or ``11_3`` in an array."""
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environ["SLURM_JOB_ID"]


def _say(text: str) -> None:
    print(f"primus: {text}", file=sys.stderr, flush=True)
