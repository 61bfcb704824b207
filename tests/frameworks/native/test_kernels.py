"""The kernels that an experiment asks for are used, or what is used instead is said; 8-bit products are near others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from primus import experiment
from primus.config.schema import ModelSpec
from primus.errors import UnfitError, UsageError
from primus.frameworks import native
from primus.frameworks.native.engine.fp8 import Float8, _quantize, choose_dtypes, choose_format
from primus.frameworks.native.engine.kernels import ATTENTION, choose_attention, enable_attention, use_float8
from primus.frameworks.native.engine.model import build_model
from primus.runs.events import read_events
from primus.runs.store import Run

CPU = torch.device("cpu")
MakeRun = Callable[..., Run]


@pytest.fixture(autouse=True)
def every_kernel() -> Iterator[None]:
    yield
    enable_attention(list(ATTENTION))


class OperatorRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def attend() -> list[str]:
    q = torch.randn(1, 2, 32, 16)
    with OperatorRecorder() as recorder:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return recorder.names


def test_the_attention_that_was_asked_for_is_the_one_that_runs() -> None:
    assert choose_attention("flash", CPU, torch.float32, 16, has_masks=False).used == "flash"
    assert any("flash_attention_for_cpu" in name for name in attend())
    assert choose_attention("unfused", CPU, torch.float32, 16, has_masks=True).used == "unfused"
    assert not any("flash" in name for name in attend())


def test_attention_that_a_device_lacks_is_left_to_torch_with_the_reason() -> None:
    for asked in ("fused", "efficient"):
        found = choose_attention(asked, CPU, torch.float32, 16, has_masks=False)  # type: ignore[arg-type]
        assert found.used == "auto" and found.reason.startswith("No "), found
        assert found.format().startswith(f"attention_backend: {asked}: auto (No ")
    assert any("flash_attention_for_cpu" in name for name in attend())


RECIPES = [(name, rowwise) for name in ("e4m3", "hybrid") for rowwise in (False, True)]


@pytest.mark.parametrize(("name", "rowwise"), RECIPES)
def test_products_of_eight_bits_are_those_of_their_rounded_numbers(name: str, rowwise: bool) -> None:
    recipe = Float8(*choose_dtypes(name, ""), rowwise)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((2, 16, 48), (32, 48), (2, 16, 32)))
    x[0, 0] *= 50  # one row is much larger than the others
    x, weight = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    y = recipe.multiply(x, weight)
    found = [y, *torch.autograd.grad(y, (x, weight), grad.bfloat16())]
    doubles = [each.detach().double() for each in (x, weight, grad.bfloat16())]
    plain = [doubles[0] @ doubles[1].T, doubles[2] @ doubles[1], doubles[2].flatten(0, 1).T @ doubles[0].flatten(0, 1)]

    def round_numbers(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        numbers, scale = _quantize(tensor.detach().bfloat16(), dtype, rowwise)
        return numbers.double() * scale.double()

    rounded_x, rounded_weight = (round_numbers(each, recipe.forward) for each in (x.flatten(0, 1), weight))
    exact = (rounded_x @ rounded_weight.T).view(2, 16, 32)
    assert torch.allclose(found[0].double(), exact, rtol=2**-7, atol=2**-7)  # one rounding to bfloat16
    for one, other, dtype in zip(found, plain, (recipe.forward, recipe.backward, recipe.backward), strict=True):
        # Two roundings: 2^-4 in e4m3, 2^-3 in e5m2, which partly cancel in the sum.
        limit = {torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.1}[dtype]
        assert (one.double() - other).norm() < limit * other.norm()
    if rowwise:  # the large row does not take the digits of the others
        assert (found[0].double() - plain[0])[1].norm() < 0.05 * plain[0][1].norm()


def test_amd_has_formats_of_its_own_before_gfx950() -> None:
    assert choose_dtypes("hybrid", "gfx942:sramecc+:xnack-") == (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    assert choose_dtypes("hybrid", "gfx950") == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert choose_dtypes("e4m3", "") == (torch.float8_e4m3fn, torch.float8_e4m3fn)


def test_a_device_without_eight_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(
        UnfitError, match=r"fp8: hybrid, fp8_recipe: rowwise: the CPU has no such products: .* 8\.9"
    ) as e:
        choose_format("hybrid", "rowwise", CPU)
    assert "set fp8: null" in str(e.value.hint)


def test_matrices_whose_sizes_do_not_fit_stay_and_are_named() -> None:
    spec = ModelSpec(num_layers=2, hidden_size=64, ffn_hidden_size=40, num_attention_heads=4, vocab_size=64)
    model = build_model(spec, "cpu", 0)
    number, unfit = use_float8(model, Float8(*choose_dtypes("e4m3", ""), False))
    # Gate and up together have 80 rows, the other matrix 40 columns.
    assert (number, unfit) == (6, ["layers.0.feed_forward.down", "layers.1.feed_forward.down"])


def test_a_run_tells_its_kernels_and_their_settings_in_force(make_run: MakeRun, train: Callable[..., Any]) -> None:
    run = make_run(
        bf16=True, fp8="hybrid", attention_backend="fused", enable_primus_turbo=True, use_turbo_rms_norm=True
    )
    train(run)
    events = list(read_events(run.events))
    [told] = [each["choices"] for each in events if each["kind"] == "kernels"]
    assert [(each["key"], each["used"].split(",")[0]) for each in told] == [
        ("attention_backend", "auto"),
        ("fp8", "8 matrices"),
        ("use_turbo_rms_norm", "RMSNorm in one pass"),
    ]
    losses = [each["loss"] for each in events if each["kind"] == "step"]
    plain = make_run("plain", bf16=True)
    train(plain)
    expected = [each["loss"] for each in read_events(plain.events) if each["kind"] == "step"]
    assert losses == pytest.approx(expected, rel=2e-2) and losses != expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bf16": False, "fp8": "e4m3"}, "fp8: e4m3: the other operators compute in bfloat16"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"}, "fp8_recipe: mxfp8: native has scales of"),
        ({"bf16": True, "fp8": "hybrid", "seq_length": 20, "micro_batch_size": 1}, "are 20 tokens of a process"),
        ({"attention_backend": "cudnn"}, "attention_backend: cudnn"),
    ],
)
def test_contradictions_are_refused(make_run: MakeRun, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        native.check(experiment.read_run_experiment(make_run(**settings)))
