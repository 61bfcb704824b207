"""Check a node against the expectations of its site (`--expect`), and derive expectations from a node."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from primus.machine.host import dimms
from primus.machine.host.dimms import Dimm
from primus.preflight.checks.ports import list_counted_ports
from primus.preflight.checks.storage import NETWORK_TYPES
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import GIB, NODE, About, judge
from primus.preflight.findings.site import (
    UNLIMITED,
    CpuExpectation,
    GpuExpectation,
    LimitExpectation,
    MemoryExpectation,
    MountExpectation,
    NicExpectation,
    SiteExpectations,
    SoftwareExpectation,
)

TOLERANCE = 0.01
"""Drivers and kernels of different versions reserve different amounts of memory."""
DMIDECODE_LIMIT_S = 10.0


class MountedFileSystem(Struct, frozen=True, kw_only=True):
    """A line of /proc/self/mounts."""

    source: str
    point: str
    type: str
    options: tuple[str, ...]


def check_gpus(node: PreflightNode) -> Iterator[CheckFinding]:
    """Number, model, memory, partition mode and firmware of the GPUs."""
    site = node.expected.site
    if site is None:
        return
    wanted, gpus = site.gpus, node.facts.devices
    yield from _compare_value("gpu.expect_count", len(gpus), wanted.count, "GPUs")
    for gpu in gpus:
        about = About(f"GPU {gpu.index}")
        yield from _compare_value("gpu.expect_model", gpu.model or gpu.name, wanted.model, about=about)
        yield from _compare_value("gpu.expect_partition_mode", gpu.partition_mode, wanted.partition_mode, about=about)
        memory_gib = None if gpu.memory_bytes is None else gpu.memory_bytes / GIB
        yield from _compare_minimum("gpu.expect_memory", memory_gib, wanted.memory_gib, "GiB", about=about)
        for name, versions in wanted.firmware.items():
            check = "gpu.expect_firmware"
            yield from _compare_version(
                check, gpu.firmware.get(name), versions, status="warn", about=About(f"{about.subject} {name}")
            )


def check_nics(node: PreflightNode) -> Iterator[CheckFinding]:
    """Number, rate and firmware of the RDMA devices in use."""
    site = node.expected.site
    if site is None:
        return
    wanted, counted = site.nics, list_counted_ports(node)[0]
    active = [(device, port) for device, port in counted if port.is_active]
    yield from _compare_value(
        "network.expect_count", len({device.name for device, _ in active}), wanted.count, "active NICs"
    )
    for device, port in active:
        about = About(f"{device.name} port {port.number}")
        yield from _compare_minimum("network.expect_rate", port.rate_gbps, wanted.rate_gbps, "Gb/s", about=about)
    for device in dict.fromkeys(device for device, _ in counted):
        versions = wanted.firmware.get(device.hca_type or device.kind or "NIC", ())
        yield from _compare_version(
            "network.expect_firmware", device.firmware, versions, status="warn", about=About(device.name)
        )


def check_software(node: PreflightNode) -> Iterator[CheckFinding]:
    """Versions of the operating system, drivers and libraries."""
    site = node.expected.site
    if site is None:
        return
    for name in SoftwareExpectation.__struct_fields__:
        versions = getattr(site.software, name)
        yield from _compare_version(f"software.expect_{name}", getattr(node.facts.software, name), versions)


def check_host(node: PreflightNode) -> Iterator[CheckFinding]:
    """Processors, memory, memory modules, and limits."""
    site = node.expected.site
    if site is None:
        return
    for name in CpuExpectation.__struct_fields__:
        yield from _compare_value(f"host.expect_{name}", getattr(node.facts.cpu, name), getattr(site.cpu, name))
    total = node.facts.memory.total_bytes
    yield from _compare_minimum(
        "host.expect_memory", None if total is None else total / GIB, site.memory.total_gib, "GiB"
    )
    yield from _check_memory_modules(node, site.memory)
    yield from _check_limits(node, site.limits)


def _check_memory_modules(node: PreflightNode, wanted: MemoryExpectation) -> Iterator[CheckFinding]:
    if wanted.dimms is None and wanted.dimm_gib is None and wanted.dimm_mts is None:
        return
    found, problem = read_dimms(node)
    if not found:
        yield judge("expect/modules_unknown", False, problem, check="host.expect_dimms")
        return
    yield from _compare_value("host.expect_dimms", len(found), wanted.dimms, "modules")
    sizes = [(dimm.slot, dimm.size_bytes / GIB) for dimm in found]
    speeds = [(dimm.slot, dimm.speed_mts) for dimm in found]
    yield from _check_each_module("host.expect_dimm_size", sizes, wanted.dimm_gib, "GiB")
    yield from _check_each_module("host.expect_dimm_speed", speeds, wanted.dimm_mts, "MT/s")


def _check_each_module(
    check: str, values: Sequence[tuple[str, float | None]], least: float | None, unit: str
) -> Iterator[CheckFinding]:
    if least is None:
        return
    words = {"check": check, "wanted": f"{least:g} {unit}"}
    if any(value is None for _, value in values):
        yield judge("expect/module_unknown", False, **words)
        return
    below = format_names(f"{slot} {value:g} {unit}" for slot, value in values if (value or 0) < least)
    yield judge("expect/module", not below, below or f"all at least {least:g} {unit}", **words)


def _check_limits(node: PreflightNode, wanted: LimitExpectation) -> Iterator[CheckFinding]:
    held = node.facts.limits
    for name, value, least, unit in (
        ("memlock", None if held.memlock_bytes is None else held.memlock_bytes / GIB, wanted.memlock_gib, "GiB"),
        ("nofile", held.nofile, wanted.nofile, "files"),
        ("shm", (held.shm_bytes or 0) / GIB, wanted.shm_gib, "GiB"),
    ):
        if least is None:
            continue
        is_good = value is None or (not isinstance(least, str) and value >= least)
        expected = least if isinstance(least, str) else f">= {least:g} {unit}"
        shown = UNLIMITED if value is None else f"{value:g} {unit}"
        yield judge("expect/limit", is_good, shown, check=f"host.expect_{name}", wanted=expected)


def check_mounts(node: PreflightNode) -> Iterator[CheckFinding]:
    """Mounted file systems: present, with the expected type, source, options and free space."""
    site = node.expected.site
    if site is None:
        return
    held = {mount.point: mount for mount in read_mounts(node)}
    for point, wanted in site.mounts.items():
        mount = held.get(point.rstrip("/") or "/")
        if mount is None:
            yield judge("expect/not_mounted", False, "", About(point), check="storage.expect_mount", point=point)
            continue
        yield _check_mount(mount, wanted)
        if wanted.min_free_gib is not None and node.tree.is_live:
            yield from _compare_minimum(
                "storage.expect_free",
                _read_free_gib(point),
                wanted.min_free_gib,
                "GiB",
                about=About(point),
                is_exact=True,
            )


def _check_mount(mount: MountedFileSystem, wanted: MountExpectation) -> CheckFinding:
    lacking = [option for option in wanted.options if option not in mount.options]
    wrong = [f"type {mount.type}"] if wanted.type and mount.type not in wanted.type else []
    wrong += [f"source {mount.source}"] if wanted.source and mount.source != wanted.source else []
    wrong += [f"without {format_names(lacking)}"] if lacking else []
    expected = format_names([*wanted.type, *([wanted.source] if wanted.source else []), *wanted.options]) or "mounted"
    shown = format_names(wrong) or f"{mount.type} from {mount.source}"
    return judge("expect/mount", not wrong, shown, About(mount.point), check="storage.expect_mount", wanted=expected)


def _read_free_gib(point: str) -> float | None:
    try:
        held = os.statvfs(point)
    except OSError:
        return None
    return held.f_bavail * held.f_frsize / GIB


def read_mounts(node: PreflightNode) -> list[MountedFileSystem]:
    """Mounted file systems; of several on one mount point the last one counts."""
    lines = (line.split() for line in (node.tree.read_text("proc/self/mounts") or "").splitlines())
    found = {
        words[1]: MountedFileSystem(
            source=_decode_mount_text(words[0]),
            point=_decode_mount_text(words[1]),
            type=words[2],
            options=tuple(words[3].split(",")),
        )
        for words in lines
        if len(words) > 3
    }
    return list(found.values())


def _decode_mount_text(text: str) -> str:
    """Decodes text of /proc/self/mounts, which encodes spaces and other characters as octal digits
    (proc_pid_mounts(5))."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_dimms(node: PreflightNode) -> tuple[list[Dimm], str]:
    """The memory modules from dmidecode if it may be run, else from the kernel; and why there are none."""
    if node.is_root and node.tree.is_live:
        answer = node.run_program(["dmidecode", "-t", "17"], DMIDECODE_LIMIT_S)
        found = dimms.parse_dmidecode(answer.text)
        if found:
            return found, ""
    found = dimms.read_edac(node.tree)
    return found, "" if found else "neither dmidecode (root) nor the kernel's EDAC driver lists the modules"


