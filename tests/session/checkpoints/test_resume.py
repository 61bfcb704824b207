"""The checkpoint that a run starts from: what the processes agree on, and what a run takes over from another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.training_runs import write_training_run
from primus.checkpoint import manifest
from primus.checkpoint.manifest import CheckpointManifest
from primus.checkpoint.shape import build_shape
from primus.experiment import read_run_experiment
from primus.runs.store import Run
from primus.session.checkpoints.resume import CheckpointSearch, ResumePoint
from primus.session.ranks.processes import OneProcess, Processes

WORLD = 3
FILES = ("a.bin", "b.bin", "c.bin")


@dataclass
class ThreadProcess:
    """One of several processes that are threads here, and exchange values through a list."""

    rank: int
    values: list[Any]
    barrier: threading.Barrier
    writer_group: None = None

    @property
    def world(self) -> int:
        return len(self.values)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather_values(self, value: Any, group: Any = None) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait(30)
        found = list(self.values)
        self.barrier.wait(30)
        return found

    def all_reduce_max(self, value: int) -> int:
        return int(max(self.all_gather_values(value)))

    def broadcast_from_first(self, value: Any) -> Any:
        return self.all_gather_values(value)[0]


def write_checkpoint(run: Run, step: int) -> Path:
    folder = run.checkpoints / f"step_{step:08d}"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f"{name} of step {step}")
    written = CheckpointManifest(
        backend="native",
        run=run.id,
        step=step,
        consumed_samples=2 * step,
        recent_losses=[3.0, 2.5],
        callbacks={"counter": step},
        model=build_shape(read_run_experiment(run).trainer.model),
        data_fingerprint="",
        compiled=False,
        world_size=WORLD,
        torch_version="",
        created=0.0,
        algorithm="blake2b",
        files=[manifest.build_entry(folder, name, "blake2b") for name in FILES],
    )
    manifest.write_manifest(folder, written)
    return folder


def find_start(run: Run, processes: Processes, said: list[str]) -> ResumePoint | None:
    trainer = read_run_experiment(run).trainer
    shape = build_shape(trainer.model)
    search = CheckpointSearch(
        run, trainer.checkpoint, shape, processes, said.append, lambda kind, **fields: None, "native"
    )
    return search.find_start()


def test_damage_that_one_process_finds_makes_all_of_them_take_the_checkpoint_before(tmp_path: Path) -> None:
    for damaged in FILES:
        run = write_training_run(tmp_path, {"mock_data": True}, f"without-{damaged}")
        write_checkpoint(run, 3)
        (write_checkpoint(run, 6) / damaged).write_text(f"{damaged} of step 7")
        said: list[list[str]] = [[] for _ in range(WORLD)]
        barrier = threading.Barrier(WORLD)
        values: list[Any] = [None] * WORLD
        with ThreadPoolExecutor(WORLD) as threads:
            each = [threads.submit(find_start, run, ThreadProcess(rank, values, barrier), said[rank])
                    for rank in range(WORLD)]  # fmt: skip
            starts = [future.result(60) for future in each]
        assert [start.step if start else None for start in starts] == [3] * WORLD
        assert said == [[f"checkpoint step_00000006 is skipped: {damaged} does not have its checksum"]] * WORLD


def test_a_run_that_begins_with_the_weights_of_another_takes_over_nothing_else(tmp_path: Path) -> None:
    first = write_training_run(tmp_path, {"mock_data": True}, "first")
    write_checkpoint(first, 6)
    settings = {"mock_data": True, "load": str(first.directory)}
    found = [
        find_start(write_training_run(tmp_path, {**settings, "finetune": finetune}, name), OneProcess(), [])
        for name, finetune in (("whole", False), ("weights", True))
    ]
    taken = [(s.step, s.consumed_samples, s.recent_losses, s.callback_state) for s in found if s is not None]
    assert taken == [(6, 12, [3.0, 2.5], {"counter": 6}), (0, 0, [], {})]
