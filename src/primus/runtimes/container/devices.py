"""Read the devices of a node for a container, the groups that own them, and the limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from primus.machine.facts import MachineFacts

CAP_SYS_RESOURCE = 24
"""Bit of the capability that lets a process raise its limits (capabilities(7))."""

RLIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "stack": resource.RLIMIT_STACK}
"""Limits that primus sets."""


class ContainerHost(Struct, frozen=True, kw_only=True):
    """Devices, groups and limits of a node."""

    vendors: frozenset[str] = frozenset()
    """Vendors of the GPUs."""
    groups: tuple[int, ...] = ()
    """Numbers of the groups that own the GPUs' device nodes; a group's name has another number in the image."""
    has_infiniband: bool = False
    is_rootless: bool = False
    limits: Mapping[str, int] = {}
    """Hard limits by name, if the engine cannot raise them; -1 is unlimited."""


def read_container_host(
    facts: MachineFacts, engine: str, *, with_devices: bool = True, root: Path = Path("/")
) -> ContainerHost:
    """Devices, groups and limits of this node for a container of `engine`; empty on a node without devices.

    Args:
        facts: Facts about this machine.
        engine: Kind of engine. podman's containers inherit the limits of this process, docker's those of the daemon.
        with_devices: Whether the container gets the devices.
        root: Root of the file system, another folder in tests.
    """
    vendors = frozenset(device.vendor for device in facts.devices) if with_devices else frozenset()
    is_bound = engine == "podman" and not _may_raise(root)
    return ContainerHost(
        vendors=vendors,
        groups=_find_device_groups(root) if "amd" in vendors else (),
        has_infiniband=with_devices and (root / "dev/infiniband").exists(),
        is_rootless=os.geteuid() != 0,
        limits={name: resource.getrlimit(number)[1] for name, number in RLIMITS.items()} if is_bound else {},
    )


def _find_device_groups(root: Path) -> tuple[int, ...]:
    """Groups of /dev/kfd and /dev/dri/renderD*, except root's."""
    found = set()
    for path in [root / "dev/kfd", *(root / "dev/dri").glob("renderD*")]:
        try:
            found.add(path.stat().st_gid)
        except OSError:  # the device does not exist
            continue
    return tuple(sorted(found - {0}))


def _may_raise(root: Path) -> bool:
    """Whether this process may raise its limits."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return not masks or bool(masks[0] >> CAP_SYS_RESOURCE & 1)
