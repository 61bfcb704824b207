"""Is the speed of a run right: beside its prediction, and beside published speeds of the same model and device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from msgspec import Struct, structs

from primus import experiment
from primus.config.schema import ModelSpec
from primus.errors import PrimusError
from primus.machine.profile import find_profile_by_name, format_typed_name
from primus.models.counts import count_parameters
from primus.prediction.device_rates import DeviceRates, read_rates
from primus.prediction.published_steps import PublishedStep, read_published_steps
from primus.prediction.step_layout import StepLayout, build_layout
from primus.prediction.step_memory import GIB, find_largest, predict_memory
from primus.prediction.step_time import StepTime, predict_step
from primus.runs.events import Event
from primus.runs.store import Run

COMPARED = {
    "precision": ("precision",),
    "recomputation": ("recompute",),
    "sequence length": ("seq_length",),
    "micro batch": ("micro_batch",),
    "overlap of tensor parallelism": ("tensor_overlap",),
    "layout": ("devices", "tensor", "pipeline", "virtual", "context", "expert", "sharding"),
}
"""Settings that are taken over one after the other, in this order; sizes of groups only together, since some do not
divide the devices of others."""
MOST_ROWS = 4


class SettingShare(Struct, frozen=True, kw_only=True):
    """A setting that differs, with the part of the gap that it explains."""

    setting: str
    here: str
    there: str
    factor: float
    """Predicted speed with the published setting over that with the run's."""


class PublishedComparison(Struct, frozen=True, kw_only=True):
    """A published row beside a run."""

    source: str
    tokens_per_s_per_device: float
    ratio: float
    """Published speed of one device over that of the run."""
    settings: tuple[SettingShare, ...]
    unexplained: float
    """What of the ratio the settings leave: software, clocks, and the error of the prediction."""


class SpeedCheck(Struct, frozen=True, kw_only=True):
    """The prediction of a run, and published rows of its model and device."""

    layout: str
    predicted_s: float
    terms: dict[str, float]
    """Predicted seconds of each term."""
    measured_s: float
    predicted_memory_gib: float
    """Of the stage that needs most."""
    published: tuple[PublishedComparison, ...]

    @property
    def ratio(self) -> float:
        """Measured over predicted time."""
        return self.measured_s / self.predicted_s


def check_speed(
    run: Run, started: Event | Mapping[str, object], step_s: float | None, tokens_per_s: float | None
) -> SpeedCheck | None:
    """The prediction beside the measured step; None for a CPU, a device without figures, or a run without steps."""
    profile = find_profile_by_name(str(started.get("device") or ""))
    world_size = started.get("world_size")
    if profile is None or not step_s or not tokens_per_s or not isinstance(world_size, int):
        return None
    local = started.get("local_world_size")
    try:
        rates = read_rates(profile, local if isinstance(local, int) else min(8, world_size))
        trainer = experiment.load_run_experiment(run).experiment.trainer
        layout = build_layout(trainer, world_size)
    except PrimusError:  # the report of the run does without
        return None
    predicted = predict_step(trainer.model, layout, rates)
    rows = _find_rows(trainer.model, format_typed_name(profile))
    each = tokens_per_s / world_size
    return SpeedCheck(
        layout=layout.format_settings(),
        predicted_s=predicted.seconds,
        terms={name: seconds for name, seconds in predicted.terms.items() if seconds > 0},
        measured_s=step_s,
        predicted_memory_gib=find_largest(predict_memory(trainer.model, layout)).total / GIB,
        published=tuple(_compare(row, trainer.model, layout, rates, predicted, each) for row in rows),
    )


def _find_rows(spec: ModelSpec, device: str) -> list[PublishedStep]:
    """Rows of a model of the same shape on the same device, those with profiles of their own left out."""
    count = count_parameters(spec)
    found = [row for row in read_published_steps() if row.device == device and row.rates is None]
    return [row for row in found if count_parameters(row.spec) == count][:MOST_ROWS]


def _compare(
    row: PublishedStep, spec: ModelSpec, layout: StepLayout, rates: DeviceRates, predicted: StepTime, here: float
) -> PublishedComparison:
    shares = tuple(_list_shares(row.layout, spec, layout, rates, predicted))
    ratio = row.tokens_per_s / here
    explained = math.prod(share.factor for share in shares)
    return PublishedComparison(
        source=row.source,
        tokens_per_s_per_device=row.tokens_per_s,
        ratio=ratio,
        settings=shares,
        unexplained=ratio / explained,
    )


def _list_shares(
    there: StepLayout, spec: ModelSpec, here: StepLayout, rates: DeviceRates, predicted: StepTime
) -> Iterator[SettingShare]:
    """Each setting that differs, taken over in turn; a replica has as many micro batches as that of the row."""
    speed, layout = predicted.tokens_per_s_per_device, here
    for title, names in COMPARED.items():
        changed = {name: getattr(there, name) for name in names if getattr(here, name) != getattr(there, name)}
        if not changed:
            continue
        layout = structs.replace(layout, **changed)
        layout = structs.replace(layout, global_batch=there.micro_batches * layout.micro_batch * layout.data)
        faster = predict_step(spec, layout, rates).tokens_per_s_per_device
        yield SettingShare(
            setting=title,
            here=", ".join(f"{name} {getattr(here, name)}" for name in changed),
            there=", ".join(f"{name} {value}" for name, value in changed.items()),
            factor=faster / speed,
        )
        speed = faster
