"""Checks of memory errors of devices: repaired errors pass, errors that require a replacement of the GPU fail.

NVIDIA: GPU Memory Error Management (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt), error recovery and response flags,
RMA policy thresholds for row-remapping. AMD: Linux drivers/gpu/drm/amd/amdgpu/amdgpu_ras_eeprom.c, whose threshold of
bad pages determines when the driver requires a replacement of the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from primus.machine.health import DeviceHealth
from primus.machine.tools.vitals import RowRemapping
from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.node import judge_value, report_info

SAFE = "AMD-AGI/Primus-SaFE node monitors"
NVIDIA = "NVIDIA GPU Memory Error Management"
AMD = "Linux amdgpu, bad_page_threshold"
RETURN = "replace the GPU (RMA)"


def judge_errors(device: DeviceHealth, subject: str) -> Iterator[CheckFinding]:
    """Findings for the memory errors of a device."""
    yield from _judge_uncorrectable_errors(device, subject)
    yield from _judge_recovery_action(device, subject)
    yield from _judge_pages(device, subject)
    if device.remapping is not None:
        yield from _judge_rows(device.remapping, subject)


def _judge_uncorrectable_errors(device: DeviceHealth, subject: str) -> Iterator[CheckFinding]:
    count = device.ecc_uncorrectable
    if count is None:
        return
    is_settled = device.recovery_action == "None"
    reason = (
        f"since the driver was loaded; contained: the driver needs no action ({NVIDIA})"
        if is_settled
        else f"since the driver was loaded; failed memory tends to fail again ({SAFE})"
    )
    advice = "reset the device; replace it if the errors return"
    status: Status = "warn" if is_settled else "fail"
    yield judge_value(
        count == 0, status, "gpu.ecc_uncorrectable", str(count), "0", reason, advice, subject=subject, value=count
    )


def _judge_recovery_action(device: DeviceHealth, subject: str) -> Iterator[CheckFinding]:
    action = device.recovery_action
    if action is not None:
        yield judge_value(
            action == "None",
            "fail",
            "gpu.recovery_action",
            action,
            "None",
            f"the driver requires it before further use ({NVIDIA})",
            "stop what uses the device, then `nvidia-smi -r`; reboot the node if it says Reboot",
            subject=subject,
        )
    if device.has_exceeded_sram_errors is not None:
        yield judge_value(
            not device.has_exceeded_sram_errors,
            "fail",
            "gpu.sram_errors",
            "threshold exceeded" if device.has_exceeded_sram_errors else "below the threshold",
            "below the threshold",
            f"on-chip memory cannot be repaired ({NVIDIA})",
            RETURN,
            subject=subject,
        )


def _judge_pages(device: DeviceHealth, subject: str) -> Iterator[CheckFinding]:
    if device.bad_pages is not None or device.has_exceeded_bad_pages is not None:
        yield _judge_bad_pages(device, subject)
    source = "(Linux amdgpu, ras/gpu_vram_bad_pages)"
    if device.pending_pages is not None:
        yield judge_value(
            device.pending_pages == 0,
            "warn",
            "gpu.pending_pages",
            str(device.pending_pages),
            "0",
            f"they will be retired {source}",
            "reset the device once it is idle",
            subject=subject,
            value=device.pending_pages,
        )
    if device.unreservable_pages is not None:
        yield judge_value(
            device.unreservable_pages == 0,
            "fail",
            "gpu.unreservable_pages",
            str(device.unreservable_pages),
            "0",
            f"failed memory is still in use {source}",
            "reboot the node; replace the GPU if they remain",
            subject=subject,
            value=device.unreservable_pages,
        )


def _judge_bad_pages(device: DeviceHealth, subject: str) -> CheckFinding:
    """Retired pages reduce the memory slightly; from the driver's threshold on, the GPU must be replaced."""
    count, threshold = device.bad_pages, device.bad_page_threshold
    is_reached = count is not None and threshold is not None and 0 < threshold <= count
    has_exceeded = is_reached or bool(device.has_exceeded_bad_pages)
    limit = "the driver's threshold" if threshold is None else f"{threshold}, the driver's threshold"
    unnumbered = "more than the driver allows" if has_exceeded else "fewer than the driver's threshold"
    return judge_value(
        not count and not has_exceeded,
        "fail" if has_exceeded else "warn",
        "gpu.bad_pages",
        unnumbered if count is None else str(count),
        "0" if not has_exceeded else f"fewer than {limit}",
        f"failed pages are retired ({AMD})",
        RETURN if has_exceeded else f"watch the number; replace the GPU at {limit} on",
        subject=subject,
        value=count,
    )


def _judge_rows(remapping: RowRemapping, subject: str) -> Iterator[CheckFinding]:
    counts = [count for count in (remapping.corrected, remapping.uncorrected) if count is not None]
    if counts:
        reason = f"repaired with spare rows ({NVIDIA})"
        yield report_info("gpu.remapped_rows", str(sum(counts)), reason, subject=subject, value=sum(counts))
    if remapping.has_failed is not None:
        yield judge_value(
            not remapping.has_failed,
            "fail",
            "gpu.remap_failure",
            "a row could not be replaced" if remapping.has_failed else "none",
            "none",
            f"the RMA flag ({NVIDIA})",
            RETURN,
            subject=subject,
        )
    if remapping.is_pending is not None:
        yield judge_value(
            not remapping.is_pending,
            "warn",
            "gpu.remap_pending",
            "a row is replaced at the next reset" if remapping.is_pending else "none",
            "none",
            f"until then the row is unused, and work can continue ({NVIDIA})",
            "reset the device once it is idle: `nvidia-smi -r`",
            subject=subject,
        )
    if remapping.banks:
        scarce = {level: count for level in ("low", "none") if (count := remapping.banks.get(level, 0))}
        yield judge_value(
            not scarce,
            "warn",
            "gpu.remap_reserve",
            ", ".join(f"{count} banks with {_SPARE[level]}" for level, count in scarce.items()) or "enough spare rows",
            "enough spare rows in each bank",
            f"the next error in such a bank may be unrepairable ({NVIDIA})",
            "watch gpu.remap_failure; plan a replacement",
            subject=subject,
            value=sum(scarce.values()),
        )


_SPARE = {"low": "few spare rows", "none": "no spare row"}
