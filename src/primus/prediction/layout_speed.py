"""The predicted speed of a layout whose ranks were executed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus.config.schema import Trainer
from primus.errors import UsageError
from primus.prediction.device_rates import read_rates
from primus.prediction.layout_machine import LayoutMachine
from primus.prediction.measured_rates import replace_rates
from primus.prediction.prediction import Prediction, find_machine, predict
from primus.prediction.rank_record import RankRecord
from primus.prediction.step_layout import build_layout
from primus.prediction.step_timeline import TimelinePass, build_timeline, time_passes


class RankTimeline(Struct, frozen=True, kw_only=True):
    """When a rank computes, exchanges and waits."""

    rank: int
    passes: tuple[TimelinePass, ...]


class LayoutSpeed(Struct, frozen=True, kw_only=True):
    """Time of a step of a layout."""

    prediction: Prediction | None = None
    problem: str = ""
    """Why there is none."""
    timelines: tuple[RankTimeline, ...] = ()
    """Of the executed micro batches, for each executed rank."""


def predict_layout(
    trainer: Trainer,
    machine: LayoutMachine,
    records: Sequence[RankRecord],
    *,
    price: float | None = None,
    measured: Sequence[str] = (),
) -> LayoutSpeed:
    """The prediction for a machine, or why there is none: a layout is judged without it, too.

    Args:
        trainer: The experiment's trainer.
        machine: The nodes.
        records: Of the executed ranks.
        price: Of a GPU for an hour.
        measured: Results of benchmarks in place of rates of the profile.

    Raises:
        UsageError: A file of `measured` is not usable.
    """
    if machine.name == "CPU" or not machine.model:
        return LayoutSpeed(problem="--assume MODEL names an accelerator whose rates are known")
    try:
        profile, _ = find_machine(machine.model)
        rates = read_rates(profile, machine.devices_per_node)
    except UsageError as error:
        return LayoutSpeed(problem=error.problem)
    rates = replace_rates(rates, measured)
    query = f"{machine.model}:{machine.devices_per_node // profile.devices_per_gpu}"
    layout = build_layout(trainer, machine.world_size)
    times = time_passes(trainer.model, layout, rates)
    return LayoutSpeed(
        prediction=predict(trainer, query, machine.nnodes, rates=rates, price=price),
        timelines=tuple(
            RankTimeline(rank=record.rank, passes=build_timeline(record, times, layout.virtual)) for record in records
        ),
    )
