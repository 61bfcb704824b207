"""Jobs are submitted once, remembered, and known again; with programs that stand for Slurm's."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fakes import cli
from fakes.slurm import FakeSlurm
from primus.runs.files import read_json
from primus.runs.store import RunMetadata

TASK = ("--", "train", "pretrain", "--config", "night.yaml")
EXPERIMENT = """\
workspace: out
env: {MY_API_KEY: canary-experiment}
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 2}}}
"""
HOSTILE = "a 'b' \"c\" $(touch evil) `id` \\ * ; & | < > # = , \u00e9\u4e2d"


ACCEPTED = '[ "$1" != --test-only ] || exit 0'
"""srun answers that it would accept the request."""


class Place:
    """A folder with an experiment, and a Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "night.yaml").write_text(EXPERIMENT)
        self.slurm = FakeSlurm(folder / "bin")
        self.slurm.answers(sbatch="echo 41", squeue="echo '41|RUNNING|None|n[1-2]'")

    def primus(self, *words: str, code: int | None = 0, **env: str) -> str:
        done = cli.run(
            *words, cwd=self.folder, **(self.slurm.environ | {"XDG_STATE_HOME": str(self.folder / "state")} | env)
        )
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in (self.folder / "out" / "night").glob("2*"))

    @property
    def metadata(self) -> RunMetadata:
        return read_json(self.runs[-1] / "metadata.json", RunMetadata)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_submitted_job_is_told_and_remembered(place: Place) -> None:
    said = place.primus("slurm", "sbatch", "-N", "2", *TASK)
    assert "job 41 is queued" in said
    (run,) = place.runs
    assert place.slurm.argv("sbatch") == ["--parsable", f"{run}/job.sh"]
    assert (run / "logs").is_dir(), "Slurm does not make the folder of a log"
    submission = json.loads((run / "submission.json").read_text())
    assert (submission["id"], submission["name"], submission["runtime"]) == ("41", "night", "slurm")
    assert submission["logs"] == [f"{run}/logs/slurm-41.out"]
    assert '"kind":"submitted"' in (run / "events.jsonl").read_text()
    assert place.metadata.outcome.state == "planned"


def test_a_job_is_one_json_object(place: Place) -> None:
    done = cli.run("--json", "slurm", "sbatch", *TASK, cwd=place.folder, **place.slurm.environ)
    values = json.loads(done.stdout)
    assert values == {"runtime": "slurm", "id": "41", "name": "night", "run": str(place.runs[0])}


def test_the_cluster_of_a_federation_is_remembered(place: Place) -> None:
    place.slurm.answers(sbatch="echo '41;north'", squeue="echo 'CLUSTER: north'; echo '41|PENDING|Priority|'")
    place.primus("slurm", "sbatch", *TASK)
    assert "queued (Priority)" in place.primus("direct", "--", "jobs", "show", "41")
    assert "--clusters=north" in place.slurm.argv("squeue")


def test_secrets_reach_a_job_by_name_alone(place: Place) -> None:
    words = ("slurm", "sbatch", "--", "direct", "--env", "GH_TOKEN=canary-typed", *TASK)
    said = place.primus(*words, HF_TOKEN="canary-shell")
    env = place.slurm.env("sbatch")
    assert (env["HF_TOKEN"], env["GH_TOKEN"]) == ("canary-shell", "canary-typed")
    left = [path.read_text(errors="replace") for path in place.runs[0].rglob("*") if path.is_file()]
    left += [path.read_text(errors="replace") for path in (place.folder / "state").rglob("*") if path.is_file()]
    assert len(left) > 5
    assert "canary" not in said + "".join(left) + " ".join(place.slurm.argv("sbatch"))


def test_a_job_inside_a_job_inherits_nothing_of_it(place: Place) -> None:
    around = {
        "SLURM_JOB_ID": "7",
        "SLURM_MEM_PER_CPU": "1",
        "SBATCH_PARTITION": "x",
        "SLURM_CONF": "/c",
        "PMI_RANK": "0",
    }
    place.primus("slurm", "sbatch", *TASK, **around)
    env = place.slurm.env("sbatch")
    assert [name for name in env if name.startswith(("SLURM", "SBATCH", "PMI"))] == ["SLURM_CONF"]
    place.primus("slurm", "srun", "--", "runs", "list", **around)
    assert place.slurm.env("srun")["SLURM_JOB_ID"] == "7", "a step belongs to the job"


