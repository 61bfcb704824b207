"""Activations that are recomputed or offloaded take less memory, and change no bit of loss and gradients."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import pytest
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from primus.config.schema import ModelSpec, TrainingConfig
from primus.frameworks.native.engine import recompute
from primus.frameworks.native.engine.model import Transformer, build_model
from primus.frameworks.native.training_settings import RecomputedModule, TrainingSettings

SPEC = ModelSpec(
    num_layers=4, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=2, vocab_size=64
)
EXPERTS = structs.replace(
    SPEC,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=32,
    first_k_dense_replace=2,
)
TOKENS = torch.randint(64, (2, 129), generator=torch.Generator().manual_seed(3))
FULL = TrainingSettings(recompute_granularity="full")
SELECTIVE = TrainingSettings(recompute_granularity="selective")


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, without those that `ignore` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(out) if isinstance(each, torch.Tensor)):
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return out

    def ignore(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        self.now -= self.live[key]
        self.live[key] = 0

    def _drop(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def build(spec: ModelSpec, settings: TrainingSettings, bf16: bool = False) -> Transformer:
    model = build_model(spec, "cpu", 1)
    model.configure(TrainingConfig(bf16=bf16), settings)
    return model


def run(model: Transformer) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes after the forward pass, most bytes, and the loss with all gradients."""
    with MemoryTracker() as tracker:
        loss = model(TOKENS[:, :-1], TOKENS[:, 1:], torch.ones(()))
        kept = tracker.now
        loss.backward()
    return (
        kept,
        tracker.peak,
        [loss.detach(), *[weight.grad for weight in model.parameters() if weight.grad is not None]],
    )


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("spec", [SPEC, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("bf16", [False, True])
def test_recomputation_keeps_less_and_changes_no_bit(spec: ModelSpec, bf16: bool) -> None:
    settings = (TrainingSettings(), SELECTIVE, FULL)
    (kept, peak, values), selective, full = (run(build(spec, each, bf16)) for each in settings)
    for other in (selective, full):
        check_equal(other[2], values)
    assert full[0] < selective[0] < 0.6 * kept
    assert full[1] < peak and selective[1] < peak


def test_the_first_layers_only_are_recomputed() -> None:
    none, two, four = (
        run(build(SPEC, structs.replace(each, recompute_num_layers=number)))
        for each, number in ((TrainingSettings(), None), (FULL, 2), (FULL, 4))
    )
    assert two[0] - four[0] == none[0] - two[0] > 0
    check_equal(two[2], none[2])


@pytest.mark.parametrize(
    ("spec", "module"),
    [(SPEC, "layernorm"), (SPEC, "mlp"), (EXPERTS, "moe"), (EXPERTS, "shared_experts"), (EXPERTS, "layernorm")],
)
def test_a_module_alone_is_recomputed(spec: ModelSpec, module: RecomputedModule) -> None:
    before = run(build(spec, TrainingSettings()))
    after = run(build(spec, structs.replace(SELECTIVE, recompute_modules=(module,))))
    check_equal(after[2], before[2])
    assert after[0] < before[0]


@pytest.mark.parametrize("granularity", [None, "full"])
def test_offloaded_activations_leave_the_device(
    monkeypatch: pytest.MonkeyPatch, granularity: Literal["full", "selective"] | None
) -> None:
    """On a CPU the copies are in the same memory, so they are counted apart."""
    settings = TrainingSettings(recompute_granularity=granularity)
    kept, _, values = run(build(SPEC, settings))
    copies = []

    def move(tensor: torch.Tensor) -> Any:
        moved = move_to_host(tensor)
        if not isinstance(moved, torch.Tensor):
            torch.utils._python_dispatch._get_current_dispatch_mode().ignore(moved[1])  # type: ignore[union-attr]
            copies.append(moved[1].shape)
        return moved

    move_to_host = recompute._move_to_host
    monkeypatch.setattr(recompute, "_move_to_host", move)
    found = run(build(SPEC, structs.replace(settings, cpu_offloading=True)))
    check_equal(found[2], values)
    if granularity == "full":
        inputs = SPEC.num_layers * TOKENS[:, :-1].numel() * SPEC.hidden_size * 4
        assert kept - found[0] == inputs
    else:
        assert found[0] < 0.35 * kept
    assert all(shape != weight.shape for shape in copies for weight in build(SPEC, settings).parameters())
