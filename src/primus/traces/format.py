"""The analysis of traces as text."""

from __future__ import annotations

from collections.abc import Iterator

from primus.report import table
from primus.traces.breakdown import SHORT_KERNEL_US, TimeBreakdown
from primus.traces.memory import MEMORY_CATEGORIES, MemoryReport
from primus.traces.operators import OperatorTime
from primus.traces.ranks import RankComparison
from primus.traces.report import TimeDifference, TraceDifference, TraceReport

MOST_OWNERS = 10
LONGEST_NAME = 64


def format_report(report: TraceReport) -> str:
    """The whole analysis."""
    where = report.device_name or ("device" if report.breakdown.timeline == "device" else "host")
    rank = f"rank {report.rank}, " if report.rank is not None else ""
    parts = [
        f"{report.files[0]}{f' and {len(report.files) - 1} more' if len(report.files) > 1 else ''} ({rank}{where})",
        *(f"note: {note}" for note in report.notes),
        format_timeline(report.breakdown),
        format_categories(report.breakdown),
        *([format_collectives(report.breakdown)] if report.breakdown.collectives else []),
        *([format_operators(report.operators)] if report.operators else []),
        *([format_ranks(report.ranks)] if report.ranks else []),
        *([format_memory(report.memory)] if report.memory else []),
    ]
    return "\n\n".join(parts)


def list_timeline_rows(found: TimeBreakdown) -> Iterator[tuple[str, float]]:
    """Names and times of the rows of the timeline."""
    yield "computation", found.computation_us
    yield "exposed communication", found.exposed_communication_us
    if found.timeline == "device":
        yield "exposed copies", found.exposed_copy_us
    yield "busy", found.busy_us
    yield "idle", found.idle_us
    yield "  waiting for data", found.idle.data_us
    yield "  host" if found.timeline == "host" else "  waiting for the host to launch", found.idle.host_us
    if found.timeline == "device":
        yield "  launched, waiting for other work", found.idle.kernel_us
        yield "  unknown", found.idle.unknown_us
    yield "total", found.total_us
    yield "hidden communication", found.hidden_communication_us


def format_timeline(found: TimeBreakdown) -> str:
    """The rows of the timeline, with shares of the total."""
    total = found.total_us or 1.0
    rows = [[name, format_us(time), f"{time / total:.1%}"] for name, time in list_timeline_rows(found)]
    lines = [table.format_table(["timeline", "time", "share"], rows, right=(1, 2))]
    if found.timeline == "device":
        lines.append(
            f"launch-bound: {found.launch_bound_share:.1%} of the time; {found.num_short_kernels:,} of"
            f" {found.num_kernels:,} kernels take less than {SHORT_KERNEL_US:g} \u00b5s"
        )
    if found.step_us:
        count = f"{found.num_steps} steps, median" if found.num_steps > 1 else "1 step,"
        lines.append(f"{count} {format_us(found.step_us)}")
    else:
        lines.append("no steps are marked: times are of the whole trace")
    return "\n".join(lines)


def format_categories(found: TimeBreakdown) -> str:
    """Kernels, or operators of the host, by category."""
    what = "kernels" if found.timeline == "device" else "operators"
    rows = [[row.category, f"{row.count:,}", format_us(row.time_us), f"{row.share:.1%}"] for row in found.categories]
    return table.format_table([what, "count", "time", "share"], rows, right=(1, 2, 3))


def format_collectives(found: TimeBreakdown) -> str:
    """Communication by collective: all of it, and what no computation hides."""
    rows = [
        [row.collective, f"{row.count:,}", format_us(row.time_us), format_us(row.exposed_us)]
        for row in found.collectives
    ]
    return table.format_table(["collective", "count", "time", "exposed"], rows, right=(1, 2, 3))


def format_operators(operators: list[OperatorTime]) -> str:
    """Operators by shape; a hyphen where FLOPs or peaks are not known."""
    rows = [
        [
            _shorten(row.name),
            _shorten(row.shape),
            f"{row.count:,}",
            format_us(row.time_us),
            f"{row.share:.1%}",
            table.format_number(row.tflops),
            table.format_number(row.gb_per_s),
            f"{row.roofline_share:.0%} {row.bound}" if row.roofline_share is not None else "-",
        ]
        for row in operators
    ]
    header = ["operator", "shape", "count", "time", "share", "TFLOP/s", "GB/s", "of roofline"]
    return table.format_table(header, rows, right=(2, 3, 4, 5, 6))


def format_ranks(found: RankComparison) -> str:
    """The ranks side by side, and who is waited for."""
    rows = [
        [
            str(row.rank),
            format_us(row.step_us) if row.step_us else "-",
            format_us(row.computation_us),
            format_us(row.wait_us),
            format_us(row.transfer_us),
            format_us(row.caused_us),
            str(row.times_last),
        ]
        for row in found.ranks
    ]
    header = ["rank", "step", "computation", "waits", "transfers", "others wait for it", "last"]
    straggler = "no straggler" if found.straggler is None else f"the others wait for rank {found.straggler}"
    skew = f"starts are {format_us(found.median_skew_us)} apart (median), at most {format_us(found.largest_skew_us)}"
    return "\n".join(
        [
            table.format_table(header, rows, right=range(7)),
            f"{found.num_collectives:,} collectives; {skew}; {straggler}",
            *(f"note: {note}" for note in found.notes),
        ]
    )


def format_memory(found: MemoryReport) -> str:
    """The peak of memory, and its owners."""
    peak = next(sample for sample in found.samples if sample.time_us == found.peak_time_us)
    parts = ", ".join(
        f"{name} {table.format_size(size)}"
        for name, size in zip(MEMORY_CATEGORIES, peak.bytes_by_category, strict=True)
        if size
    )
    size = table.format_size(found.peak_bytes)
    rows = [
        [_shorten(row.owner), row.category, f"{row.count:,}", table.format_size(row.bytes)]
        for row in found.owners[:MOST_OWNERS]
    ]
    return "\n".join(
        [
            f"memory of the {found.device}: peak {size} {format_us(found.peak_time_us)} after the start: {parts}",
            *([found.note] if found.note else []),
            table.format_table(["allocated by", "category", "count", "at the peak"], rows, right=(2, 3)),
        ]
    )


def format_difference(found: TraceDifference, a: str, b: str) -> str:
    """Two traces side by side."""
    header = [f"time of a {found.unit}", "A", "B", "change", ""]
    return "\n\n".join(
        [
            f"A: {a}\nB: {b}",
            table.format_table(header, [_format_change(row) for row in found.times], right=(1, 2, 3, 4)),
            table.format_table(
                ["operator", *header[1:]], [_format_change(row) for row in found.operators], right=(1, 2, 3, 4)
            ),
        ]
    )


def _format_change(row: TimeDifference) -> list[str]:
    share = f"{row.change_us / row.a_us:+.1%}" if row.a_us else "new" if row.b_us else ""
    return [_shorten(row.what), format_us(row.a_us), format_us(row.b_us), format_us(row.change_us), share]


def format_us(microseconds: float) -> str:
    """A time in microseconds, ms or s."""
    size = abs(microseconds)
    if size < 1000:
        return f"{microseconds:.1f} \u00b5s"
    return f"{microseconds / 1e3:,.2f} ms" if size < 1e6 else f"{microseconds / 1e6:,.2f} s"


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 3]}..."
