"""The predicted speed and memory of an experiment on machines that are not here, as a value and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from primus.report.table import format_table

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


def format_prediction(found: Prediction, *, explain: bool) -> str:
    """The prediction as text."""
    mfu = f", MFU {found.mfu:.1%} of the {found.peak_dtype} peak" if found.mfu else ""
    rate = f"{found.tokens_per_s_per_device:,.0f} tokens/s/GPU, {found.tflops_per_device:,.0f} TFLOP/s/GPU{mfu}"
    lines = [
        f"{found.nodes} x {found.machine}: {found.layout}",
        f"{found.seconds:.3g} s a step of {found.tokens:,} tokens; {rate}",
    ]
    if found.cost_per_billion_tokens is not None:
        lines.append(f"cost of 1e9 tokens: {found.cost_per_billion_tokens:,.2f}")
    memory = max(found.memory, key=lambda each: each.total)
    limit = f" of {found.memory_bytes / GIB:,.0f} GiB" if found.memory_bytes else ""
    lines.append(f"memory: {memory.total / GIB:,.1f} GiB{limit} on the {memory.stage}{_format_fit(found)}")
    parts = ["\n".join(lines), _format_terms(found), _format_memory(found)]
    if found.collectives:
        parts.append(_format_collectives(found.collectives))
    if explain:
        parts.append(_format_explanation(found))
    trust = [f"assumed: {text}" for text in found.assumptions]
    device = found.machine.partition(":")[0]
    trust += [f"error against published rows of {device}, {text}" for text in found.published_errors]
    if not found.published_errors:
        trust.append("no published row of this device is known: trust the order more than the numbers")
    return "\n\n".join([*parts, "\n".join(trust)])


def _format_fit(found: Prediction) -> str:
    return "" if found.fits is not False else ": does not fit"


def _format_terms(found: Prediction) -> str:
    rows = [
        (name, f"{seconds:.4g}", f"{seconds / found.seconds:.1%}")
        for name, seconds in sorted(found.terms.items(), key=lambda pair: -pair[1])
        if seconds > 0
    ]
    return format_table(("term", "s", "share"), rows, right=(1, 2))


def _format_memory(found: Prediction) -> str:
    header = ("GiB", *(stage.stage for stage in found.memory))
    names = list(found.memory[0].list_components())
    rows = [(name, *(f"{getattr(stage, name) / GIB:,.1f}" for stage in found.memory)) for name in names]
    rows.append(("total", *(f"{stage.total / GIB:,.1f}" for stage in found.memory)))
    return format_table(header, rows, right=range(1, len(header)))


def _format_collectives(collectives: Sequence[PredictedCollective]) -> str:
    rows = [
        (
            each.name,
            str(each.size),
            "yes" if each.crosses else "no",
            f"{each.bytes_of_step / 1e9:,.3g}",
            f"{each.seconds:.3g}",
            f"{each.exposed_seconds:.3g}",
        )
        for each in collectives
    ]
    header = ("collective", "group", "crosses nodes", "GB sent", "s", "s not hidden")
    return format_table(header, rows, right=(1, 3, 4, 5))


def _format_explanation(found: Prediction) -> str:
    lines = ["What dominates, and what would change it:"]
    for term in list_dominating_terms(found.terms):
        lines.append(f"  {term}: {found.terms[term] / found.seconds:.0%}. {MEANINGS[term]}")
        for each in found.what_ifs:
            if each.term == term:
                change = each.seconds / found.seconds - 1
                fits = "" if each.fits is not False else ", which does not fit"
                lines.append(f"    {each.change}: {change:+.1%} time, {each.memory_gib:,.0f} GiB{fits}")
    lines += [f"  rates: {name}: {source}" for name, source in found.sources.items()]
    return "\n".join(lines)


MEANINGS = {
    "products": "Matrix products at the rate of the best measured one, times the fitted share.",
    "attention": "Scores and weighted values; longer sequences cost more, windows less.",
    "element-wise": "Norms, activations, permutations and casts at the memory's bandwidth.",
    "recompute": "What the backward pass computes again, to save memory.",
    "host": "The host cannot launch as fast as the device computes: larger micro batches, or CUDA graphs.",
    "tensor": "Collectives around each layer: smaller groups, or overlap.",
    "context": "Keys and values of other parts of the sequence.",
    "expert": "Tokens on their way to experts and back: groups within a node.",
    "weights and gradients": "Gathers and scatters that computation does not hide: more tokens for each exchange.",
    "pipeline": "Activations between stages.",
    "bubble": "Stages wait at both ends of a step: more micro batches, or more groups of layers.",
    "optimizer": "Weights and moments, read and written once a step.",
}
"""What each term is, and what makes it smaller."""
