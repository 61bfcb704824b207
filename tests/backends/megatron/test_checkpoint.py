"""Checkpoints of the megatron backend: bit-identical on the same processes, and readable by other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.torchtitan.runs import write_start
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats.open import open_checkpoint

from .test_parity import EXPERTS, build, train_all, write_expert_start

pytestmark = [pytest.mark.engine("megatron"), pytest.mark.slow]


@pytest.mark.parametrize(("world", "optimizer"), [(1, True), (1, False), (2, True)])
def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(tmp_path: Path, world: int, optimizer: bool) -> None:
    trainer = build("llama", parallel={"use_distributed_optimizer": optimizer})
    start = write_start(tmp_path / "start", trainer)
    saved = str(tmp_path / "saved")
    requests: list[dict[str, Any]] = [
        {**start, "last": 6},
        {**start, "last": 3, "save": saved},
        {**start, "load": saved, "first": 4, "last": 6},
    ]
    whole, _, resumed = train_all(tmp_path, [(trainer, request) for request in requests], world)
    assert resumed["steps"] == whole["steps"][3:]


def test_another_layout_continues_from_the_weights_and_the_optimizer(tmp_path: Path) -> None:
    trainer = build("llama")
    start = write_start(tmp_path / "start", trainer)
    saved = str(tmp_path / "saved")
    (whole, _) = train_all(tmp_path, [(trainer, {**start, "last": 6}), (trainer, {**start, "last": 3, "save": saved})])
    layouts = [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}]
    resume = {**start, "load": saved, "first": 4, "last": 6}
    resumed = train_all(tmp_path / "two", [(build("llama", parallel=each), resume) for each in layouts], 2)
    for layout, result in zip(layouts, resumed, strict=True):
        losses = [loss for loss, *_ in result["steps"]]
        assert losses == pytest.approx([loss for loss, *_ in whole["steps"][3:]], abs=5e-5), layout


def test_a_checkpoint_after_skipped_steps_only_is_complete(tmp_path: Path) -> None:
    trainer = build("llama")
    start = write_start(tmp_path / "start", trainer)
    saved = str(tmp_path / "saved")
    requests = [{**start, "last": 0, "save": saved}, {**start, "load": saved, "last": 2}, {**start, "last": 2}]
    _, resumed, whole = train_all(tmp_path, [(trainer, request) for request in requests])
    assert resumed["steps"] == whole["steps"]


def test_experts_continue_with_and_without_expert_parallelism(tmp_path: Path) -> None:
    """The number of optimizers depends on the layout; a converted checkpoint has stacked layers."""
    trainer = build("llama", model=EXPERTS)
    start = write_expert_start(tmp_path / "start", trainer)
    saved, converted = tmp_path / "saved", tmp_path / "converted"
    (whole, _) = train_all(
        tmp_path, [(trainer, {**start, "last": 7}), (trainer, {**start, "last": 3, "save": str(saved)})]
    )
    opened = open_checkpoint(str(saved), trainer.model)
    write_conversion(plan_conversion(opened, TargetSettings("megatron", optimizer=True)), converted, lambda _: None)
    (iteration,) = converted.glob("[ir]*")
    resumes = [{**start, "load": str(folder), "first": 4, "last": 6} for folder in (saved, iteration)]
    parallel = build("llama", model=EXPERTS, parallel={"expert_model_parallel_size": 2})
    again = tmp_path / "again"
    results = train_all(tmp_path / "two", [(parallel, {**resumes[0], "save": str(again)}), (parallel, resumes[1])], 2)
    results += train_all(tmp_path, [(trainer, resumes[1])])
    results += train_all(tmp_path, [(trainer, {**start, "load": str(again), "first": 7, "last": 7})])
    expected = [loss for loss, *_ in whole["steps"]]
    for result in results:
        losses = [loss for loss, *_ in result["steps"]]
        assert losses == pytest.approx(expected[6:] if len(losses) == 1 else expected[3:6], abs=5e-5)
