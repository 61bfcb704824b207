"""float16 trains with a loss scale that follows the rule of Megatron-LM, and tells the steps that it skips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine.loss_scale import LossScale
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import NONFINITE, OVERFLOW, StepResult, prepare_model, train_step
from primus.frameworks.native.training_settings import TrainingSettings

SPEC = ModelSpec(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=67)
TOKENS = torch.randint(67, (4, 33), generator=torch.Generator().manual_seed(1))


def follow_rule(overflows: list[bool], scale: float, floor: float, window: int, hysteresis: int) -> list[float]:
    """DynamicGradScaler.update (megatron/core/optimizer/grad_scaler.py)."""
    found, growth, left = [], 0, hysteresis
    for overflow in overflows:
        if overflow:
            growth, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, floor)
        else:
            growth += 1
            if growth == window:
                growth, left, scale = 0, hysteresis, scale * 2
        found.append(scale)
    return found


@pytest.mark.parametrize(("window", "hysteresis"), [(3, 2), (2, 1), (4, 3)])
def test_the_scale_follows_the_rule(window: int, hysteresis: int) -> None:
    overflows = [bool(int(each)) for each in "1100001011100010000011110000"]
    settings = TrainingSettings(
        initial_loss_scale=64.0, min_loss_scale=16.0, loss_scale_window=window, hysteresis=hysteresis
    )
    scale, found = LossScale(settings, torch.device("cpu")), []
    for overflow in overflows:
        scale.update(torch.tensor(overflow), torch.tensor(overflow))
        before = scale.state.clone()
        scale.update(torch.tensor(False), torch.tensor(True))  # skipped for another reason
        assert torch.equal(scale.state, before)
        found.append(float(scale.value))
    assert found == follow_rule(overflows, 64.0, 16.0, window, hysteresis)
    assert len(set(found)) > 2


def train(settings: TrainingSettings, steps: int) -> list[StepResult]:
    model = build_model(SPEC, "cpu", 0)
    model.compute_dtype = torch.float16 if settings.fp16 else None
    scale = LossScale(settings, torch.device("cpu")) if settings.fp16 else None
    trainable = replace(prepare_model(model, device="cpu"), loss_scale=scale)
    optimizer = build_optimizer(model, OptimizerConfig())
    batch = (TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous())
    return [train_step(trainable, optimizer, [batch], learning_rate=3e-3, clip_grad=1.0) for _ in range(steps)]


def test_float16_has_the_losses_and_norms_of_float32_whatever_the_scale() -> None:
    expected = train(TrainingSettings(), 10)
    for initial in (1024.0, 65536.0):
        found = train(TrainingSettings(fp16=True, initial_loss_scale=initial), 10)
        assert not any(each.is_skipped for each in found)
        assert [each.loss for each in found] == pytest.approx([each.loss for each in expected], rel=2e-3)
        assert [each.grad_norm for each in found] == pytest.approx([each.grad_norm for each in expected], rel=2e-2)


def test_overflows_are_skipped_until_the_scale_fits() -> None:
    found = train(TrainingSettings(fp16=True, initial_loss_scale=2.0**30, hysteresis=1), 24)
    reasons = [float(each.values[2]) for each in found]
    count = reasons.count(OVERFLOW)
    assert 2 < count < 20 and reasons == [OVERFLOW] * count + [0.0] * (24 - count)
    assert len({each.loss for each in found[: count + 1]}) == 1, "skipped steps change nothing"
    assert found[-1].loss < found[0].loss


def test_an_overflow_at_the_smallest_scale_is_a_step_that_is_not_finite() -> None:
    settings = TrainingSettings(fp16=True, initial_loss_scale=2.0**30, min_loss_scale=2.0**29, hysteresis=1)
    assert [float(each.values[2]) for each in train(settings, 3)] == [OVERFLOW, NONFINITE, NONFINITE]