def test_hostile_values_reach_slurm_unchanged(place: Place) -> None:
    place.primus("slurm", "sbatch", "-J", HOSTILE, "--comment", "two\nlines", *TASK, BIG="x" * 100_000, ODD=HOSTILE)
    assert place.slurm.argv("sbatch") == ["--parsable", "--comment", "two\nlines", f"{place.runs[0]}/job.sh"]
    env = place.slurm.env("sbatch")
    assert (env["ODD"], len(env["BIG"])) == (HOSTILE, 100_000)
    assert not (place.folder / "evil").exists()
    place.primus("slurm", "srun", "-J", HOSTILE, "--", "runs", "list", "--name", HOSTILE)
    argv = place.slurm.argv("srun")
    assert argv[argv.index("-J") + 1] == HOSTILE
    assert argv[-1] == HOSTILE


def test_folders_of_logs_are_made_before_the_job(place: Place) -> None:
    place.primus("slurm", "sbatch", "-J", "big", "-o", "my logs/%x/%j-%N.log", "--error=err/e", *TASK)
    assert (place.folder / "my logs/big").is_dir()
    assert (place.folder / "err").is_dir()
    submission = json.loads((place.runs[0] / "submission.json").read_text())
    assert submission["logs"] == [f"{place.folder}/my logs/big/41-*.log", f"{place.folder}/err/e"]


def test_a_folder_that_cannot_be_made_yet_is_refused(place: Place) -> None:
    said = place.primus("slurm", "sbatch", "-o", "logs/%j/out", *TASK, code=2)
    assert "the folder's name contains the number of the job, which is not known yet" in said
    assert "cannot be created: /proc/none" in place.primus("slurm", "sbatch", "-o", "/proc/none/out", *TASK, code=1)
    assert not place.slurm.calls("sbatch")
    assert not place.runs, "a run that stays planned for ever"


def test_a_refused_job_is_said_and_leaves_nothing(place: Place) -> None:
    place.primus("slurm", "sbatch", *TASK)
    latest = os.readlink(place.folder / "out/night/latest")
    place.slurm.answers(sbatch="echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", squeue="")
    said = place.primus("slurm", "sbatch", "-p", "x", *TASK, code=1)
    assert "Slurm rejected the job: sbatch: error: invalid partition specified: x" in said
    assert [run.name for run in place.runs] == [latest]
    assert os.readlink(place.folder / "out/night/latest") == latest


def test_the_option_that_was_meant_is_named(place: Place) -> None:
    place.slurm.answers(sbatch="echo \"sbatch: unrecognized option '--max-restart'\" >&2; exit 1", squeue="")
    assert "did you mean '--max-restarts'?" in place.primus("slurm", "sbatch", "--max-restart", "2", *TASK, code=1)


def test_a_job_that_was_accepted_unheard_is_not_submitted_twice(place: Place) -> None:
    place.slurm.answers(
        sbatch="echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
        squeue='echo "40|night|primus:other"; echo "43|night|primus:$(basename out/night/2*)"',
    )
    assert "job 43 is queued" in place.primus("slurm", "sbatch", *TASK)


def test_where_nobody_knows_whether_a_job_was_accepted_that_is_said(place: Place) -> None:
    place.slurm.answers(sbatch="exit 1", squeue="echo 'squeue: error: Unable to contact' >&2; exit 1")
    said = place.primus("slurm", "sbatch", *TASK, code=1)
    assert "the job may have been accepted" in said
    assert "squeue --me --name=night" in said


def test_a_run_belongs_to_one_job(place: Place) -> None:
    place.primus("slurm", "sbatch", *TASK)
    again = ("slurm", "sbatch", "--", "train", "pretrain", "--run", str(place.runs[0]))
    (place.runs[0] / "job.sh").write_text("as job 41 has it")
    said = place.primus(*again, code=1)
    assert "belongs to job 41 of slurm, which is running" in said
    assert (place.runs[0] / "job.sh").read_text() == "as job 41 has it"
    place.slurm.answers(squeue="echo error >&2; exit 1")
    assert "squeue does not respond" in place.primus(*again, code=1)
    assert len(place.slurm.calls("sbatch")) == 1
    place.slurm.answers(
        sbatch="echo 42", squeue="echo '41|COMPLETED|None|n1'", scontrol="echo 'JobState=COMPLETED ExitCode=0:0'"
    )
    assert "job 42 is queued" in place.primus(*again)


