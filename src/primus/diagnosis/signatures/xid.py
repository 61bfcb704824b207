"""Xid events of NVIDIA GPUs, by what NVIDIA's catalogue wants done, and the signatures made of them.

Source: docs.nvidia.com/deploy/xid-errors, analyzing-xid-catalog (October 2025), "Resolution Bucket (Immediate Action)".
"""

from __future__ import annotations

from primus.diagnosis.signature import Signature, SignaturePattern

SOURCE = "docs.nvidia.com/deploy/xid-errors, Xid catalog"

DAMAGE: dict[int, str] = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    54: "auxiliary power is not connected",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    64: "a row or page could not be replaced",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP did not answer",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    151: "key rotation failed",
    155: "NVLink error found by software",
    158: "GPU fatal time-out",
    167: "PCIe fatal time-out",
}
"""The device is reset, restarted or looked at before it is used again: RESET_GPU, RESTART_BM, RESTART_VM,
CHECK_MECHANICALS and the workflows of 48 and 74. 61 is of drivers older than the catalogue."""
REPAIRED: dict[int, str] = {
    63: "a row or page is replaced at the next reset",
    92: "many single-bit ECC errors",
    93: "the infoROM is worn",
    94: "contained memory error",
    121: "C2C error, corrected",
    156: "a resource was retired",
    157: "a resource could not be retired",
    160: "a channel was retired",
    161: "a channel could not be retired",
    164: "power smoothing hardware is near its end of life",
    165: "power smoothing hardware is at its end of life",
    168: "less memory is available",
    171: "uncorrectable DRAM error, details of another Xid",
    172: "uncorrectable SRAM error, details of another Xid",
}
"""The hardware has dealt with it, and the device may go on: IGNORE, or RESTART_APP for the one program of a contained
error. `preflight` judges the flags that these set: gpu.remap_failure, gpu.remap_pending, gpu.recovery_action."""
PROGRAM: dict[int, str] = {
    8: "GPU stopped processing",
    11: "corrupted push buffer",
    13: "graphics engine exception",
    25: "illegal push buffer",
    31: "memory page fault",
    32: "corrupted push buffer",
    37: "driver firmware error",
    38: "driver firmware error",
    39: "copy engine exception",
    40: "copy engine exception",
    41: "copy engine exception",
    43: "GPU stopped processing",
    44: "fault during context switch",
    45: "clean-up after another error",
    60: "video processor exception",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    68: "video decoder exception",
    69: "graphics engine class error",
    80: "corrupted data sent to the GPU",
    109: "context switch time-out",
    137: "NVLink privilege error",
    141: "CUDA fast path error",
    **dict.fromkeys((70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine error"),
    **dict.fromkeys((82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142), "video engine error"),
}
"""The program is restarted: RESTART_APP and CHECK_APP. 43, 45 and 109 as in NVIDIA/k8s-device-plugin, whose health
checks take them, with 13, 31 and 68, for faults of an application."""
SILENT = (14, 106, 107, 162, 163)
"""Test messages and changes of state that are no errors."""
LINK_ERRORS = "14[4-9]|150"
"""Errors of NVLink 5, whose line says whether they are fatal."""
RECOVERY = 154
"""The recovery action changed; the line says to what, and `(None)` takes it back."""


def _match_any_code(codes: object) -> str:
    return "|".join(str(code) for code in codes)  # type: ignore[attr-defined]


HEAD = r"NVRM: Xid \([^)]*\): "
_KNOWN = _match_any_code([*DAMAGE, *REPAIRED, *PROGRAM, *SILENT, LINK_ERRORS, RECOVERY])

SIGNATURES = (
    Signature(
        name="kernel-xid",
        role="root",
        action="exclude",
        strength="certain",
        signs=(
            SignaturePattern("NVRM: Xid", rf"{HEAD}({_match_any_code(DAMAGE)}),(?!.*fallen off)"),
            SignaturePattern("NVRM: Xid", rf"{HEAD}({LINK_ERRORS}), \S+ Fatal\b"),
            SignaturePattern("NVRM: Xid", rf"{HEAD}{RECOVERY},(?!.*to 0x0 \(None\)).*(Reset|Reboot|Drain)"),
        ),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="the driver reports an error of a GPU that calls for a reset or more",
        fix="look the Xid up in NVIDIA's catalogue; drain the node and reset the GPU",
        source=SOURCE,
    ),
    Signature(
        name="kernel-xid-contained",
        role="root",
        action="retry",
        strength="likely",
        signs=(SignaturePattern("NVRM: Xid", rf"{HEAD}94,"),),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="a GPU's memory had an error that was contained: it ended the program that used it, and no other",
        fix="start again; reset the GPU once it is idle",
        source=SOURCE,
    ),
    Signature(
        name="kernel-xid-repaired",
        role="info",
        strength="likely",
        signs=(
            SignaturePattern("NVRM: Xid", rf"{HEAD}({_match_any_code(code for code in REPAIRED if code != 94)}),"),
            SignaturePattern("NVRM: Xid", rf"{HEAD}({LINK_ERRORS}), \S+ Non-?fatal\b"),
        ),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="a GPU repaired or bore an error",
        fix="reset the GPU once it is idle; watch gpu.remap_failure of `preflight`",
        source=SOURCE,
    ),
    Signature(
        name="kernel-xid-of-the-program",
        role="root",
        action="stop",
        first_action="retry",
        strength="likely",
        signs=(SignaturePattern("NVRM: Xid", rf"{HEAD}({_match_any_code(PROGRAM)}),(?!.*caused by previous Xid)"),),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="the driver reports a fault of the program on a GPU",
        fix="bisect the fused operations with --env CUDA_LAUNCH_BLOCKING=1",
        source=f"{SOURCE}; NVIDIA/k8s-device-plugin health checks",
    ),
    Signature(
        name="kernel-xid-unknown",
        role="root",
        action="exclude",
        strength="likely",
        signs=(SignaturePattern("NVRM: Xid", rf"{HEAD}(?!({_KNOWN}),)\d+,"),),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="the driver reports an error of a GPU that NVIDIA's catalogue does not explain",
        fix="look the Xid up in the documentation of the driver; drain the node where it comes again",
        source=SOURCE,
    ),
    Signature(
        name="kernel-nvswitch",
        role="root",
        action="exclude",
        strength="certain",
        signs=(SignaturePattern("SXid", r"nvidia-nvswitch\d*: SXid \([^)]*\): \d+, Fatal\b"),),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="an NVSwitch reports a fatal error: the GPUs behind it do not reach each other",
        fix="drain the node and boot it again; look the SXid up in the Fabric Manager user guide",
        source="NVIDIA Fabric Manager User Guide, appendix D; leptonai/gpud sxid/kmsg.go",
    ),
    Signature(
        name="kernel-nvswitch-borne",
        role="info",
        strength="likely",
        signs=(SignaturePattern("SXid", r"nvidia-nvswitch\d*: SXid \([^)]*\): (?!22013\b)\d+, Non-fatal\b"),),
        is_kernel=True,
        systems=("NVIDIA",),
        cause="an NVSwitch reports an error that it bore",
        fix="look the SXid up in the Fabric Manager user guide where it comes again",
        source="NVIDIA Fabric Manager User Guide, appendix D: 22013 is written at each start",
    ),
)