def build_expectations(node: PreflightNode) -> SiteExpectations:
    """The properties of this node as expectations of similar nodes."""
    facts, cpu, held = node.facts, node.facts.cpu, node.facts.software
    gpus, counted = facts.devices, list_counted_ports(node)[0]
    memories = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes]
    rates = [port.rate_gbps for _, port in counted if port.is_active and port.rate_gbps]
    found, _ = read_dimms(node)
    speeds = [dimm.speed_mts for dimm in found]
    total, limits = facts.memory.total_bytes, facts.limits
    locked = UNLIMITED if limits.memlock_bytes is None else _round_down(limits.memlock_bytes / GIB)
    return SiteExpectations(
        gpus=GpuExpectation(
            count=len(gpus),
            model=facts.model,
            memory_gib=round(min(memories) / GIB, 2) if memories else None,
            partition_mode=_find_common_value(gpu.partition_mode for gpu in gpus),
            firmware=_group_versions((name, version) for gpu in gpus for name, version in gpu.firmware.items()),
        ),
        nics=NicExpectation(
            count=len({device.name for device, port in counted if port.is_active}),
            rate_gbps=min(rates, default=None),
            firmware=_group_versions(
                (device.hca_type or device.kind or "NIC", device.firmware) for device, _ in counted if device.firmware
            ),
        ),
        software=SoftwareExpectation(
            **{name: (value,) for name in SoftwareExpectation.__struct_fields__ if (value := getattr(held, name))}
        ),
        memory=MemoryExpectation(
            total_gib=round(total / GIB, 2) if total else None,
            dimms=len(found) or None,
            dimm_gib=min((dimm.size_bytes / GIB for dimm in found), default=None),
            dimm_mts=None if None in speeds else min((speed for speed in speeds if speed), default=None),
        ),
        cpu=CpuExpectation(
            model=cpu.model, sockets=cpu.sockets, cores=cpu.cores, threads=cpu.threads, numa_nodes=cpu.numa_nodes
        ),
        mounts={
            mount.point: MountExpectation(type=(mount.type,), source=mount.source, options=mount.options[:1])
            for mount in read_mounts(node)
            if mount.type in NETWORK_TYPES
        },
        limits=LimitExpectation(
            memlock_gib=locked,
            nofile=UNLIMITED if limits.nofile is None else limits.nofile,
            shm_gib=_round_down(limits.shm_bytes / GIB) if limits.shm_bytes else None,
        ),
    )


