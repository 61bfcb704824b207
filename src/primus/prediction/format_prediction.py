"""A prediction as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from primus.prediction.prediction import Prediction, list_dominating_terms
from primus.prediction.step_memory import GIB
from primus.prediction.step_time import PredictedCollective
from primus.report.table import format_table


def format_prediction(found: Prediction, *, explain: bool) -> str:
    """Time, memory, and how far to trust them."""
    memory = max(found.memory, key=lambda each: each.total)
    limit = f" of {found.memory_bytes / GIB:,.0f} GiB" if found.memory_bytes else ""
    misfit = ": does not fit" if found.fits is False else ""
    needed = f"memory: {memory.total / GIB:,.1f} GiB{limit} on the {memory.stage}{misfit}\n\n{_format_memory(found)}"
    return f"{format_speed(found, explain=explain)}\n\n{needed}"


def format_speed(found: Prediction, *, explain: bool) -> str:
    """The step's time by term, and what it rests on."""
    parts = ["\n".join(list_speeds(found)), _format_terms(found)]
    if found.collectives:
        parts.append(_format_collectives(found.collectives))
    if explain:
        parts.append("\n".join(list_explanations(found)))
    return "\n\n".join([*parts, "\n".join(list_grounds(found))])


def list_speeds(found: Prediction) -> Iterator[str]:
    """Layout, step, rates, waiting and cost, each in a sentence."""
    mfu = f", MFU {found.mfu:.1%} of the {found.peak_dtype} peak" if found.mfu else ""
    rate = f"{found.tokens_per_s_per_device:,.0f} tokens/s/GPU, {found.tflops_per_device:,.0f} TFLOP/s/GPU{mfu}"
    yield f"{found.nodes} x {found.machine}: {found.layout}"
    yield f"{found.seconds:.3g} s a step of {found.tokens:,} tokens; {rate}"
    yield (
        f"of the step: waiting for collectives {found.exposed_communication:.1%} (hidden behind computation"
        f" {found.hidden_communication:.1%}), bubble {found.bubble_s:.3g} s ({found.bubble_s / found.seconds:.1%})"
    )
    if found.cost_per_billion_tokens is not None:
        yield f"cost of 1e9 tokens: {found.cost_per_billion_tokens:,.2f}"


def list_grounds(found: Prediction) -> Iterator[str]:
    """What is assumed, and how far predictions are from published rows."""
    yield from (f"assumed: {text}" for text in found.assumptions)
    device = found.machine.partition(":")[0]
    yield from (f"error against published rows of {device}, {text}" for text in found.published_errors)
    if not found.published_errors:
        yield "no published row of this device is known: trust the order more than the numbers"


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


def list_explanations(found: Prediction) -> Iterator[str]:
    """The terms that dominate, what would change them, and the source of each rate."""
    yield "What dominates, and what would change it:"
    for term in list_dominating_terms(found.terms):
        yield f"  {term}: {found.terms[term] / found.seconds:.0%}. {MEANINGS[term]}"
        for each in found.what_ifs:
            if each.term == term:
                change = each.seconds / found.seconds - 1
                fits = "" if each.fits is not False else ", which does not fit"
                yield f"    {each.change}: {change:+.1%} time, {each.memory_gib:,.0f} GiB{fits}"
    yield from (f"  rates: {name}: {source}" for name, source in found.sources.items())


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
