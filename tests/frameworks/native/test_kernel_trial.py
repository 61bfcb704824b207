"""Kernels are tried against float64 before the first step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from primus import experiment
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError
from primus.frameworks import native
from primus.frameworks.native.engine import experts, kernel_trial, ops
from primus.frameworks.native.engine.kernel_trial import TriedKernel, judge, list_kernels, try_kernels
from primus.frameworks.native.engine.model import build_model
from primus.runs.attempt import Attempt
from primus.runs.events import read_events
from primus.runs.store import Run

SPEC = ModelSpec(
    num_layers=1,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=200,
    max_position_embeddings=64,
    num_experts=8,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_the_kernels_of_a_model_are_right(dtype: torch.dtype | None) -> None:
    model = build_model(SPEC, CPU, 1)
    model.compute_dtype = dtype
    verdicts = try_kernels(list_kernels(model, CPU, 2, 64), 60)
    assert [each.problem for each in verdicts] == [""] * 7
    assert verdicts[0].shapes[3] == [8, 192, 64], "the experts' own"
    assert {each.name for each in verdicts} >= {"attention", "RMSNorm", "rotary embedding", "cross-entropy"}


def test_rows_that_a_kernel_leaves_unwritten_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = experts.multiply_groups

    def forget_last_rows(rows_RI: Tensor, weights_EIO: Tensor, counts_E: Tensor) -> Tensor:
        """Stops at the last expert that has rows, as kernels with wrong ends of groups do."""
        whole = multiply(rows_RI, weights_EIO, counts_E)
        found = torch.empty_like(whole)
        done = int(counts_E[:-1].sum())
        found[:done] = whole[:done]
        return found

    monkeypatch.setattr(experts, "multiply_groups", forget_last_rows)
    model = build_model(SPEC, CPU, 1)
    verdicts = {each.name: each for each in try_kernels(list_kernels(model, CPU, 2, 64), 60)}
    assert verdicts["experts (even)"].problem
    assert not verdicts["attention"].problem


def test_memory_of_every_output_holds_nan_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which block a CPU's allocator gives next is not certain, so the tensors are looked at instead."""
    made: list[Tensor] = []
    fill = torch.full

    def record(*args: Any, **options: Any) -> Tensor:
        made.append(fill(*args, **options))
        return made[-1]

    monkeypatch.setattr(torch, "full", record)
    assert not judge(TriedKernel("product", torch.mm, torch.mm, (torch.ones(4, 3), torch.ones(3, 2)))).problem
    assert [tuple(each.shape) for each in made] == [(4, 2), (4, 3), (3, 2)] * 2
    assert all(each.isnan().all() and each.dtype == torch.float32 for each in made)


def test_experts_are_tried_with_all_rows_at_a_late_one_and_with_some_that_have_none() -> None:
    kernels = list(list_kernels(build_model(SPEC, CPU, 1), CPU, 2, 64))
    counts = {each.name: each.inputs[2].tolist() for each in kernels if each.name.startswith("experts")}
    assert counts["experts (even)"] == [32] * 8
    assert counts["experts (all at one)"] == [0, 0, 0, 0, 256, 0, 0, 0]
    zipf = counts["experts (Zipf)"]
    assert sum(zipf) == 256 and zipf.count(0) == 3 and zipf[0] > 2 * zipf[2] > 0


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (lambda x: x.exp() * (1 + (torch.arange(8) == 3) * 0.01), "differs from float64 by"),
        (lambda x: x.exp() + (x.sum() - x.sum().detach()), "differs from float64 by"),
        (lambda x: x.exp().masked_fill(torch.arange(8) == 3, torch.nan), "not finite"),
    ],
    ids=["one column", "gradient", "nan"],
)
def test_a_wrong_output_or_gradient_is_found(run: Callable[[Tensor], Tensor], problem: str) -> None:
    inputs = (torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),)
    assert not judge(TriedKernel("exponential", torch.exp, torch.exp, inputs)).problem
    assert problem in judge(TriedKernel("exponential", run, torch.exp, inputs)).problem


def test_a_kernel_that_gives_other_bits_each_time_is_known() -> None:
    turns = iter([0.0, 1e-7] * 2)
    kernel = TriedKernel("unsteady", lambda x: x + next(turns), lambda x: x, (torch.ones(4),))
    assert not judge(kernel).is_repeatable


def test_no_kernel_is_begun_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = (TriedKernel(name, torch.exp, torch.exp, (torch.ones(4),)) for name in "abc")
    clock = iter([0.0, 1.0, 6.0])
    monkeypatch.setattr(kernel_trial, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert [each.name for each in try_kernels(kernels)] == ["a", "b"]


def test_a_run_with_right_kernels_trains_and_keeps_their_verdicts(
    make_run: Callable[..., Run], train: Callable[..., Attempt]
) -> None:
    run = make_run(kernel_trial="always", train_iters=1)
    train(run)
    [trial] = [each for each in read_events(run.events) if each["kind"] == "kernel_trial"]
    assert {each["name"] for each in trial["kernels"]} >= {"attention", "SwiGLU"}
    assert not any(each["problem"] for each in trial["kernels"])


def test_a_wrong_kernel_stops_a_run_before_its_first_step(
    make_run: Callable[..., Run], train: Callable[..., Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.swiglu
    monkeypatch.setattr(ops, "swiglu", lambda x: right(x) * 1.1)
    run = make_run(kernel_trial="always", train_iters=1)
    with pytest.raises(PrimusError, match=r"kernel trial on the CPU .*SwiGLU .* differs from float64") as error:
        train(run)
    assert "kernel_trial: off" in str(error.value.hint)
    assert not [each for each in read_events(run.events) if each["kind"] == "step"]


def test_a_run_on_a_cpu_tries_no_kernels_by_itself(make_run: Callable[..., Run], train: Callable[..., Attempt]) -> None:
    run = make_run(train_iters=1)
    train(run)
    assert not [each for each in read_events(run.events) if each["kind"] == "kernel_trial"]


def test_another_value_is_refused(make_run: Callable[..., Run]) -> None:
    with pytest.raises(UsageError, match="kernel_trial: sometimes"):
        native.check(experiment.read_run_experiment(make_run(kernel_trial="sometimes")))


def test_preflight_tries_kernels_of_dense_layers_and_of_experts_on_a_device() -> None:
    tried = native.try_kernels(torch.device("cpu"))
    names = [name for name, _ in tried]
    assert {"attention", "RMSNorm", "SwiGLU", "cross-entropy", "experts (Zipf)"} <= set(names)
    assert [problem for _, problem in tried if problem] == []


def test_preflight_names_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "swiglu", lambda gate_up: 1.1 * gate_up.chunk(2, -1)[0])
    [(name, problem)] = [each for each in native.try_kernels(torch.device("cpu")) if each[1]]
    assert name == "SwiGLU" and "differs from float64" in problem
