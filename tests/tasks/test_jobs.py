"""`jobs list`, `show`, `logs`, `cancel` and `wait` on jobs that were submitted earlier."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from fakes import cli
from fakes.slurm import FakeSlurm
from primus.launch.jobs import job_states, submissions
from primus.runs.store import Run, RunMetadata, RunOutcome, State, create_run
from primus.runtime import JobState, Submission


def run_id(number: str) -> str:
    """Id of the run of job `number`."""
    return f"20260101_000000-{int(number):04x}"


class Desk:
    """Somebody who has submitted jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slurm = FakeSlurm(folder / "bin")
        self.environ = self.slurm.environ | {"XDG_STATE_HOME": str(folder / "state")}

    def submitted(self, number: str, name: str = "night", **changes: object) -> Run:
        identity = run_id(number)
        run = create_run(
            self.folder / "out" / name / identity, RunMetadata(id=identity, name=name, task="t", created=1)
        )
        (run.directory / "logs").mkdir()
        values = {"logs": (f"logs/slurm-{number}.out",), "submitted": float(number)} | changes
        submission = Submission(runtime="slurm", id=number, name=name, directory=str(run.directory), **values)  # type: ignore[arg-type]
        submissions.remember_submission(submission, self.environ, print)
        return run

    def jobs(self, *words: str, code: int = 0, as_json: bool = False) -> subprocess.CompletedProcess[str]:
        start = ("--json", "direct") if as_json else ("direct",)
        done = cli.run(*start, "--", "jobs", *words, cwd=self.folder, **self.environ)
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_nothing_was_submitted(desk: Desk) -> None:
    assert desk.jobs("list").stdout == "no jobs were submitted from this home folder\n"
    assert "no job '5' was submitted from here" in desk.jobs("show", "5", code=2).stderr


