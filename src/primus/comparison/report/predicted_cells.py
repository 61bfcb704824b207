"""Machines that nobody here has, compared by prediction: the cells of `compare predict`, beside published results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus import registry
from primus.comparison.report.published_results import PublishedResult, read_published_results
from primus.config.data_file import convert_data, read_data_file
from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.errors import UsageError
from primus.machine.profile import Profile
from primus.models.counts import count_parameters
from primus.prediction.layout_request import FitRequest, build_request
from primus.prediction.layout_search import choose_layout, format_misfit
from primus.prediction.prediction import find_machine, list_published_errors
from primus.prediction.step_layout import Precision
from primus.prediction.step_memory import GIB
from primus.report.table import format_table

Format = Literal["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
PRECISIONS: dict[Format, Precision] = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
"""Rate of products in each format. Scales of blocks cost nothing here."""
BLOCK_SCALED = ("mxfp8", "mxfp4", "nvfp4")
BLOCK_ARCHITECTURES = ("gfx950", "sm100", "sm103")
"""Architectures with products of block-scaled formats (CDNA 4, Blackwell)."""
NVIDIA_ONLY: tuple[Format, ...] = ("nvfp4",)
KWH_J = 3.6e6
SHIPPED = "purchases"
SAME = (
    "The same for all predicted rows: model, length, tokens of a step. Each machine has the layout that is predicted to"
    " be its fastest."
)
DIFFERENT = "These are different computations: a ratio across formats is not fair without a check of the loss."
Positive = Annotated[int, Meta(ge=1)]


class PurchaseMachine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines to compare."""

    nodes: Positive = 1
    formats: tuple[Format, ...] = ("bf16",)
    price_per_gpu_hour: Annotated[float, Meta(gt=0)] | None = None
    price_source: str = ""
    """Source and date of the price, with its currency."""


class PurchaseMatrix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `compare predict` compares."""

    model: str
    """Preset."""
    seq_length: Positive
    batch_tokens: Positive
    """Tokens of a step, the same for all machines."""
    engine: str | None = None
    machines: dict[str, PurchaseMachine]
    """By ``MODEL:GPUS``."""


class PredictedCell(Struct, frozen=True, kw_only=True):
    """One machine with one format, or one published result."""

    kind: Literal["predicted", "published"]
    machine: str
    nodes: int | None
    format: str
    layout: str = ""
    tokens_per_s_per_gpu: float | None = None
    tokens_per_s_per_node: float | None = None
    tokens_per_kwh: float | None = None
    """Tokens of a GPU for a kilowatt hour at its rated power; without host, network and cooling."""
    tokens_per_price: float | None = None
    """Tokens for one unit of the price's currency."""
    memory_gib: float | None = None
    source: str = ""
    """Of a published result or a price; how far predictions for the device are off."""
    problem: str = ""
    """Why there is no figure."""


class PurchaseComparison(Struct, frozen=True, kw_only=True):
    """All cells of a matrix."""

    matrix: PurchaseMatrix
    cells: list[PredictedCell]
    notes: list[str]


def read_purchase_matrix(name: str) -> PurchaseMatrix:
    """The matrix in a file, or the one of that name that comes with primus.

    Raises:
        UsageError: There is none, it is wrong, or a price has no source.
    """
    path = Path(name)
    if not path.is_file():
        folder = registry.PACKAGE / "presets" / SHIPPED
        path = folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml")))
            raise UsageError(f"--matrix {name}: no such file", f"name a file, or one of {known}")
    file = read_data_file(path)
    matrix = convert_data(file.values, PurchaseMatrix, [file])
    for machine, each in matrix.machines.items():
        if each.price_per_gpu_hour and not each.price_source:
            raise UsageError(f"{name}: machines.{machine}: a price without source", "add price_source with its date")
    return matrix


def predict_matrix(matrix: PurchaseMatrix) -> PurchaseComparison:
    """Each machine with each of its formats, by the layout that is predicted to be fastest there; published results.

    Raises:
        UsageError: The model or a machine does not exist.
    """
    spec = load_model(matrix.model)
    cells: list[PredictedCell] = []
    notes: list[str] = []
    for machine, asked in matrix.machines.items():
        profile, _ = find_machine(machine)
        cells += [_predict_cell(spec, matrix, machine, asked, name, notes) for name in asked.formats]
        cells += _list_published(spec, profile, matrix.seq_length)
    return PurchaseComparison(matrix=matrix, cells=cells, notes=list(dict.fromkeys(notes)))


