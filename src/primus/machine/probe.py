"""Detects the machine from the kernel's files, and from tools for values that the files lack; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from msgspec import structs

from primus.errors import UsageError
from primus.machine import pci, profile
from primus.machine.facts import Device, Link, MachineFacts, MachineProblem, RdmaDevice, Software, Vendor
from primus.machine.host import system as host
from primus.machine.network import interfaces
from primus.machine.tree import FileTree

Tools = Literal["never", "missing", "all"]
MODEL_VARIABLE = "PRIMUS_GPU_MODEL"
ROOT_VARIABLE = "PRIMUS_MACHINE_ROOT"
"""Directory with the /sys, /proc, /dev and /opt of another machine, to see what a command would do there."""
KFD = "sys/class/kfd"
NVIDIA_DRIVER = "proc/driver/nvidia"
FABRICS = ("sys/class/infiniband", "sys/class/cxi")

Cards = tuple[tuple[Device, ...], tuple[Link, ...]]
"""GPUs of one vendor, and the links between them. The modules that read them are imported only on machines with files
or devices of that vendor."""


def find_machine_root(environ: Mapping[str, str]) -> Path:
    """Root of the file system that describes the machine."""
    return Path(environ.get(ROOT_VARIABLE) or "/")


class MachineReader:
    """Reads a machine as far as a command needs: its GPUs alone, which decide most of a launch, or all facts.

    Args:
        root: Root of its file system; another directory is a recorded machine.
        environ: Variables of the process; PRIMUS_GPU_MODEL overrides the model of all devices.
        tools: Whether to run vendors' tools: never (the default for a recorded machine), if the kernel's files lack a
            value (the default for the running machine), or always, to compare.
    """

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None, tools: Tools | None = None):
        self._tree, self._environ = FileTree(root, files_only=tools == "never"), environ or {}
        self._tools = tools or ("missing" if self._tree.is_live else "never")

    @cached_property
    def gpu_facts(self) -> MachineFacts:
        """The GPUs, their links and the drivers that tools name, without any other fact.

        Raises:
            UsageError: PRIMUS_GPU_MODEL is not a known model.
        """
        # Files, and NVML on NVIDIA machines, are read first. Tools run afterwards in separate processes, only for
        # values that are missing, because a tool takes seconds and hangs with a hung driver.
        tree = self._tree
        devices, links = _read_gpus(tree, pci.list_accelerators(tree))
        devices, drivers = _add_tool_values(tree, devices, self._environ, self._tools)
        if devices:
            devices = _override_model(_find_failures(tree, devices), self._environ)
        software = Software(amd_driver=drivers.get("amd"), nvidia_driver=drivers.get("nvidia"))
        return MachineFacts(files_only=tree.files_only, devices=devices, links=links, software=software)

    def read_facts(self, master: str | None = None) -> MachineFacts:
        """All facts.

        Args:
            master: Address of the launch's master, for the interface that leads there. Without tools no name of it is
                resolved.

        Raises:
            UsageError: PRIMUS_GPU_MODEL is not a known model.
        """
        tree, gpus = self._tree, self.gpu_facts
        software = host.read_software(tree)
        found = interfaces.list_interfaces(tree)
        rdma = _read_rdma_devices(tree)
        is_known = master and not (tree.files_only and interfaces.parse_ip_address(master) is None)
        return structs.replace(
            gpus,
            host=host.read_host_name(tree),
            interfaces=found,
            master_interface=interfaces.find_route(tree, found, master) if master and is_known else None,
            rdma=rdma,
            traffic_classes=_read_traffic_classes(tree, rdma),
            cpu=host.read_cpu(tree, self._environ),
            memory=host.read_memory(tree),
            limits=host.read_limits(tree),
            software=structs.replace(
                software,
                amd_driver=software.amd_driver or gpus.software.amd_driver,
                nvidia_driver=software.nvidia_driver or gpus.software.nvidia_driver,
            ),
            container=host.detect_container(tree, self._environ),
            scheduler=host.detect_scheduler(self._environ),
            # Evaluated last: each of the reads above may add problems to the tree.
            problems=tuple(dict.fromkeys(tree.problems)),
        )


def probe(
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    *,
    tools: Tools | None = None,
    master: str | None = None,
) -> MachineFacts:
    """All facts of a machine, as `MachineReader` reads them.

    Raises:
        UsageError: PRIMUS_GPU_MODEL is not a known model.
    """
    return MachineReader(root, environ, tools).read_facts(master)


def _read_gpus(tree: FileTree, functions: Sequence[pci.PciFunction]) -> Cards:
    """The GPUs of one vendor, since a job runs on one. On a machine with NVIDIA GPUs, AMD devices without a profile are
    integrated graphics."""
    by_amd, by_nvidia = _read_amd_gpus(tree, functions), _read_nvidia_gpus(tree, functions)
    is_amd = not by_nvidia[0] or any(device.model for device in by_amd[0])
    kept, left_out = (by_amd, by_nvidia) if is_amd else (by_nvidia, by_amd)
    for device in left_out[0]:
        where = f"{device.model or device.name or 'device'} ({device.bdf})"
        tree.problems.append(
            MachineProblem(where, f"is ignored: this machine uses its {'AMD' if is_amd else 'NVIDIA'} GPUs")
        )
    return kept


def _find_failures(tree: FileTree, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with what is wrong with them on the bus; a driver may still list a GPU that has left it."""
    return tuple(
        structs.replace(device, failure=pci.find_failure(tree, device.bdf, has_driver=bool(device.partitions)))
        if device.bdf
        else device
        for device in devices
    )


