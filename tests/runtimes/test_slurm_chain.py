"""Chains of jobs: submitted one behind the other, shown as one job, continued and ended by their batch scripts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fakes import cli
from fakes.slurm import FakeSlurm
from primus.errors import UsageError
from primus.launch.jobs import submissions
from primus.launch.supervision.restart_policy import AttemptResult
from primus.runs.store import Run, RunMetadata, RunOutcome, create_run
from primus.runtime import JobState, SchedulerState, Submission
from primus.runtimes.slurm import chain
from primus.runtimes.slurm.options import parse
from runtimes.test_slurm_script import BatchHost

EXPERIMENT = """\
workspace: out
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 2}}}
"""
COUNTING = 'number=$((40 + $(wc -l <"$FAKE_SLURM/sbatch.calls"))); '


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    slurm = FakeSlurm(tmp_path / "bin")
    slurm.answers(sbatch=COUNTING + "echo $number")
    return slurm


def submit(slurm: FakeSlurm, *words: str) -> tuple[Submission, str]:
    """The record of a submission, and what was said."""
    folder = slurm.folder.parent
    task = ("--", "train", "pretrain", "--config", "night.yaml")
    environ = slurm.environ | {"XDG_STATE_HOME": str(folder / "state")}
    done = cli.run("slurm", "sbatch", "-t", "60", *words, *task, cwd=folder, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = folder.glob("out/night/2*")
    holder = submissions.read_holder(run)
    assert holder is not None
    return holder, done.stdout + done.stderr


def test_each_job_waits_for_the_one_before(slurm: FakeSlurm) -> None:
    holder, said = submit(slurm, "--chain", "3")
    script = f"{holder.directory}/job.sh"
    assert slurm.calls("sbatch") == [
        f"--parsable {script}",
        f"--dependency=afterany:41 --parsable {script}",
        f"--dependency=afterany:42 --parsable {script}",
    ]
    assert (holder.id, holder.place) == ("41", {"chain": "41,42,43"})
    assert [Path(log).name for log in holder.logs] == ["slurm-41.out", "slurm-42.out", "slurm-43.out"]
    assert "job 41 is queued, and 42, 43 after it" in said
    environ = {"XDG_STATE_HOME": str(slurm.folder.parent / "state")}
    assert submissions.find_submission("42", environ).id == "41"
    head = Path(script).read_text().partition("\n\n")[0]
    assert "--signal=B:USR1@600" in head


def test_a_chain_is_as_long_as_slurm_accepts(slurm: FakeSlurm) -> None:
    limit = '[ $number -lt 43 ] || { echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }; '
    slurm.answers(sbatch=COUNTING + limit + "echo $number")
    holder, said = submit(slurm, "--chain", "5")
    assert holder.place == {"chain": "41,42"}
    assert "the chain has 2 of 5 jobs: Slurm rejected the next one: QOSMaxSubmitJobPerUserLimit" in said


def test_a_dry_run_says_what_follows_the_first_job(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    words = ("slurm", "sbatch", "-t", "60", "--chain", "2", "--", "train", "pretrain", "--config", "night.yaml")
    said = cli.run("--dry-run", *words, cwd=tmp_path).stdout
    assert "note: chain: 1 more job of the same script, each with --dependency=afterany:<the one before>" in said


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("sbatch --chain 2", "--chain needs the time limit of each job"),
        ("sbatch --chain 0 -t 5", "--chain 0 is not a number of jobs"),
        ("sbatch --chain 2 -t 5 --requeue", "--requeue continues the same job"),
        ("sbatch --chain 2 -t 5 -a 0-3", "--chain continues a run"),
        ("srun --chain 2 -t 5", "slurm srun does not support --chain"),
    ],
)
def test_what_cannot_be_a_chain_is_refused(words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse(words.split())


def state(name: SchedulerState, node: str = "", reason: str = "") -> JobState:
    return JobState(state=name, raw=name.upper(), nodes=(node,) if node else (), reason=reason)


DONE, RUNNING = state("done", "n1"), state("running", "n1")
WAITING = state("queued", reason="Dependency")
CANCELLED = state("cancelled")


@pytest.mark.parametrize(
    ("states", "run", "expected", "reason"),
    [
        ((RUNNING, WAITING, WAITING), "running", "running", "job 1, 1 of 3"),
        ((DONE, state("queued", reason="Priority"), WAITING), "interrupted", "queued", "job 2, 2 of 3; Priority"),
        ((DONE, DONE, CANCELLED), "done", "done", "job 2, 2 of 3"),
        ((DONE, DONE, CANCELLED), "interrupted", "cancelled", "job 2, 2 of 3"),
        ((DONE, state("cancelled", "n1"), CANCELLED), "interrupted", "cancelled", "job 2, 2 of 3"),
        ((DONE, state("failed", "n1"), CANCELLED), "failed", "failed", "job 2, 2 of 3"),
        ((CANCELLED, CANCELLED, CANCELLED), "planned", "cancelled", "job 3, 3 of 3"),
        ((state("gone"), RUNNING, WAITING), "running", "running", "job 2, 2 of 3"),
    ],
)
def test_a_chain_is_shown_as_one_job(
    states: tuple[JobState, ...], run: str, expected: str, reason: str, tmp_path: Path
) -> None:
    create_run(tmp_path / "run", RunMetadata(id="r", name="n", task="t", created=1))
    Run(tmp_path / "run").update_metadata(outcome=RunOutcome(state=run))  # type: ignore[arg-type]
    chained = Submission(
        runtime="slurm", id="1", name="n", directory=str(tmp_path / "run"), submitted=0, place={"chain": "1,2,3"}
    )
    found = chain.combine_link_states(chained, dict(zip(("1", "2", "3"), states, strict=True)))
    assert (found.state, found.reason) == (expected, reason)


def make_chain(host: BatchHost, jobs: str) -> None:
    """Record that the run of `host`, whose job is 7, belongs to a chain."""
    submissions.remember_submission(
        Submission(
            runtime="slurm",
            id=jobs.partition(",")[0],
            name="n",
            directory=str(host.run.directory),
            submitted=time.time(),
            place={"chain": jobs},
        ),
        {"XDG_STATE_HOME": str(host.folder / "state")},
        print,
    )
    host.write_program("scancel", 'echo "scancel $*" >>"$CALLS"')


@pytest.fixture
def host(tmp_path: Path) -> BatchHost:
    return BatchHost(tmp_path)


def test_a_job_at_its_time_limit_leaves_the_run_to_the_next_one(host: BatchHost) -> None:
    make_chain(host, "7,8,9")
    host.record(AttemptResult(attempt=0, kind="preempted", reason="time limit"))
    assert host.run_job(("launcher",), "-t 5", CODE="143") == 0
    assert "continue: time limit; the next job of the chain resumes the run" in host.log
    assert host.calls == [], "the jobs behind it stay"


def test_the_last_job_of_a_chain_ends_as_one_without(host: BatchHost) -> None:
    make_chain(host, "5,6,7")
    host.record(AttemptResult(attempt=0, kind="preempted", reason="time limit"))
    assert host.run_job(("launcher",), "-t 5", CODE="143") == 143


@pytest.mark.parametrize(("kind", "code"), [("done", 0), ("failed", 4)])
def test_a_job_that_ends_the_run_cancels_those_behind_it(kind: str, code: int, host: BatchHost) -> None:
    make_chain(host, "6,7,8,9")
    host.record(AttemptResult(attempt=0, kind=kind))  # type: ignore[arg-type]
    assert host.run_job(("launcher",), "-t 5", CODE=str(code)) == code
    assert host.calls == ["scancel --state=PENDING 8 9"]
    assert "jobs 8, 9 of the chain are cancelled" in host.log


def test_a_job_behind_the_end_of_its_run_starts_nothing(host: BatchHost) -> None:
    make_chain(host, "6,7,8")
    host.run.update_metadata(outcome=RunOutcome(state="done", exit_code=0))
    assert host.run_job(("launcher",), "-t 5", CODE="1") == 0
    assert host.steps == []
    assert "the run is done since an earlier job of the chain" in host.log


def test_cancel_ends_all_jobs_of_a_chain_that_are_left(slurm: FakeSlurm) -> None:
    holder, _ = submit(slurm, "--chain", "3")
    slurm.answers(squeue="echo '41|COMPLETED||n1'; echo '42|RUNNING||n1'; echo '43|PENDING|Dependency|'")
    environ = slurm.environ | {"XDG_STATE_HOME": str(slurm.folder.parent / "state")}
    shown = cli.run("--json", "direct", "--", "jobs", "show", "43", cwd=slurm.folder, **environ)
    assert json.loads(shown.stdout)["state"]["reason"] == "job 42, 2 of 3"
    done = cli.run("direct", "--", "jobs", "cancel", holder.id, cwd=slurm.folder, **environ)
    assert done.returncode == 0, done.stderr
    assert slurm.argv("scancel") == ["42", "43"]
