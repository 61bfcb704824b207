"""The report of a layout as text."""

from __future__ import annotations

from collections.abc import Iterator

from primus.prediction.format_prediction import format_speed
from primus.prediction.layout_run import LayoutReport
from primus.prediction.layout_speed import LayoutSpeed
from primus.prediction.rank_record import MemoryParts, RankRecord
from primus.report.table import format_table

GIB = 2**30
PARTS = MemoryParts.__struct_fields__
TERA = 1e12


def format_layout(report: LayoutReport, *, explain: bool = False) -> str:
    """Memory, exchanges and operations of the executed ranks, whether they fit, and the time of a step."""
    devices = f"{report.world_size} x {report.machine} on {report.nnodes} nodes"
    blocks = [f"{report.framework} on {devices}: ranks executed on fake tensors in {report.seconds:.0f} s"]
    blocks += [format_table(*_build_memory_table(report))]
    blocks += [_format_rank(record) for record in report.records]
    blocks += ["\n".join(_list_verdicts(report)), _format_speed(report.speed, explain)]
    assumptions = dict.fromkeys(text for record in report.records for text in record.assumptions)
    blocks += ["\n".join(["assumptions:", *(f"  - {text}" for text in assumptions)])]
    return "\n\n".join(blocks)


def _build_memory_table(report: LayoutReport) -> tuple[list[str], list[list[str]], list[int]]:
    header = ["rank", "stage", "layers", *PARTS, "peak GiB", "in"]
    rows = [
        [
            str(record.rank),
            f"{record.kind} {record.stage + 1}/{record.num_stages}" if record.num_stages > 1 else "only",
            _format_layers(record.layers),
            *(f"{getattr(record.peak.parts, name) / GIB:.2f}" for name in PARTS),
            f"{record.peak.parts.total / GIB:.2f}",
            f"{record.peak.phase} of micro batch {record.peak.micro_batch}",
        ]
        for record in report.records
    ]
    return header, rows, [0, *range(3, 4 + len(PARTS))]


def _format_layers(layers: tuple[int, ...]) -> str:
    if not layers:
        return "none"
    is_range = layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if is_range else f"{len(layers)}: {layers[0]}-{layers[-1]}"


def _format_rank(record: RankRecord) -> str:
    schedule = ""
    if record.num_stages > 1:
        schedule = f", {record.schedule}, {record.in_flight} in flight, bubble {record.bubble:.1%}"
    title = (
        f"rank {record.rank}: {record.micro_batches} micro batches{schedule}; {record.flops / TERA:,.0f} TFLOP by"
        f" {record.num_operators:,} operators; {record.saved_bytes / GIB:.2f} GiB in a checkpoint"
    )
    exchanges = sorted(record.exchanges, key=lambda each: -each.total_bytes)
    rows = [
        [
            each.operation,
            each.group,
            str(each.size),
            f"{each.num_nodes} nodes" if each.crosses_nodes else "one node",
            each.phase,
            f"{each.count:,}",
            f"{each.total_bytes / GIB:,.3f}",
        ]
        for each in exchanges
    ]
    header = ["exchange", "group", "ranks", "over", "in", "count", "GiB"]
    return "\n".join([title, format_table(header, rows, (2, 5, 6), indent=2)] if rows else [title])


def _format_speed(speed: LayoutSpeed, explain: bool) -> str:
    if speed.prediction is None:
        return f"time of a step: not predicted; {speed.problem}"
    return format_speed(speed.prediction, explain=explain)


def _list_verdicts(report: LayoutReport) -> Iterator[str]:
    if not report.fit:
        yield "memory of a device: not known, so nothing is compared with it"
    for fit in report.fit:
        word = "fits" if fit.fits else "does not fit"
        yield (
            f"rank {fit.rank} {word}: peak {fit.peak_bytes / GIB:.1f}"
            f" + fragmentation {fit.fragmentation_bytes / GIB:.1f} + libraries {fit.reserved_bytes / GIB:.1f}"
            f" = {fit.needed_bytes / GIB:.1f} of {fit.device_bytes / GIB:.1f} GiB"
        )
