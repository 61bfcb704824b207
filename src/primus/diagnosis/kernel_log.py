"""Reads the kernel log of this node."""

from __future__ import annotations

import re
import time
from pathlib import Path

from primus import process

LIMIT_S = 3.0
_KERNEL_TIMESTAMP = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]")


def read_kernel_log(since: float | None = None) -> tuple[bytes, str]:
    """Messages since a time, from dmesg or else from the journal, and the reason if there are none.

    Args:
        since: Seconds since the epoch; None reads everything since boot.
    """
    answer = process.run_command(["dmesg"], limit_s=LIMIT_S)
    if answer.state != "ok":
        journal = process.run_command(
            ["journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-monotonic"], limit_s=LIMIT_S
        )
        if journal.state != "ok" or "No entries" in journal.text or not journal.text.strip():
            return b"", f"the kernel log could not be read: {answer.problem}; many systems restrict it to root"
        answer = journal
    lines = answer.text.splitlines()
    booted = _read_boot_time()
    if since is not None and booted is not None:
        lines = [line for line in lines if _is_since(line, since - booted)]
    return "\n".join(lines).encode("utf-8", "replace"), ""


def _is_since(text: str, uptime_s: float) -> bool:
    stamp = _KERNEL_TIMESTAMP.search(text)
    return stamp is None or float(stamp[1]) >= uptime_s


def _read_boot_time() -> float | None:
    try:
        return time.time() - float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