def _round_down(value: float) -> float:
    """Rounded down to thousandths, so that the node itself meets the expectation."""
    return math.floor(value * 1000) / 1000


def _find_common_value(values: Iterable[str | None]) -> str | None:
    """The only value; None if there are several or none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _group_versions(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for name, version in pairs:
        found.setdefault(name, {})[version] = None
    return {name: tuple(versions) for name, versions in sorted(found.items())}


def _compare_value(
    check: str, value: object, wanted: object, unit: str = "", about: About = NODE
) -> Iterator[CheckFinding]:
    if wanted is not None:
        shown = "not known" if value is None else f"{value} {unit}".strip()
        is_same = str(value).casefold() == str(wanted).casefold()
        yield judge("expect", is_same, shown, about, check=check, wanted=f"{wanted} {unit}".strip())


def _compare_minimum(
    check: str, value: float | None, wanted: float | None, unit: str, about: About = NODE, *, is_exact: bool = False
) -> Iterator[CheckFinding]:
    if wanted is not None:
        shown = "not known" if value is None else f"{value:.6g} {unit}"
        is_enough = value is not None and value >= (wanted if is_exact else wanted * (1 - TOLERANCE))
        yield judge("expect", is_enough, shown, about, check=check, wanted=f"{wanted:g} {unit}")


def _compare_version(
    check: str, value: str | None, versions: Sequence[str], about: About = NODE, *, status: str = "fail"
) -> Iterator[CheckFinding]:
    if versions:
        words = {"check": check, "wanted": " or ".join(versions), "status": status}
        yield judge("expect/version", value in versions, value or "not known", about, **words)


HOST_CHECKS, GPU_CHECKS, NETWORK_CHECKS = (check_host,), (check_gpus,), (check_nics,)
STORAGE_CHECKS, SOFTWARE_CHECKS = (check_mounts,), (check_software,)
