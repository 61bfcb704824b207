"""Checks that PyTorch can use the accelerators of this machine, so that no job falls back to the CPU unnoticed."""

from __future__ import annotations

import grp
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from primus.bootstrap.torch_builds import (
    ROCM_TARGETS,
    Build,
    Hardware,
    find_installed_build,
    find_mismatch,
    has_forward_compatibility,
)
from primus.errors import UnfitError
from primus.machine import devices
from primus.machine.facts import Device, DeviceKind, MachineFacts
from primus.machine.probe import find_machine_root, probe
from primus.package_files import PROGRAM


def find_accelerators(facts: MachineFacts) -> tuple[Device, ...]:
    """The devices that PyTorch could use: those that the driver lists, and known models that it does not list.

    An AMD GPU without support in any PyTorch build, such as integrated graphics, is not among them.
    """
    return tuple(
        device
        for device in facts.devices
        if device.model or (device.partitions and (device.vendor == "nvidia" or device.architecture in ROCM_TARGETS))
    )


def check_launch(
    asked: DeviceKind, facts: MachineFacts, environ: Mapping[str, str], folders: Sequence[str] | None = None
) -> None:
    """Reject a launch whose workers could not use the accelerators of this machine; reads files only.

    Args:
        asked: Device that the job requests.
        facts: Facts about the machine.
        environ: Variables of the workers.
        folders: Import path of the workers; None for that of this interpreter.

    Raises:
        UnfitError: The installed PyTorch cannot use the accelerators, or there are none and the job needs one.
    """
    if asked == "cpu":
        return
    found = find_accelerators(facts)
    if not found:
        if asked == "cuda":
            raise _explain_missing_accelerators()
        return
    build = find_installed_build(sys.path if folders is None else folders)
    root = find_machine_root(environ)
    reason = next(iter(_find_certain_reasons(build, facts, environ, root)), None) if build else None
    if reason:
        raise _explain_unusable_accelerators(build, facts, root, "cannot use them", [reason])


def choose_device_type(asked: DeviceKind, num_visible: int, environ: Mapping[str, str], error: str = "") -> str:
    """``cuda`` or ``cpu`` for a worker in which PyTorch sees `num_visible` devices.

    Args:
        asked: Device that the job requests.
        num_visible: Devices that PyTorch sees.
        environ: Variables of this process.
        error: PyTorch's own error, where it sees no device.

    Raises:
        UnfitError: PyTorch sees no device, and the machine has accelerators or the job needs one.
    """
    if asked == "cpu":
        return "cpu"
    if num_visible:
        return "cuda"
    facts = probe(find_machine_root(environ), environ, tools="never")
    if find_accelerators(facts):
        build = find_installed_build(sys.path)
        root = find_machine_root(environ)
        reasons = [*_find_certain_reasons(build, facts, environ, root), *_find_likely_reasons(facts, root)]
        if error and not reasons:
            reasons.append(f"PyTorch says: {error}")
        raise _explain_unusable_accelerators(build, facts, root, "sees none of them", reasons)
    if asked == "cuda":
        raise _explain_missing_accelerators()
    return "cpu"


def describe_hardware(facts: MachineFacts, root: Path) -> Hardware:
    """Properties of the machine that decide which build of PyTorch works on it."""
    found = find_accelerators(facts)
    if not found:
        return Hardware()
    return Hardware(
        vendor=found[0].vendor,
        num_devices=len(found),
        name=describe_devices(found),
        driver=facts.software.nvidia_driver or "",
        device_ids=tuple(device.device_id for device in found if device.device_id),
        has_compat=has_forward_compatibility(root),
    )


def describe_devices(found: Iterable[Device]) -> str:
    """The devices as text: ``8 x MI300X``."""
    names = Counter(device.model or device.name or f"{device.vendor.upper()} GPU" for device in found)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _explain_missing_accelerators() -> UnfitError:
    return UnfitError(
        "device is 'cuda', and this machine has no AMD or NVIDIA accelerator",
        "run on a machine with an accelerator, or pass --device cpu to train on the CPU",
    )


