"""One step of one rank by torchtitan's own trainer, on fake tensors, alone in a fake process group.

The trainer is built as in a run. From the moment at which it allocates the model, everything is fake. Initial values
are skipped, since torchtitan reads values of weights to draw them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.pipelining._utils import _StageMeta, extract_tensor_metas
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_iter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.model import BaseModel
from torchtitan.tools import utils
from torchtitan.trainer import Trainer as TitanTrainer

from primus.config.schema import Experiment, Trainer
from primus.errors import UnfitError
from primus.frameworks.torchtitan.engine.driver import TorchTitanEngine
from primus.frameworks.torchtitan.engine.layout import plan_layout
from primus.frameworks.torchtitan.engine.run import explain_refusal
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

GROUPS = {
    "tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert", "efsdp": "expert_shard", "fsdp": "shard",
    "dp_replicate": "replicate", "loss": "losses", "batch": "batch",
}  # fmt: skip
"""What the ranks of a mesh share, by torchtitan's name of it."""
CPU = torch.device("cpu")


def run_fake_rank(experiment: Experiment, rank: int, world: int, devices_per_node: int) -> RankRecord:
    """The record of a rank of a run that does not happen.

    Raises:
        UnfitError: The model has operators that exist on accelerators only.
        UsageError: torchtitan refuses the layout.
    """
    started = time.monotonic()
    trainer = structs.replace(
        experiment.trainer, training=structs.replace(experiment.trainer.training, compile=False, device="cpu")
    )
    refuse_accelerator_operators(trainer)
    plan = StepPlan(trainer, world, 1)
    batch = trainer.training.global_batch_size
    if plan.executed < plan.micro_batches and batch is not None:
        fewer = structs.replace(trainer.training, global_batch_size=batch // plan.micro_batches * plan.executed)
        trainer = structs.replace(trainer, training=fewer)
    observer = StepObserver({}, devices_per_node, is_fake=True)
    with ExitStack() as stack:
        stack.enter_context(join_fake_group(rank, world))
        titan, saved_bytes = _execute_step(trainer, world, observer, stack)
        stage = titan.parallel_dims.get_optional_mesh("pp")
        executed = ExecutedRank(
            framework="torchtitan",
            rank=rank,
            world_size=world,
            devices_per_node=devices_per_node,
            stage=stage.get_local_rank() if stage is not None else 0,
            layers=tuple(int(name) for part in titan.model_parts for name in part.layers),
            saved_bytes=saved_bytes,
            assumptions=tuple(_list_assumptions(experiment.trainer, plan)),
            seconds=time.monotonic() - started,
        )
    return build_record(executed, trainer, plan, observer)


def refuse_accelerator_operators(trainer: Trainer) -> None:
    """Refuse what torchtitan computes by kernels of accelerators only: what cannot be executed here may still run.

    Raises:
        UnfitError: Names the setting.
    """
    needs_gpu = {
        "context_parallel_size": trainer.parallel.context_parallel_size > 1,
        "reset_attention_mask": trainer.data.reset_attention_mask,
        "attention_sinks": trainer.model.attention_sinks,
        "fp8": trainer.training.fp8 is not None,
    }
    for key, is_asked in needs_gpu.items():
        if is_asked:
            raise UnfitError(
                f"{key}: torchtitan computes it by kernels that exist on accelerators only, so that its step cannot be"
                " executed on fake tensors here",
                "`analyze speed` predicts its memory and time by formulas; --engine native executes the model",
            )


def _execute_step(trainer: Trainer, world: int, observer: StepObserver, stack: ExitStack) -> tuple[TitanTrainer, int]:
    """The trainer after one step, and bytes of what a checkpoint takes of it; `stack` ends the fake modes."""
    layout = plan_layout(trainer.training, trainer.parallel, world)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    stack.enter_context(_prepare_torchtitan())
    stack.enter_context(_begin_fake_at_allocation(FakeTensorMode(allow_non_fake_inputs=True), observer))
    with explain_refusal():
        engine = TorchTitanEngine(trainer, layout, folder=Path(folder), device=CPU)
    stack.callback(engine.close)
    titan = engine.trainer
    meshes = {meaning: titan.parallel_dims.get_optional_mesh(name) for name, meaning in GROUPS.items()}
    names = {mesh.get_group().group_name: meaning for meaning, mesh in meshes.items() if mesh is not None}
    # The norm of gradients, and whether they are finite.
    observer.name_groups({dist.group.WORLD.group_name: "world", **names} if dist.group.WORLD else names)
    for part in titan.model_parts:
        observer.label("weights", [*list_local(part.parameters()), *part.buffers()])
    for optimizer in titan.optimizers.optimizers:
        _init_optim_state(optimizer)
        observer.label("optimizer", list_local(list_states(optimizer)))
    if titan.parallel_dims.pp_enabled:
        _describe_stages(titan, trainer)
    _observe_passes(titan, observer)
    size = (trainer.training.micro_batch_size, trainer.training.seq_length + 1)
    tokens = [np.zeros(size, dtype=np.int64) for _ in range(layout.num_micro_batches)]
    engine.step(tokens, trainer.optimizer.lr)
    observer.begin("save")
    state = titan.checkpointer._flattened_model_states_sd()
    tensors = list_local([each for each in tree_iter(state) if isinstance(each, Tensor)])
    return titan, sum(each.numel() * each.element_size() for each in tensors)


@contextmanager
def _prepare_torchtitan() -> Iterator[None]:
    """What reads values of tensors, or the index of a device, is replaced for the duration of a `with`."""
    initialize, find_device = BaseModel.init_weights, utils.get_local_device
    exchange_counts, reorder = (
        AllToAllTokenDispatcher._sync_token_count_exchange,
        AllToAllTokenDispatcher._local_reorder,
    )
    before = os.environ.get("LOCAL_RANK")
    num_rows = 0

    def reorder_and_count(dispatcher: AllToAllTokenDispatcher, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal num_rows
        result: tuple[Tensor, Tensor, Tensor] = reorder(dispatcher, *inputs)
        num_rows = result[0].shape[0]
        return result

    def spread_evenly(
        dispatcher: AllToAllTokenDispatcher, local_counts_E: Tensor, global_counts_PE: Tensor, size: int
    ) -> tuple[Tensor, list[int], list[int]]:
        # As many tokens for each rank of the group, in place of counts that have no values.
        own, rest = divmod(num_rows, size)
        splits = [own + (place < rest) for place in range(size)]
        return global_counts_PE.reshape(-1), splits, splits

    BaseModel.init_weights = lambda self, **_: None
    # A fake tensor on `cpu:0` is on another device than one on `cpu`.
    utils.get_local_device = lambda: CPU
    AllToAllTokenDispatcher._sync_token_count_exchange = spread_evenly
    AllToAllTokenDispatcher._local_reorder = reorder_and_count
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        BaseModel.init_weights, utils.get_local_device = initialize, find_device
        AllToAllTokenDispatcher._sync_token_count_exchange = exchange_counts
        AllToAllTokenDispatcher._local_reorder = reorder
        if before is None:
            del os.environ["LOCAL_RANK"]


@contextmanager
def _begin_fake_at_allocation(mode: FakeTensorMode, observer: StepObserver) -> Iterator[None]:
    """Meshes need values, and the model is on the meta device before: modes begin where the trainer allocates it."""
    allocate = nn.Module.to_empty
    with ExitStack() as modes:

        def begin_and_allocate(module: nn.Module, **options: Any) -> nn.Module:
            nn.Module.to_empty = allocate  # type: ignore[method-assign]
            modes.enter_context(mode)
            modes.enter_context(observer)
            return allocate(module, **options)

        nn.Module.to_empty = begin_and_allocate  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.to_empty = allocate  # type: ignore[method-assign]


def _describe_stages(titan: TitanTrainer, trainer: Trainer) -> None:
    """Give stages the shapes of what they receive and send, which they ask other ranks for in a run."""
    training, tensor = trainer.training, titan.parallel_dims.get_optional_mesh("tp")
    shape = [training.micro_batch_size, training.seq_length, trainer.model.hidden_size]
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    placement: Placement = Shard(1) if trainer.parallel.sequence_parallel else Replicate()
    if tensor is not None and trainer.parallel.sequence_parallel:
        shape[1] //= tensor.size()
    hidden = torch.empty(shape, dtype=dtype, requires_grad=True)
    if tensor is not None:
        hidden = DTensor.from_local(hidden, tensor, (placement,))
    tokens = torch.empty(shape[0], training.seq_length, dtype=torch.int64)
    loss = torch.empty((), dtype=torch.float32, requires_grad=True)
    schedule = titan.pp_schedule
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        received, sent = tokens if stage.is_first else hidden, loss if stage.is_last else hidden
        stage._mesh_cache.update_from_tensors((received, sent))
        stage._user_meta = _StageMeta(
            inputs=extract_tensor_metas((received,)),
            outputs=extract_tensor_metas((sent,)),
            input_grads=extract_tensor_metas((None if stage.is_first else hidden.detach(),), allow_none=True),
            output_grads=extract_tensor_metas((sent.detach(),), allow_none=True),
        )


def _observe_passes(titan: TitanTrainer, observer: StepObserver) -> None:
    """Tell the observer when passes begin, and which tensors are gradients."""

    def begin_micro_batch(*_: Any) -> None:
        for part in titan.model_parts:
            observer.label("gradients", list_unsharded_gradients(part))
        observer.begin_micro_batch()

    def end_forward(_: Any, __: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: observer.begin_backward())

    def begin_update(*_: Any) -> None:
        gradients = [each.grad for part in titan.model_parts for each in part.parameters() if each.grad is not None]
        observer.label("gradients", list_local(gradients))
        observer.begin("optimizer")

    run_passes = titan.forward_backward_step

    def run_and_end_passes(**options: Any) -> Tensor:
        loss = run_passes(**options)
        observer.begin("clip")
        return loss

    titan.forward_backward_step = run_and_end_passes
    for part in titan.model_parts:
        part.register_forward_pre_hook(begin_micro_batch, prepend=True)
        part.register_forward_hook(end_forward)
    titan.optimizers.optimizers[0].register_step_pre_hook(begin_update)


def _list_assumptions(trainer: Trainer, plan: StepPlan) -> Iterator[str]:
    yield "weights have no values; initial values and data are not read"
    yield "torchtitan's operators are those of its CPU: attention is fused as on an accelerator, the rest is not"
    if trainer.training.compile is True:
        yield "layers are not compiled here; compiled ones keep fewer tensors for the backward pass"
    if trainer.model.num_experts:
        yield "tokens go to all experts evenly"
    if plan.executed < plan.micro_batches:
        yield f"{plan.executed} of {plan.micro_batches} micro batches are executed; others add what the last one does"
