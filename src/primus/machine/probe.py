"""What this machine is, from the kernel's files first and from tools where those are silent; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import structs

from primus.errors import UsageError
from primus.machine import host, interfaces, pci, profile
from primus.machine.facts import Device, Facts, Link, Problem, RdmaDevice, Vendor
from primus.machine.tree import Tree

Tools = Literal["never", "missing", "all"]
MODEL_VARIABLE = "PRIMUS_GPU_MODEL"
ROOT_VARIABLE = "PRIMUS_MACHINE_ROOT"
"""Folder with the /sys, /proc, /dev and /opt of another machine, to see what a command would do there."""
KFD = "sys/class/kfd"
NVIDIA_DRIVER = "proc/driver/nvidia"
FABRICS = ("sys/class/infiniband", "sys/class/cxi")

Cards = tuple[tuple[Device, ...], tuple[Link, ...]]
"""Cards of one vendor, and the links between them. What reads them is imported on machines that have something to do
with that vendor."""


def root_of(environ: Mapping[str, str]) -> Path:
    """Root of the file system that describes the machine."""
    return Path(environ.get(ROOT_VARIABLE) or "/")


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    *,
    tools: Tools | None = None,
    master: str | None = None,
) -> Facts:
    """The facts of a machine.

    Args:
        root: Root of its file system; another folder is a recorded machine.
        environ: Variables of the process; PRIMUS_GPU_MODEL overrides the model of all devices.
        tools: Whether vendors' tools are asked: never, where the kernel's files are silent (the default on the running
            machine), or always, to compare. A recorded machine is never asked by default.
        master: Address of the launch's master, for the interface that leads there.

    Raises:
        UsageError: PRIMUS_GPU_MODEL names no known model.
    """
    tree, environ = Tree(root, files_only=tools == "never"), environ or {}
    functions = pci.accelerators(tree)
    devices, links = _cards(tree, functions)
    devices, drivers = _by_tools(tree, devices, environ, tools or ("missing" if tree.is_live else "never"))
    software = host.software(tree)
    found = interfaces.interfaces(tree)
    rdma = _rdma(tree)
    return Facts(
        host=host.name(tree),
        files_only=tree.files_only,
        devices=_overridden(devices, environ),
        links=links,
        interfaces=found,
        master_interface=interfaces.route(tree, found, master) if master else None,
        rdma=rdma,
        traffic_classes=_traffic_classes(tree, rdma),
        cpu=host.cpu(tree, environ),
        memory=host.memory(tree),
        limits=host.limits(tree),
        software=structs.replace(
            software,
            amd_driver=software.amd_driver or drivers.get("amd"),
            nvidia_driver=software.nvidia_driver or drivers.get("nvidia"),
        ),
        container=host.container(tree, environ),
        scheduler=host.scheduler(environ),
        problems=tuple(dict.fromkeys(tree.problems)),
    )


def _cards(tree: Tree, functions: Sequence[pci.Function]) -> Cards:
    """The cards of one vendor, since a job runs on one kind; AMD's beside NVIDIA's are the processor's graphics unless
    a profile knows them."""
    by_amd, by_nvidia = _amd_cards(tree, functions), _nvidia_cards(tree, functions)
    is_amd = not by_nvidia[0] or any(device.model for device in by_amd[0])
    kept, left_out = (by_amd, by_nvidia) if is_amd else (by_nvidia, by_amd)
    for device in left_out[0]:
        where = f"{device.model or device.name or 'device'} ({device.bdf})"
        tree.problems.append(Problem(where, f"is left out beside the cards of {'AMD' if is_amd else 'NVIDIA'}"))
    return kept


def _amd_cards(tree: Tree, functions: Sequence[pci.Function]) -> Cards:
    if not tree.names(KFD) and pci.AMD not in {function.vendor for function in functions}:
        return (), ()
    from primus.machine import amd

    return amd.cards(tree, functions)


def _nvidia_cards(tree: Tree, functions: Sequence[pci.Function]) -> Cards:
    if not tree.names(NVIDIA_DRIVER) and pci.NVIDIA not in {function.vendor for function in functions}:
        return (), ()
    from primus.machine import nvidia

    return nvidia.cards(tree, functions)


def _rdma(tree: Tree) -> tuple[RdmaDevice, ...]:
    if not any(map(tree.names, FABRICS)) and not tree.may_ask:
        return ()
    from primus.machine import rdma

    return rdma.devices(tree)


def _traffic_classes(tree: Tree, rdma: Sequence[RdmaDevice]) -> tuple[int, int] | None:
    if not tree.may_ask or not any(device.kind == "ainic" for device in rdma):
        return None
    from primus.machine import qos

    return qos.ask(tree)


def _overridden(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    wanted = environ.get(MODEL_VARIABLE)
    if not wanted:
        return tuple(devices)
    try:
        known = profile.by_name(wanted) or profile.named(wanted)
    except UsageError as error:
        raise UsageError(f"${MODEL_VARIABLE}: {error.problem}", error.hint) from None
    return tuple(
        structs.replace(device, model=known.model, sources={**device.sources, "model": "user"}) for device in devices
    )


def _by_tools(
    tree: Tree, devices: tuple[Device, ...], environ: Mapping[str, str], tools: Tools
) -> tuple[tuple[Device, ...], dict[Vendor, str]]:
    """The devices with what tools add, and the drivers' versions."""
    if tools == "never":
        return devices, {}
    from primus.machine.tools import added  # a machine that is read from files needs none

    return added(tree, devices, environ, ask_all=tools == "all")
