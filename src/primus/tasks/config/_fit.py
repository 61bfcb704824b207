"""The starting file of `config init --fit`: the layout that is predicted to train fastest."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from primus import registry
from primus.config import template
from primus.config.extended_files import load_model
from primus.config.schema import DEFAULTS, ModelSpec
from primus.errors import UsageError
from primus.prediction.device_rates import DeviceRates
from primus.prediction.layout_request import FitRequest, build_request
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
from primus.prediction.step_layout import build_layout
from primus.prediction.step_memory import GIB
from primus.prediction.step_time import predict_step

DOCS = {VIRTUAL_KEY: "Groups of consecutive layers on each pipeline stage (interleaved schedule)."}


def format_fitted_file(model: str, asked: FitRequest) -> str:
    """A starting file with the chosen layout, commented with what was predicted and what lost.

    Raises:
        UsageError: The model, machine or engine does not exist, figures of the device are missing, or nothing fits.
    """
    spec, name, preset = _read_model(model)
    try:
        request, notes = build_request(spec, name, asked)
    except UsageError as error:
        raise UsageError(error.problem.replace("--assume", "--fit"), error.hint) from None
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
