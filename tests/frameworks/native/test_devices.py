"""Native trains alike on each device: the steps of float64 on the CPU, within the rounding of float32."""

from __future__ import annotations

import pytest
import torch

from primus.config.extended_files import load_model
from primus.config.schema import OptimizerConfig
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

STEPS = 8
RATE = 1e-2


def train(device: str, dtype: torch.dtype, *, bf16: bool = False) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of the model `tiny`."""
    spec = load_model("tiny.yaml")
    model = build_model(spec, "cpu", seed=3).to(dtype)
    model.compute_dtype = torch.bfloat16 if bf16 else None
    trainable = prepare_model(model, device=device)
    optimizer = build_optimizer(trainable.model, OptimizerConfig(lr=RATE))
    tokens = torch.randint(spec.vocab_size, (4, 33), generator=torch.Generator().manual_seed(5)).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    results = [train_step(trainable, optimizer, [batch], learning_rate=RATE, clip_grad=1.0) for _ in range(STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_takes_the_steps_of_float64(device: str) -> None:
    """Tolerances: those of `compare engines` in float32."""
    found, expected = train(device, torch.float32), train("cpu", torch.float64)
    assert expected[0][0] - expected[-1][0] > 0.1, "it learns, so that an error would show"
    for step, (mine, exact) in enumerate(zip(found, expected, strict=True), 1):
        assert mine[0] == pytest.approx(exact[0], abs=5e-5), f"step {step}"
        assert mine[1] == pytest.approx(exact[1], rel=1e-4), f"step {step}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_takes_the_steps_of_float64_in_bfloat16(device: str) -> None:
    """Tolerance: that of `compare engines` in bfloat16; at this learning rate rounding grows after four steps."""
    found, expected = train(device, torch.float32, bf16=True)[:4], train("cpu", torch.float64)[:4]
    for step, (mine, exact) in enumerate(zip(found, expected, strict=True), 1):
        assert mine[0] == pytest.approx(exact[0], abs=5e-2), f"step {step}"
        assert mine[1] == pytest.approx(exact[1], rel=0.05), f"step {step}"
    assert any(abs(mine[0] - exact[0]) > 1e-6 for mine, exact in zip(found, expected, strict=True)), "it is bfloat16"
