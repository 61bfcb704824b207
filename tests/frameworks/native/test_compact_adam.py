"""AdamW with states of 8 bits, or in bfloat16 with random rounding, is AdamW within the error of its states."""

from __future__ import annotations

import pytest
import torch

from primus.config.schema import ModelSpec, OptimizerConfig
from primus.frameworks.native.engine.compact_adam import CompactAdamW, _mix, dequantize, quantize, round_at_random
from primus.frameworks.native.engine.model import build_model
from primus.frameworks.native.engine.optimizer import build_optimizer, read_state
from primus.frameworks.native.engine.placement import PlacedWeight
from primus.frameworks.native.engine.state import collect_moments, take_moments
from primus.frameworks.native.engine.step import Trainable, prepare_model, train_step
from primus.frameworks.native.training_settings import TrainingSettings

SPEC = ModelSpec(
    num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, vocab_size=97
)
BF16 = TrainingSettings(main_params_dtype="bf16")
TOKENS = torch.randint(97, (4, 33), generator=torch.Generator().manual_seed(1))


def build(name: str, settings: TrainingSettings, seed: int = 0) -> tuple[Trainable, torch.optim.Optimizer]:
    is_small = settings.main_params_dtype == "bf16"
    model = build_model(SPEC, "cpu", seed, torch.bfloat16 if is_small else torch.float32)
    trainable = prepare_model(model, device="cpu")
    return trainable, build_optimizer(model, OptimizerConfig(optimizer=name), settings)  # type: ignore[arg-type]


def train(prepared: tuple[Trainable, torch.optim.Optimizer], steps: int) -> list[float]:
    batch = (TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous())
    return [train_step(*prepared, [batch], learning_rate=3e-3, clip_grad=1.0).loss for _ in range(steps)]


def count_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(each.nbytes for state in optimizer.state.values() for each in state.values())


@pytest.mark.parametrize(
    ("name", "settings", "tolerance", "share"),
    [("adamw_8bit", TrainingSettings(), 1.5e-2, 0.28), ("adamw", BF16, 3e-2, 0.51), ("adamw_8bit", BF16, 3e-2, 0.28)],
    ids=["8 bits", "bf16", "8 bits and bf16"],
)
def test_losses_are_those_of_adamw_with_smaller_states(
    name: str, settings: TrainingSettings, tolerance: float, share: float
) -> None:
    reference, compact = build("adamw", TrainingSettings()), build(name, settings)
    expected, found = train(reference, 25), train(compact, 25)
    assert expected[-1] < 0.3 * expected[0]
    assert found == pytest.approx(expected, rel=tolerance)
    assert count_state_bytes(compact[1]) < share * count_state_bytes(reference[1])


@pytest.mark.parametrize(("name", "settings"), [("adamw_8bit", TrainingSettings()), ("adamw", BF16)])
def test_saved_states_continue_to_the_same_bits(name: str, settings: TrainingSettings) -> None:
    first, second = build(name, settings), build(name, settings, seed=5)
    train(first, 3)
    saved = {key: tensor.clone() for key, tensor in collect_moments(first[0].model, first[1]).items()}
    named = collect_moments(second[0].model, second[1])
    assert named.keys() == saved.keys() and "optimizer.exp_avg.layers.0.attention.qkv.weight" in named
    for key, tensor in named.items():
        tensor.copy_(saved[key])
    take_moments(second[0].model, second[1], named)
    second[0].model.load_state_dict(first[0].model.state_dict())
    assert train(first, 3) == train(second, 3)
    weights = zip(first[0].model.parameters(), second[0].model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_an_update_below_half_a_unit_is_kept_on_average() -> None:
    """The step of bfloat16 at 1 is 2^-7 upwards; 100 updates of 2e-4 would all be lost if they were rounded to the
    nearest."""
    model = build_model(SPEC, "cpu", 0, torch.bfloat16)
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    group = {"params": [weight], "lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = CompactAdamW([group], {weight: ("w", PlacedWeight(weight))}, quantizes=False)
    optimizer.state[weight] = optimizer.create_state(weight)
    for _ in range(100):
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    assert weight.dtype == torch.bfloat16 and model is not None
    # 4,096 independent walks of 100 steps: the deviation of their mean is 1e-4 or less.
    assert float(weight.detach().float().mean()) == pytest.approx(1.02, abs=5e-4)


def test_a_number_is_rounded_to_its_neighbours_with_their_probabilities() -> None:
    wide = torch.full((1 << 16,), 1.0 + 2**-7 * 0.25)
    rounded = round_at_random(wide, _mix(torch.arange(1 << 16, dtype=torch.int32)))
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.25, abs=0.01)
    exact = torch.tensor([0.0, -1.5, torch.inf, -torch.inf])
    assert torch.equal(round_at_random(exact, torch.full((4,), -1, dtype=torch.int32)).float(), exact)


@pytest.mark.parametrize("has_sign", [True, False])
def test_quantized_values_are_near_and_stay_the_same_when_quantized_again(has_sign: bool) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    values = values if has_sign else values.square()
    codes, scales = quantize(values, has_sign)
    found = dequantize(codes, scales, has_sign)[:5000]
    # Half the largest gap between two values: 0.9 / 64 of a scale, or half of it without a sign.
    limits = scales.expand(-1, 256).flatten()[:5000] * (0.9 / 64 / 2 if has_sign else 0.9 / 128 / 2) * 1.01
    assert ((found - values).abs() <= limits).all()
    again = quantize(found, has_sign)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_a_skipped_step_changes_nothing() -> None:
    trainable, optimizer = build("adamw_8bit", TrainingSettings())
    train((trainable, optimizer), 1)
    before = [each.clone() for state in optimizer.state.values() for each in state.values()]
    assert trainable.model.norm is not None
    trainable.model.norm.weight.detach()[0] = torch.inf
    weights = [each.detach().clone() for each in trainable.model.parameters()]
    train((trainable, optimizer), 1)
    after = [each for state in optimizer.state.values() for each in state.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(torch.equal(*pair) for pair in zip(weights, trainable.model.parameters(), strict=True))


def test_small_weights_have_plain_moments() -> None:
    trainable, optimizer = build("adamw_8bit", TrainingSettings())
    norm = trainable.model.place_weights()["norm.weight"]
    assert read_state(optimizer, "norm.weight", norm)["exp_avg"] is optimizer.state[norm.tensor]["exp_avg"]
