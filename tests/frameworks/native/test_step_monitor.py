"""What a step shows besides its loss: routers that are not finite, experts without tokens, losses of further tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frameworks.native.conftest import Workers, attempt_events
from primus import registry
from primus.frameworks.native.engine.step_monitor import describe_load
from primus.runs.store import Run

FAULTS = '''"""Make logits of rank 1 infinite in step 2, and lead all tokens to expert 2 from step 3 on."""

import torch
from primus.callback import Callback


class Faults(Callback):
    def __init__(self, training):
        self.training = training
        self.router = training.model.layers["1"].feed_forward.router

    @torch.no_grad()
    def before_step(self):
        if self.training.step == 1 and self.training.attempt.rank == 1:
            self.hook = self.router.register_forward_pre_hook(lambda _, args: (args[0] * torch.inf, *args[1:]))
        if self.training.step == 2:
            if self.training.attempt.rank == 1:
                self.hook.remove()
            self.router.balance_bias[2] = 1000.0


def build(options, training):
    return Faults(training)
'''
MODEL: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 1, "moe_router_enable_expert_bias": True}


def test_a_router_that_is_not_finite_and_idle_experts_are_named_and_training_goes_on(
    make_run: Callable[..., Run], start_workers: Callable[..., Workers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plug_ins/callbacks").mkdir(parents=True)
    (tmp_path / "plug_ins/callbacks/faults.py").write_text(FAULTS)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "plug_ins"))
    registry._index_folders.cache_clear()
    run = make_run(train_iters=4, callbacks=["faults"], sample_tokens=0, moe_router_score_function="sigmoid", **MODEL)
    said = start_workers(run, world=2).succeed()
    assert "step 2: the router of layer 1 has logits that are NaN or infinite, on rank 1 (first of 1 layers)" in said
    assert said.count("layer 1: all tokens go to expert 2: raise moe_aux_loss_coeff") == 1, "said when it begins"
    steps = attempt_events(run, 0, "step")
    assert [step["skipped"] for step in steps] == [False, True, False, False]
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps if not step["skipped"])
    (failure,) = attempt_events(run, 0, "router_not_finite")
    assert (failure["layers"], failure["ranks"]) == ([1], [1])
    routing = attempt_events(run, 0, "routing")
    # Two processes with two sequences of 32 tokens each.
    assert [sum(event["loads"]["0"]) for event in routing] == [128] * 4
    assert routing[3]["loads"]["1"] == [0, 0, 128, 0] and routing[3]["largest_load"] == 4.0


def test_loads_are_described() -> None:
    assert describe_load([3, 0, 1, 0], 1) == "experts 1, 3 of 4 got no token"
    assert describe_load([3, 0, 3, 0], 2).startswith("all tokens go to experts 0, 2: ")
    assert describe_load([1, 1], 2) == describe_load([1, 2, 3], 2) == ""