def test_all_jobs_take_one_question(desk: Desk) -> None:
    for number in ("11", "12", "13"):
        desk.submitted(number)
    desk.slurm.answers(
        squeue="echo '11|RUNNING|None|n[1-2]'; echo '12|PENDING|BadConstraints|'; echo '13|COMPLETED|None|n1'"
    )
    desk.slurm.answers(scontrol="echo 'JobState=COMPLETED ExitCode=0:0 Restarts=1 NodeList=n1'")
    lines = desk.jobs("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["job", "11", "12"]
    assert "BadConstraints, needs operator action: no node matches the options" in lines[2]
    (call,) = desk.slurm.calls("squeue")
    assert "--jobs=11,12,13" in call

    listed = json.loads(desk.jobs("list", "--all", as_json=True).stdout)
    assert [(each["id"], each["state"]["state"]) for each in listed] == [
        ("11", "running"),
        ("12", "queued"),
        ("13", "done"),
    ]
    assert "--jobs=11,12 " in desk.slurm.calls("squeue")[-1], "what has ended is not asked for again"


def test_a_users_filters_do_not_hide_jobs(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="[ -z \"$SQUEUE_PARTITION\" ] && echo '11|RUNNING|None|n1'")
    desk.environ["SQUEUE_PARTITION"] = "other"
    assert "running" in desk.jobs("show", "11").stdout


def test_a_scheduler_that_does_not_answer_is_said_and_nothing_is_changed(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    done = desk.jobs("list", code=1)
    assert "unknown" in done.stdout
    assert "Unable to contact slurm controller" in done.stdout
    for word in ("show", "cancel"):
        assert "squeue does not respond" in desk.jobs(word, "11", code=1).stderr
    assert not desk.slurm.calls("scancel")


def test_an_answer_without_jobs_does_not_end_a_job(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo 'Welcome to the cluster'")
    assert "unexpected output of squeue: 'Welcome to the cluster'" in desk.jobs("show", "11", code=1).stderr
    desk.slurm.answers(squeue="echo 'Welcome to the cluster'; echo '11|RUNNING|None|n1'")
    assert "running" in desk.jobs("show", "11").stdout


@pytest.mark.parametrize(
    ("bodies", "state"),
    [
        ({"sacct": "echo '11|TIMEOUT|0:0|n[1-2]'"}, ("failed", 124, "TIMEOUT")),
        ({"sacct": "echo '11|CANCELLED by 0|0:15|None assigned'"}, ("cancelled", 143, "CANCELLED")),
        ({"sacct": "exit 1", "scontrol": "echo 'JobState=NODE_FAIL ExitCode=1:0'"}, ("failed", 1, "NODE_FAIL")),
        ({"sacct": "exit 1", "scontrol": "exit 1"}, ("failed", 3, "failed")),
    ],
)
def test_a_job_that_has_left_the_queue_is_known_all_the_same(
    desk: Desk, bodies: dict[str, str], state: tuple[str, int, str]
) -> None:
    run = desk.submitted("11")
    run.update_metadata(outcome=RunOutcome(state="failed", exit_code=3, reason="rank 0"))
    desk.slurm.answers(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", **bodies)
    shown = json.loads(desk.jobs("show", "11", as_json=True).stdout)["state"]
    assert (shown["state"], shown["exit_code"], shown["raw"]) == state


def test_a_job_that_has_lost_its_script_is_told_from_one_that_runs(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo '11|RUNNING|None|n[2-3]|n1'")
    assert "its first node is lost, and its script with it; needs operator action" in desk.jobs("show", "11").stdout
    desk.slurm.answers(squeue="echo '11|RUNNING|None|n[1-3]|n1'")
    assert "first node" not in desk.jobs("show", "11").stdout


def test_a_job_is_found_by_its_number_name_or_run(desk: Desk) -> None:
    desk.slurm.answers(squeue="echo '11|RUNNING|None|n1'; echo '12|RUNNING|None|n1'")
    run = desk.submitted("11", "night")
    desk.submitted("12", "night")
    for name, number in (("11", "11"), ("night", "12"), (run_id("11"), "11"), (str(run.directory), "11")):
        assert json.loads(desk.jobs("show", name, as_json=True).stdout)["id"] == number
    assert "did you mean 'night'?" in desk.jobs("show", "nihgt", code=2).stderr
    assert "jobs list --all" in desk.jobs("show", "9/9", code=2).stderr


def test_logs_are_printed_whole_or_from_near_the_end(desk: Desk) -> None:
    run = desk.submitted("11")
    desk.slurm.answers(squeue="echo '11|PENDING|Priority|'")
    assert "job 11 has no log yet; it is queued (Priority)" in desk.jobs("logs", "11", code=2).stderr
    (run.directory / "logs/slurm-11.out").write_text("one\ntwo\nthree\n")
    (run.directory / "logs/rank_3.log").write_text("of rank 3\n")
    assert desk.jobs("logs", "11").stdout == "one\ntwo\nthree\n"
    assert desk.jobs("logs", "11", "--tail", "2").stdout == "two\nthree\n"
    assert desk.jobs("logs", "11", "--tail", "0").stdout == ""
    assert desk.jobs("logs", "11", "--rank", "3").stdout == "of rank 3\n"
    assert "no log of rank 4" in desk.jobs("logs", "11", "--rank", "4", code=2).stderr


@pytest.mark.parametrize(
    ("squeue", "is_kept"),
    [("echo '11|PENDING|Priority|'", True), ("echo down >&2; exit 1", True), ("echo '11|CANCELLED|None|'", False)],
)
def test_a_run_that_waits_in_a_queue_is_neither_dead_nor_cleaned_away(desk: Desk, squeue: str, is_kept: bool) -> None:
    run = desk.submitted("11")
    desk.slurm.answers(squeue=squeue)

    def runs(*words: str) -> str:
        return cli.run("direct", "--", "runs", *words, "--workspace", "out", cwd=desk.folder, **desk.environ).stdout

    assert runs("list").splitlines()[1].split()[2] == "planned"
    runs("clean", "--older-than-days", "1", "--yes")
    assert run.directory.exists() == is_kept


def test_an_array_is_one_job(desk: Desk) -> None:
    run = desk.submitted("11", logs=("logs/slurm-11_*.out",))
    desk.slurm.answers(
        squeue="echo '11_[2-3]|PENDING|Resources|'; echo '11_0|COMPLETED|None|n1'; echo '11_1|RUNNING||n2'"
    )
    (listed,) = json.loads(desk.jobs("list", as_json=True).stdout)
    assert (listed["state"]["state"], listed["state"]["nodes"]) == ("running", ["n1", "n2"])
    assert listed["state"]["reason"] == "array: 1 running, 1 queued, 1 done"
    desk.slurm.answers(squeue="echo '11_2|COMPLETED||n2'; echo '11_3|FAILED|NonZeroExitCode|n2'")
    desk.slurm.answers(
        scontrol="echo 'JobId=12 ArrayJobId=11 ArrayTaskId=2 JobState=COMPLETED ExitCode=0:0';"
        "echo 'JobId=11 ArrayJobId=11 ArrayTaskId=3 JobState=FAILED ExitCode=7:0'"
    )
    assert "failed (array: 1 failed, 1 done)" in desk.jobs("wait", "11", code=7).stdout
    assert run.read_metadata().outcome.state == "failed"


def test_an_array_whose_jobs_are_done_is_done(desk: Desk) -> None:
    run = desk.submitted("11")
    desk.slurm.answers(squeue="echo '11_0|COMPLETED||n1'")
    accounted = "echo '11_0|COMPLETED|0:0|n1'; echo '11_1|COMPLETED|0:0|n1'"
    desk.slurm.answers(sacct=f"{accounted}; echo '11_2|FAILED|4:0|n1'")
    desk.jobs("wait", "11", code=4), "one that squeue has forgotten"
    desk.submitted("12", place={"array": "0-1"})
    desk.slurm.answers(squeue="echo '12_0|COMPLETED||n1'", sacct=accounted.replace("11", "12"))
    desk.jobs("wait", "12")
    assert run.read_metadata().outcome.state == "failed"
    assert Run(run.directory.with_name(run_id("12"))).read_metadata().outcome.state == "done"


def test_why_a_job_has_waited_is_not_why_it_has_ended(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo '11|CANCELLED|JobHeldUser|'")
    said = desk.jobs("logs", "11", code=2).stderr
    assert said.endswith("job 11 has no log; it is cancelled\n"), "no --follow helps"


def test_logs_are_followed_to_the_end_of_the_job(desk: Desk) -> None:
    run = desk.submitted("11")
    log = run.directory / "logs/slurm-11.out"
    log.write_text("one\ntwo\n")
    desk.slurm.answers(squeue=f"grep -q four '{log}' && s=COMPLETED || s=RUNNING; echo \"11|$s|None|n1\"")
    desk.slurm.answers(scontrol="echo 'JobState=COMPLETED ExitCode=0:0'")
    words = ("direct", "--", "jobs", "logs", "11", "--follow", "--tail", "1")
    with cli.started(*words, cwd=desk.folder, **desk.environ) as process:
        assert process.stdout
        assert process.stdout.readline() == "two\n"
        with log.open("a") as file:
            file.write("three\nfour\n")
        out, _ = process.communicate(timeout=30)
    assert out == "three\nfour\n"


def test_a_job_is_cancelled_once(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo '11|RUNNING|None|n1'")
    assert "job 11 (night) is being cancelled" in desk.jobs("cancel", "11").stdout
    assert desk.slurm.argv("scancel") == ["11"]
    desk.slurm.answers(scancel="echo 'scancel: error: Kill job error on job id 11: Access denied' >&2; exit 1")
    assert "Access denied" in desk.jobs("cancel", "11", code=1).stderr
    desk.slurm.answers(squeue="echo '11|CANCELLED|None|n1'")
    desk.slurm.forget()
    assert "has ended already: cancelled" in desk.jobs("cancel", "11").stdout
    assert not desk.slurm.calls("scancel")


@pytest.mark.parametrize(
    ("raw", "state", "code"),
    [("CANCELLED", "interrupted", 130), ("NODE_FAIL", "failed", 1), ("COMPLETED", "done", 0)],
)
def test_a_run_that_nobody_could_record_ends_with_its_job(desk: Desk, raw: str, state: str, code: int | None) -> None:
    run = desk.submitted("11")
    desk.slurm.answers(squeue=f"echo '11|{raw}|None|'", scontrol=f"echo 'JobState={raw} ExitCode=0:0'")
    desk.jobs("show", "11")
    outcome = run.read_metadata().outcome
    assert (outcome.state, outcome.exit_code) == (state, code)
    assert raw in outcome.reason or state == "done"


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_job_cancelled_between_two_attempts_ends_with_the_code_of_a_cancellation(desk: Desk, state: State) -> None:
    run = desk.submitted("11")
    ended = None if state == "running" else time.time() + 1
    failure = RunOutcome(state=state, exit_code=None if state == "running" else 7, reason="rank 3 failed")
    run.update_metadata(attempts=2, ended=ended, outcome=failure)
    desk.slurm.answers(squeue="echo '11|CANCELLED|None|n1|n1'")
    said = desk.jobs("wait", "11", code=143)
    assert "run interrupted: job 11 of slurm was cancelled" in said.stdout + said.stderr
    assert ("before that: rank 3 failed" in said.stdout + said.stderr) == (state == "failed")


def test_to_wait_ends_as_the_job_does_or_in_time(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo '11|RUNNING|None|n1'")
    assert "running" in desk.jobs("wait", "11", "--timeout", "0.5", code=124).stdout
    desk.slurm.answers(squeue="echo '11|CANCELLED|None|n1'")
    desk.jobs("wait", "11", code=130)


def test_a_question_that_fails_while_waiting_is_asked_again(desk: Desk) -> None:
    desk.submitted("11")
    count = '$(($(wc -l <"$FAKE_SLURM/squeue.calls")))'
    desk.slurm.answers(squeue=f"[ {count} -gt 2 ] && echo '11|COMPLETED|None|n1' || {{ echo away >&2; exit 1; }}")
    desk.slurm.answers(scontrol="echo 'JobState=COMPLETED ExitCode=0:0'")
    done = desk.jobs("wait", "11")
    assert done.stderr.count("squeue does not respond: away; retrying") == 1


def test_where_nothing_can_be_written_jobs_are_shown_all_the_same(desk: Desk) -> None:
    run = desk.submitted("11")
    desk.slurm.answers(squeue="echo '11|CANCELLED|None|n1|n1'; echo '12|CANCELLED|None|n1|n1'")
    ended = desk.folder / "state" / "primus" / "jobs" / "ended"
    ended.touch()
    assert "cancelled" in desk.jobs("list", "--all").stdout
    assert run.read_metadata().outcome.state == "interrupted"
    full = "import primus.runs.store as s\ndef full(*_): raise s.PrimusError('full')\ns.write_json = full"
    other = desk.submitted("12")
    done = cli.run("direct", "--", "jobs", "list", "--all", cwd=desk.folder, before=full, **desk.environ)
    assert (done.returncode, done.stdout.count("cancelled")) == (0, 2), done.stdout + done.stderr
    assert other.read_metadata().outcome.state == "planned"


def test_a_job_that_is_gone_is_not_waited_for(desk: Desk) -> None:
    desk.submitted("11")
    desk.slurm.answers(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    hasty = "import primus.launch.jobs.job_states as j; j.FIRST_POLL_S = 0.01"
    for words in (("wait", "11"), ("logs", "11", "--follow")):
        desk.slurm.forget()
        done = cli.run("direct", "--", "jobs", *words, cwd=desk.folder, before=hasty, **desk.environ)
        assert done.returncode == (1 if words[0] == "wait" else 0), done.stdout + done.stderr
        assert "gone (Slurm has no record of it)" in done.stdout + done.stderr
        assert len(desk.slurm.calls("squeue")) == 5, "a scheduler may hear of a job seconds later"
    assert "no queued or running jobs" in desk.jobs("list").stdout
    assert "gone" in desk.jobs("list", "--all").stdout


def test_a_number_that_slurm_gives_again_is_another_job(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    (tmp_path / "run").mkdir()
    old = Submission(runtime="slurm", id="5", name="a", directory=str(tmp_path / "run"), submitted=1.0)
    job_states._record_answer(old, JobState(state="done"), environ)
    assert job_states.query_state(old, environ).state == "done"
    newer = Submission(runtime="slurm", id="5", name="b", directory=str(tmp_path / "run"), submitted=time.time() + 60)
    assert job_states._read_known_end(newer, environ) is None


def test_a_cancellation_that_slurm_refuses_with_exit_code_0_is_an_error(desk: Desk) -> None:
    desk.submitted("11")
    refusal = "echo 'scancel: error: Kill job error on job id 11: Access denied' >&2; exit 0"
    desk.slurm.answers(squeue="echo '11|RUNNING|None|n1|n1'", scancel=refusal)
    assert "Access denied" in desk.jobs("cancel", "11", code=1).stderr


def test_an_interrupted_run_whose_job_slurm_has_forgotten_is_cancelled_and_not_done(desk: Desk) -> None:
    run = desk.submitted("11")
    run.update_metadata(outcome=RunOutcome(state="interrupted", exit_code=143, reason="SIGTERM"))
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    desk.slurm.answers(squeue=gone, sacct="exit 1", scontrol="exit 1")
    shown = json.loads(desk.jobs("show", "11", as_json=True).stdout)["state"]
    assert (shown["state"], shown["exit_code"]) == ("cancelled", 143)


def test_the_end_that_nodes_recorded_is_not_replaced_by_the_answer_of_the_scheduler(desk: Desk) -> None:
    run = desk.submitted("11")
    own = RunOutcome(state="failed", exit_code=7, reason="rank 3: out of memory")
    run.update_metadata(ended=100.0, outcome=own)
    desk.slurm.answers(squeue="echo '11|NODE_FAIL|None|n1|n1'", scontrol="echo 'JobState=NODE_FAIL ExitCode=1:0'")
    desk.jobs("show", "11")
    assert run.read_metadata().outcome == own


def test_a_run_that_another_job_has_taken_over_is_neither_ended_nor_reported_by_the_earlier_one(desk: Desk) -> None:
    run = desk.submitted("11")
    earlier = submissions.Submission(runtime="slurm", id="7", name="night", directory=str(run.directory), submitted=1.0)
    submissions.remember_submission(earlier, desk.environ, print)
    (run.directory / submissions.RECORD).write_bytes(
        msgspec.json.encode(Submission(**{**msgspec.structs.asdict(earlier), "id": "11", "submitted": 11.0}))
    )
    run.update_metadata(attempts=1, started=12.0, outcome=RunOutcome(state="running"))
    desk.slurm.answers(squeue="echo '7|CANCELLED|None|n1|n1'")
    desk.jobs("wait", "7", code=130)
    assert run.read_metadata().outcome.state == "running"
    run.update_metadata(ended=13.0, outcome=RunOutcome(state="failed", exit_code=9, reason="rank 0"))
    assert "rank 0" not in desk.jobs("wait", "7", code=130).stderr


def test_the_outcome_of_an_earlier_job_of_the_same_run_is_not_that_of_this_one(desk: Desk) -> None:
    run = desk.submitted("11", submitted=50.0)
    run.update_metadata(ended=40.0, outcome=RunOutcome(state="failed", exit_code=9, reason="of the job before"))
    desk.slurm.answers(squeue="echo '11|FAILED|NonZeroExitCode|n1|n1'", scontrol="echo 'JobState=FAILED ExitCode=4:0'")
    assert "of the job before" not in desk.jobs("wait", "11", code=4).stderr


@pytest.mark.parametrize(("age_s", "state"), [(10.0, "planned"), (500.0, "interrupted")])
def test_a_deleted_job_ends_its_run_only_once_it_must_have_been_registered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, age_s: float, state: str
) -> None:
    run = desk.submitted("11", submitted=time.time() - age_s)
    submission = job_states.read_json(run.directory / submissions.RECORD, Submission)
    job_states._record_answer(submission, JobState(state="gone", is_deleted=True), desk.environ)
    assert run.read_metadata().outcome.state == state
