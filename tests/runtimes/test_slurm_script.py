"""The batch script of a job, executed by bash with the real `jobs run-step` and executables in place of Slurm's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.cli import wait_for
from primus.launch.supervision import attempt_history
from primus.launch.supervision.restart_policy import AttemptResult
from primus.runs.store import RunMetadata, RunOutcome, create_run
from primus.runtimes.slurm.batch_job import SRUN_EXIT_LIMIT_S, BatchJob, BatchJobSupervisor
from primus.runtimes.slurm.options import parse
from primus.runtimes.slurm.script import BatchScript, format_batch_script

LIMIT_S = 30
RUN_ID = "20260101_000000-000a"


class BatchHost:
    """The first node of a job: a folder with its script and run, and programs that note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        identity = RunMetadata(id=RUN_ID, name="night", task="t", created=1)
        self.run = create_run(folder / "runs 'of' $(touch evil)" / RUN_ID, identity)
        self.write_program("srun", 'printf "%s\\0" "$@" >>"$DUMP"; exit "${CODE-0}"')
        self.write_program("scontrol", 'echo "scontrol $*" >>"$CALLS"; exit "${REFUSED-0}"')
        self.write_program("sinfo", "")
        self.write_program("primus-cli", f'exec {sys.executable} -m primus.cli.main "$@"')

    def write_program(self, name: str, body: str) -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)

    def record(self, *ends: AttemptResult) -> None:
        """Record attempts as their nodes do."""
        self.run.update_metadata(attempts=len(ends), outcome=RunOutcome(state="running"))
        for end in ends:
            attempt_history.record_attempt_result(self.run, end)

    @contextlib.contextmanager
    def start(self, command: tuple[str, ...], options: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        """A running job, whose script and programs are killed at the end."""
        batch = BatchScript(
            options=parse(["sbatch", *options.split()]),
            run=str(self.run.directory),
            name="n",
            command=command,
            primus=str(self.folder / "primus-cli"),
        )
        (self.folder / "job.sh").write_text(format_batch_script(batch), encoding="utf-8")
        env = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "DUMP": str(self.folder / "dump"),
            "CALLS": str(self.folder / "calls"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        with (self.folder / "out").open("wb") as out:
            process = subprocess.Popen(
                ["bash", str(self.folder / "job.sh")],
                env=env | environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.folder,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run_job(self, command: tuple[str, ...], options: str, **environ: str) -> int:
        with self.start(command, options, **environ) as process:
            return process.wait(LIMIT_S)

    @property
    def steps(self) -> list[str]:
        """Arguments of all calls of srun."""
        file = self.folder / "dump"
        return file.read_bytes().decode().split("\0")[:-1] if file.exists() else []

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def log(self) -> str:
        return (self.folder / "out").read_text()


@pytest.fixture
def host(tmp_path: Path) -> BatchHost:
    return BatchHost(tmp_path)


SLEEPS = 'touch "$DUMP"; for i in {1..200}; do sleep 0.1; done'


def test_a_job_whose_step_succeeds_exits_with_0(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="done"))
    assert host.run_job(("launcher", "go"), "-N 2") == 0
    ours = ["--nodes=2", "--ntasks=2", "--overlap", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60"]
    assert host.steps[:6] == ours
    assert host.steps[-2:] == ["launcher", "go"]
    assert "primus: job 7 starts a step on 2 nodes\nprimus: finish: done\n" in host.log


def test_a_failed_job_exits_with_the_code_that_its_nodes_have_recorded(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="failed"))
    host.run.update_metadata(outcome=RunOutcome(state="failed", exit_code=7))
    assert host.run_job(("launcher",), "-N 2", CODE="9") == 7
    assert host.steps.count("launcher") == 1


def test_a_restart_excludes_lost_nodes(host: BatchHost) -> None:
    """The second attempt is recorded by the second srun, as the nodes would."""
    host.record(AttemptResult(attempt=0, kind="lost node", action="exclude", hosts=("n2.site",)))
    done = 'sed -i \'s/"attempts":1/"attempts":2/\' "$RUN/metadata.json"; exit 0'
    srun = 'printf "%s\\0" "$@" >>"$DUMP"; case $* in *--exclude*) ' + done + " ;; esac; exit 1"
    host.write_program("srun", srun)
    options = "-N 2 --spare-nodes 1 --restart-delay 0"
    nodes = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
    assert host.run_job(("launcher",), options, RUN=str(host.run.directory), **nodes) == 0, host.log
    assert host.steps.count("launcher") == 2
    assert host.steps.count("--nodes=2") == 2, "the spare node is not used by default"
    assert "--exclude=n2" in host.steps
    assert "job 7 starts a step on 2 nodes without n2" in host.log


def test_a_preempted_job_with_requeue_is_requeued(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="preempted"))
    with host.start(("launcher",), "-N 2 --requeue", CODE="1") as process:
        wait_for(lambda: "scontrol requeue 7" in host.calls, "the requeue")
        assert process.poll() is None, "Slurm ends the script; one that exits would complete the job"
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_rejected_requeue_ends_the_job_with_the_code_of_the_step(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="preempted"))
    assert host.run_job(("launcher",), "-N 2 --requeue", CODE="3", REFUSED="1") == 3
    assert "Slurm did not requeue the job" in host.log


