"""The faults of a drill: what each does, where it may be planted, and which event shows that it was detected."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.launch.supervision.straggler_detection import STRAGGLER_WINDOWS, WINDOW_S
from primus.machine.cluster import ClusterLayout

FaultName = Literal["kill-rank", "hang", "kill-node", "fill-disk", "slow-rank", "drop-network"]
LEAST_STOPPED_FACTOR, MOST_STOPPED_FACTOR = 2.0, 10.0
"""Times as long as it runs that a slow rank is stopped. On processors that others use as well, a rank that was stopped
for a moment gets its share back when it continues, and is not slower."""
LEAST_STEP_S = 1e-3
LONG_SLOWED_STEP_S = 3 * WINDOW_S
"""Step of a slow rank that the drill does not make longer than it has to."""
CAP_NET_ADMIN = 12
"""Number of the capability that changes network interfaces (capability.h of Linux)."""
MOST_FILLED_BYTES = 64 << 30
"""Size of a file system that a drill fills at most: a larger one is a shared one, and takes minutes to fill."""


class FaultKind(Struct, frozen=True, kw_only=True):
    """One kind of fault."""

    name: FaultName
    act: str
    """What the drill does, for people."""
    detected_by: tuple[str, ...]
    """Kinds of events by which a run shows that it has noticed; the first one counts."""
    on_head: bool = False
    """Whether it is planted on node 0, instead of on the last node."""
    restarts: bool = True
    """Whether the ranks start again."""
    allowed_by: str | None = None
    """Option by which the user allows it; None for a fault of the drill's own processes."""


KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind(name="kill-rank", act="kills one rank (SIGKILL)", detected_by=("failure", "attempt_ended")),
        # On node 0: the rank that writes the events must be found, too.
        FaultKind(name="hang", act="stops one rank in its step (SIGSTOP)", detected_by=("hang",), on_head=True),
        FaultKind(
            name="kill-node", act="kills the launcher of one node and all its ranks", detected_by=("attempt_ended",)
        ),
        FaultKind(
            name="fill-disk",
            act="fills the file system of --fill while a checkpoint is due",
            detected_by=("checkpoint_failed",),
            on_head=True,
            restarts=False,
            allowed_by="--fill",
        ),
        FaultKind(
            name="slow-rank",
            act="slows one rank: stops it most of the time (SIGSTOP, SIGCONT)",
            detected_by=("straggler",),
            restarts=False,
        ),
        FaultKind(
            name="drop-network",
            act="takes the network interface of one node down for a while",
            detected_by=("hang", "failure", "attempt_ended"),
            allowed_by="--network-interface",
        ),
    )
}
"""By name, in the order in which a drill plants them."""


class FaultPermissions(Struct, frozen=True, kw_only=True):
    """What the user allows a drill to disturb besides its own processes."""

    fill: str = ""
    """Folder on a file system that may be filled."""
    interface: str = ""
    """Network interface that may be taken down."""


def choose_stopped_factor(step_s: float) -> float:
    """Times as long as it runs that a slow rank is stopped, by the time of a step."""
    return min(MOST_STOPPED_FACTOR, max(LEAST_STOPPED_FACTOR, LONG_SLOWED_STEP_S / max(step_s, LEAST_STEP_S)))


def find_slow_time_s(step_s: float) -> float:
    """Time for which a rank is slow: the windows of straggler detection, which begin at any time and have a slowed step
    each, and one more."""
    return max(WINDOW_S, (1 + choose_stopped_factor(step_s)) * step_s) * (STRAGGLER_WINDOWS + 2)


def find_target_node(kind: FaultKind, layout: ClusterLayout) -> int:
    """The node on which a fault is planted."""
    return 0 if kind.on_head else layout.nnodes - 1


def find_layout_obstacle(kind: FaultKind, layout: ClusterLayout | None, allowed: FaultPermissions) -> str:
    """Why a fault cannot be planted in such a job, whatever its nodes are; empty if it can.

    Args:
        kind: The fault.
        layout: Nodes and processes; None if they are not known yet.
        allowed: What the user allows.
    """
    if kind.name == "slow-rank" and layout is not None and layout.world_size < 2:
        return "one rank has no other rank to be compared with"
    if kind.name == "fill-disk" and not allowed.fill:
        return "name a folder on a small file system that may be filled: --fill FOLDER"
    if kind.name == "drop-network" and layout is not None and layout.nnodes < 2:
        return "one node has no network to the other ranks"
    if kind.name == "drop-network" and not allowed.interface:
        return "name the network interface that may be taken down: --network-interface NAME"
    return ""


def find_node_obstacle(kind: FaultKind, allowed: FaultPermissions, others: Sequence[Path]) -> str:
    """Why a fault cannot be planted on this node; empty if it can.

    Args:
        kind: The fault.
        allowed: What the user allows.
        others: Folders whose file systems must not be filled.
    """
    if kind.name == "fill-disk":
        return _find_disk_obstacle(Path(allowed.fill), others)
    if kind.name == "drop-network":
        return _find_network_obstacle(allowed.interface)
    return ""


def _find_disk_obstacle(folder: Path, others: Sequence[Path]) -> str:
    if not folder.is_dir():
        return f"--fill {folder} is not a folder here"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"--fill {folder} cannot be written to"
    device = folder.stat().st_dev
    # Other programs write to these; a drill must fill nothing that the machine or the user needs.
    needed = (Path("/"), Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path("/dev", "shm"), *others)
    for other in needed:
        if other.exists() and other.stat().st_dev == device:
            return f"--fill {folder} is on the file system of {other}: give it one of its own, such as a tmpfs"
    space = os.statvfs(folder)
    size = space.f_frsize * space.f_blocks
    if size > MOST_FILLED_BYTES:
        most = MOST_FILLED_BYTES >> 30
        return f"the file system of --fill {folder} has {size / 2**30:.0f} GiB, and a drill fills at most {most} GiB"
    return ""


def _find_network_obstacle(interface: str) -> str:
    if not re.fullmatch(r"[\w.@-]+", interface) or not Path("/sys/class/net", interface).exists():
        return f"--network-interface: this node has no interface {interface}"
    if interface == "lo":
        return "--network-interface lo: programs of this machine need the loopback interface"
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if capabilities is None or not int(capabilities[1], 16) >> CAP_NET_ADMIN & 1:
        return f"changing {interface} needs root, or the capability NET_ADMIN in a network namespace of its own"
    return ""