def _explain_unusable_accelerators(
    build: Build | None, facts: MachineFacts, root: Path, sees: str, reasons: list[str]
) -> UnfitError:
    present = describe_devices(find_accelerators(facts))
    what = f"PyTorch {build.torch} (built for {build})" if build else "PyTorch"
    because = f": {'; '.join(reasons)}" if reasons else ""
    vendor = find_accelerators(facts)[0].vendor
    image = "rocm/primus" if vendor == "amd" else "nvcr.io/nvidia/pytorch"
    mismatched = build is not None and find_mismatch(build, describe_hardware(facts, root)) is not None
    repair = (
        f"{PROGRAM} setup installs the build for this machine, or use an image such as {image} (docs/install.md)"
        if mismatched
        else "fix this, then start again (docs/install.md)"
    )
    return UnfitError(f"{present} present: {what} {sees}{because}", f"{repair}; --device cpu trains on the CPU")


def _find_certain_reasons(
    build: Build | None, facts: MachineFacts, environ: Mapping[str, str], root: Path
) -> Iterator[str]:
    """Reasons, from files and variables, for which no process can use the accelerators."""
    mismatch = find_mismatch(build, describe_hardware(facts, root)) if build else None
    if mismatch:
        yield mismatch
    if not facts.partitions:
        yield "no driver lists them: the driver is not loaded or failed"
    elif not devices.list_usable_devices(facts, environ):
        names = devices.AMD_VISIBLE if _is_amd(facts) else devices.NVIDIA_VISIBLE
        given = [f"{name}={environ[name]!r}" for name in names if name in environ]
        yield f"{', '.join(given)} selects no device"
    yield from find_access_problems(facts, root)


def find_access_problems(facts: MachineFacts, root: Path) -> Iterator[str]:
    """Reasons why this user cannot open the files of the devices in /dev."""
    if (root / "dev").is_dir():  # a recorded machine may have none
        yield from _check_amd_access(root, facts) if _is_amd(facts) else _check_nvidia_access(root, facts)


def _find_likely_reasons(facts: MachineFacts, root: Path) -> Iterator[str]:
    """Possible reasons why PyTorch sees no device."""
    if not _is_amd(facts) and not facts.container and (root / "dev").is_dir() and not _list_nvidia_nodes(root):
        yield "/dev has no nvidia0: run nvidia-smi or nvidia-modprobe once as root"


def _is_amd(facts: MachineFacts) -> bool:
    return any(device.vendor == "amd" for device in facts.devices)


def _check_amd_access(root: Path, facts: MachineFacts) -> Iterator[str]:
    """The ROCm runtime opens /dev/kfd and a render node of each device (ROCm installation guide, group permissions)."""
    kfd = root / "dev/kfd"
    minors = [part.render_minor for part in facts.partitions if part.render_minor is not None]
    nodes = [root / f"dev/dri/renderD{minor}" for minor in minors]
    container = "start the container with --device /dev/kfd --device /dev/dri" if facts.container else ""
    if not kfd.exists():
        yield f"/dev/kfd does not exist; {container or 'the amdgpu driver creates it'}"
    elif not os.access(kfd, os.R_OK | os.W_OK):
        yield f"this user has no permission to open /dev/kfd: {_format_group_hint(kfd)}"
    elif nodes and not any(node.exists() for node in nodes):
        yield f"/dev/dri/renderD* does not exist; {container or 'the amdgpu driver creates them'}"
    elif nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        there = next(node for node in nodes if node.exists())
        yield f"this user has no permission to open /dev/dri/{there.name}: {_format_group_hint(there)}"


def _check_nvidia_access(root: Path, facts: MachineFacts) -> Iterator[str]:
    """Outside a container the first process that needs the device nodes may create them (nvidia-modprobe)."""
    nodes = _list_nvidia_nodes(root)
    if facts.container and not nodes:
        yield "the container has no /dev/nvidia0: start it with --gpus all, or --device nvidia.com/gpu=all"
    elif nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        yield f"this user has no permission to open /dev/{nodes[0].name}: {_format_group_hint(nodes[0])}"


def _list_nvidia_nodes(root: Path) -> list[Path]:
    return sorted(node for node in (root / "dev").glob("nvidia[0-9]*"))


def _format_group_hint(node: Path) -> str:
    number = node.stat().st_gid
    try:
        name = grp.getgrgid(number).gr_name
    except KeyError:
        name = str(number)
    return f"it belongs to group {name} (usermod -aG {name} USER; in a container --group-add {number})"
