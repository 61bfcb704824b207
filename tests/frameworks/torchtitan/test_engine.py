"""The engine's own promises: resume bit by bit, evaluation, skipped steps, settings of torchtitan's tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from .runs import (
    GLOBAL_BATCH,
    SEQUENCE,
    STEPS,
    build_trainer,
    compute_rates,
    draw_tokens,
    train_by_engine,
    train_native,
    write_start,
)

pytestmark = [pytest.mark.engine("torchtitan"), pytest.mark.slow]

FIRST, LAST = 2, 4
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2},
]


def save_and_resume(tmp_path: Path, start: dict[str, str], layout: dict[str, Any]) -> list[Any]:
    """A run that saves on its way, and the rest of it from what it has saved."""
    trainer = build_trainer("llama", parallel=layout)
    folder = str(tmp_path / "_".join(["checkpoint", *layout]))
    return [
        (trainer, {**start, "last": LAST, "save_after": FIRST, "save": folder, "evaluate": True}),
        (trainer, {**start, "first": FIRST + 1, "last": LAST, "load": folder}),
    ]


def test_one_process_resumes_bit_by_bit_also_what_two_have_saved(tmp_path: Path) -> None:
    start = write_start(tmp_path, build_trainer("llama"))
    undisturbed = (build_trainer("llama"), {**start, "last": LAST})
    whole, saved, resumed = train_by_engine(tmp_path / "one", [undisturbed, *save_and_resume(tmp_path, start, {})])
    assert saved["steps"] == whole["steps"], "neither the evaluation nor the checkpoint has changed anything"
    assert resumed["steps"] == whole["steps"][FIRST:]
    loss, tokens = saved["evaluation"]
    assert tokens == GLOBAL_BATCH * SEQUENCE
    assert loss / tokens < whole["steps"][0][0], "it has learnt"
    assert whole["memory"] > 0

    pairs = [save_and_resume(tmp_path / "two", start, layout) for layout in LAYOUTS]
    found = train_by_engine(tmp_path / "two", [request for pair in pairs for request in pair], world=2)
    for layout, results in zip(LAYOUTS, zip(*[iter(found)] * 2, strict=True), strict=True):
        assert results[1]["steps"] == results[0]["steps"][FIRST:], layout
        assert results[0]["evaluation"] == pytest.approx(saved["evaluation"], rel=1e-5), layout
        assert results[0]["data_size"] == (1 if layout else 2)

    trainer = build_trainer("llama")
    rest = {**start, "first": FIRST + 1, "last": LAST}
    others = [(trainer, {**rest, "load": pair[0][1]["save"]}) for pair in pairs]
    for layout, result in zip(LAYOUTS, train_by_engine(tmp_path / "others", others), strict=True):
        expected = [pytest.approx(step, rel=1e-4) for step in whole["steps"][FIRST:]]
        assert result["steps"] == expected, layout


def test_an_evaluation_of_the_initial_weights_is_the_loss_of_the_first_step(tmp_path: Path) -> None:
    start = write_start(tmp_path, build_trainer("qwen3"))
    chunked = build_trainer("qwen3", training={"loss_chunk_size": 16})
    plain = build_trainer("qwen3")
    requests = [
        (trainer, {**start, "last": last, "evaluate": not last}) for trainer in (plain, chunked) for last in (0, 1)
    ]
    evaluated, stepped, in_chunks, stepped_in_chunks = train_by_engine(tmp_path / "engine", requests)
    for result in (evaluated, in_chunks):
        assert result["evaluation"][0] / result["evaluation"][1] == pytest.approx(stepped["steps"][0][0], rel=1e-6)
    assert stepped_in_chunks["steps"][0] == pytest.approx(stepped["steps"][0], rel=1e-5)


def test_a_step_without_a_finite_gradient_changes_nothing(tmp_path: Path) -> None:
    start = write_start(tmp_path, build_trainer("llama"))
    saved = str(tmp_path / "checkpoint")
    trainer = build_trainer("llama")
    poisoned = {**start, "last": 3, "poison": 2, "save": saved}
    foreach = structs.replace(trainer, backend_args={"optimizer": {"implementation": "foreach"}})
    found = train_by_engine(
        tmp_path / "engine", [(trainer, poisoned), (foreach, poisoned), (trainer, {**start, "last": 2})]
    )
    for result in found[:2]:
        assert [skipped for _, _, skipped in result["steps"]] == [False, True, False]
        assert not np.isfinite(result["steps"][1][1])
    # The step after the skipped one has the weights of the first step, and the batch of the third.
    assert found[0]["steps"][0] == found[2]["steps"][0]
    assert found[0]["weights_after"][1] == found[0]["weights_after"][0]


def test_a_pipeline_of_two_stages_in_each_process_has_the_losses_of_native(tmp_path: Path) -> None:
    deep = {"num_layers": 4}
    alone = build_trainer("llama", model=deep)
    start = write_start(tmp_path, alone)
    interleaved = structs.replace(
        build_trainer("llama", model=deep, parallel={"pipeline_model_parallel_size": 2}),
        backend_args={"parallelism": {"pipeline_parallel_schedule": "Interleaved1F1B"}},
    )
    (found,) = train_by_engine(tmp_path / "engine", [(interleaved, {**start, "last": 3, "evaluate": True})], world=2)
    expected = train_native(alone, draw_tokens(alone), steps=3)
    for (loss, grad_norm, _), native in zip(found["steps"], expected, strict=True):
        assert (loss, grad_norm) == (pytest.approx(native[0], abs=5e-6), pytest.approx(native[1], rel=1e-5))
    assert found["evaluation"][1] == GLOBAL_BATCH * SEQUENCE
    assert found["evaluation"][0] / found["evaluation"][1] < expected[0][0]


def test_the_engines_own_schedule_and_initial_values_are_used_when_asked(tmp_path: Path) -> None:
    start = write_start(tmp_path, build_trainer("llama"))
    tokens = {"tokens": start["tokens"]}
    own = build_trainer("llama", optimizer={"schedule": "engine", "lr_warmup_iters": 2})
    whole = {**tokens, "last": STEPS}
    found, again = train_by_engine(tmp_path / "engine", [(own, whole), (own, whole)])
    assert found["steps"] == again["steps"], "its initial values depend on the seed"
    expected = compute_rates(own)
    # Alike in warm-up; later each step has the rate that primus applies one step before.
    assert found["rates"][:2] == pytest.approx(expected[:2])
    assert found["rates"][3:] == pytest.approx(expected[2:-1], rel=1e-6)


def test_settings_of_the_tree_reach_torchtitan(tmp_path: Path) -> None:
    start = write_start(tmp_path, build_trainer("llama"))
    trainer = build_trainer("llama", training={"recompute_activations": True})
    settings = {
        "training": {"gc_freq": 7},
        "activation_checkpoint.mode": "selective",
        "debug": {"detect_anomaly": False},
    }
    found = train_by_engine(
        tmp_path / "engine",
        [
            (structs.replace(trainer, backend_args=settings), {**start, "last": 1, "config": True}),
            (trainer, {**start, "last": 1, "config": True}),
        ],
    )
    assert found[0]["config"]["training"]["gc_freq"] == 7
    assert found[0]["config"]["activation_checkpoint"] == "SelectiveAC"
    assert found[1]["config"]["activation_checkpoint"] == "FullAC"
    assert found[0]["steps"] == found[1]["steps"]
