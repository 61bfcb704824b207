"""Checkpoints of the megatron backend: bit-identical on the same processes, and readable by other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frameworks.torchtitan.runs import write_start
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats.open import open_checkpoint

from .test_parity import EXPERTS, LAYOUTS, build, change, train_all, write_expert_start

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


def test_a_padded_vocabulary_is_in_no_export_and_continues_with_other_padding(tmp_path: Path) -> None:
    """300 tokens: 512 rows over two processes, of which the second has 212 of padding, and 384 on one."""
    import torch

    one = build("llama-tied", model={"vocab_size": 300})
    two = change(one, parallel=LAYOUTS["tensor"])
    start = write_start(tmp_path / "start", one)
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    (whole,) = train_all(tmp_path, [(one, {**start, "last": 6})])
    (begun,) = train_all(tmp_path / "two", [(two, {**start, "last": 3, "save": str(saved)})], 2)
    assert [loss for loss, *_ in begun["steps"]] == pytest.approx([loss for loss, *_ in whole["steps"][:3]], abs=1e-6)

    state = read_embedding_state(saved)
    assert {len(tensor) for tensor in state.values()} == {512}
    assert all(not tensor[300:].any() and tensor[:300].any() for tensor in state.values())

    opened = open_checkpoint(str(saved), one.model)
    write_conversion(plan_conversion(opened, TargetSettings("huggingface")), exported, lambda _: None)
    weights = open_checkpoint(str(exported)).weights.read("model.embed_tokens.weight")
    assert torch.equal(weights, state["embedding.word_embeddings.weight"][:300])

    converted = tmp_path / "converted"
    write_conversion(plan_conversion(opened, TargetSettings("megatron", optimizer=True)), converted, lambda _: None)
    (iteration,) = converted.glob("[ir]*")
    resumes = [{**start, "load": str(folder), "first": 4, "last": 6} for folder in (saved, iteration)]
    results = train_all(tmp_path / "again", [(two, each) for each in resumes], 2)
    results += train_all(tmp_path, [(one, each) for each in resumes])
    for result in results:
        losses = [loss for loss, *_ in result["steps"]]
        assert losses == pytest.approx([loss for loss, *_ in whole["steps"][3:]], abs=2e-6)


def test_rows_of_padding_stay_zero_where_the_engine_draws_the_weights(tmp_path: Path) -> None:
    trainer = build("llama", model={"vocab_size": 300}, training={"init": "engine"})
    start = write_start(tmp_path / "start", trainer)
    del start["weights"]
    train_all(tmp_path, [(trainer, {**start, "last": 2, "save": str(tmp_path / "saved")})])
    state = read_embedding_state(tmp_path / "saved")
    assert all(len(tensor) == 384 and not tensor[300:].any() and tensor[:300].any() for tensor in state.values())


def read_embedding_state(folder: Path) -> dict[str, Any]:
    """The tensors of weights and optimizer with a row for each token, as they are in the files."""
    from primus.checkpoint.formats.dcp import DcpFolder

    files = DcpFolder(folder)
    names = [name for name in files.list_tensors() if name.endswith(("word_embeddings.weight", "output_layer.weight"))]
    assert len(names) >= 4  # masters and two moments, too
    return {name: files.read(name) for name in names}
