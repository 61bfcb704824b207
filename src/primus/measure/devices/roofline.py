"""A timed call as a row: its rate, the share of the device's limit, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping

from primus.benchmark import BenchmarkRow, CaseValue, DevicePeaks, MeasuredCall
from primus.machine.measurements import Timing


def build_row(
    case: Mapping[str, CaseValue], measured: MeasuredCall, timing: Timing, peaks: DevicePeaks
) -> BenchmarkRow:
    """The row of a timed call."""
    amount, unit, peak = _find_amount(measured, peaks)
    value = timing.median_s * 1e6 if amount is None else amount / timing.median_s
    interval = timing.interval_s and tuple(
        sorted(seconds * 1e6 if amount is None else amount / seconds for seconds in timing.interval_s)
    )
    figures = {}
    if measured.flop and measured.value != "flop":
        figures["tflops"] = measured.flop / timing.median_s / 1e12
    if measured.moved_bytes and measured.value != "bytes":
        figures["gb_per_s"] = measured.moved_bytes / timing.median_s / 1e9
    return BenchmarkRow(
        case=dict(case),
        value=value,
        unit=unit,
        interval=(interval[0], interval[1]) if interval else None,
        timing=timing,
        figures=figures,
        flop=measured.flop,
        moved_bytes=measured.moved_bytes,
        peak=peak,
        share=value / peak if peak else None,
        bound=find_bound(measured, peaks),
        convention=measured.convention,
    )


def _find_amount(measured: MeasuredCall, peaks: DevicePeaks) -> tuple[float | None, str, float | None]:
    """What a call counts, in the unit of its rate, that unit and the limit; no amount if the value is a time."""
    if measured.value == "flop" and measured.flop:
        return measured.flop / 1e12, "TFLOP/s", peaks.tflops.get(measured.dtype)
    if measured.value == "bytes" and measured.moved_bytes:
        return measured.moved_bytes / 1e9, "GB/s", peaks.gb_per_s
    return None, "us", None


def find_bound(measured: MeasuredCall, peaks: DevicePeaks) -> str:
    """The limit that a call reaches first: ``compute``, ``memory`` or ``launch``; empty if the limits are not known.

    The roofline (Williams, Waterman, Patterson 2009) with the time of an empty operation as a third limit.
    """
    peak = peaks.tflops.get(measured.dtype)
    times = {
        "compute": measured.flop / peak / 1e12 if measured.flop and peak else None,
        "memory": measured.moved_bytes / peaks.gb_per_s / 1e9 if measured.moved_bytes and peaks.gb_per_s else None,
        "launch": peaks.launch_s,
    }
    wanted = ("compute", "memory") if measured.flop else ("memory",)
    if any(times[name] is None for name in wanted):
        return ""
    return max(times, key=lambda name: times[name] or 0.0)
