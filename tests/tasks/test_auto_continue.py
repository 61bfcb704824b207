"""`auto_continue_train` continues what has ended early, and begins nothing beside what has not ended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from pathlib import Path

import pytest

from fakes import cli
from primus.errors import UsageError
from primus.launch.jobs import run_claims
from primus.launch.run_folder import make_run_folder
from primus.plan import LaunchJob
from primus.runs import lock
from primus.runs.store import Run, RunOutcome, create_run_id, list_runs
from primus.runtime import LaunchRequest
from primus.task import TaskContext
from primus.tasks.train._job import prepare_new_run

EXPERIMENT = """\
exp_name: night
workspace: out
modules:
  pre_trainer:
    framework: abacus
    model: tiny
    overrides: {mock_data: true, seq_length: 8, train_iters: 3, auto_continue_train: true}
"""


@pytest.fixture
def begun(tmp_path: Path) -> Run:
    """A run that says it is running, and has a checkpoint."""
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    assert train(tmp_path).returncode == 0
    (run,) = list_runs(tmp_path / "out" / "night")
    run.update_metadata(outcome=RunOutcome(state="running"))
    (run.checkpoints / "step_00000001").mkdir(parents=True)
    (run.checkpoints / "step_00000001" / "manifest.json").write_text("{}")
    return run


def train(folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return cli.run(*before, "direct", "--", "train", "pretrain", "--config", "night.yaml", *words, cwd=folder)


def write_record(run: Run, renewal: int) -> None:
    record = {"host": "another-host", "pid": 77, "renewal": renewal}
    path = run.directory / lock.FILE
    path.with_suffix(".new").write_text(json.dumps(record))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("before", [(), ("--dry-run",)])
def test_a_run_that_is_executed_is_neither_continued_nor_begun_again(
    begun: Run, tmp_path: Path, before: tuple[str, ...]
) -> None:
    with begun.hold_lock():
        refused = train(tmp_path, before=before)
    assert refused.returncode == 2
    assert f"{begun.directory.relative_to(tmp_path)} is executed by process " in refused.stderr
    assert "--auto_continue_train false" in refused.stderr
    assert [run.id for run in list_runs(tmp_path / "out" / "night")] == [begun.id]


def test_a_run_that_has_no_checkpoint_yet_is_not_begun_again_either(begun: Run, tmp_path: Path) -> None:
    (begun.checkpoints / "step_00000001" / "manifest.json").unlink()
    with begun.hold_lock():
        assert train(tmp_path).returncode == 2
        beside = train(tmp_path, "--auto_continue_train", "false")
    assert beside.returncode == 0, beside.stderr
    assert len(list_runs(tmp_path / "out" / "night")) == 2


def test_a_run_that_another_host_executes_is_not_begun_again(begun: Run, tmp_path: Path) -> None:
    over = threading.Event()

    def renew() -> None:
        renewal = 0
        while not over.wait(0.2):
            renewal += 1
            write_record(begun, renewal)

    write_record(begun, 0)
    other = threading.Thread(target=renew)
    other.start()
    try:
        refused = train(tmp_path)
    finally:
        over.set()
        other.join()
    assert refused.returncode == 2
    assert "is executed by process 77 on another-host" in refused.stderr


def test_a_run_whose_launcher_died_is_continued_here_and_from_another_host(begun: Run, tmp_path: Path) -> None:
    again = train(tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"continuing {begun.directory.relative_to(tmp_path)}" in again.stdout
    begun.update_metadata(outcome=RunOutcome(state="running"))
    write_record(begun, 5)
    again = train(tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"continuing {begun.directory.relative_to(tmp_path)}" in again.stdout
    assert "checking whether it is still active" in again.stdout
    assert lock.read_record(begun.directory / lock.FILE) is None


def test_the_same_command_typed_twice_in_one_moment_starts_one_run(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    # Both have listed the runs before either has created its own.
    first, second, other = (plan(tmp_path, *words) for words in ((), (), ("--auto_continue_train", "false")))
    run = create(first, tmp_path)
    with pytest.raises(UsageError, match=f"has just started .*{run.id}"):
        create(second, tmp_path)
    assert create(other, tmp_path), "runs that continue nothing are independent"
    assert len(list_runs(tmp_path / "out" / "night")) == 2


def test_a_run_that_its_command_has_created_but_not_locked_yet_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    run = create(plan(tmp_path), tmp_path)
    late = plan(tmp_path)
    late.check_start()  # nobody holds the run yet
    with run.hold_lock(), pytest.raises(UsageError, match="has just started"):
        create(late, tmp_path)
    with run_claims.hold_for_submission(run, {}), pytest.raises(UsageError, match="another command is starting"):
        late.check_start()
    late.check_start()


def plan(folder: Path, *words: str) -> LaunchJob:
    """A run of the experiment, planned by a command of its own."""
    config = (
        EXPERIMENT.replace("workspace: out", f"workspace: {folder / 'out'}")
        .replace("abacus", "native")
        .replace("tiny", "llama_quickstart.yaml")
    )
    (folder / "night.yaml").write_text(config)
    context = TaskContext(environ={}, overrides=words)
    return prepare_new_run(str(folder / "night.yaml"), "pre_trainer", context)


def create(job: LaunchJob, folder: Path) -> Run:
    request = LaunchRequest(runtimes=(), task="train pretrain", words=())
    return make_run_folder(folder / "out" / "night" / create_run_id(), job, request, ())


def test_a_run_that_changed_settings_leave_behind_is_named_with_both_ways_on(begun: Run, tmp_path: Path) -> None:
    # Runs of one second have no order.
    cli.wait_for(lambda: create_run_id()[: len("20260101_000000")] > begun.id, "another second")
    changed = train(tmp_path, "--train_iters", "5", "--micro_batch_size", "2")
    assert changed.returncode == 0, changed.stderr
    where = begun.directory.relative_to(tmp_path)
    assert f"note: auto_continue_train: {where} ended early and is not resumed, because settings differ:" in (
        changed.stderr
    )
    assert "micro_batch_size 2 instead of 1, train_iters 5 instead of 3;" in changed.stderr
    assert f"`--load {where}/checkpoints` begins a new run at its step 1" in changed.stderr
    assert f"`--run {where}`" in changed.stderr
    assert len(list_runs(tmp_path / "out" / "night")) == 2

    planned = train(tmp_path, "--micro_batch_size", "2", before=("--dry-run",))
    assert "auto_continue_train" not in planned.stdout + planned.stderr, "the newest run of the model is done"


@pytest.mark.parametrize("how", ["it is executed", "it is done", "it has another model", "the settings are the same"])
def test_a_run_is_not_named_as_left_behind_where(begun: Run, tmp_path: Path, how: str) -> None:
    words = {
        "it has another model": ("--num_layers", "3"),
        "the settings are the same": (),
    }.get(how, ("--micro_batch_size", "2"))
    if how == "it is done":
        begun.update_metadata(outcome=RunOutcome(state="done"))
    with begun.hold_lock() if how == "it is executed" else contextlib.nullcontext():
        found = train(tmp_path, *words, before=("--dry-run",))
    assert found.returncode == 0, found.stderr
    assert "ended early" not in found.stdout + found.stderr
    resumes = f"resumes {begun.id} from its newest checkpoint" in found.stdout
    assert resumes == (how == "the settings are the same")


def test_a_plan_has_the_note_about_a_run_that_is_left_behind(begun: Run, tmp_path: Path) -> None:
    planned = train(tmp_path, "--lr", "0.5", before=("--dry-run",))
    assert "note: auto_continue_train: " in planned.stdout and "lr 0.5 instead of " in planned.stdout
