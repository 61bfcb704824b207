"""A checkpoint that cannot be written does not end the run: it is reported, tried again, and counts at the end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fakes.bigram_engine import BigramEngine, train_bigrams
from fakes.small_disk import fill_disk, mount_small_disk
from fakes.training_runs import write_training_run
from primus import experiment
from primus.callback import SavedCheckpoint
from primus.checkpoint import folders, manifest
from primus.errors import PrimusError
from primus.runs import events
from primus.runs.attempt import Attempt
from primus.runs.store import Run
from primus.session.checkpoints.saver import CheckpointSaver, CheckpointSettings, FailedCheckpoint, TrainingPosition
from primus.session.ranks.processes import OneProcess

SETTINGS: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 32,
    "train_iters": 6,
    "micro_batch_size": 2,
    "bf16": False,
    "lr": 1.0,
    "lr_warmup_iters": 0,
    "save_interval": 1,
    "disable_tensorboard": True,
}
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE)


class RecordingSaver(CheckpointSaver):
    """Keeps what it reports; its files are one number."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.saved: list[SavedCheckpoint] = []
        self.failed: list[FailedCheckpoint] = []
        self.waits_for: list[int] = []
        defaults: dict[str, Any] = {
            "backend": "abacus", "library_version": "1", "folder": folder, "run": "run", "keep_last_n": None,
            "model": {}, "data_fingerprint": "data", "retry_s": 0.0, "max_failed": 3,
        }  # fmt: skip
        super().__init__(
            CheckpointSettings(**{**defaults, **settings}),
            OneProcess(),
            self.saved.append,
            self.failed.append,
            self.waits_for.append,
        )

    def save_number(self, step: int, errors: list[int], in_thread: bool = False, num_bytes: int = 0) -> None:
        """Save; each number in `errors` is the errno of one try."""

        def write(folder: Path) -> None:
            if errors:
                number = errors.pop(0)
                (folder / "half").write_text("1")
                raise OSError(number, os.strerror(number))
            (folder / "number").write_text(str(step))

        self.save(lambda: write, TrainingPosition(step, step), num_bytes, in_thread)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("number", DISK_ERRORS)
def test_a_write_that_fails_once_is_repeated_in_an_empty_folder(tmp_path: Path, number: int, in_thread: bool) -> None:
    saver = RecordingSaver(tmp_path)
    saver.save_number(1, [number], in_thread)
    saver.check_last()
    assert [saved.step for saved in saver.saved] == [1] and not saver.failed
    found = manifest.read_manifest(tmp_path / "step_00000001")
    assert found is not None and [file.name for file in found.files] == ["number"]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("number", DISK_ERRORS)
def test_a_write_that_fails_twice_is_reported_and_the_checkpoint_before_it_is_kept(
    tmp_path: Path, number: int, in_thread: bool
) -> None:
    saver = RecordingSaver(tmp_path, keep_last_n=1)
    saver.save_number(1, [], in_thread)
    saver.save_number(2, [number, number], in_thread)
    saver.finish_writing()
    assert [(failed.step, failed.num_failed) for failed in saver.failed] == [(2, 1)]
    assert os.strerror(number) in saver.failed[0].error.problem and "step_00000002" in saver.failed[0].error.problem
    assert [found.name for found in tmp_path.iterdir()] == ["step_00000001"], "no half checkpoint takes space"
    assert saver.last_step is None, "the step is not saved"
    with pytest.raises(PrimusError, match="the checkpoint of step 2 could not be written"):
        saver.check_last()
    saver.save_number(3, [], in_thread)
    saver.check_last()
    assert [found.name for found in tmp_path.iterdir()] == ["step_00000003"] and saver.last_step == 3


def test_only_failures_in_a_row_use_up_the_limit(tmp_path: Path) -> None:
    saver = RecordingSaver(tmp_path, max_failed=2)
    for step, is_written in enumerate([False, True, False, True], start=1):
        saver.save_number(step, [] if is_written else [errno.EIO] * 2)
        assert not saver.has_given_up
    saver.save_number(5, [errno.EIO] * 2)
    assert not saver.has_given_up
    saver.save_number(6, [errno.EIO] * 2)
    assert saver.has_given_up and [failed.num_failed for failed in saver.failed] == [1, 1, 1, 2]


def test_a_full_disk_is_noticed_before_the_engine_writes(tmp_path: Path) -> None:
    """Files of an engine that are smaller than what is left could be written, and its peers would wait for the rest."""
    with mount_small_disk(tmp_path / "disk", 4) as disk:
        saver = RecordingSaver(disk)
        ballast = fill_disk(disk)
        ballast.write_bytes(ballast.read_bytes()[: -(1 << 16)])
        saver.save_number(1, [])
        assert [failed.step for failed in saver.failed] == [1] and folders.list_checkpoints(disk) == []
        ballast.unlink()
        saver.save_number(2, [])
        assert [saved.step for saved in saver.saved] == [2]


