"""Checkpoints are whole or absent, and hold the state of the step that they are named after."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from msgspec import structs

from primus.checkpoint import folders, manifest
from primus.config.schema import ModelSpec, OptimizerConfig
from primus.errors import PrimusError
from primus.frameworks.native.engine.checkpoint import (
    collect_current_state,
    count_bytes,
    prepare_files,
    read_state,
    restore_state,
)
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.session.checkpoints.resume import ResumePoint
from primus.session.checkpoints.saver import CheckpointSaver, CheckpointSettings, SavedCheckpoint, TrainingPosition
from primus.session.ranks.torch_processes import TorchProcesses

ALONE = TorchProcesses(0, 1, torch.device("cpu"), timedelta(minutes=1))


def saver(folder: Path, keep_last_n: int | None = None) -> tuple[CheckpointSaver, list[SavedCheckpoint]]:
    saved: list[SavedCheckpoint] = []
    settings = CheckpointSettings(
        backend="native",
        library_version="2",
        folder=folder,
        run="run",
        keep_last_n=keep_last_n,
        model={"num_layers": 2},
        data_fingerprint="data",
        retry_s=0.0,
    )
    return CheckpointSaver(settings, ALONE, saved.append), saved


def save(writer: CheckpointSaver, weight: torch.Tensor, step: int, is_async: bool = True) -> None:
    state = {"model.weight": weight}
    position = TrainingPosition(step, consumed_samples=10 * step)
    writer.save(lambda: prepare_files(state, is_async, ALONE), position, count_bytes(state), is_async)


def loaded(folder: Path, like: torch.Tensor) -> torch.Tensor:
    state = {"model.weight": torch.full_like(like, -1)}
    read_state(state, folder, ALONE)
    return state["model.weight"]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_checkpoint_holds_the_state_at_the_moment_of_the_call(tmp_path: Path, is_async: bool) -> None:
    weight = torch.arange(3_000_000, dtype=torch.float32)
    expected = weight.clone()
    writer, saved = saver(tmp_path)
    save(writer, weight, 7, is_async)
    weight.zero_()  # training goes on
    writer.finish_writing()
    assert torch.equal(loaded(tmp_path / "step_00000007", expected), expected)
    assert [(done.step, done.folder) for done in saved] == [(7, tmp_path / "step_00000007")]


def test_the_manifest_tells_what_the_checkpoint_is_made_of(tmp_path: Path) -> None:
    writer, saved = saver(tmp_path)
    save(writer, torch.ones(10), 7)
    writer.finish_writing()
    folder = tmp_path / "step_00000007"
    found = manifest.read_manifest(folder)
    assert found is not None
    assert (found.step, found.consumed_samples, found.run, found.world_size) == (7, 70, "run", 1)
    assert {file.name for file in found.files} == {path.name for path in folder.iterdir()} - {manifest.MANIFEST_NAME}
    assert found.total_bytes == saved[0].total_bytes
    assert manifest.find_damage(folder, found) == ""


def test_older_checkpoints_are_deleted_once_the_new_one_is_complete(tmp_path: Path) -> None:
    writer, _ = saver(tmp_path, keep_last_n=2)
    for step in (1, 2, 3, 4):
        save(writer, torch.ones(10), step)
    writer.finish_writing()
    assert [folders.parse_step(found) for found in folders.list_checkpoints(tmp_path)] == [3, 4]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_failed_write_is_an_error_and_keeps_the_checkpoint_before_it(tmp_path: Path, is_async: bool) -> None:
    weight = torch.ones(3_000_000)
    writer, saved = saver(tmp_path, keep_last_n=1)
    save(writer, weight, 1, is_async)
    writer.finish_writing()

    def write_second() -> None:
        save(writer, weight, 2, is_async)
        writer.check_last()

    with file_size_limit(1 << 20), pytest.raises(PrimusError, match="the checkpoint of step 2 could not be written"):
        write_second()
    assert [done.step for done in saved] == [1]
    assert [found.name for found in folders.list_checkpoints(tmp_path)] == ["step_00000001"], (
        "no half checkpoint is left"
    )
    assert torch.equal(loaded(tmp_path / "step_00000001", weight), weight)


def test_a_checkpoint_that_does_not_fit_on_disk_is_not_started(tmp_path: Path) -> None:
    writer, _ = saver(tmp_path)
    huge = torch.empty(1 << 50, device="meta")
    save(writer, huge, 3)
    with pytest.raises(PrimusError, match=r"step 3 .* no space left: it needs 4194304.000 GiB, and .* are free"):
        writer.check_last()
    assert folders.list_checkpoints(tmp_path) == []


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    half = tmp_path / "step_00000005"
    half.mkdir()
    (half / "__7_0.distcp").write_bytes(b"half of a file of a larger job")
    writer, _ = saver(tmp_path)
    save(writer, torch.ones(10), 5)
    writer.finish_writing()
    assert not (half / "__7_0.distcp").exists()
    assert folders.is_complete(half)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer, _ = saver(tmp_path / "file")
    save(writer, torch.ones(10), 1)
    with pytest.raises(PrimusError, match=r"file/step_00000001: Not a directory"):
        writer.check_last()


def test_a_tensor_of_another_size_cannot_be_loaded(tmp_path: Path) -> None:
    writer, _ = saver(tmp_path)
    save(writer, torch.ones(10), 1)
    writer.finish_writing()
    for name, shape, problem in (
        ("model.weight", 11, r"cannot be loaded: model.weight is \[10\] in it, and \[11\] in this model"),
        ("optimizer.exp_avg.weight", 10, r"cannot be loaded: it has no optimizer.exp_avg.weight"),
    ):
        with pytest.raises(PrimusError, match=problem) as raised:
            read_state({name: torch.ones(shape)}, tmp_path / "step_00000001", ALONE)
        assert "any layout" in str(raised.value.hint)


@pytest.mark.parametrize("world_size", [1, 2])
def test_generators_are_restored_only_by_as_many_processes_as_have_saved(tmp_path: Path, world_size: int) -> None:
    spec = ModelSpec(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=16)
    model = build_model(spec, "cpu", 1)
    optimizer = build_optimizer(model, OptimizerConfig())
    torch.manual_seed(1)
    state = collect_current_state(model, optimizer, ALONE)
    writer, _ = saver(tmp_path)
    writer.save(lambda: prepare_files(state, False, ALONE), TrainingPosition(1, 1), count_bytes(state), False)
    saved, seeded = torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(2))
    found = manifest.read_manifest(tmp_path / "step_00000001")
    assert found is not None
    torch.manual_seed(2)
    start = ResumePoint(tmp_path / "step_00000001", structs.replace(found, world_size=world_size))
    restore_state(start, model, optimizer, ALONE)
    assert torch.equal(torch.rand(3), saved if world_size == 1 else seeded)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Writes beyond `limit` bytes fail, as on a full disk; Python ignores the signal that would end the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
