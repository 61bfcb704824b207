"""What a check found, and what that means for a node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Status = Literal["ok", "info", "warn", "unknown", "fail"]
"""`unknown` could not be measured, and is never ok; `info` has no expectation."""
ORDER: tuple[Status, ...] = ("ok", "info", "warn", "unknown", "fail")
"""From good to bad."""


class CheckFinding(Struct, frozen=True, kw_only=True):
    """The result of one check on one thing."""

    check: str
    """Group and name: ``host.memlock``, ``gpu.pcie_link``, ``network.rdma_port``."""
    subject: str = ""
    """What was looked at: ``GPU 3``, ``mlx5_0 port 1``; empty for the node."""
    status: Status
    measured: str
    """With its unit."""
    expected: str = ""
    reason: str = ""
    """Why that is expected, with its source."""
    advice: str = ""
    """What to do; always there where the status is warn, unknown or fail."""
    value: float | None = None
    """`measured` as a number, where nodes are compared by it."""
    host: str = ""
    """Node that it is about, where a check looks at several; empty for the one that the report is of, or for all."""

    @property
    def group(self) -> str:
        return self.check.partition(".")[0]


class NodeReport(Struct, frozen=True, kw_only=True):
    """All findings of one node, and what must agree between nodes."""

    host: str
    node_rank: int = 0
    time: float
    """Seconds since the epoch, at the start."""
    duration_s: float
    findings: tuple[CheckFinding, ...] = ()
    stack: dict[str, str] = {}
    """Driver, firmware, kernel, packages, ...: what is equal on all nodes of a sane cluster."""


def find_worst_status(findings: Iterable[CheckFinding]) -> Status:
    """The worst status among `findings`; ok without any."""
    return max((finding.status for finding in findings), key=ORDER.index, default="ok")
