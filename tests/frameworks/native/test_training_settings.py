"""Runs with settings of memory, precision and optimizer train, resume to the same bits, and refuse contradictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from primus import experiment
from primus.errors import UsageError
from primus.frameworks import native
from primus.runs import events
from primus.runs.store import Run


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon", "recompute_granularity": "selective", "recompute_num_layers": 1},
        {"optimizer": "sgd", "cpu_offloading": True, "recompute_activations": True, "recompute_num_layers": 1},
        {"optimizer": "adamw_8bit", "recompute_granularity": "full"},
        {"main_params_dtype": "bf16", "bf16": True, "recompute_granularity": "selective"},
        {"optimizer_cpu_offload": True, "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"fp16": True, "initial_loss_scale": 2.0**30, "hysteresis": 1},
    ],
    ids=["muon", "sgd", "8 bits", "bf16 states", "host", "fp16"],
)
def test_a_run_resumes_with_the_losses_of_an_uninterrupted_one(
    make_run: Callable[..., Run], train: Callable[..., Any], settings: dict[str, Any]
) -> None:
    run = make_run(train_iters=16, save_interval=8, **settings)
    train(run)
    expected = [(step["loss"], step["skipped"]) for step in events.read_steps(run.events)]
    (run.checkpoints / "step_00000016" / "manifest.json").unlink()
    train(run, number=1)
    loaded = [event["step"] for event in events.read_events(run.events) if event["kind"] == "checkpoint_loaded"]
    assert loaded == [8]
    assert [(step["loss"], step["skipped"]) for step in events.read_steps(run.events)] == expected
    assert len({loss for loss, _ in expected}) > 4
    # More of them in a row than a run survives that are not overflows.
    assert sum(skipped for _, skipped in expected) > 5 if "fp16" in settings else not any(each[1] for each in expected)


@pytest.mark.parametrize(
    ("settings", "problem", "hint"),
    [
        ({"fp16": True, "bf16": True}, "fp16: true: bf16 is true as well", "set bf16: false"),
        ({"recompute_activations": True, "recompute_granularity": "selective"}, "recomputes whole layers", "set one"),
        ({"recompute_modules": ["mlp"]}, "only with recompute_granularity: selective", "set it"),
        ({"recompute_granularity": "some"}, "recompute_granularity: some: Invalid", "docs/training.md"),
        ({"main_params_dtype": "bf16", "optimizer": "sgd", "bf16": True}, "not with optimizer: sgd", "adamw"),
        ({"main_params_dtype": "bf16"}, "compute in another precision", "set bf16: true"),
        ({"optimizer_cpu_offload": True, "optimizer": "muon"}, "not with optimizer: muon", "remove it"),
        (
            {"recompute_granularity": "selective", "context_parallel_size": 2},
            "not with context_parallel_size > 1",
            "full",
        ),
        ({"muon_momentun": 0.9}, "muon_momentun", "muon_momentum"),
    ],
)
def test_a_contradiction_is_refused_with_what_to_do(
    make_run: Callable[..., Run], settings: dict[str, Any], problem: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        native.check(experiment.read_run_experiment(make_run(**settings)))
    assert problem in str(error.value) and hint in f"{error.value} {error.value.hint}"
