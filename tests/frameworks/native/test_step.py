"""A step: accumulation, clipping, skipping, precision, and one process against two that are sharded."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from fakes.gloo import in_processes
from primus.config.schema import ModelSpec, OptimizerConfig, ParallelConfig
from primus.data.training.masks import DocumentHandling
from primus.frameworks.native.engine.layout import ALONE, Layout, build_layout
from primus.frameworks.native.engine.loss import IGNORED
from primus.frameworks.native.engine.model import Transformer, build_model, initialize_weights
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.recompute import ActivationMemory
from primus.frameworks.native.engine.spikes import LossWindow
from primus.frameworks.native.engine.step import (
    NONFINITE,
    SPIKE,
    StepResult,
    Trainable,
    evaluate_batches,
    prepare_model,
    shard_model,
    train_step,
)
from primus.session.fake_run.fake_group import join_fake_group

SPEC = ModelSpec(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=160,
    qk_layernorm=True,
)
ONE_LAYER = structs.replace(SPEC, num_layers=1)
"""For what compiles, which takes half a minute a layer."""
CONFIG = OptimizerConfig(lr=1e-2, clip_grad=0.5)


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro batches of two sequences whose targets are partly ignored, unevenly."""
    generator = torch.Generator().manual_seed(seed)
    micro_batches = []
    for index in range(count):
        tokens = torch.randint(0, SPEC.vocab_size, (2, 17), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, : 3 * index] = IGNORED
        micro_batches.append((tokens[:, :-1], targets))
    return micro_batches


EOD = int(batches(1)[0][0][0, 7])
"""Ends a document in the first step."""


def prepared_model(
    spec: ModelSpec,
    device: str,
    layout: Layout = ALONE,
    *,
    bf16: bool = False,
    recompute: bool = False,
    documents: DocumentHandling | None = None,
    **options,
) -> Trainable:
    model = build_model(spec, device, seed=1, layout=layout)
    model.documents, model.activations = documents, ActivationMemory("full" if recompute else None)
    model.compute_dtype = torch.bfloat16 if bf16 else None
    return prepare_model(model, device="cpu", **options)


def trainable(
    spec: ModelSpec = SPEC, documents: DocumentHandling | None = None, **options
) -> tuple[Trainable, torch.optim.Optimizer]:
    prepared = prepared_model(spec, "cpu", documents=documents, **options)
    return prepared, build_optimizer(prepared.model, CONFIG)


def run(steps: int, **options) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    prepared, optimizer = trainable(**options)
    results = [step(prepared, optimizer, batches(3, seed)) for seed in range(steps)]
    return results, prepared.model.state_dict()


def step(prepared: Trainable, optimizer: torch.optim.Optimizer, micro_batches) -> StepResult:
    return train_step(prepared, optimizer, micro_batches, learning_rate=1e-2, clip_grad=0.5)


def test_training_on_one_batch_lowers_its_loss() -> None:
    prepared, optimizer = trainable()
    losses = [step(prepared, optimizer, batches(1)).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_the_same_steps_give_the_same_bits(options: dict) -> None:
    first, first_weights = run(3, **options)
    again, again_weights = run(3, **options)
    assert all(torch.equal(a.values, b.values) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(first_weights[name], again_weights[name]) for name in first_weights)


def test_micro_batches_give_the_mean_over_all_their_tokens() -> None:
    """Unequal numbers of targets: a mean of means would differ. Tolerance: float32 rounding."""
    micro_batches = batches(3)
    whole = [(torch.cat([tokens for tokens, _ in micro_batches]), torch.cat([targets for _, targets in micro_batches]))]
    accumulated, single = (step(*trainable(), chosen) for chosen in (micro_batches, whole))
    assert accumulated.num_tokens == single.num_tokens == 3 * 32 - 9
    assert accumulated.loss == pytest.approx(single.loss, rel=1e-6)
    assert accumulated.grad_norm == pytest.approx(single.grad_norm, rel=1e-5)


@pytest.mark.parametrize("clip_grad", [0.5, 1000.0, 0.0])
def test_a_step_clips_a_norm_above_the_limit_before_adamw_and_keeps_one_below(clip_grad: float) -> None:
    ours, optimizer = trainable()
    plain, plain_optimizer = trainable()
    micro_batches = batches(2)
    result = train_step(ours, optimizer, micro_batches, learning_rate=1e-2, clip_grad=clip_grad)
    tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        plain.model(inputs, targets, 1.0 / tokens.double()).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), clip_grad or torch.inf)
    assert 0.5 < norm < 1000.0
    plain_optimizer.param_groups[0]["lr"] = plain_optimizer.param_groups[1]["lr"] = 1e-2
    plain_optimizer.step()
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for weight, expected in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    # The first step of AdamW hardly depends on the scale of the gradient; its moments do.
    for moments, expected in zip(optimizer.state.values(), plain_optimizer.state.values(), strict=True):
        torch.testing.assert_close(moments["exp_avg"], expected["exp_avg"], rtol=1e-4, atol=1e-8)


