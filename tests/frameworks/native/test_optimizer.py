"""AdamW's groups and the learning-rate schedule against Megatron's definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primus.config.schedule import compute_learning_rate
from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer

SPEC = ModelSpec(
    num_layers=1, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, vocab_size=40, add_qkv_bias=True
)


def test_matrices_decay_while_norms_and_biases_do_not() -> None:
    model = build_model(SPEC, "cpu", seed=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3
    assert kept["weight_decay"] == 0.0
    assert all(parameter.ndim == 2 for parameter in decayed["params"])
    assert all(names[id(parameter)].endswith(("norm.weight", ".bias")) for parameter in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_tied_weights_are_optimised_once() -> None:
    model = build_model(ModelSpec(**(as_dict(SPEC) | {"untie_embeddings_and_output_weights": False})), "cpu", seed=0)
    parameters = [p for group in build_optimizer(model, OptimizerConfig()).param_groups for p in group["params"]]
    assert len(parameters) == len({id(parameter) for parameter in parameters})


def test_a_step_is_adamw_written_plainly() -> None:
    model = build_model(SPEC, "cpu", seed=0)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
    optimizer = build_optimizer(model, config)
    weight = model.layers["0"].feed_forward.down.weight
    expected, gradient = weight.detach().double(), torch.linspace(-1, 1, weight.numel()).view_as(weight)
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in (1, 2, 3):
        weight.grad = gradient * step
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient * step
        second = 0.9 * second + 0.1 * (gradient * step) ** 2
        update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * update
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "train_iters", "rates"),
    [
        ({"lr_warmup_iters": 10}, 100, {1: 1e-4, 5: 5e-4, 10: 1e-3}),
        ({"lr_warmup_fraction": 0.1, "lr_decay_iters": 200}, 1000, {20: 1e-3, 10: 5e-4}),
        (
            {"min_lr": 1e-4, "lr_warmup_iters": 20},
            100,
            {60: (1e-3 + 1e-4) / 2, 40: 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4))},
        ),
        ({"min_lr": 0.0, "lr_decay_style": "linear"}, 10, {step: 1e-3 * (1 - step / 10) for step in range(1, 11)}),
        (
            {"min_lr": 1e-5, "lr_decay_style": "WSD", "lr_warmup_iters": 10, "lr_wsd_decay_iters": 20},
            100,
            {11: 1e-3, 80: 1e-3, 90: 1e-5 + (1e-3 - 1e-5) / 2, 100: 1e-5},
        ),
        ({"lr_decay_style": "constant"}, 100, {500: 1e-3}),
        ({"min_lr": 1e-4, "lr_decay_iters": 50}, 100, {50: 1e-4, 99: 1e-4}),
    ],
    ids=["warm-up", "warm-up as a share", "cosine", "linear", "WSD", "constant", "decay that ends before the run"],
)
def test_the_rate_of_each_step_is_that_of_its_schedule(
    settings: dict[str, Any], train_iters: int, rates: dict[int, float]
) -> None:
    config = OptimizerConfig(lr=1e-3, **settings)
    assert {step: compute_learning_rate(step, config, train_iters) for step in rates} == pytest.approx(rates)


@given(
    style=st.sampled_from(["cosine", "linear", "WSD", "constant"]),
    warmup=st.integers(0, 150),
    train_iters=st.integers(1, 120),
    decay=st.none() | st.integers(0, 150),
    step=st.integers(1, 200),
)
def test_a_rate_is_never_above_the_peak_nor_negative(style, warmup, train_iters, decay, step) -> None:
    config = OptimizerConfig(lr=1e-3, lr_decay_style=style, lr_warmup_iters=warmup, lr_wsd_decay_iters=decay)
    assert 0.0 <= compute_learning_rate(step, config, train_iters) <= 1e-3


def as_dict(spec: ModelSpec) -> dict:
    return {name: getattr(spec, name) for name in spec.__struct_fields__}


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_a_ratio_follows_the_learning_rate_to_the_same_bits(style: str) -> None:
    rate = OptimizerConfig(lr=2e-3, min_lr=0.1 * 2e-3, lr_decay_style=style, lr_warmup_iters=3)
    ratio = OptimizerConfig(lr=2e-3, min_lr_ratio=0.1, lr_decay_style=style, lr_warmup_iters=3)
    assert [compute_learning_rate(step, ratio, 20) for step in range(1, 25)] == [
        compute_learning_rate(step, rate, 20) for step in range(1, 25)
    ]
    lower = OptimizerConfig(lr=1e-4, min_lr_ratio=0.1, lr_decay_style=style)
    assert compute_learning_rate(20, lower, 20) == pytest.approx(1e-5)
