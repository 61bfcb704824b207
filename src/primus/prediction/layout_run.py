"""A layout on a machine: its ranks are executed on fake tensors, and their memory is compared with the devices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from primus.config.load import Resolved
from primus.errors import UsageError
from primus.models import training_memory
from primus.prediction.fake_ranks import check_world_size, choose_ranks, run_ranks
from primus.prediction.layout_machine import LayoutMachine
from primus.prediction.layout_speed import LayoutSpeed, predict_layout
from primus.prediction.layout_verdict import RankFit, judge_memory
from primus.prediction.rank_record import RankRecord


class LayoutUnknown(UsageError):
    """A layout cannot be executed here: neither that it runs nor that it fails is known."""


class LayoutReport(Struct, frozen=True, kw_only=True):
    """What the executed ranks of a layout do."""

    experiment: str
    framework: str
    machine: str
    nnodes: int
    world_size: int
    device_bytes: int | None
    records: tuple[RankRecord, ...]
    fit: tuple[RankFit, ...]
    """Of each record; empty where the memory of a device is not known."""
    fits: bool
    seconds: float
    speed: LayoutSpeed


def execute_layout(
    resolved: Resolved,
    machine: LayoutMachine,
    ranks: str,
    environ: Mapping[str, str],
    *,
    price: float | None = None,
    measured: Sequence[str] = (),
) -> LayoutReport:
    """Execute ranks of an experiment on a machine, and predict the speed of all.

    Args:
        resolved: The experiment.
        machine: The nodes.
        ranks: What `choose_ranks` takes.
        environ: For the processes of ranks.
        price: Of a GPU for an hour.
        measured: Results of benchmarks in place of rates of the devices' profile.

    Raises:
        UsageError: The layout cannot run.
        LayoutUnknown: Its framework cannot execute it, or this machine lacks what that needs.
        PrimusError: A process of a rank was killed, or took too long.
    """
    started = time.monotonic()
    asked = resolved.experiment
    if machine.name == "CPU" and asked.trainer.training.device == "auto":
        training = structs.replace(asked.trainer.training, device="cpu")
        asked = structs.replace(asked, trainer=structs.replace(asked.trainer, training=training))
    check_world_size(resolved, machine.world_size)
    check_lower_bound(resolved, machine)
    chosen = choose_ranks(ranks, asked.trainer, machine.world_size)
    answers = run_ranks(asked, chosen, machine.world_size, machine.devices_per_node, environ)
    for answer in answers:
        if answer.is_unknown:
            raise LayoutUnknown(answer.problem, answer.hint)
        if answer.record is None:
            raise UsageError(f"rank {answer.rank} of {machine.world_size}: {answer.problem}", answer.hint)
    records = tuple(answer.record for answer in answers if answer.record is not None)
    memory = machine.device_bytes
    fit = tuple(judge_memory(record, memory) for record in records) if memory else ()
    return LayoutReport(
        experiment=asked.exp_name,
        framework=asked.trainer.framework,
        machine=machine.name,
        nnodes=machine.nnodes,
        world_size=machine.world_size,
        device_bytes=memory,
        records=records,
        fit=fit,
        fits=all(each.fits for each in fit),
        seconds=time.monotonic() - started,
        speed=predict_layout(asked.trainer, machine, records, price=price, measured=measured),
    )


def check_lower_bound(resolved: Resolved, machine: LayoutMachine) -> None:
    """Refuse what weights, gradients and optimizer state already exclude.

    Raises:
        UsageError: They need more than the devices have; says by how much and what would fit.
    """
    if machine.facts is None:
        return
    need = training_memory.estimate_need(resolved.experiment.trainer)
    fit = training_memory.compare_with_machine(need, machine.facts, machine.nnodes)
    if fit is not None and not fit.fits:
        raise UsageError(fit.format_problem(), fit.format_remedy())
