"""A step of fake tensors as a record: what was observed, extended to all micro batches of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct, structs
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from primus.config.checks import data_parallel_size
from primus.config.schema import Trainer
from primus.prediction.rank_record import Kind, MemoryMoment, MemoryParts, RankRecord
from primus.session.fake_run.observer import StepObserver
from primus.session.ranks.torch_processes import read_peak_host_memory


class StepPlan:
    """How many micro batches a step has, and how many of them show all that it does.

    Args:
        trainer: The experiment.
        world: Its processes.
        groups: Groups of layers of each pipeline stage.
    """

    def __init__(self, trainer: Trainer, world: int, groups: int) -> None:
        training, self.num_stages = trainer.training, trainer.parallel.pipeline_model_parallel_size
        replicas = data_parallel_size(trainer.parallel, world)
        batch = training.global_batch_size or training.micro_batch_size * replicas
        self.micro_batches = max(1, batch // (training.micro_batch_size * replicas))
        self.groups = groups
        self.executed = min(self.micro_batches, self._count_needed())

    def _count_needed(self) -> int:
        """One is not enough where gradients of several add up; with stages, as many as are under way, and two more: the
        first of them meets gradients of others, and the second adds what each further one does."""
        if self.num_stages == 1:
            return 2
        if self.groups == 1:
            return self.num_stages + 2
        # In rounds of as many micro batches as there are stages; other numbers pass all forward first.
        return 3 * self.num_stages if self.micro_batches % self.num_stages == 0 else self.micro_batches

    @property
    def schedule(self) -> str:
        """Of native's pipeline and, with one group of layers, of torchtitan's."""
        if self.num_stages == 1:
            return "none"
        if self.groups == 1:
            return "1F1B" if self.micro_batches >= self.num_stages else "GPipe"
        count = self.micro_batches
        return "Interleaved1F1B" if count % max(1, count // self.num_stages) == 0 else "LoopedBFS"

    @property
    def bubble(self) -> float:
        """Share of the step that a stage waits (arXiv 2104.04473, section 2.2), of which it is (p - 1) / (v m) of the
        rest."""
        waiting = self.num_stages - 1
        return waiting / (self.groups * self.micro_batches + waiting)


class ExecutedRank(Struct, frozen=True, kw_only=True):
    """The rank that was executed."""

    framework: str
    rank: int
    world_size: int
    devices_per_node: int
    stage: int
    layers: tuple[int, ...]
    saved_bytes: int
    assumptions: tuple[str, ...]
    seconds: float


def build_record(executed: ExecutedRank, trainer: Trainer, plan: StepPlan, observer: StepObserver) -> RankRecord:
    """The record of a rank of whose step `plan.executed` micro batches were executed."""
    missing = plan.micro_batches - plan.executed
    peak, timeline, kept = observer.find_moments()
    waiting = _measure_waiting(trainer, observer, plan)
    window = plan.num_stages if plan.groups > 1 else 1
    return RankRecord(
        framework=executed.framework,
        rank=executed.rank,
        kind=_find_kind(executed.stage, plan.num_stages),
        stage=executed.stage,
        num_stages=plan.num_stages,
        layers=executed.layers,
        world_size=executed.world_size,
        devices_per_node=executed.devices_per_node,
        micro_batches=plan.micro_batches,
        executed_micro_batches=plan.executed,
        in_flight=-(-observer.most_in_flight // plan.groups),
        schedule=plan.schedule,
        bubble=plan.bubble,
        peak=_add_waiting(peak, waiting, missing),
        kept=kept,
        timeline=tuple(_add_waiting(moment, waiting, missing) for moment in timeline),
        passes=observer.list_passes(),
        exchanges=observer.list_exchanges(missing, window, plan.groups),
        work=observer.list_work(missing, window, plan.groups),
        saved_bytes=executed.saved_bytes,
        assumptions=executed.assumptions,
        seconds=executed.seconds,
        process_bytes=read_peak_host_memory(),
    )


def _find_kind(stage: int, num_stages: int) -> Kind:
    if num_stages == 1:
        return "only"
    return "first" if stage == 0 else "last" if stage == num_stages - 1 else "middle"


def _measure_waiting(trainer: Trainer, observer: StepObserver, plan: StepPlan) -> MemoryParts:
    """What each micro batch of a step has from the beginning: its tokens and targets, which a pipeline copies, and
    there its weight and the buffers into which torch.distributed.pipelining receives."""
    training, has_stages = trainer.training, plan.num_stages > 1
    received = sum(each.total_bytes for each in observer.list_exchanges() if each.operation == "receive")
    tokens = training.micro_batch_size * training.seq_length * torch.int64.itemsize
    return MemoryParts(
        communication=received // plan.executed,
        activations=4 * tokens + torch.float64.itemsize if has_stages else 2 * tokens,
    )


def _add_waiting(moment: MemoryMoment, waiting: MemoryParts, count: int) -> MemoryMoment:
    parts = structs.replace(
        moment.parts,
        communication=moment.parts.communication + count * waiting.communication,
        activations=moment.parts.activations + count * waiting.activations,
    )
    return structs.replace(moment, parts=parts)


def list_unsharded_gradients(model: torch.nn.Module) -> list[Tensor]:
    """Whole gradients that FSDP2 holds between the micro batches of a step."""
    found: list[Tensor] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = module._get_fsdp_state()._fsdp_param_groups
        for parameter in (each for group in groups for each in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)
            found += [
                each
                for each in (parameter.unsharded_accumulated_grad, getattr(whole, "grad", None))
                if each is not None
            ]
    return found


def list_local(tensors: Any) -> list[Tensor]:
    """The parts of tensors that are on this rank."""
    return [each._local_tensor if hasattr(each, "_local_tensor") else each for each in tensors]


def list_states(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """All tensors that an optimizer keeps."""
    return [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
