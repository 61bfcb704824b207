"""Findings of checks and their status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Status = Literal["ok", "info", "warn", "unknown", "fail"]
"""`unknown` was not measured and never counts as ok; `info` has no expected value."""
ORDER: tuple[Status, ...] = ("ok", "info", "warn", "unknown", "fail")
"""Statuses from best to worst."""


class CheckFinding(Struct, frozen=True, kw_only=True):
    """Result of one check on one subject."""

    check: str
    """Group and name: ``host.memlock``, ``gpu.pcie_link``, ``network.rdma_port``."""
    subject: str = ""
    """Subject of the check: ``GPU 3``, ``mlx5_0 port 1``; empty for the whole node."""
    status: Status
    measured: str
    """Measured value with its unit."""
    expected: str = ""
    reason: str = ""
    """Why this value is expected, with its source."""
    advice: str = ""
    """Recommended action; always set if the status is warn, unknown or fail."""
    value: float | None = None
    """`measured` as a number, to compare nodes."""
    host: str = ""
    """Node that the finding concerns if a check covers several nodes; empty for the node of the report, or for all."""

    @property
    def group(self) -> str:
        return self.check.partition(".")[0]


class NodeReport(Struct, frozen=True, kw_only=True):
    """All findings of one node, and the properties that must be the same on all nodes."""

    host: str
    node_rank: int = 0
    time: float
    """Start of the checks, in seconds since the epoch."""
    duration_s: float
    findings: tuple[CheckFinding, ...] = ()
    stack: dict[str, str] = {}
    """Driver, firmware, kernel, packages, ...: properties that are the same on all nodes of a consistent cluster."""


def find_worst_status(findings: Iterable[CheckFinding]) -> Status:
    """The worst status among `findings`; ok if there are none."""
    return max((finding.status for finding in findings), key=ORDER.index, default="ok")