def test_an_array_task_exits_with_the_code_of_its_step(host: BatchHost) -> None:
    assert host.run_job(("launcher", "go"), "-a 0-3") == 0
    assert host.steps[:2] == ["--nodes=2", "--ntasks=2"]
    assert host.steps[-2:] == ["launcher", "go"]
    assert host.run_job(("launcher",), "-a 0-3 --requeue", CODE="5") == 5
    assert host.calls == []
    assert host.run.read_metadata().outcome.state == "planned", "array tasks share no record"


def test_an_array_task_is_requeued_after_the_warning_signal(host: BatchHost) -> None:
    host.write_program("srun", f'trap "exit 143" TERM; {SLEEPS}')
    with host.start(("launcher",), "-a 0-3 --requeue", SLURM_ARRAY_JOB_ID="6", SLURM_ARRAY_TASK_ID="3") as process:
        wait_for((host.folder / "dump").exists, "the step")
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "scontrol requeue 7" in host.calls, "the requeue")
    assert "job 6_3 starts a step" in host.log


def test_a_job_whose_run_cannot_be_read_exits_with_the_code_of_the_step(host: BatchHost) -> None:
    (host.run.directory / "metadata.json").write_text("{")
    assert host.run_job(("launcher",), "-N 2", CODE="5") == 5
    assert host.run_job(("launcher",), "-N 2", CODE="0") == 1
    assert "cannot decide what follows the step" in host.log


def test_the_warning_signal_is_passed_to_srun_and_ends_the_job(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="failed"))
    host.write_program("srun", f'trap "echo USR1 >>$CALLS; exit 4" USR1; {SLEEPS}')
    with host.start(("launcher",), "-N 2 --max-restarts 3") as process:
        wait_for((host.folder / "dump").exists, "the step")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 4
    assert host.calls == ["USR1"]
    assert "time limit or preemption signal received for job 7: stopping the step" in host.log
    (end,) = attempt_history.read_attempt_results(host.run)[-1:]
    assert (end.kind, end.reason) == ("preempted", "time limit or preemption signal received")


def test_a_warning_signal_during_the_restart_delay_starts_no_other_step(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="failed"))
    with host.start(("launcher",), "-N 2 --max-restarts 2 --restart-delay 600", CODE="6") as process:
        wait_for(lambda: "primus: restart: " in host.log, "the decision")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 6
    assert host.steps.count("launcher") == 1