def _predict_cell(
    spec: ModelSpec, matrix: PurchaseMatrix, machine: str, asked: PurchaseMachine, name: Format, notes: list[str]
) -> PredictedCell:
    profile, devices = find_machine(machine)
    try:
        _check_format(profile, name)
        fit = FitRequest(machine, asked.nodes, matrix.batch_tokens, matrix.engine, matrix.seq_length, PRECISIONS[name])
        request, found = build_request(spec, matrix.model, fit)
        notes += found
        choice = choose_layout(request, asked.nodes)
        if not choice.fitting:
            raise UsageError(format_misfit(choice, asked.nodes))
    except UsageError as error:
        return PredictedCell(kind="predicted", machine=machine, nodes=asked.nodes, format=name, problem=error.problem)
    best = choice.fitting[0]
    rate = best.tokens_per_s * profile.devices_per_gpu
    price = asked.price_per_gpu_hour
    errors = "; ".join(list_published_errors(request.rates.name))
    return PredictedCell(
        kind="predicted",
        machine=machine,
        nodes=asked.nodes,
        format=name,
        layout=f"{best.trainer.framework}: {best.layout.format_settings()}",
        tokens_per_s_per_gpu=rate,
        tokens_per_s_per_node=best.tokens_per_s * devices,
        tokens_per_kwh=rate * KWH_J / profile.power_w if profile.power_w else None,
        tokens_per_price=rate * 3600 / price if price else None,
        memory_gib=best.memory.total / GIB,
        source="; ".join(part for part in (asked.price_source, f"error of {errors}" if errors else "") if part),
    )


def _check_format(profile: Profile, name: Format) -> None:
    if name in BLOCK_SCALED and profile.architecture not in BLOCK_ARCHITECTURES:
        raise UsageError(f"{profile.model} has no products in {name}")
    if name in NVIDIA_ONLY and profile.vendor != "nvidia":
        raise UsageError(f"{profile.model} has no products in {name}: it is NVIDIA's format")
    if PRECISIONS[name] not in profile.peaks:
        raise UsageError(f"the profile of {profile.model} has no peak in {PRECISIONS[name]}")


def _list_published(spec: ModelSpec, profile: Profile, seq_length: int) -> Iterator[PredictedCell]:
    count = count_parameters(spec)
    for row in read_published_results():
        if row.device == profile.model and _is_same_length(row, seq_length) and _count(row.model) == count:
            power = profile.power_w
            yield PredictedCell(
                kind="published",
                machine=row.device.lower(),
                nodes=None,
                format=row.precision,
                layout=f"{row.framework}: {row.layout or 'layout not stated'}",
                tokens_per_s_per_gpu=row.tokens_per_s_per_device,
                tokens_per_kwh=row.tokens_per_s_per_device * KWH_J / power if power else None,
                source=f"{row.source} {row.version}".strip(),
            )


def _is_same_length(row: PublishedResult, seq_length: int) -> bool:
    return row.seq_length in (None, seq_length)


def _count(model: str) -> object:
    return count_parameters(load_model(model))


def format_purchase(found: PurchaseComparison) -> str:
    """The table with what makes its rows comparable and what does not."""
    matrix = found.matrix
    header = (
        "", "machine", "format", "tokens/s/GPU", "tokens/s/node", "M tokens/kWh", "M tokens/price", "layout"
    )  # fmt: skip
    rows = [_list_cells(cell) for cell in found.cells]
    formats = dict.fromkeys(cell.format for cell in found.cells if cell.kind == "predicted")
    lines = [
        f"{matrix.model}, length {matrix.seq_length:,}, {matrix.batch_tokens:,} tokens a step",
        "",
        format_table(header, rows, right=(3, 4, 5, 6)),
        "",
        SAME,
    ]
    if len(formats) > 1:
        lines.append(f"Not the same: {', '.join(formats)}. {DIFFERENT}")
    lines.append("kWh: rated power of the GPU alone. Published rows have settings of their own.")
    lines += list(dict.fromkeys(f"{cell.machine}: {cell.source}" for cell in found.cells if _has_remark(cell)))
    return "\n".join([*lines, *found.notes])


def _has_remark(cell: PredictedCell) -> bool:
    return cell.kind == "predicted" and bool(cell.source)


def _list_cells(cell: PredictedCell) -> Sequence[str]:
    return (
        cell.kind,
        cell.machine + (f" x {cell.nodes}" if cell.nodes else ""),
        cell.format,
        _format_rate(cell.tokens_per_s_per_gpu, 1),
        _format_rate(cell.tokens_per_s_per_node, 1),
        _format_rate(cell.tokens_per_kwh, 1e6),
        _format_rate(cell.tokens_per_price, 1e6),
        cell.problem or cell.layout,
    )


def _format_rate(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if unit == 1 else f"{value / unit:,.3g}"
