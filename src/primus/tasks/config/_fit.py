"""The starting file of `config init --fit`: the layout that is predicted to train fastest."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from primus import registry
from primus.config import template
from primus.config.extended_files import load_model
from primus.config.schema import DEFAULTS, DataConfig, Experiment, ModelSpec, Trainer, TrainingConfig
from primus.errors import UsageError
from primus.framework import FRAMEWORKS
from primus.machine.profile import Profile
from primus.prediction.device_rates import DeviceRates, read_rates
from primus.prediction.layout_search import (
    MOST_NODES,
    VIRTUAL_KEY,
    Candidate,
    LayoutChoice,
    LayoutRequest,
    choose_layout,
    choose_runners_up,
    explain_loss,
    find_smallest_cluster,
    format_misfit,
)
from primus.prediction.prediction import find_machine
from primus.prediction.step_layout import build_layout
from primus.prediction.step_memory import GIB
from primus.prediction.step_time import predict_step

ENGINES = ("native", "torchtitan", "megatron", "megatron_bridge")
"""Frameworks that are tried where none is named, in this order."""
DOCS = {VIRTUAL_KEY: "Groups of consecutive layers on each pipeline stage (interleaved schedule)."}


class FitRequest(Struct, frozen=True):
    """What `config init --fit` asks for."""

    machine: str
    """``MODEL`` or ``MODEL:GPUS``."""
    nodes: int
    batch_tokens: int
    engine: str | None


def format_fitted_file(model: str, asked: FitRequest) -> str:
    """A starting file with the chosen layout, commented with what was predicted and what lost.

    Raises:
        UsageError: The model, machine or engine does not exist, figures of the device are missing, or nothing fits.
    """
    spec, name, preset = _read_model(model)
    request, notes = build_search(spec, name, asked)
    choice = choose_layout(request, asked.nodes)
    if not choice.fitting:
        raise _refuse(name, asked, request, choice)
    best = choice.fitting[0]
    lines = [*_describe(best, asked, request), *notes, *_list_runners_up(choice), *_list_precision(best, request)]
    return template.format_starting_file(
        name,
        spec,
        template.collect_key_docs() | DOCS,
        preset=preset,
        values=_list_values(best),
        framework=best.trainer.framework,
        notes=[part for line in lines for part in textwrap.wrap(line, 116, subsequent_indent="  ")],
    )


def _read_model(model: str) -> tuple[ModelSpec, str, str]:
    path = Path(model)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return load_model(model), path.stem, model
    file = registry.find_plug_in_file("models", model)
    return load_model(model), file.stem if file else model, ""


def build_search(spec: ModelSpec, name: str, asked: FitRequest) -> tuple[LayoutRequest, list[str]]:
    """What to search for, and notes about the engine and what is assumed of the device.

    Raises:
        UsageError: The machine or engine does not exist, figures of the device are missing, or no engine trains the
            model.
    """
    profile, devices = _find_machine(asked.machine)
    rates = read_rates(profile, devices)
    length = min(template.SHORT_SEQUENCE, spec.max_position_embeddings)
    experiment, notes = _choose_engine(spec, name, length, asked.engine)
    request = LayoutRequest(
        experiment=experiment,
        check=registry.load_plug_in(FRAMEWORKS, experiment.trainer.framework).check,
        rates=rates,
        devices_of_node=devices,
        batch_tokens=asked.batch_tokens,
    )
    return request, [*notes, *(f"Assumed: {text}." for text in rates.list_assumptions("bf16"))]


def _find_machine(machine: str) -> tuple[Profile, int]:
    try:
        return find_machine(machine)
    except UsageError as error:
        raise UsageError(error.problem.replace("--assume", "--fit"), error.hint) from None


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


def _refuse(name: str, asked: FitRequest, request: LayoutRequest, choice: LayoutChoice) -> UsageError:
    nodes = find_smallest_cluster(request, asked.nodes)
    problem = f"{name} does not fit {asked.nodes} x {asked.machine}: {format_misfit(choice, asked.nodes)}"
    if nodes is None:
        return UsageError(
            problem, f"it fits no cluster of up to {MOST_NODES} such nodes either: use devices with more memory"
        )
    return UsageError(problem, f"the smallest cluster on which it fits: --nnodes {nodes}")


def _describe(best: Candidate, asked: FitRequest, request: LayoutRequest) -> Iterator[str]:
    assert best.time
    time, memory = best.time, best.memory
    limit = (request.rates.memory_bytes or 0) / GIB
    mfu = f", MFU {time.mfu:.0%}" if time.mfu else ""
    yield ""
    yield f"Layout for {asked.nodes} x {asked.machine}, chosen by prediction (docs/prediction.md):"
    yield f"  {best.layout.format_settings()}"
    yield (
        f"  {time.tokens_per_s_per_device:,.0f} tokens/s/GPU, {time.seconds:.2f} s a step of {time.tokens:,} tokens"
        f"{mfu}; {memory.total / GIB:.0f} of {limit:.0f} GiB on the {memory.stage}"
    )


def _list_runners_up(choice: LayoutChoice) -> Iterator[str]:
    best = choice.fitting[0]
    others = choose_runners_up(choice)
    if others:
        yield f"Runners-up, of {len(choice.fitting)} layouts that fit ({choice.num_accepted} are possible):"
    for each in others:
        yield f"  {each.layout.format_settings()}: {explain_loss(best, each)}"


def _list_precision(best: Candidate, request: LayoutRequest) -> Iterator[str]:
    """What fp8 would give, which changes results, so that it is not chosen here."""
    rates: DeviceRates = request.rates
    if "fp8" not in rates.peak_tflops or best.time is None:
        return
    training = structs.replace(best.trainer.training, fp8="e4m3")
    trainer = structs.replace(best.trainer, training=training)
    try:
        request.check(structs.replace(request.experiment, trainer=trainer))
    except UsageError:
        return
    time = predict_step(trainer.model, build_layout(trainer, best.layout.devices), rates)
    gain = best.time.seconds / time.seconds - 1
    yield f"fp8: e4m3 is predicted to be {gain:+.0%} faster; it changes results, so it is left to you."


def _list_values(best: Candidate) -> dict[str, Any]:
    """The settings of the layout that differ from the defaults, and those that every starting file shows."""
    trainer = best.trainer
    values: dict[str, Any] = {
        "seq_length": trainer.training.seq_length,
        "micro_batch_size": trainer.training.micro_batch_size,
        "global_batch_size": trainer.training.global_batch_size,
        "recompute_activations": trainer.training.recompute_activations,
    }
    sizes = structs.asdict(trainer.parallel)
    values |= {key: value for key, value in sizes.items() if value != DEFAULTS[key]}
    return values | trainer.backend_args
