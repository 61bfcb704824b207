"""Checks of memory errors of devices: repaired errors pass, errors that require a replacement of the GPU fail."""

from __future__ import annotations

from collections.abc import Iterator

from primus.machine.health import DeviceHealth
from primus.machine.tools.vitals import RowRemapping
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.rules import About, judge, judge_readings, report_info


def judge_errors(device: DeviceHealth, about: About) -> Iterator[CheckFinding]:
    """Findings for the memory errors of a device."""
    is_settled = device.recovery_action == "None"
    row = "gpu.ecc_uncorrectable/settled" if is_settled else "gpu.ecc_uncorrectable"
    yield from judge_readings(device, (row, "gpu.recovery_action", "gpu.sram_errors"), about)
    if device.bad_pages is not None or device.has_exceeded_bad_pages is not None:
        yield _judge_bad_pages(device, about)
    yield from judge_readings(device, ("gpu.pending_pages", "gpu.unreservable_pages"), about)
    if device.remapping is not None:
        yield from _judge_rows(device.remapping, about)


def _judge_bad_pages(device: DeviceHealth, about: About) -> CheckFinding:
    """Retired pages reduce the memory slightly; from the driver's threshold on, the GPU must be replaced."""
    count, threshold = device.bad_pages, device.bad_page_threshold
    is_reached = count is not None and threshold is not None and 0 < threshold <= count
    has_exceeded = is_reached or bool(device.has_exceeded_bad_pages)
    most = "the driver's threshold" if threshold is None else f"{threshold}, the driver's threshold"
    unnumbered = "more than the driver allows" if has_exceeded else "fewer than the driver's threshold"
    row, shown = (
        "gpu.bad_pages/exceeded" if has_exceeded else "gpu.bad_pages",
        unnumbered if count is None else str(count),
    )
    return judge(row, not count and not has_exceeded, shown, about, most=most, value=count)


def _judge_rows(remapping: RowRemapping, about: About) -> Iterator[CheckFinding]:
    counts = [count for count in (remapping.corrected, remapping.uncorrected) if count is not None]
    if counts:
        reason = "repaired with spare rows (NVIDIA GPU Memory Error Management)"
        yield report_info("gpu.remapped_rows", str(sum(counts)), reason, about, value=sum(counts))
    yield from judge_readings(remapping, ("gpu.remap_failure", "gpu.remap_pending"), about)
    if remapping.banks:
        spare = {"low": "few spare rows", "none": "no spare row"}
        scarce = {level: count for level in spare if (count := remapping.banks.get(level, 0))}
        shown = ", ".join(f"{count} banks with {spare[level]}" for level, count in scarce.items())
        yield judge("gpu.remap_reserve", not scarce, shown, about, value=sum(scarce.values()))