def test_the_gradient_is_cleared_after_a_step() -> None:
    prepared, optimizer = trainable()
    step(prepared, optimizer, batches(1))
    assert all(parameter.grad is None for parameter in prepared.model.parameters())


@pytest.mark.parametrize("moment", ["first step", "later step"])
def test_a_step_that_is_not_finite_changes_nothing(moment: str) -> None:
    prepared, optimizer = trainable()
    if moment == "later step":
        step(prepared, optimizer, batches(1))
    poison = prepared.model.layers["0"].feed_forward.gate_up.weight
    healthy = poison[0, 0].item()
    with torch.no_grad():
        poison[0, 0] = torch.inf
    before, random_state = copy.deepcopy(snapshot(prepared, optimizer)), torch.get_rng_state()
    result = step(prepared, optimizer, batches(1, seed=1))
    assert result.is_skipped
    assert torch.equal(random_state, torch.get_rng_state())
    after = snapshot(prepared, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        poison[0, 0] = healthy
    assert not step(prepared, optimizer, batches(1, seed=1)).is_skipped


def test_a_skipped_first_step_leaves_no_trace_in_later_ones() -> None:
    disturbed, disturbed_optimizer = trainable()
    norm = disturbed.model.norm.weight
    with torch.no_grad():
        norm[0] = torch.nan
    assert step(disturbed, disturbed_optimizer, batches(1)).is_skipped
    with torch.no_grad():
        norm[0] = 1.0
    undisturbed = trainable()
    for seed in range(3):
        ours = step(disturbed, disturbed_optimizer, batches(1, seed))
        assert torch.equal(ours.values, step(*undisturbed, batches(1, seed)).values)


@pytest.mark.parametrize(("factor", "reason"), [(1.0, SPIKE), (torch.inf, NONFINITE)])
def test_a_spike_with_a_gradient_that_is_not_finite_is_skipped_as_not_finite(factor: float, reason: float) -> None:
    prepared, optimizer = trainable()
    window = LossWindow(4, 6.0, torch.device("cpu"))
    window.replace([1.0, 1.1, 1.2, 1.3])
    prepared.model.norm.weight.register_hook(lambda gradient: gradient * factor)
    assert step(replace(prepared, window=window), optimizer, batches(1)).values[2] == reason


def test_bf16_trains_near_fp32_and_keeps_fp32_masters() -> None:
    """Tolerance: 8 bits of mantissa; losses of the first steps agree to half a percent."""
    wide, _ = run(4)
    narrow, weights = run(4, bf16=True)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    for ours, expected in zip(narrow, wide, strict=True):
        assert ours.loss == pytest.approx(expected.loss, rel=5e-3)
    assert narrow[0].grad_norm == pytest.approx(wide[0].grad_norm, rel=1e-2)


def test_recomputed_activations_give_the_same_bits() -> None:
    kept, recomputed = run(2), run(2, recompute=True)
    assert all(torch.equal(a.values, b.values) for a, b in zip(kept[0], recomputed[0], strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch while it compiles
@pytest.mark.parametrize(
    "options", [{"documents": DocumentHandling(EOD, True, True)}, {"bf16": True}], ids=["fp32-documents", "bf16"]
)
def test_a_compiled_step_agrees_with_an_eager_one(options: dict) -> None:
    """Tolerance: other orders of summation in fp32; in bf16 fused steps round less often."""
    eager, compiled = (run(3, spec=ONE_LAYER, compile=compile, **options) for compile in (False, True))
    bf16 = "bf16" in options
    assert bf16 or eager[0][0].loss != run(1, spec=ONE_LAYER)[0][0].loss, "documents matter"
    for ours, expected in zip(compiled[0], eager[0], strict=True):
        assert ours.loss == pytest.approx(expected.loss, rel=1e-3 if bf16 else 1e-5)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=3e-2 if bf16 else 1e-3)


def test_evaluation_is_the_mean_loss_over_all_tokens_and_trains_nothing() -> None:
    prepared, optimizer = trainable()
    before = copy.deepcopy(snapshot(prepared, optimizer))
    loss_sum, tokens = evaluate_batches(prepared, batches(3))
    assert loss_sum / tokens == pytest.approx(step(*trainable(), batches(3)).loss, rel=1e-6)
    assert all(torch.equal(before[name], value) for name, value in snapshot(prepared, optimizer).items())


LAYOUTS = {"sharded": {}, "replicated": {"shard": False}, "bf16": {"bf16": True}, "recompute": {"recompute": True}}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    """What each of two gloo processes saw, by layout."""
    folder = tmp_path_factory.mktemp("two_processes")
    in_processes(2, worker, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_train_as_one(layout: str, two_processes: list[dict[str, dict]]) -> None:
    """The same four micro batches, two in each process.

    Tolerance: fp32 sums in another order, amplified by Adam in the first steps; bf16 also rounds its casts.
    """
    first, second = (outcomes[layout] for outcomes in two_processes)
    bf16 = layout == "bf16"
    prepared, optimizer = trainable(bf16=bf16)
    for name, weight in prepared.model.state_dict().items():
        assert torch.equal(first["initial"][name], weight), f"{name} depends on the number of processes"
    alone = [step(prepared, optimizer, batches(4, seed)).values for seed in range(4)]
    for ours, other, expected in zip(first["values"], second["values"], alone, strict=True):
        assert torch.equal(ours, other), "the processes must agree bit by bit"
        torch.testing.assert_close(ours, expected, rtol=1e-2 if bf16 else 1e-4, atol=0.0)
    assert first["evaluation"] == second["evaluation"]
    loss_sum, tokens = evaluate_batches(prepared, batches(4))
    assert first["evaluation"] == (pytest.approx(loss_sum, rel=1e-2 if bf16 else 1e-4), tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_processes_skip_a_step_that_is_not_finite_in_one(layout: str, two_processes: list[dict[str, dict]]) -> None:
    for outcomes in two_processes:
        assert outcomes[layout]["skipped"]
        assert outcomes[layout]["unchanged"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_reduced_once_a_step(layout: str, two_processes: list[dict[str, dict]]) -> None:
    one, three = two_processes[0][layout]["num_reductions"]
    assert one == three > 0, "however many micro batches it has"


def worker(rank: int, folder: Path) -> None:
    torch.save({layout: train_in_two(rank, options) for layout, options in LAYOUTS.items()}, folder / f"{rank}.pt")


def train_in_two(rank: int, options: dict) -> dict:
    options = dict(options)
    layout = build_layout(ParallelConfig(use_distributed_optimizer=options.pop("shard", True)), torch.device("cpu"), 2)
    prepared = prepared_model(SPEC, "meta", layout, **options)
    initialize_weights(prepared.model, 1)
    initial = gathered(prepared)
    optimizer = build_optimizer(prepared.model, CONFIG)
    values = [step(prepared, optimizer, batches(4, seed)[rank::2]).values for seed in range(4)]
    evaluation = evaluate_batches(prepared, batches(4)[rank::2])
    num_reductions = [count_reductions(prepared, optimizer, count) for count in (1, 3)]
    before = gathered(prepared)
    prepared.model.frequencies.fill_(torch.nan if rank == 1 else 0.0)
    skipped = step(prepared, optimizer, batches(1)).is_skipped
    after = gathered(prepared)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    return {
        "values": values, "evaluation": evaluation, "initial": initial, "skipped": skipped, "unchanged": unchanged,
        "num_reductions": num_reductions,
    }  # fmt: skip


class ReductionCounter(TorchDispatchMode):
    """Counts collectives that reduce tensors: of gradients, and the few sums of a step itself."""

    num_reductions = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_reductions += function.namespace == "c10d" and "reduce" in str(function)
        return function(*args, **(kwargs or {}))


def count_reductions(prepared: Trainable, optimizer: torch.optim.Optimizer, num_micro_batches: int) -> int:
    with ReductionCounter() as counter:
        step(prepared, optimizer, batches(num_micro_batches))
    return counter.num_reductions


def gathered(prepared: Trainable) -> dict[str, torch.Tensor]:
    return {name: weight.full_tensor().clone() for name, weight in prepared.model.state_dict().items()}


def snapshot(prepared: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every number that a step may change; optimizer state only once it exists."""
    numbers = dict(prepared.model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        numbers |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    return numbers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch while it compiles
@pytest.mark.parametrize("compiles", [True, False])
def test_the_loss_is_compiled_where_each_layer_is(compiles: bool) -> None:
    with join_fake_group(0, 2):
        layout = build_layout(ParallelConfig(use_distributed_optimizer=True), torch.device("cpu"), 2)
        with torch.device("meta"):
            model = Transformer(SPEC, layout)
        shard_model(model, compile=compiles)
        assert model.loss_settings.is_fused == compiles