def test_of_two_submissions_of_a_run_at_once_one_is_refused(place: Place) -> None:
    place.primus("slurm", "sbatch", *TASK)
    place.slurm.answers(
        sbatch="touch $FAKE_SLURM/asked; read -r _ <$FAKE_SLURM/go; echo 42", squeue="echo '41|CANCELLED|None||'"
    )
    os.mkfifo(place.slurm.folder / "go")
    again = ("slurm", "sbatch", "--", "train", "pretrain", "--run", str(place.runs[0]))
    environ = place.slurm.environ | {"XDG_STATE_HOME": str(place.folder / "state")}
    with cli.started(*again, cwd=place.folder, **environ) as first:
        cli.wait_for((place.slurm.folder / "asked").exists, "the first submission")
        assert "another command is submitting" in place.primus(*again, code=1)
        (place.slurm.folder / "go").write_text("go\n")
        said = "".join(first.communicate(timeout=20))
    assert "job 42 is queued" in said
    assert len(place.slurm.calls("sbatch")) == 2


def test_a_question_about_the_start_leaves_nothing(place: Place) -> None:
    place.slurm.answers(sbatch="echo 'sbatch: Job 5 to start at 2026-01-01' >&2")
    said = place.primus("slurm", "sbatch", "--test-only", *TASK)
    assert "Job 5 to start" in said
    assert place.slurm.argv("sbatch")[:2] == ["--parsable", "--test-only"]
    assert not (place.folder / "out" / "night").exists()
    place.slurm.answers(sbatch="echo 41")
    place.primus("slurm", "sbatch", *TASK)
    place.slurm.answers(sbatch="echo 'allocation failure' >&2; exit 1")
    place.primus("slurm", "sbatch", "--test-only", *TASK, code=1)
    assert len(place.runs) == 1
    assert (place.folder / "out/night/latest").resolve() == place.runs[0]


def test_without_slurm_a_clear_error_and_no_run(place: Place) -> None:
    said = place.primus("slurm", "sbatch", *TASK, code=2, PATH="/nowhere")
    assert "sbatch is not installed" in said
    assert not place.runs


def test_to_wait_gives_the_jobs_exit_code(place: Place) -> None:
    place.slurm.answers(
        squeue="[ -e seen ] && echo '41|FAILED|NonZeroExitCode|n1' || echo '41|PENDING|JobHeldUser|'; touch seen",
        scontrol="echo 'JobState=FAILED Reason=NonZeroExitCode Restarts=2 ExitCode=9:0 NodeList=n1'",
    )  # fmt: skip
    said = place.primus("slurm", "sbatch", "--wait", *TASK, code=9)
    assert "JobHeldUser, needs operator action: scontrol release 41" in said
    assert "job 41 is failed (NonZeroExitCode)" in said


def test_the_log_is_followed_until_the_end(place: Place) -> None:
    place.slurm.answers(
        sbatch="echo 41; { sleep 0.5; echo first; sleep 1; echo last; } >$(dirname ${@: -1})/logs/slurm-41.out &",
        squeue='grep -qs last out/night/2*/logs/slurm-41.out && s=COMPLETED || s=RUNNING; echo "41|$s|None|n1"',
        scontrol="echo 'JobState=COMPLETED ExitCode=0:0'",
    )
    done = cli.run("slurm", "sbatch", "--follow", *TASK, cwd=place.folder, **place.slurm.environ)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in ("first", "last")] == ["first", "last"]


def test_a_job_that_cannot_be_remembered_is_told_all_the_same(place: Place) -> None:
    (place.folder / "file").touch()
    said = place.primus("slurm", "sbatch", *TASK, XDG_STATE_HOME=str(place.folder / "file"))
    assert "job 41 is submitted, but its record cannot be written" in said
    assert "job 41 is queued" in said
    assert "running" in place.primus("direct", "--", "jobs", "show", str(place.runs[0]))


