"""A disk that is full while a run trains ends neither its steps nor its records, and what is freed is used."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.small_disk import fill_disk, mount_small_disk
from primus.checkpoint import folders, manifest
from primus.runs import events
from primus.runs.store import Run


def list_steps(run: Run, kind: str) -> list[int]:
    return [event["step"] for event in events.read_events(run.events) if event["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [True, False])
def test_two_processes_train_on_while_the_disk_is_full_and_save_when_it_is_free(
    tmp_path: Path, make_run: Callable[..., Run], start_workers: Callable[..., Any], async_save: bool
) -> None:
    with mount_small_disk(tmp_path / "disk", 16) as disk:
        run = make_run(
            train_iters=100_000, save_interval=25, keep_last_n=1, global_batch_size=4, save=str(disk / "saved"),
            async_save=async_save, max_failed_saves=1000,
        )  # fmt: skip
        workers = start_workers(run, world=2)
        workers.wait_for_event("checkpoint_saved")
        ballast = fill_disk(disk)
        workers.wait_for_event("checkpoint_failed")
        (kept,) = [found for found in folders.list_checkpoints(disk / "saved") if folders.is_complete(found)]
        found = manifest.read_manifest(kept)
        assert found is not None and manifest.find_damage(kept, found) == ""
        ballast.unlink()
        failed = list_steps(run, "checkpoint_failed")[-1]
        workers.wait_for_event("checkpoint_saved", failed + 1)
        workers.send(signal.SIGTERM)
        said = workers.succeed()
        assert list_steps(run, "interrupted") == [list_steps(run, "checkpoint_saved")[-1]]
        assert "could not be written" in said and "no space left" in said.lower()


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step_when_too_many_saves_have_failed(
    tmp_path: Path, make_run: Callable[..., Run], start_workers: Callable[..., Any]
) -> None:
    with mount_small_disk(tmp_path / "disk", 1) as disk:
        run = make_run(train_iters=100_000, save_interval=5, global_batch_size=4, save=str(disk), max_failed_saves=2)
        workers = start_workers(run, world=2)
        assert workers.wait() == [1, 1]
        assert len(list_steps(run, "checkpoint_failed")) == 2
        for rank in (0, 1):
            assert "could not be written" in (run.attempt_folder(0) / f"rank_{rank}.error.json").read_text()
        assert [found.name for found in disk.iterdir()] == []
