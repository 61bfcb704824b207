"""Muon against a plain one, and against torch's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine.model import Transformer, build_model
from primus.frameworks.native.engine.muon import orthogonalize
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.training_settings import TrainingSettings

SPEC = ModelSpec(
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=40,
    num_experts=3,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
)
QKV = (16, 8, 8)


def build(settings: TrainingSettings) -> tuple[Transformer, torch.optim.Optimizer]:
    model = build_model(SPEC, "cpu", 0, torch.float64)
    return model, build_optimizer(model, OptimizerConfig(optimizer="muon", weight_decay=0.1), settings)


def draw_gradients(model: Transformer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def cut_matrices(name: str, weight: torch.Tensor) -> list[torch.Tensor]:
    """The matrices as Hugging Face has them."""
    if name.endswith("qkv.weight"):
        return list(weight.split(QKV))
    if name.endswith("experts.gate_up"):
        return [half for expert in weight for half in expert.chunk(2)]
    return list(weight) if weight.dim() == 3 else [weight]


def compute_plainly(matrix: torch.Tensor, factor: float) -> torch.Tensor:
    x = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T) / (matrix.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return factor * (x if matrix.shape[0] <= matrix.shape[1] else x.T)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        ("spectral", lambda rows, columns: max(rows, columns) ** 0.5),
        ("unit_rms_norm", lambda rows, columns: (rows / columns) ** 0.5),
        ("shape_scaling", lambda rows, columns: max(1, rows / columns) ** 0.5),
    ],
)
def test_a_step_is_muon_written_plainly(mode, factor, nesterov: bool) -> None:
    settings = TrainingSettings(
        muon_scale_mode=mode, muon_use_nesterov=nesterov, muon_momentum=0.9, muon_extra_scale_factor=0.2
    )
    model, optimizer = build(settings)
    chosen = [name for name, weight in model.named_parameters() if name.startswith("layers.") and weight.dim() > 1]
    assert {name.rsplit("layers.0.")[1] for name in chosen} == {
        *("attention.qkv.weight", "attention.output.weight", "feed_forward.router.weight"),
        *("feed_forward.experts.gate_up", "feed_forward.experts.down"),
    }
    weights = dict(model.named_parameters())
    expected = {name: weights[name].detach().clone() for name in chosen}
    momentum = {name: torch.zeros_like(expected[name]) for name in chosen}
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    for seed in range(3):
        draw_gradients(model, seed)
        for name in chosen:
            gradient = weights[name].grad
            assert gradient is not None
            momentum[name] = 0.9 * momentum[name] + gradient
            update = gradient + 0.9 * momentum[name] if nesterov else momentum[name]
            for matrix, part in zip(cut_matrices(name, expected[name]), cut_matrices(name, update), strict=True):
                matrix.mul_(1 - 0.02 * 0.1).sub_(0.02 * compute_plainly(part, 0.2 * factor(*part.shape)))
        optimizer.step()
    for name in chosen:
        torch.testing.assert_close(weights[name].detach(), expected[name], rtol=0, atol=1e-12, msg=name)


def test_a_matrix_gets_the_update_of_torch() -> None:
    """torch's Muon computes in bfloat16."""
    matrix = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.zeros(24, 16))
    weight.grad = matrix
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    update = orthogonalize(matrix, 5) * (24 / 16) ** 0.5
    torch.testing.assert_close(-weight.detach(), update, rtol=0, atol=0.02)
    singular = torch.linalg.svdvals(orthogonalize(matrix.double(), 5))
    assert 0.6 < singular.min() < singular.max() < 1.3


def test_a_skipped_step_changes_nothing() -> None:
    model, optimizer = build(TrainingSettings())
    draw_gradients(model, 0)
    optimizer.step()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    momenta = [state["momentum_buffer"].clone() for state in optimizer.state.values() if "momentum_buffer" in state]
    draw_gradients(model, 1)
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.fill_(torch.nan)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    after = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    assert all(torch.equal(one, other) for one, other in zip(momenta, after, strict=True))


def test_a_gradient_is_divided_by_the_scale() -> None:
    """An update depends on its direction only, so the momentum of a second gradient shows the size of the first."""
    found = []
    for scale in (1.0, 8.0):
        model, optimizer = build(TrainingSettings())
        for seed, own in ((0, scale), (1, 1.0)):
            draw_gradients(model, seed)
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad *= own
            optimizer.grad_scale = torch.tensor(own)  # type: ignore[attr-defined]
            optimizer.step()
        found.append([weight.detach().clone() for weight in model.parameters()])
    assert all(torch.equal(*pair) for pairs in pairwise(found) for pair in zip(*pairs, strict=True))
