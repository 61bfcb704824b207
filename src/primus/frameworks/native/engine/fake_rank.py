"""One step of one rank, executed by the code of the run and observed: on fake tensors, alone in a fake process group.

What differs from the run: weights have no values, tokens go to experts evenly, and of many micro batches only so many
are executed that more change neither memory nor what each adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from primus.callback import CONVENTION
from primus.config.checks import data_parallel_size
from primus.config.schema import Experiment, Trainer
from primus.data.training.dataset import MOCK_EOD
from primus.frameworks.native.engine.checkpoint import collect_current_state, count_bytes
from primus.frameworks.native.engine.compilation import COMPILE_S, EAGER_TFLOPS, MARGIN, SAVED_SHARE
from primus.frameworks.native.engine.driver import build_unsharded
from primus.frameworks.native.engine.layout import Layout, build_layout
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.moe import MixtureOfExperts
from primus.frameworks.native.engine.ops import plan_accelerator
from primus.frameworks.native.engine.optimizer import HostOptimizer, build_optimizer, fill_state
from primus.frameworks.native.engine.pipeline import Batch
from primus.frameworks.native.engine.step import allocate_model, shard_model, train_step
from primus.frameworks.native.layout_settings import LayoutSettings
from primus.frameworks.native.support import read_own_settings
from primus.frameworks.native.training_settings import TrainingSettings
from primus.models.counts import flops_per_token
from primus.prediction.rank_record import RankRecord
from primus.session.fake_run.fake_group import join_fake_group
from primus.session.fake_run.fake_record import (
    ExecutedRank,
    StepPlan,
    build_record,
    list_local,
    list_states,
    list_unsharded_gradients,
)
from primus.session.fake_run.observer import StepObserver
from primus.session.ranks.torch_processes import TorchProcesses

SHARDED = ("data", "context", "tensor", "pipeline", "expert", "sequence", "stage")
"""Axes of a layout whose groups have their names."""


def run_fake_rank(experiment: Experiment, rank: int, world: int, devices_per_node: int) -> RankRecord:
    """The record of a rank of a run that does not happen; needs no GPU, network, data or memory for the model.

    Args:
        experiment: What would be trained; with `device: cpu` by CPUs, else by accelerators.
        rank: Of the process.
        world: Processes of the run.
        devices_per_node: Processes on each node.

    Raises:
        PrimusError: What a process of the run would raise; also what PyTorch does.
    """
    started = time.monotonic()
    trainer = experiment.trainer
    plan = StepPlan(trainer, world, read_own_settings(trainer, LayoutSettings).num_virtual_stages_per_pipeline_rank)
    compiles = trainer.training.device != "cpu" and _compiles(trainer, world)
    with ExitStack() as stack:
        stack.enter_context(join_fake_group(rank, world))
        if trainer.training.device != "cpu":
            stack.enter_context(plan_accelerator("compiled" if compiles else "eager"))
        layout = _build_layout(trainer, world)
        modes = FakeTensorMode(allow_non_fake_inputs=True)
        observer = StepObserver(name_groups(layout), devices_per_node, is_fake=True)
        model, saved_bytes = execute_step(trainer, layout, rank, world, plan.executed, observer, modes)
    executed = ExecutedRank(
        framework="native",
        rank=rank,
        world_size=world,
        devices_per_node=devices_per_node,
        stage=layout.pipeline.rank,
        layers=tuple(n for group in model.stage.groups for n in group),
        saved_bytes=saved_bytes,
        assumptions=tuple(_list_assumptions(trainer, plan, compiles)),
        seconds=time.monotonic() - started,
    )
    return build_record(executed, trainer, plan, observer)


def execute_step(
    trainer: Trainer,
    layout: Layout,
    rank: int,
    world: int,
    micro_batches: int,
    observer: StepObserver,
    fake_mode: FakeTensorMode | None,
    initialize: Callable[[Transformer], None] | None = None,
) -> tuple[Transformer, int]:
    """Set-up, one step and what a checkpoint would take of it, observed; the model, and bytes of its checkpoint.

    Args:
        trainer: The experiment.
        layout: Of this process, which has joined its group.
        rank: Of this process.
        world: Number of processes.
        micro_batches: How many the step has.
        observer: Sees everything.
        fake_mode: Makes tensors without memory; None for real ones.
        initialize: Fills the weights of a real model.
    """
    device = torch.device("cpu")
    settings = read_own_settings(trainer, TrainingSettings)
    # On the meta device, so that nothing is allocated.
    model = build_unsharded(trainer, layout, torch.float32, MOCK_EOD)
    shard_model(model, compile=False)
    with fake_mode or nullcontext(), observer:
        trainable = allocate_model(model, device=device, compile=False)
        optimizer = build_optimizer(model, trainer.optimizer, settings)
        fill_state(optimizer)
        if initialize is not None:
            initialize(model)
        observer.label("weights", [*list_local(model.parameters()), *model.buffers()])
        inner = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
        observer.label("optimizer", list_local(list_states(inner)))
        _observe_passes(model, optimizer, observer)
        trainable = replace(trainable, timer=_PassEnd(observer))
        for module in model.modules() if fake_mode is not None else ():
            if isinstance(module, MixtureOfExperts):
                module.read_counts = _spread_evenly
        batches = [_build_batch(trainer) for _ in range(micro_batches)]
        clip = trainer.optimizer.clip_grad
        train_step(trainable, optimizer, batches, learning_rate=trainer.optimizer.lr, clip_grad=clip)
        del batches
        observer.begin("save")
        processes = TorchProcesses(rank, world, device, timedelta(minutes=1))
        return model, _count_own_bytes(collect_current_state(model, optimizer, processes))


class _PassEnd:
    """After the passes of a micro batch comes another one, or the end of the step."""

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        yield
        self._observer.begin("clip")


def _observe_passes(model: Transformer, optimizer: torch.optim.Optimizer, observer: StepObserver) -> None:
    """Tell the observer when passes begin, and which tensors are gradients."""

    def begin_micro_batch(*_: Any) -> None:
        # Several micro batches add up gradients before they are reduced.
        observer.label("gradients", list_unsharded_gradients(model))
        observer.begin_micro_batch()

    def begin_backward(gradient: Tensor) -> None:
        observer.begin_backward()

    def end_forward(_: Any, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(begin_backward)

    def begin_update(*_: Any) -> None:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        observer.label("gradients", list_local(gradients))
        observer.begin("optimizer")

    model.register_forward_pre_hook(begin_micro_batch, prepend=True)
    model.register_forward_hook(end_forward)
    optimizer.register_step_pre_hook(begin_update)


def _spread_evenly(counts_P: Tensor, rows: int) -> list[int]:
    size, rest = divmod(rows, counts_P.shape[0])
    return [size + (place < rest) for place in range(counts_P.shape[0])]


def _build_batch(trainer: Trainer) -> Batch:
    size = (trainer.training.micro_batch_size, trainer.training.seq_length)
    tokens = torch.randint(0, trainer.model.vocab_size, size)
    return tokens, tokens.clone()


def _count_own_bytes(state: dict[str, Tensor]) -> int:
    """Bytes of the pieces of this process."""
    pieces = (piece.local for each in state.values() for piece in getattr(each, "pieces", ()))
    own = sum(piece.numel() * piece.element_size() for piece in pieces)
    return own or count_bytes(state)


def _build_layout(trainer: Trainer, world: int) -> Layout:
    settings = read_own_settings(trainer, LayoutSettings)
    return build_layout(trainer.parallel, torch.device("cpu"), world, settings)


def name_groups(layout: Layout) -> dict[str, str]:
    """What the ranks of each process group share, by its name; of groups with the same ranks, each has its own."""
    named: dict[str, str] = {}
    for mesh, prefix in ((layout.expert_mesh, "expert_"), (layout.shard_mesh, "")):
        for dim, name in enumerate(mesh.mesh_dim_names or () if mesh is not None else ()):
            assert mesh is not None
            named[mesh.get_group(dim).group_name] = prefix + name
    for name in SHARDED:
        group = getattr(layout, name).group
        if group is not None:
            named[group.group_name] = name
    for name in ("losses", "ends"):
        group = getattr(layout, name)
        if group is not None:
            named.setdefault(group.group_name, name)  # it may be the group that shards weights
    return named


def _compiles(trainer: Trainer, world: int) -> bool:
    """As `compilation.decide_compilation` does for a new run on an accelerator."""
    asked = trainer.training.compile
    if asked != "auto":
        return asked
    training = trainer.training
    batch = training.global_batch_size or training.micro_batch_size * data_parallel_size(trainer.parallel, world)
    tokens = training.train_iters * batch * training.seq_length
    flops = tokens * flops_per_token(trainer.model, training.seq_length, CONVENTION) / world
    return SAVED_SHARE * flops / (EAGER_TFLOPS["cuda"] * 1e12) > MARGIN * COMPILE_S


def _list_assumptions(trainer: Trainer, plan: StepPlan, compiles: bool) -> Iterator[str]:
    yield "weights have no values; initial values and data are not read"
    if trainer.training.device != "cpu":
        yield "operators and their tensors are those of an accelerator, without what its kernels use inside"
        if compiles:
            yield "compiled layers keep as much for the backward pass as the engine's own derivatives do"
    if trainer.model.num_experts:
        yield "tokens go to all experts evenly"
    if plan.executed < plan.micro_batches:
        yield f"{plan.executed} of {plan.micro_batches} micro batches are executed; others add what the last one does"