@pytest.mark.parametrize("is_accepted", [True, False])
def test_an_interrupted_submission_is_looked_for(place: Place, is_accepted: bool) -> None:
    known = 'echo "43|night|primus:$(basename out/night/2*)"' if is_accepted else ":"
    place.slurm.answers(sbatch="trap '' INT; sleep 20 & wait", squeue=known)
    environ = place.slurm.environ | {"XDG_STATE_HOME": str(place.folder / "state")}
    with cli.started("slurm", "sbatch", *TASK, cwd=place.folder, **environ) as process:
        cli.wait_for(lambda: place.slurm.calls("sbatch"), "the submission")
        process.send_signal(signal.SIGINT)
        said = "".join(process.communicate(timeout=20))
    assert process.returncode == 130, said
    if is_accepted:
        assert "job 43 is already queued" in said
        place.slurm.answers(squeue="echo '43|PENDING|None||'")
        assert "43" in place.primus("direct", "--", "jobs", "list")
    else:
        assert "squeue --me --name=night" in said
        assert place.metadata.outcome.state == "interrupted"


def test_an_interrupt_leaves_the_job_running(place: Place) -> None:
    with cli.started("slurm", "sbatch", "--follow", *TASK, cwd=place.folder, **place.slurm.environ) as process:
        cli.wait_for(lambda: place.slurm.calls("squeue"), "the first question")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "job 41 keeps running" in out + err
    assert not place.slurm.calls("scancel")


def test_a_step_that_never_began_is_recorded(place: Place) -> None:
    place.slurm.answers(srun=f"{ACCEPTED}; exit 5")
    place.primus("slurm", "-N", "2", *TASK, code=5)
    assert place.metadata.outcome.reason == "srun exited with code 5, before any node started"


@pytest.mark.parametrize(("rejection", "code"), [(255, 2), (1, 1)])
def test_a_step_that_slurm_does_not_accept_leaves_no_run(place: Place, rejection: int, code: int) -> None:
    place.slurm.answers(srun=f"{ACCEPTED}; exit 0")
    place.primus("slurm", "srun", *TASK, code=1)  # nothing was run, but there is a run
    before, latest = place.runs, os.readlink(place.folder / "out" / "night" / "latest")
    place.slurm.answers(srun=f"echo 'srun: error: no such queue' >&2; exit {rejection}")
    said = place.primus("slurm", "srun", *TASK, code=code)
    assert "primus-cli: Slurm rejected the step: no such queue\n" in said
    assert place.runs == before
    assert os.readlink(place.folder / "out" / "night" / "latest") == latest


def test_a_step_whose_nodes_have_written_something_is_no_rejected_one(place: Place) -> None:
    writes = f"mkdir -p '{place.folder}/out/night/latest/logs'; exit 1"
    place.slurm.answers(srun=writes)
    assert "srun exited with code 1, before any node started" in place.primus("slurm", "srun", *TASK, code=1)
    assert len(place.slurm.calls("srun")) == 1, "Slurm is not asked"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_cannot_plan_its_job_says_why_in_the_run(place: Place, rank: int) -> None:
    hook = place.folder / "hooks" / "train" / "warm.sh"
    hook.parent.mkdir(parents=True)
    hook.write_text("# primus: twice\n")
    launcher = f'export SLURM_NODEID={rank}; while [ "${{1##*/}}" != primus-cli ]; do shift; done; "$@"'
    place.slurm.answers(srun=f"{ACCEPTED}; {launcher}; exit $?")
    said = place.primus("slurm", "srun", *TASK, code=2)
    outcome = place.metadata.outcome
    assert (outcome.state, outcome.exit_code) == ("failed", 2)
    assert outcome.reason.endswith("hooks/train/warm.sh:1: '# primus:' has no setting 'twice'")
    assert outcome.reason.startswith("node 1 (") == (rank == 1)
    assert "before any node started" not in said
    # A command that a user types for a run that is queued, or has ended, changes nothing in it.
    place.primus("direct", "--", "train", "pretrain", "--run", str(place.runs[-1]), "--lr", "3", code=2)
    assert place.metadata.outcome == outcome
