"""Data about a node that the checks use, and how a finding writes names, links and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from primus import process
from primus.machine import profile as profiles
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import Device, MachineFacts, PcieLink
from primus.machine.profile import Profile
from primus.machine.tree import FileTree
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.rules import NODE, About, judge
from primus.preflight.findings.site import SiteExpectations
from primus.preflight.findings.thresholds import Thresholds
from primus.process import CommandResult

Group = Literal["host", "gpu", "network", "storage", "software"]
GROUPS: tuple[Group, ...] = ("host", "gpu", "network", "storage", "software")
"""Groups of checks without load, in the order of a report."""


class NodeExpectations(Struct, frozen=True, kw_only=True):
    """Values that the user expects on every node."""

    gpus: int | None = None
    """Number of devices that processes see; None expects the number of existing devices."""
    rdma_nics: int | None = None
    """Number of RDMA devices with an active port."""
    rdma_nic_allowlist: str | None = None
    """RDMA devices in use, in the syntax of NCCL_IB_HCA."""
    tools: tuple[str, ...] = ()
    """Programs that must be installed."""
    folders: tuple[tuple[str, str], ...] = ()
    """Folders that a run writes to, each with its purpose."""
    allowed_processes: tuple[str, ...] = ()
    """Names of programs that may use devices in addition to those known to be harmless."""
    allows_foreign_processes: bool = False
    skips_kernel_log: bool = False
    site: SiteExpectations | None = None
    """Expectations in the site's file; None if the file does not exist."""


class PreflightNode(Struct, frozen=True, kw_only=True):
    """Facts and expectations of one node; read-only."""

    facts: MachineFacts
    tree: FileTree
    environ: Mapping[str, str] = {}
    limits: Thresholds = Thresholds()
    expected: NodeExpectations = NodeExpectations()
    layout: ClusterLayout = ClusterLayout(nproc=1)
    now: float = 0.0
    """Start of the checks, in seconds since the epoch."""
    is_root: bool = False

    @property
    def has_devices(self) -> bool:
        return bool(self.facts.devices)

    @property
    def has_rdma(self) -> bool:
        """Whether an RDMA port is active."""
        return any(port.is_active for device in self.facts.rdma for port in device.ports)

    def run_program(self, argv: Sequence[str], limit_s: float | None = None) -> CommandResult:
        """Result of a read-only program within a time limit (default: that of the management tools)."""
        return process.run_command(argv, self.environ, limit_s or self.limits.smi_limit_s)

    def judge(self, row: str, reading: object, text: str = "", about: About = NODE, /, **words: Any) -> CheckFinding:
        """The finding for a reading of this node; see `rules.judge`."""
        return judge(row, reading, text, about, limits=self.limits, **words)

    @property
    def list_profiles(self) -> list[tuple[Device, Profile]]:
        """The devices of known models, with their profiles."""
        known = ((device, profiles.find_profile_by_name(device.model)) for device in self.facts.devices if device.model)
        return [(device, profile) for device, profile in known if profile is not None]


def format_names(names: Iterable[object], most: int = 8) -> str:
    """`a, b and 3 more`."""
    shown = [str(name) for name in names]
    rest = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")


def format_pcie(link: PcieLink) -> str:
    """`16 GT/s x8 at 0000:4c:00.0`; the port is named if it is not the device's own."""
    return f"{link.speed_gts:g} GT/s x{link.width}" + (f" at {link.port}" if link.port else "")


def format_ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` of numbers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
