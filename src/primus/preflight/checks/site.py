"""Check a node against the expectations of its site (`--expect`), and derive expectations from a node."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from primus.machine.host import dimms
from primus.machine.host.dimms import Dimm
from primus.preflight.checks.ports import list_counted_ports
from primus.preflight.checks.storage import NETWORK_TYPES
from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.node import PreflightNode, format_names, judge_value, report_unknown
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

GIB = 1 << 30
TOLERANCE = 0.01
"""Drivers and kernels of different versions reserve different amounts of memory."""
REASON = "the site's file of --expect"
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
        subject = f"GPU {gpu.index}"
        yield from _compare_value("gpu.expect_model", gpu.model or gpu.name, wanted.model, subject=subject)
        yield from _compare_value(
            "gpu.expect_partition_mode", gpu.partition_mode, wanted.partition_mode, subject=subject
        )
        memory_gib = None if gpu.memory_bytes is None else gpu.memory_bytes / GIB
        yield from _compare_minimum("gpu.expect_memory", memory_gib, wanted.memory_gib, "GiB", subject=subject)
        for name, versions in wanted.firmware.items():
            check = "gpu.expect_firmware"
            yield from _compare_version(check, gpu.firmware.get(name), versions, "warn", subject=f"{subject} {name}")


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
        subject = f"{device.name} port {port.number}"
        yield from _compare_minimum("network.expect_rate", port.rate_gbps, wanted.rate_gbps, "Gb/s", subject=subject)
    for device in dict.fromkeys(device for device, _ in counted):
        versions = wanted.firmware.get(device.hca_type or device.kind or "NIC", ())
        yield from _compare_version("network.expect_firmware", device.firmware, versions, "warn", subject=device.name)


def check_software(node: PreflightNode) -> Iterator[CheckFinding]:
    """Versions of the operating system, drivers and libraries."""
    site = node.expected.site
    if site is None:
        return
    for name in SoftwareExpectation.__struct_fields__:
        versions = getattr(site.software, name)
        yield from _compare_version(f"software.expect_{name}", getattr(node.facts.software, name), versions, "fail")


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
        yield report_unknown(
            "host.expect_dimms", problem, "the modules are listed", REASON,
            "run as root, install dmidecode, or load the kernel's EDAC driver",
        )  # fmt: skip
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
    expected = f"{least:g} {unit} each"
    if any(value is None for _, value in values):
        yield report_unknown(check, "not read: dmidecode needs root", expected, REASON, "run as root")
        return
    below = [f"{slot} {value:g} {unit}" for slot, value in values if (value or 0) < least]
    advice = "reseat or replace the module; see the firmware's memory settings"
    yield judge_value(
        not below, "fail", check, format_names(below) or f"all at least {least:g} {unit}", expected, REASON, advice
    )


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
        shown = UNLIMITED if value is None else f"{value:g} {unit}"
        expected = least if isinstance(least, str) else f">= {least:g} {unit}"
        yield judge_value(
            is_good, "fail", f"host.expect_{name}", shown, expected, REASON, "raise the limit: limits.conf, systemd"
        )


def check_mounts(node: PreflightNode) -> Iterator[CheckFinding]:
    """Mounted file systems: present, with the expected type, source, options and free space."""
    site = node.expected.site
    if site is None:
        return
    held = {mount.point: mount for mount in read_mounts(node)}
    for point, wanted in site.mounts.items():
        mount = held.get(point.rstrip("/") or "/")
        if mount is None:
            yield judge_value(
                False, "fail", "storage.expect_mount", "not mounted", "mounted", REASON,
                f"mount it: `mount {point}`; see the kernel log of the file system's client", subject=point,
            )  # fmt: skip
            continue
        yield _check_mount(mount, wanted)
        if wanted.min_free_gib is not None and node.tree.is_live:
            yield from _compare_minimum(
                "storage.expect_free", _read_free_gib(point), wanted.min_free_gib, "GiB", subject=point, is_exact=True
            )


def _check_mount(mount: MountedFileSystem, wanted: MountExpectation) -> CheckFinding:
    lacking = [option for option in wanted.options if option not in mount.options]
    wrong = [f"type {mount.type}"] if wanted.type and mount.type not in wanted.type else []
    wrong += [f"source {mount.source}"] if wanted.source and mount.source != wanted.source else []
    wrong += [f"without {format_names(lacking)}"] if lacking else []
    expected = [*wanted.type, *([wanted.source] if wanted.source else []), *wanted.options]
    return judge_value(
        not wrong, "fail", "storage.expect_mount", format_names(wrong) or f"{mount.type} from {mount.source}",
        format_names(expected) or "mounted", REASON, "mount it like the others: /etc/fstab, client settings",
        subject=mount.point,
    )  # fmt: skip


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


def _compare_value(check: str, value: object, wanted: object, unit: str = "", **more: Any) -> Iterator[CheckFinding]:
    if wanted is None:
        return
    advice = "see the node's findings, or exclude it; update the file if the site changed"
    shown = "not known" if value is None else f"{value} {unit}".strip()
    yield judge_value(
        str(value).casefold() == str(wanted).casefold(),
        "fail",
        check,
        shown,
        f"{wanted} {unit}".strip(),
        REASON,
        advice,
        **more,
    )


def _compare_minimum(
    check: str, value: float | None, wanted: float | None, unit: str, *, is_exact: bool = False, **more: Any
) -> Iterator[CheckFinding]:
    if wanted is None:
        return
    least = wanted if is_exact else wanted * (1 - TOLERANCE)
    shown = "not known" if value is None else f"{value:.6g} {unit}"
    advice = "see the node's findings, or exclude it; update the file if the site changed"
    yield judge_value(
        value is not None and value >= least, "fail", check, shown, f"{wanted:g} {unit}", REASON, advice, **more
    )


def _compare_version(
    check: str, value: str | None, versions: Sequence[str], otherwise: Status, **more: Any
) -> Iterator[CheckFinding]:
    if not versions:
        return
    advice = "install what the site expects, or add the version to the file"
    yield judge_value(
        value in versions, otherwise, check, value or "not known", " or ".join(versions), REASON, advice, **more
    )


HOST_CHECKS, GPU_CHECKS, NETWORK_CHECKS = (check_host,), (check_gpus,), (check_nics,)
STORAGE_CHECKS, SOFTWARE_CHECKS = (check_mounts,), (check_software,)
