"""The predicted speed and memory of an experiment on machines that are not here."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from primus.config.schema import ModelSpec, Trainer
from primus.errors import UsageError
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.profile import Profile, find_profile
from primus.prediction.device_rates import DeviceRates, read_rates
from primus.prediction.published_steps import read_published_steps
from primus.prediction.step_layout import StepLayout, build_layout
from primus.prediction.step_memory import GIB, StepMemory, find_largest, predict_memory
from primus.prediction.step_time import PredictedCollective, StepTime, predict_step

NUM_EXPLAINED = 3
"""Terms that are explained."""


class WhatIf(Struct, frozen=True, kw_only=True):
    """What another setting would change."""

    term: str
    change: str
    seconds: float
    """Of the step with it, for as many tokens."""
    memory_gib: float
    fits: bool | None
    """None if the device's memory is not known."""


class Prediction(Struct, frozen=True, kw_only=True):
    """What is predicted of one step."""

    machine: str
    nodes: int
    devices: int
    layout: str
    seconds: float
    tokens: int
    """Of a step."""
    tokens_per_s_per_device: float
    tflops_per_device: float
    """Model FLOPs, causal convention."""
    mfu: float | None
    peak_dtype: str
    cost_per_billion_tokens: float | None
    """In the currency of the price; None without one."""
    slowest_stage: str
    terms: dict[str, float]
    """Seconds of each term, which sum up to `seconds`."""
    bubble_s: float
    """In which the slowest stage waits for others."""
    exposed_communication: float
    """Share of the step in which devices wait for collectives."""
    hidden_communication: float
    """Collectives beside which devices compute, as a share of the step."""
    collectives: tuple[PredictedCollective, ...]
    memory: tuple[StepMemory, ...]
    """Of each kind of stage, in the order of the pipeline."""
    memory_bytes: int | None
    """Of a device."""
    fits: bool | None
    assumptions: tuple[str, ...]
    sources: dict[str, str]
    published_errors: tuple[str, ...]
    """How far predictions for the same device are from published rows."""
    what_ifs: tuple[WhatIf, ...]


def find_machine(machine: str) -> tuple[Profile, int]:
    """The profile of ``MODEL[:GPUS]`` and its devices.

    Raises:
        UsageError: The model does not exist, or the number is not valid.
    """
    facts = build_assumed_machine(machine)
    if not facts.devices:
        raise UsageError(f"--assume {machine}: not a GPU", "name a GPU model, such as mi300x:8")
    profile = find_profile(machine.partition(":")[0])
    return profile, len(facts.devices) * profile.devices_per_gpu


def predict(
    trainer: Trainer, machine: str, nodes: int, *, rates: DeviceRates | None = None, price: float | None = None
) -> Prediction:
    """The prediction for an experiment on `nodes` machines.

    Args:
        trainer: The experiment's trainer.
        machine: ``MODEL`` or ``MODEL:GPUS``.
        nodes: Number of such machines.
        rates: Measured rates in place of those of the profile.
        price: Of a GPU for an hour.

    Raises:
        UsageError: The machine is not known, its profile lacks figures, or nothing divides.
    """
    profile, devices_of_node = find_machine(machine)
    rates = rates or read_rates(profile, devices_of_node)
    layout = build_layout(trainer, nodes * devices_of_node)
    spec = trainer.model
    time, memory = predict_step(spec, layout, rates), predict_memory(spec, layout)
    need, limit = find_largest(memory).total, rates.memory_bytes
    hours = 1e9 / time.tokens_per_s_per_device / 3600
    return Prediction(
        machine=machine,
        nodes=nodes,
        devices=layout.devices,
        layout=layout.format_settings(),
        seconds=time.seconds,
        tokens=time.tokens,
        tokens_per_s_per_device=time.tokens_per_s_per_device,
        tflops_per_device=time.tflops,
        mfu=time.mfu,
        peak_dtype=time.peak_dtype,
        cost_per_billion_tokens=hours * price / profile.devices_per_gpu if price is not None else None,
        slowest_stage=time.stage,
        terms=time.terms,
        bubble_s=time.terms["bubble"],
        exposed_communication=time.communication_share,
        hidden_communication=time.hidden_share,
        collectives=time.collectives,
        memory=tuple({stage.stage: stage for stage in sorted(memory, key=lambda each: each.total)}.values()),
        memory_bytes=limit,
        fits=None if limit is None else need <= limit,
        assumptions=tuple(rates.list_assumptions(layout.precision)),
        sources=rates.sources,
        published_errors=tuple(list_published_errors(rates.name)),
        what_ifs=tuple(_list_what_ifs(spec, layout, rates, time)),
    )


def list_published_errors(device: str) -> Iterator[str]:
    """The error of predictions for published rows of the same device, those that were fitted to and the others."""
    rows = [row for row in read_published_steps() if row.device == device]
    for use, meaning in (("fit", "fitted to"), ("held", "not fitted to")):
        errors = [
            predict_step(row.spec, row.layout, row.read_rates()).tokens_per_s_per_device / row.tokens_per_s - 1
            for row in rows
            if row.use == use
        ]
        if errors:
            yield f"{len(errors)} rows {meaning}: {min(errors):+.0%} to {max(errors):+.0%}"


def list_dominating_terms(time_terms: dict[str, float]) -> list[str]:
    """The terms that take most of the step."""
    return sorted(time_terms, key=lambda name: -time_terms[name])[:NUM_EXPLAINED]


def _list_what_ifs(spec: ModelSpec, layout: StepLayout, rates: DeviceRates, time: StepTime) -> Iterator[WhatIf]:
    for term in list_dominating_terms(time.terms):
        for change, other in _list_changes(term, layout, rates):
            try:
                changed = predict_step(spec, other, rates)
            except ZeroDivisionError:  # the replicas do not divide the batch any more
                continue
            need = find_largest(predict_memory(spec, other)).total
            yield WhatIf(
                term=term,
                change=change,
                seconds=changed.seconds * time.tokens / changed.tokens,
                memory_gib=need / GIB,
                fits=None if rates.memory_bytes is None else need <= rates.memory_bytes,
            )


def _list_changes(term: str, layout: StepLayout, rates: DeviceRates) -> Iterator[tuple[str, StepLayout]]:
    """Other settings that make a term smaller."""
    replace = structs.replace
    if term == "products" and layout.precision == "bf16" and "fp8" in rates.peak_tflops:
        yield "fp8: e4m3 (changes results)", replace(layout, precision="fp8")
    if term == "recompute":
        yield "no recomputation", replace(layout, recompute="none")
    if term == "tensor":
        yield f"tensor_model_parallel_size: {layout.tensor // 2}", replace(layout, tensor=layout.tensor // 2)
    larger = layout.micro_batches % 2 == 0
    if term in ("weights and gradients", "host", "element-wise", "products", "pipeline") and larger:
        yield f"micro_batch_size: {2 * layout.micro_batch}", replace(layout, micro_batch=2 * layout.micro_batch)
    if term in ("weights and gradients", "bubble", "optimizer"):
        yield f"global_batch_size: {2 * layout.global_batch}", replace(layout, global_batch=2 * layout.global_batch)
    if term == "bubble":
        yield "twice the groups of layers of a stage", replace(layout, virtual=2 * layout.virtual)
    if term == "expert" and layout.expert > 1:
        yield f"expert_model_parallel_size: {layout.expert // 2}", replace(layout, expert=layout.expert // 2)
    if term == "context" and layout.context > 1:
        yield f"context_parallel_size: {layout.context // 2}", replace(layout, context=layout.context // 2)
