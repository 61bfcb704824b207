"""What to search a layout for: a model on machines, by the first engine that can train it."""

from __future__ import annotations

from msgspec import Struct

from primus import registry
from primus.config import template
from primus.config.schema import DataConfig, Experiment, ModelSpec, Trainer, TrainingConfig
from primus.errors import UsageError
from primus.framework import FRAMEWORKS
from primus.prediction.device_rates import read_rates
from primus.prediction.layout_search import LayoutRequest
from primus.prediction.prediction import find_machine
from primus.prediction.step_layout import Precision

ENGINES = ("native", "torchtitan", "megatron", "megatron_bridge")
"""Frameworks that are tried where none is named, in this order."""


class FitRequest(Struct, frozen=True):
    """A model on machines."""

    machine: str
    """``MODEL`` or ``MODEL:GPUS``."""
    nodes: int
    batch_tokens: int
    """Of a step."""
    engine: str | None = None
    seq_length: int | None = None
    """None for that of a starting file."""
    precision: Precision | None = None
    """Of products, whatever the engine's settings say; None for theirs."""


def build_request(spec: ModelSpec, name: str, asked: FitRequest) -> tuple[LayoutRequest, list[str]]:
    """What to search for, and notes about the engine and what is assumed of the device.

    Raises:
        UsageError: The machine or engine does not exist, figures of the device are missing, or no engine trains the
            model.
    """
    profile, devices = find_machine(asked.machine)
    rates = read_rates(profile, devices)
    length = asked.seq_length or min(template.SHORT_SEQUENCE, spec.max_position_embeddings)
    experiment, notes = _choose_engine(spec, name, length, asked.engine)
    request = LayoutRequest(
        experiment=experiment,
        check=registry.load_plug_in(FRAMEWORKS, experiment.trainer.framework).check,
        rates=rates,
        devices_of_node=devices,
        batch_tokens=asked.batch_tokens,
        precision=asked.precision,
    )
    assumed = rates.list_assumptions(asked.precision or "bf16")
    return request, [*notes, *(f"Assumed: {text}." for text in assumed)]


def _choose_engine(spec: ModelSpec, name: str, length: int, engine: str | None) -> tuple[Experiment, list[str]]:
    """The experiment of the first engine that can train the model, with a note why others cannot."""
    refused: list[str] = []
    for framework in [engine] if engine else ENGINES:
        trainer = Trainer(
            framework=framework,
            model=spec,
            training=TrainingConfig(seq_length=length),
            data=DataConfig(mock_data=True),
        )
        experiment = Experiment(exp_name=f"{name}-pretrain", trainer=trainer)
        try:
            registry.load_plug_in(FRAMEWORKS, framework).check(experiment)
        except UsageError as error:
            if engine:
                raise
            refused.append(f"Not {framework}: {error.problem}.")
            continue
        return experiment, refused
    raise UsageError(f"{name}: no engine trains it: {' '.join(refused)}", "name another with --engine")