def test_the_size_of_the_checkpoint_before_must_be_free(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", 8) as disk:
        saver = RecordingSaver(disk)
        saver.save(lambda: lambda folder: fill(folder / "x", 5 << 20), TrainingPosition(1, 1), 0, False)
        saver.save_number(2, [])
        assert "no space left: it needs 0.005 GiB, and 0.003 GiB are free" in saver.failed[0].error.problem


def fill(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))


def test_older_checkpoints_that_cannot_be_deleted_do_not_spoil_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path, keep: int) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(folders, "prune_checkpoints", refuse)
    saver = RecordingSaver(tmp_path, keep_last_n=1)
    saver.save_number(1, [])
    assert [saved.step for saved in saver.saved] == [1] and not saver.failed
    assert "older checkpoints could not be deleted" in capfd.readouterr().err


def test_a_save_that_has_to_wait_for_the_one_before_says_so(tmp_path: Path) -> None:
    saver = RecordingSaver(tmp_path)
    is_waiting = saver.waits_for
    saver.save(lambda: lambda folder: wait_until(lambda: bool(is_waiting)), TrainingPosition(1, 1), 0, True)
    saver.save_number(2, [])
    assert saver.waits_for == [1] and [saved.step for saved in saver.saved] == [1, 2]


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        pass


class FailingEngine(BigramEngine):
    """Its disk refuses the checkpoints of some steps."""

    refused: tuple[int, ...] = ()

    def save(self, folder: Path) -> None:
        if self.steps in self.refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save(folder)


def train(run: Run, monkeypatch: pytest.MonkeyPatch, *refused: int, stop: str | None = None, number: int = 0) -> None:
    monkeypatch.setattr("fakes.bigram_engine.BigramEngine", FailingEngine)
    monkeypatch.setattr(FailingEngine, "refused", refused)
    monkeypatch.setattr(CheckpointSettings, "retry_s", 0.0)
    with closing(Attempt(run, number)) as attempt:
        attempt.stop_signal = stop
        train_bigrams(experiment.read_run_experiment(run), attempt)


def list_steps(run: Run, kind: str) -> list[int]:
    return [event["step"] for event in events.read_events(run.events) if event["kind"] == kind]


def test_a_run_goes_on_after_a_failed_save_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_training_run(tmp_path, SETTINGS)
    train(run, monkeypatch, 2, 3, 5)
    assert list_steps(run, "step") == [1, 2, 3, 4, 5, 6] and list_steps(run, "training_ended")
    assert list_steps(run, "checkpoint_failed") == [2, 3, 5]
    assert list_steps(run, "checkpoint_saved") == [1, 4, 6]
    said = capsys.readouterr().out
    assert "step_00000002: No space left on device (the run fails after 2 more)" in said
    assert "step_00000003: No space left on device (the run fails after 1 more)" in said


def test_a_run_fails_when_too_many_saves_in_a_row_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_training_run(tmp_path, SETTINGS, max_failed_saves=2)
    with pytest.raises(PrimusError, match="the checkpoint of step 4 could not be written"):
        train(run, monkeypatch, 1, 3, 4)
    assert list_steps(run, "step") == [1, 2, 3, 4] and list_steps(run, "checkpoint_saved") == [2]
    train(run, monkeypatch, number=1)
    assert list_steps(run, "step") == [1, 2, 3, 4, 3, 4, 5, 6], "it resumes from the last complete checkpoint"


def test_a_last_save_that_fails_counts_after_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_training_run(tmp_path, SETTINGS)
    with pytest.raises(PrimusError, match="the checkpoint of step 6 could not be written"):
        train(run, monkeypatch, 6)
    assert list_steps(run, "training_ended") == [6] and list_steps(run, "checkpoint_saved") == [1, 2, 3, 4, 5]


def test_a_save_after_a_signal_that_fails_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_training_run(tmp_path, SETTINGS, train_iters=1)
    train(run, monkeypatch)
    longer = write_training_run(tmp_path, SETTINGS, "longer", save_interval=None, load=str(run.checkpoints))

    def stop_after_a_step(engine: BigramEngine, *args: Any) -> Any:
        attempts[0].stop_signal = "SIGTERM"
        return step(engine, *args)

    attempts, step = [], BigramEngine.step
    monkeypatch.setattr(BigramEngine, "step", stop_after_a_step)
    monkeypatch.setattr("fakes.bigram_engine.BigramEngine", FailingEngine)
    monkeypatch.setattr(FailingEngine, "refused", (1,))
    monkeypatch.setattr(CheckpointSettings, "retry_s", 0.0)
    with closing(Attempt(longer, 0)) as attempt:
        attempts.append(attempt)
        with pytest.raises(PrimusError, match="could not be written"):
            train_bigrams(experiment.read_run_experiment(longer), attempt)
    assert list_steps(longer, "interrupted") == [], "the event implies a complete checkpoint"
