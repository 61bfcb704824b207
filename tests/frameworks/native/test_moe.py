"""Mixtures of experts: the plain formula, losses and biases of routers, experts without tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine import moe
from primus.frameworks.native.engine.layout import ALONE
from primus.frameworks.native.engine.model import Transformer, build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.recompute import ActivationMemory
from primus.frameworks.native.engine.step import StepResult, Trainable, prepare_model, train_step
from primus.frameworks.native.router_settings import RouterSettings

SPEC = ModelSpec(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    vocab_size=96,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    init_method_std=0.2,
)
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"moe_router_pre_softmax": False},
    "qwen3": {"moe_router_norm_topk_prob": True},
    "softmax, not renormalized": {},
    "deepseek v2": {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 16.0},
    "deepseek v3": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_norm_topk_prob": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "gpt-oss": {"moe_router_pre_softmax": False, "add_bias_linear": True, "activation_clamp": 0.5},
}


def build_layer(**changes: Any) -> moe.MixtureOfExperts:
    """A layer in float64 with random weights, biases included."""
    layer = moe.MixtureOfExperts(replace(SPEC, **changes), None, ALONE).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in (*layer.parameters(), *(bias for _, bias in layer.named_buffers() if bias.is_floating_point())):
            weight.normal_(0.0, 0.4, generator=generator)
    return layer


def draw_tokens(layer: moe.MixtureOfExperts, seed: int = 2) -> torch.Tensor:
    return torch.randn(3, 7, SPEC.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def apply_plainly(layer: moe.MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    spec, router, experts = layer.router.spec, layer.router, layer.experts
    rows = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token + (0.0 if router.bias is None else router.bias)
        is_sigmoid = spec.moe_router_score_function == "sigmoid"
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(0)
        order = (scores + (router.balance_bias if router.is_balanced else 0.0)).detach()
        if spec.moe_router_num_groups:
            groups = order.view(spec.moe_router_num_groups, -1)
            best = groups.sort(1, descending=True).values[:, : 2 if is_sigmoid else 1].sum(1)
            for group in best.argsort(descending=True)[spec.moe_router_group_topk :]:
                groups[group] = -math.inf
        chosen = order.argsort(descending=True)[: spec.moe_router_topk]
        weights = scores[chosen]
        if spec.moe_router_norm_topk_prob or not spec.moe_router_pre_softmax:
            weights = weights / weights.sum()
        row = torch.zeros_like(token)
        for weight, expert in zip(weights * spec.moe_router_topk_scaling_factor, chosen, strict=True):
            gate, up = (experts.gate_up[expert] @ token + (0.0 if experts.gate_up_bias is None
                        else experts.gate_up_bias[expert])).chunk(2)  # fmt: skip
            if experts.clamp is None:
                hidden = gate * gate.sigmoid() * up
            else:
                gate, up = gate.clamp(max=experts.clamp), up.clamp(-experts.clamp, experts.clamp)
                hidden = (up + 1) * gate * (1.702 * gate).sigmoid()
            down = experts.down[expert] @ hidden
            row = row + weight * (down if experts.down_bias is None else down + experts.down_bias[expert])
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("name", ROUTERS)
def test_results_and_gradients_are_those_of_the_plain_formula(name: str) -> None:
    layer = build_layer(**ROUTERS[name])
    x, other = (draw_tokens(layer).requires_grad_() for _ in range(2))
    direction = draw_tokens(layer, seed=3)
    weights = list(layer.parameters())
    ours, plain = layer(x), apply_plainly(layer, other)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((ours * direction).sum(), [x, *weights])
    expected = torch.autograd.grad((plain * direction).sum(), [other, *weights])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("bias", [0.0, 50.0])
def test_an_expert_without_tokens_has_no_gradient_and_one_with_all_of_them_is_right(bias: float) -> None:
    """With the bias all tokens go to experts 3 and 5."""
    layer = build_layer(**ROUTERS["gpt-oss"])
    with torch.no_grad():
        layer.router.bias[[3, 5]] += bias
        layer.router.bias[7] = -100.0
    x = draw_tokens(layer)
    ours, plain = layer(x), apply_plainly(layer, x)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    ours.sum().backward()
    idle = [0, 1, 2, 4, 6, 7] if bias else [7]
    for weight in (layer.experts.gate_up, layer.experts.down, layer.experts.down_bias):
        assert not weight.grad[idle].any() and weight.grad.isfinite().all() and weight.grad[3].any()


def test_a_capacity_drops_the_lowest_scores_of_a_crowded_expert() -> None:
    layer = build_layer(**ROUTERS["qwen3"])
    x = draw_tokens(layer).requires_grad_()
    layer.capacity_factor = float(SPEC.num_experts)
    torch.testing.assert_close(layer(x), apply_plainly(layer, x), rtol=1e-12, atol=1e-12)
    layer.capacity_factor = 0.6
    capacity = math.ceil(3 * 7 * 2 / 8 * 0.6)
    scores, experts, counts = layer.router(x.flatten(0, 1), None)
    plan = moe.plan_capacity(scores.detach(), experts, counts, 0.6)
    assert plan.counts_E.tolist() == [capacity] * 8
    for expert in range(8):
        own = sorted(scores[experts == expert].tolist(), reverse=True)
        kept = scores[(experts == expert) & (plan.kept_TK == 1)].tolist()
        assert sorted(kept, reverse=True) == own[:capacity]
    # What is dropped adds nothing: the plain sum over the choices that are kept.
    kept_scores, rows = scores * plan.kept_TK, x.flatten(0, 1)
    expected = torch.zeros_like(rows)
    for choice in range(2):
        hidden = torch.einsum("tgd,td->tg", layer.experts.gate_up[experts[:, choice]], rows)
        gate, up = hidden.chunk(2, -1)
        down = torch.einsum("tdf,tf->td", layer.experts.down[experts[:, choice]], gate * gate.sigmoid() * up)
        expected = expected + kept_scores[:, choice : choice + 1] * down
    ours, direction = layer(x), draw_tokens(layer, seed=5)
    torch.testing.assert_close(ours, expected.view_as(ours), rtol=1e-12, atol=1e-12)
    weights = [x, *layer.parameters()]
    found = torch.autograd.grad((ours * direction).sum(), weights)
    plain = torch.autograd.grad((expected.view_as(ours) * direction).sum(), weights)
    torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-12)


def test_losses_of_a_router_are_those_of_megatron_and_are_not_in_the_result() -> None:
    layer = build_layer(moe_aux_loss_coeff=0.3)
    moe.apply_router_settings(layer, RouterSettings(moe_z_loss_coeff=0.1))
    x, weight = draw_tokens(layer), torch.tensor(0.25, dtype=torch.float64)
    with_losses, without = layer(x, weight), layer(x)
    assert torch.equal(with_losses, without)
    own = layer.router.weight
    (found,) = torch.autograd.grad(with_losses.sum(), own)
    logits = x.flatten(0, 1) @ own.t()
    chosen = torch.nn.functional.one_hot(logits.topk(2).indices, 8).sum((0, 1)).double() / (21 * 2)
    balance = 8 * (chosen * logits.softmax(-1).mean(0)).sum()
    losses = 0.25 * (0.3 * balance + 0.1 * logits.logsumexp(-1).square().mean())
    (expected,) = torch.autograd.grad(without.sum() + losses, own)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_even_choices_have_a_balancing_loss_of_one() -> None:
    layer = build_layer(moe_aux_loss_coeff=1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
    logits = torch.zeros(16, 8, dtype=torch.float64)
    assert layer.router._compute_loss(logits, torch.full((8,), 4)).item() == pytest.approx(1.0)


def prepare(rate: float = 0.0, **changes: Any) -> tuple[Trainable, torch.optim.AdamW]:
    model = build_model(replace(SPEC, **changes), "cpu", seed=1)
    moe.apply_router_settings(model, RouterSettings(moe_router_bias_update_rate=rate))
    return prepare_model(model, device="cpu"), build_optimizer(model, OptimizerConfig(lr=1e-2))


def take_step(
    prepared: tuple[Trainable, torch.optim.AdamW], micro_batches: int = 1, seed: int = 0, rate: float = 1e-2
) -> StepResult:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SPEC.vocab_size, (4, 17), generator=generator)
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens.chunk(micro_batches)]
    return train_step(*prepared, batches, learning_rate=rate, clip_grad=1.0)


def test_the_bias_of_a_crowded_expert_falls_and_that_of_an_idle_one_rises() -> None:
    prepared = prepare(rate=0.125, **ROUTERS["deepseek v3"])
    routers = prepared[0].routers
    loads = []

    def keep_load(router: moe.Router, _: Any, found: Any) -> None:
        loads.append(found[2].double())

    for router in routers:
        router.register_forward_hook(keep_load)
    take_step(prepared, micro_batches=2)
    assert len(routers) == 2 and len(loads) == 4
    for layer, router in enumerate(routers):
        load = loads[layer] + loads[layer + 2]
        assert torch.equal(router.balance_bias, 0.125 * (load.mean() - load).sign().float())
        assert not router.load.any()


def test_the_biases_balance_the_load_of_weights_that_do_not_change() -> None:
    prepared = prepare(rate=0.01, **ROUTERS["deepseek v3"])
    router, found = prepared[0].routers[0], []
    with torch.no_grad():
        router.balance_bias[0] = 0.5
    router.register_forward_hook(lambda _, __, result: found.append(result[2].double()))
    for _ in range(100):
        take_step(prepared, rate=0.0)
    assert found[-1].max() / found[-1].mean() < 1.25 < 1.5 < found[0].max() / found[0].mean()


def test_a_router_that_is_not_finite_skips_the_step_and_changes_nothing() -> None:
    prepared = prepare(rate=0.1, moe_aux_loss_coeff=0.1, **ROUTERS["deepseek v3"])
    take_step(prepared)
    with torch.no_grad():
        prepared[0].model.layers["1"].feed_forward.router.weight[0, 0] = math.nan
    before = {name: tensor.clone() for name, tensor in prepared[0].model.state_dict().items()}
    result = take_step(prepared)
    assert result.is_skipped and math.isnan(result.loss)
    for name, tensor in prepared[0].model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


def test_recomputed_activations_change_no_bit() -> None:
    found = []
    for recompute in (False, True):
        prepared = prepare(rate=0.1, moe_aux_loss_coeff=0.1, **ROUTERS["deepseek v3"])
        prepared[0].model.activations = ActivationMemory("full" if recompute else None)
        found.append([take_step(prepared, seed=step).values for step in range(3)] + list(buffers(prepared[0].model)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def buffers(model: Transformer) -> list[torch.Tensor]:
    return [bias for _, bias in moe.iterate_balance_biases(model)]


def test_bf16_stays_near_fp32() -> None:
    """Tolerance: 8 bits of bfloat16, and tokens whose experts are nearly equal."""
    losses = []
    for dtype in (None, torch.bfloat16):
        prepared = prepare(moe_aux_loss_coeff=0.1, **ROUTERS["qwen3"])
        prepared[0].model.compute_dtype = dtype
        losses.append([take_step(prepared, seed=step).loss for step in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch while it compiles
@pytest.mark.parametrize("capacity", [None, 0.8])
def test_a_compiled_model_trains_alike(capacity: float | None) -> None:
    """In one graph; tolerance: the compiler adds in another order."""
    losses = []
    for compiled in (False, True):
        model = build_model(replace(SPEC, moe_aux_loss_coeff=0.1, **ROUTERS["deepseek v3"]), "cpu", seed=1)
        moe.apply_router_settings(model, RouterSettings(moe_expert_capacity_factor=capacity))
        prepared = prepare_model(model, device="cpu"), build_optimizer(model, OptimizerConfig(lr=1e-2))
        if compiled:
            compute = torch.compile(model, fullgraph=True)
            prepared = dataclasses.replace(prepared[0], loss=compute), prepared[1]
        losses.append([take_step(prepared, seed=step).loss for step in range(3)])
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
