"""megatron-core and native train alike: fp32 on a CPU, the same weights, tokens and learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from frameworks.engine_processes import ask_engine
from frameworks.torchtitan.runs import (
    KINDS,
    STEPS,
    STEPS_OF_PROCESSES,
    build_trainer,
    draw_tokens,
    measure_trained_model,
    train_by_engine,
    train_native,
    write_start,
)
from primus.config.schema import Trainer

pytestmark = [pytest.mark.engine("megatron"), pytest.mark.slow]

FIRST_LOSS, LOSS, GRADIENT_NORM = 1e-6, 5e-5, 1e-4
SCRIPT = Path(__file__).with_name("engine_process.py")
LAYOUTS: dict[str, dict[str, Any]] = {
    "distributed optimizer": {},
    "replicated": {"use_distributed_optimizer": False},
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_router_norm_topk_prob": True}


def build(kind: str, **changes: Any) -> Trainer:
    return replace(build_trainer(kind, **changes), framework="megatron")


def change(trainer: Trainer, **groups: Any) -> Trainer:
    """A trainer with other values in its groups, and with `backend_args` of its own."""
    for group, values in groups.items():
        new = values if group == "backend_args" else replace(getattr(trainer, group), **values)
        trainer = replace(trainer, **{group: new})
    return trainer


def train_all(tmp_path: Path, requests: list[tuple[Trainer, dict[str, Any]]], world: int = 1) -> list[dict[str, Any]]:
    return train_by_engine(tmp_path / "engine", requests, world=world, engine="megatron", script=SCRIPT)


def run_code(code: str) -> str:
    """What a program prints in a process that has imported megatron-core."""
    return str(ask_engine("megatron", SCRIPT, 1, [{"code": code}])[0]["printed"])


def compare(tmp_path: Path, runs: list[tuple[str, dict[str, Any]]], world: int) -> None:
    """Compare each run, a kind of model and a layout, with native in one process."""
    starts = {kind: write_start(tmp_path / kind, build(kind)) for kind, _ in runs}
    last = STEPS if world == 1 else STEPS_OF_PROCESSES
    requests = [(build(kind, parallel=layout), {**starts[kind], "last": last}) for kind, layout in runs]
    found = train_all(tmp_path, requests, world)
    expected = {kind: train_native(build(kind), draw_tokens(build(kind)), last) for kind in starts}
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
    losses = measure_trained_model(tmp_path, "megatron", SCRIPT)
    assert losses[0] <= FIRST_LOSS and max(losses) <= LOSS, losses


def test_two_processes_have_the_losses_of_native_in_every_layout(tmp_path: Path) -> None:
    compare(tmp_path, [("llama", layout) for layout in LAYOUTS.values()], world=2)


def test_two_processes_have_the_losses_of_native_for_every_model(tmp_path: Path) -> None:
    tied = [kind for kind in KINDS if kind != "llama"]
    compare(tmp_path, [(kind, LAYOUTS[name]) for kind in tied for name in ("tensor and sequence", "pipeline")], world=2)


def test_stages_of_different_sizes_have_the_losses_of_native(tmp_path: Path) -> None:
    trainer = build("llama", model={"num_layers": 3}, parallel=LAYOUTS["pipeline"])
    start = write_start(tmp_path / "start", trainer)
    placements = [{"pipeline_model_parallel_layout": "Et|ttL"}, {"decoder_first_pipeline_num_layers": 2}]
    found = train_all(tmp_path, [(replace(trainer, backend_args=each), start) for each in placements], world=2)
    native = train_native(build("llama", model={"num_layers": 3}), draw_tokens(trainer))
    for result in found:
        losses = [abs(mine[0] - other[0]) for mine, other in zip(result["steps"], native, strict=True)]
        assert max(losses) <= LOSS, losses


def test_rows_that_pad_the_vocabulary_take_no_part_in_the_loss_of_any_layout(tmp_path: Path) -> None:
    """389 tokens: 390, 392 or 512 rows, of which those of a whole rank may be padding."""
    odd = {"model": {"vocab_size": 389}}
    trainer = build("llama", **odd)
    start = {**write_start(tmp_path / "start", trainer), "last": 4}
    pads = {"parallel": LAYOUTS["tensor"], "backend_args": {"make_vocab_size_divisible_by": 200}}
    layouts = [{}, {"parallel": LAYOUTS["tensor and sequence"]}, {"parallel": LAYOUTS["pipeline"]}, pads]
    found = train_all(tmp_path / "two", [(change(trainer, **each), start) for each in layouts], 2)
    exact = {"backend_args": {"make_vocab_size_divisible_by": 1}}
    found += train_all(tmp_path / "one", [(change(trainer, **each), start) for each in (exact, {})])
    expected = train_native(trainer, draw_tokens(trainer), 4)
    for result in found:
        for (loss, norm, _), (native_loss, native_norm) in zip(result["steps"], expected, strict=True):
            assert loss == pytest.approx(native_loss, abs=1e-6)
            assert norm == pytest.approx(native_norm, rel=1e-5)


def test_experts_train_alike_in_one_process_and_over_two(tmp_path: Path) -> None:
    trainer = build("llama", model=EXPERTS)
    start = write_expert_start(tmp_path / "start", trainer)
    start["last"] = STEPS_OF_PROCESSES
    one = train_all(tmp_path / "one", [(trainer, start)])[0]["steps"]
    layouts = [
        {},
        {"expert_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ]
    two = train_all(tmp_path / "two", [(build("llama", model=EXPERTS, parallel=each), start) for each in layouts], 2)
    assert one[0][0] - one[-1][0] > 0.1
    for layout, result in zip(layouts, two, strict=True):
        losses = [abs(mine[0] - other[0]) for mine, other in zip(one, result["steps"], strict=True)]
        assert max(losses) <= LOSS, (layout, max(losses))
        live = result["settings"]  # of the groups and objects, after the first step
        assert {key: live[key] for key in layout} == layout
        assert (live["bf16"], live["fp8"], live["context_parallel_size"]) == (False, None, 1)


def write_expert_start(folder: Path, trainer: Trainer) -> dict[str, Any]:
    import torch

    from primus.checkpoint.initial_weights import InitialWeights

    start: dict[str, Any] = dict(write_start(folder, build("llama")))
    weights = InitialWeights(trainer.model, seed=1234)
    torch.save({name: weights.read(name).contiguous() for name in weights.list_tensors()}, start["weights"])
    return start


def test_evaluation_sums_the_losses_of_all_processes_and_changes_nothing(tmp_path: Path) -> None:
    trainer = build("llama", parallel=LAYOUTS["pipeline"])
    start = write_start(tmp_path / "start", trainer)
    none = {**start, "last": 0, "evaluate": True}
    pipeline, sharded = train_all(tmp_path, [(trainer, none), (build("llama"), none)], world=2)
    loss, tokens = pipeline["evaluation"]
    assert tokens == draw_tokens(trainer)[0].size - len(draw_tokens(trainer)[0])
    assert loss / tokens == pytest.approx(train_native(build("llama"), draw_tokens(trainer), 1)[0][0], abs=1e-6)
    assert sharded["evaluation"][1] == tokens


def test_masked_tokens_and_separated_documents_count_as_in_native(tmp_path: Path) -> None:
    from primus.data.training.masks import DocumentHandling

    trainer = build("llama", data={"eod_mask_loss": True, "reset_attention_mask": True})
    start = write_start(tmp_path / "start", trainer)
    (found,) = train_all(tmp_path, [(trainer, {**start, "eod_id": 7, "last": 2})])
    expected = train_native_with_documents(trainer, DocumentHandling(7, False, True), steps=2)
    assert [loss for loss, *_ in found["steps"]] == pytest.approx(expected, abs=2e-6)


def train_native_with_documents(trainer: Trainer, documents: Any, steps: int) -> list[float]:
    import torch

    from frameworks.torchtitan.runs import build_native_model, compute_rates
    from primus.frameworks.native.engine.batch import to_batch
    from primus.frameworks.native.engine.optimizer import build_optimizer
    from primus.frameworks.native.engine.step import prepare_model, train_step

    model = build_native_model(trainer)
    model.documents = documents
    trainable = prepare_model(model, device="cpu")
    optimizer, found = build_optimizer(model, trainer.optimizer), []
    for tokens, rate in zip(draw_tokens(trainer)[:steps], compute_rates(trainer), strict=False):
        size = trainer.training.micro_batch_size
        batches = [to_batch(tokens[at : at + size], 7, torch.device("cpu")) for at in range(0, len(tokens), size)]
        result = train_step(trainable, optimizer, batches, learning_rate=rate, clip_grad=1.0)
        found.append(result.loss)
    return found


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    trainer = build("llama")
    start = write_start(tmp_path / "start", trainer)
    infinite = {**start, "factor": {"2": 1e38}, "last": 4}  # the second step makes weights infinite
    (found,) = train_all(tmp_path, [(trainer, infinite)])
    assert [skipped for *_, skipped in found["steps"]] == [False, False, True, True]