def test_a_warning_signal_before_the_first_step_starts_none(host: BatchHost) -> None:
    environ = {"PATH": f"{host.folder}:{os.environ['PATH']}", "DUMP": str(host.folder / "dump"), "SLURM_JOB_ID": "7"}
    job = BatchJob(command=("srun", "launcher"), environ=environ, run=host.run, num_nodes=2)
    with BatchJobSupervisor(job).handle_warning() as supervisor:
        signal.raise_signal(signal.SIGUSR1)
        assert supervisor.run_steps(host.run) == 128 + signal.SIGUSR1
    assert host.steps == []


def test_sigterm_ends_the_script_as_any_other(host: BatchHost) -> None:
    host.write_program("srun", SLEEPS)
    with host.start(("launcher",), "-N 2 --requeue") as process:
        wait_for((host.folder / "dump").exists, "the step")
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM
    assert not host.calls


def test_a_step_whose_node_is_lost_ends_after_the_other_launchers(host: BatchHost) -> None:
    """srun stays until Slurm has noticed; the other launchers know, and leave when their hooks are done."""
    host.record(AttemptResult(attempt=0, kind="failed"))
    host.run.update_metadata(outcome=RunOutcome(state="failed", exit_code=8))
    older = json.dumps({"time": 0, "kind": "nodes_left"}) + "\n"  # of a step before this one
    host.run.events.write_text(older)
    asked = "case $* in *SLURMD_NODENAME*) exit ;; esac"  # which nodes respond
    host.write_program("srun", f'{asked}; touch "$DUMP"; trap "" TERM; while :; do sleep 0.1; done')
    with host.start(("launcher",), "-N 2") as process:
        wait_for((host.folder / "dump").exists, "the step")
        with host.run.events.open("a") as file:
            file.write(json.dumps({"time": 1, "kind": "straggler"}) + "\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)  # the hooks of the launchers may take long
        started = time.monotonic()
        with host.run.events.open("a") as file:
            file.write(json.dumps({"time": 2, "kind": "nodes_left"}) + "\n")
        assert process.wait(LIMIT_S) == 8
        assert time.monotonic() - started >= SRUN_EXIT_LIMIT_S


def test_steps_inherit_all_variables_and_the_cores_of_the_job(host: BatchHost) -> None:
    host.record(AttemptResult(attempt=0, kind="done"))
    host.write_program("srun", 'echo "$SLURM_EXPORT_ENV $SRUN_CPUS_PER_TASK" >>"$CALLS"')
    assert host.run_job(("launcher",), "-N 2 -c 96", SLURM_EXPORT_ENV="NONE", SLURM_CPUS_PER_TASK="96") == 0
    assert host.calls == ["ALL 96"]


@pytest.mark.parametrize("options", ["-N 2", "-N 2 --requeue --spare-nodes 1 -t 60", "-a 0-3"])
def test_a_script_has_at_most_20_lines(host: BatchHost, options: str) -> None:
    batch = BatchScript(
        options=parse(["sbatch", *options.split()]), run="/r", name="n", command=("true",), primus="/p/primus-cli"
    )
    assert len(format_batch_script(batch).splitlines()) <= 20


hostile = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=0, max_size=30)
shells = st.sampled_from(
    [
        "--",
        "--json",
        "--help",
        "-h",
        "--dry-run",
        "--run",
        "$(id)",
        "`id`",
        "a b",
        "'",
        '"',
        "\\",
        "\n",
        "$HOME",
        "!!",
        "*",
        "~",
        "{a,b}",
        "#",
        "%j",
        "\u00e9\u4e2d",
    ]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(hostile | shells, min_size=1, max_size=6))
def test_any_arguments_reach_each_node_unchanged(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        host = BatchHost(Path(folder))
        assert host.run_job(("launcher", *words), "-N 2") == 0, host.log
        assert host.steps[host.steps.index("launcher") + 1 :] == words
        assert not (host.folder / "evil").exists()


def test_an_argument_of_100_kb_reaches_each_node(host: BatchHost) -> None:
    word = "a'b\n$x" * 16000
    assert host.run_job(("launcher", word), "-N 2") == 0
    assert host.steps[-1] == word