def _read_amd_gpus(tree: FileTree, functions: Sequence[pci.PciFunction]) -> Cards:
    if not tree.list_names(KFD) and pci.AMD not in {function.vendor for function in functions}:
        return (), ()
    from primus.machine.amd import devices as amd

    return amd.read_gpus(tree, functions)


def _read_nvidia_gpus(tree: FileTree, functions: Sequence[pci.PciFunction]) -> Cards:
    if not tree.list_names(NVIDIA_DRIVER) and pci.NVIDIA not in {function.vendor for function in functions}:
        return (), ()
    from primus.machine.nvidia import devices as nvidia

    return nvidia.read_gpus(tree, functions)


def _read_rdma_devices(tree: FileTree) -> tuple[RdmaDevice, ...]:
    # The tools read the same files: they list more only where these are hidden, and with them the whole bus.
    if not any(map(tree.list_names, FABRICS)) and (not tree.may_ask or tree.list_names(pci.DEVICES)):
        return ()
    from primus.machine.network import rdma

    return rdma.read_rdma_devices(tree)


def _read_traffic_classes(tree: FileTree, rdma: Sequence[RdmaDevice]) -> tuple[int, int] | None:
    if not tree.may_ask or not any(device.kind == "ainic" for device in rdma):
        return None
    from primus.machine.network import qos

    return qos.read_traffic_classes(tree)


def _override_model(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    wanted = environ.get(MODEL_VARIABLE)
    if not wanted:
        return tuple(devices)
    try:
        known = profile.find_profile_by_name(wanted) or profile.find_profile(wanted)
    except UsageError as error:
        raise UsageError(f"${MODEL_VARIABLE}: {error.problem}", error.hint) from None
    return tuple(
        structs.replace(device, model=known.model, sources={**device.sources, "model": "user"}) for device in devices
    )


def _add_tool_values(
    tree: FileTree, devices: tuple[Device, ...], environ: Mapping[str, str], tools: Tools
) -> tuple[tuple[Device, ...], dict[Vendor, str]]:
    """The devices completed with the tools' values, and driver versions."""
    has_none = not devices and bool(tree.list_names(pci.DEVICES))  # a bus that is visible, and holds no device
    if tools == "never" or (tools == "missing" and has_none):
        return devices, {}
    from primus.machine.tools.device_values import add_tool_values  # not needed if files have all values

    return add_tool_values(tree, devices, environ, ask_all=tools == "all")
