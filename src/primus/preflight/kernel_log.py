"""What the kernel has complained of since it was booted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from primus.preflight.finding import Finding
from primus.preflight.node import Node, info, judged, ok

SAFE = "AMD-AGI/Primus-SaFE node monitors"
SMOKE = "AMD-AGI/Primus node_smoke"
CHECK = "host.kernel_log"
LIMIT_S = 3.0


class Pattern(Struct, frozen=True):
    """Lines that say something is wrong, once there are `count` of them."""

    pattern: str
    severity: Literal["fail", "warn"]
    source: str
    count: int = 1
    ignored: str = ""
    """Lines that match this as well are harmless."""

    def matches(self, line: str) -> bool:
        is_ignored = self.ignored and re.search(self.ignored, line)
        return bool(re.search(self.pattern, line, re.IGNORECASE) and not is_ignored)


PATTERNS = (
    *(
        Pattern(pattern, "fail", SAFE)
        for pattern in (
            r"uncorrectable hardware errors detected in .* block",
            r"amdgpu.*(poison|uncorrectable|fatal)",
            r"Accelerator Check Architecture.*uncorrectable",
            r"kernel panic",
            r"EDAC.*Uncorrected",
            r"MCE.*Hardware Error",
            r"mce:.*Machine check",
            r"pcieport.*AER.*(Uncorrectable|Fatal)",
            r"DPC:.*containment",
            r"PCIe Bus Error.*Fatal",
            r"AER.*recovery failed",
            r"mlx5_core.*PCI slot is unavailable",
            r"CSTS=0xffffffff",
            r"hard lockup",
            r"amdgpu: Failed to import IPC handle",
            r"xgmi.*link error",
        )
    ),
    Pattern(r"NVRM: Xid", "fail", SAFE, ignored=r"Xid \([^)]*\): (13|31|43|45|68|109)\b"),
    Pattern(r"NVRM: Xid", "warn", "NVIDIA/k8s-device-plugin counts 13, 31, 43, 45, 68 and 109 as the application's"),
    Pattern(r"amdgpu.*hang", "warn", SAFE, 5),
    Pattern(r"amdgpu.*reset", "warn", SAFE, 5, ignored=r"init context"),
    Pattern(r"mlx5_core.*init failed", "warn", SAFE, 3),
    Pattern(r"mlx5_core.*Link down", "warn", SAFE, 5),
    Pattern(r"mlx5_core.*High temperature", "warn", SAFE, 3),
    Pattern(r"soft lockup", "warn", SAFE, 3),
    Pattern(r"I/O error.*nvme", "warn", SAFE, 20),
    Pattern(r"infiniband.*wait status -512", "warn", SAFE, 500),
    Pattern(r"nfs.*not responding", "warn", SAFE, 500),
    Pattern(r"gpu reset", "warn", SMOKE),
    Pattern(r"hung_task", "warn", SMOKE),
    Pattern(r"page allocation failure", "warn", SMOKE),
    Pattern(r"hardware error", "warn", SMOKE),
    Pattern(r"\*ERROR\*", "warn", SMOKE),
    Pattern(r"amdgpu.*(error|fail|timeout)", "warn", SMOKE),
)

_HARMLESS = re.compile(r"severity=Correct(ed|able)|HEST: Enabling Firmware First")
"""Said of errors that the hardware mended; it counts those, and so do the checks of devices."""


def kernel_log(node: Node) -> Iterator[Finding]:
    """The lines since boot, of the last hours at most, against the table."""
    if node.expected.skips_kernel_log:
        yield info(CHECK, "not read: --skip-dmesg")
        return
    if not node.tree.is_live:
        return
    lines, problem = _read(node)
    if lines is None:
        yield info(CHECK, f"not read: {problem}", "only root may, on many systems", advice="run preflight as root")
        return
    hours = node.limits.kernel_log_hours
    found = list(findings(lines, hours))
    yield from found or [ok(CHECK, f"{len(lines)} lines of the last {hours:g} h", "none of the known signs of damage")]


def findings(lines: Iterable[str], hours: float) -> Iterator[Finding]:
    """One finding for each pattern that `lines` match often enough, without those whose lines were named before."""
    suspects = [line for line in lines if _ANY.search(line) and not _HARMLESS.search(line)]
    named: set[str] = set()
    for pattern in PATTERNS:
        hits = [line for line in suspects if pattern.matches(line)]
        if len(hits) < pattern.count or named.issuperset(hits):
            continue
        named.update(hits)
        yield judged(
            False,
            pattern.severity,
            CHECK,
            f"{len(hits)} times in {hours:g} h, last: {hits[-1].strip()[:160]}",
            f"fewer than {pattern.count}",
            f"a sign of damage ({pattern.source})",
            "look at the device that it names; drain the node where it comes again",
            subject=pattern.pattern,
        )


_ANY = re.compile("|".join(f"(?:{entry.pattern})" for entry in PATTERNS), re.IGNORECASE)

_STAMP = re.compile(r"\[\s*(\d+\.\d+)\]")


def _read(node: Node) -> tuple[list[str] | None, str]:
    """Lines of the kernel log within the time that counts, by dmesg, else from the journal."""
    uptime_s = float((node.tree.text("proc/uptime") or "0").split()[0])
    hours = node.limits.kernel_log_hours
    answer = node.call(["dmesg"], LIMIT_S)
    if answer.state == "ok":
        return recent(answer.text.splitlines(), uptime_s - hours * 3600), ""
    journal = node.call(
        ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-monotonic", f"--since=-{hours * 60:.0f}min"],
        LIMIT_S,
    )
    if journal.state == "ok" and "No entries" not in journal.text:
        return journal.text.splitlines(), ""
    return None, answer.problem


def recent(lines: Iterable[str], since_s: float) -> list[str]:
    """The lines that were written `since_s` seconds after boot, or later; one without a time stays."""
    kept = []
    for line in lines:
        stamp = _STAMP.search(line)
        if stamp is None or float(stamp[1]) >= since_s:
            kept.append(line)
    return kept


CHECKS = (kernel_log,)
