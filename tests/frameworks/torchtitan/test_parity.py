"""torchtitan and native train alike: fp32 on a CPU, the same weights, tokens and learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .runs import (
    KINDS,
    SCRIPT,
    STEPS,
    STEPS_OF_PROCESSES,
    build_trainer,
    draw_tokens,
    measure_trained_model,
    train_by_engine,
    train_native,
    write_start,
)

pytestmark = [pytest.mark.engine("torchtitan"), pytest.mark.slow]

FIRST_LOSS, LOSS, GRADIENT_NORM = 1e-6, 5e-5, 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"use_distributed_optimizer": False},
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def compare(tmp_path: Path, runs: list[tuple[str, dict[str, Any]]], world: int) -> None:
    """Compare each run, a kind of model and a layout, with native in one process."""
    trainers = [build_trainer(kind, parallel=layout) for kind, layout in runs]
    starts = {kind: write_start(tmp_path / kind, build_trainer(kind)) for kind, _ in runs}
    last = STEPS if world == 1 else STEPS_OF_PROCESSES
    requests = [(trainer, {**starts[kind], "last": last}) for trainer, (kind, _) in zip(trainers, runs, strict=True)]
    found = train_by_engine(tmp_path / "engine", requests, world=world)
    expected = {kind: train_native(build_trainer(kind), draw_tokens(build_trainer(kind)), last) for kind in starts}
    for (kind, layout), result in zip(runs, found, strict=True):
        steps = list(zip(result["steps"], expected[kind], strict=True))
        losses = [abs(mine[0] - native[0]) for mine, native in steps]
        norms = [abs(mine[1] / native[1] - 1) for mine, native in steps]
        differences = (kind, layout, losses[0], max(losses), max(norms))
        assert losses[0] <= FIRST_LOSS, differences
        assert max(losses) <= LOSS, differences
        assert max(norms) <= GRADIENT_NORM, differences
        assert not any(skipped for _, _, skipped in result["steps"])
        assert expected[kind][0][0] - expected[kind][-1][0] > 0.1  # it learns, so that an error would show


def test_one_process_has_the_losses_of_native(tmp_path: Path) -> None:
    compare(tmp_path, [(kind, {}) for kind in KINDS], world=1)


def test_a_trained_model_has_the_losses_of_float64(tmp_path: Path) -> None:
    losses = measure_trained_model(tmp_path, "torchtitan", SCRIPT)
    assert losses[0] <= FIRST_LOSS and max(losses) <= LOSS, losses


def test_two_processes_have_the_losses_of_native_in_every_layout(tmp_path: Path) -> None:
    compare(tmp_path, [("llama", layout) for layout in LAYOUTS.values()], world=2)


def test_two_processes_have_the_losses_of_native_for_every_model(tmp_path: Path) -> None:
    tied = [kind for kind in KINDS if kind != "llama"]
    runs = [(kind, layout) for kind in tied for layout in (LAYOUTS["sharded"], LAYOUTS["tensor and sequence"])]
    compare(tmp_path, [*runs, ("qwen3-untied", LAYOUTS["pipeline"])], world=2)
