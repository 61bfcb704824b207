"""Memory of a step against published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from primus import experiment
from primus.prediction.published_steps import PublishedStep, read_published_steps
from primus.prediction.step_layout import StepLayout, build_layout
from primus.prediction.step_memory import GIB, find_largest, predict_memory

GOLDEN = {
    # activations of the first stage in GiB without recomputation, and with sequence parallelism and selective
    # recomputation: arXiv:2205.05198, figures 1 and 7, as in calculon-ai/calculon llm/validation.py
    "gpt_22B": (59.25, 9.56),
    "gpt3_175B": (66.84, 12.35),
    "gpt_530B": (114.02, 23.08),
    "gpt_1T": (131.25, 26.56),
}
STATES = {"gpt_22B": 45.56, "gpt3_175B": 45.56, "gpt_530B": 31.64, "gpt_1T": 32.96}
"""Weights, gradients and optimizer state of a middle stage's layers, in GiB; the same sources."""


def find_row(model: str) -> PublishedStep:
    return next(row for row in read_published_steps() if row.model == model)


@pytest.mark.parametrize("model", GOLDEN)
def test_activations_are_those_of_the_paper(model: str) -> None:
    row = find_row(model)
    plain = structs.replace(row.layout, recompute="none", sequence_parallel=False)
    selective = structs.replace(row.layout, recompute="scores", sequence_parallel=True)
    found = [predict_memory(row.spec, layout)[0].activations / GIB for layout in (plain, selective)]
    assert found == pytest.approx(GOLDEN[model], rel=1e-3)


@pytest.mark.parametrize("model", STATES)
def test_weights_and_optimizer_are_those_of_the_paper(model: str) -> None:
    row = find_row(model)
    stages = predict_memory(row.spec, row.layout)
    stage = stages[len(stages) // 2]
    # Of the only stage of 22B, the paper leaves out the embedding.
    embedding = row.spec.vocab_size * row.spec.hidden_size / 8 * 18 if len(stages) == 1 else 0
    assert (stage.weights + stage.gradients + stage.optimizer - embedding) / GIB == pytest.approx(
        STATES[model], rel=2e-3
    )


def test_measured_peaks_of_compiled_llama_8b_are_within_5_percent() -> None:
    rows = [row for row in read_published_steps() if row.memory_gib and row.rates and row.model == "llama3.1_8B"]
    compiled = [row for row in rows if row.layout.fused and row.layout.recompute == "alternate"]
    assert len(compiled) == 4
    for row in compiled:
        assert row.memory_gib is not None
        predicted = find_largest(predict_memory(row.spec, row.layout)).total / GIB
        assert predicted == pytest.approx(row.memory_gib, rel=0.05), row.layout


def test_sharding_recomputation_and_later_stages_need_less() -> None:
    spec = find_row("llama3.1_70B").spec
    base = StepLayout(devices=64, pipeline=4, tensor=8, global_batch=64, seq_length=8192, sharding="none")

    def total(**changes: object) -> float:
        return find_largest(predict_memory(spec, structs.replace(base, **changes))).total

    assert total(sharding="full") < total(sharding="optimizer") < total()
    assert total(recompute="full") < total(recompute="alternate") < total()
    stages = predict_memory(spec, base)
    assert [stage.stage for stage in stages] == ["first stage", "middle stage", "middle stage", "last stage"]
    assert stages[0].activations == 4 * stages[3].activations


def test_activations_of_fp32_take_twice_those_of_bf16() -> None:
    spec = find_row("llama3.1_70B").spec
    layout = StepLayout(devices=64, tensor=8, global_batch=64, seq_length=8192)
    bf16, fp32 = (predict_memory(spec, structs.replace(layout, precision=name))[0] for name in ("bf16", "fp32"))
    assert fp32.activations == 2 * bf16.activations
    assert fp32.weights == bf16.weights


@pytest.mark.parametrize(
    ("model", "changes", "devices", "executed"),
    [
        # weights, gathered, gradients, optimizer, the sum of all, in GiB, by `analyze layout` for MI300X
        ("llama3.1_8B", {"micro_batch_size": 2, "seq_length": 8192}, 8, (3.74, 1.96, 29.92, 7.48, 121.8)),
        (
            "qwen3_30B_A3B",
            {"micro_batch_size": 4, "seq_length": 4096, "expert_model_parallel_size": 8},
            16,
            (7.11, 1.16, 19.24, 14.22, 125.1),
        ),
        (
            "deepseek_v2_lite",
            {"micro_batch_size": 2, "seq_length": 4096, "expert_model_parallel_size": 8},
            8,
            (7.32, 0.78, 11.61, 14.63, 64.0),
        ),
    ],
)
def test_native_needs_what_its_executed_step_needs(
    tmp_path: Path, model: str, changes: dict[str, int], devices: int, executed: tuple[float, ...]
) -> None:
    """Tolerance: 5 %, with which the formulas count activations of all models."""
    settings = {"bf16": True, "use_distributed_optimizer": True, "global_batch_size": 1024, **changes}
    lines = [f"      {key}: {json.dumps(value)}" for key, value in settings.items()]
    head = f"modules:\n  pre_trainer:\n    framework: native\n    model: {model}.yaml\n    overrides:\n"
    (tmp_path / "f.yaml").write_text(head + "\n".join([*lines, "      mock_data: true", ""]))
    trainer = experiment.resolve_experiment(tmp_path / "f.yaml", (), {}, is_elsewhere=True).experiment.trainer
    (found,) = predict_memory(trainer.model, build_layout(trainer, devices))
    states = found.weights, found.gathered, found.gradients, found.optimizer
    assert [each / GIB for each in states] == pytest.approx(executed[:4], rel=0.02)
    assert (found.total - found.allowance) / GIB == pytest.approx(executed[4], rel=0.05)


@pytest.mark.parametrize(
    ("model", "executed"),
    [("llama3.1_8B", 149_640), ("mixtral_8x7B", 203_068), ("gemma2_9B", 194_590), ("gpt_oss_20B", 185_780)],
)
def test_a_layer_of_native_keeps_what_an_executed_one_does(tmp_path: Path, model: str, executed: int) -> None:
    """Bytes for a token of 4,096: what one more layer adds to `analyze layout` for MI300X. Tolerance: the factors are
    one for all models without windows, and one for those with them."""
    text = f"modules:\n  pre_trainer:\n    framework: native\n    model: {model}.yaml\n    overrides:\n"
    text += "      {mock_data: true, bf16: true, seq_length: 4096, num_layers: 1}\n"
    (tmp_path / "f.yaml").write_text(text)
    trainer = experiment.resolve_experiment(tmp_path / "f.yaml", (), {}, is_elsewhere=True).experiment.trainer
    (found,) = predict_memory(trainer.model, build_layout(trainer, 1))
    assert found.activations / 4096 == pytest.approx(executed, rel=0.15)
