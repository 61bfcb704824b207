"""Checks of the devices that need no load: which they are, and how they are connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from primus.machine import devices as visible
from primus.machine.facts import Device
from primus.machine.profile import Profile
from primus.preflight.finding import Finding
from primus.preflight.node import Node, info, judged, listed, unknown
from primus.report import table

SAFE = "AMD-AGI/Primus-SaFE node monitors"
MODE_PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
"""Partitions of a card by its mode; in CPX every accelerator die is one (AMD, MI300X partitioning guide)."""
MEMORY_TOLERANCE = 0.05
"""Part of the memory that firmware and error correction may keep to themselves."""


def count(node: Node) -> Iterator[Finding]:
    """As many devices as expected, and visible to processes."""
    facts, asked = node.facts, node.expected.gpus
    there = len(facts.partitions)
    if not there:
        yield _nothing(len(facts.devices), asked)
        return
    text = _described(node)
    if asked is None:
        yield _usual_number(node, text)
    else:
        yield judged(
            there == asked,
            "fail",
            "gpu.count",
            text,
            str(asked),
            "--expected-gpus",
            "see the kernel log for a device that fell off the bus; boot the node again",
            value=there,
        )
    seen = visible.count(node.environ, node.tree.root)
    yield judged(
        seen > 0,
        "fail",
        "gpu.visible",
        f"{seen} of {there}",
        "at least one",
        "processes see what *_VISIBLE_DEVICES leaves them",
        "unset ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES",
        value=seen,
    )


def _usual_number(node: Node, text: str) -> Finding:
    """Where nobody says how many: servers with linked cards are whole, or give a single card away."""
    cards, size = len(node.facts.devices), max((profile.hive_size or 1 for _, profile in node.profiles), default=1)
    return judged(
        cards == 1 or cards % size == 0,
        "warn",
        "gpu.count",
        text,
        "at least one" if size == 1 else f"whole servers of {size}, or --expected-gpus",
        "a card may have fallen off the bus",
        "see the kernel log; say --expected-gpus where fewer are right",
        value=len(node.facts.partitions),
    )


def _nothing(cards: int, asked: int | None) -> Finding:
    if not asked and not cards:
        return info("gpu.count", "none: CPU only", "a node without accelerators is fit for work that needs none")
    return judged(
        False,
        "fail",
        "gpu.count",
        f"0, of {cards} cards on the bus" if cards else "0",
        str(asked or "at least one"),
        "--expected-gpus" if asked else "no process can use these cards",
        "is the driver loaded (lsmod), and does the container get /dev/kfd and /dev/dri, or --gpus all?",
        value=0,
    )


def _described(node: Node) -> str:
    cards = Counter(device.model or device.name or "unknown model" for device in node.facts.devices)
    text = ", ".join(f"{number} x {model}" for model, number in sorted(cards.items()))
    partitions = len(node.facts.partitions)
    return text if partitions == len(node.facts.devices) else f"{text}, {partitions} devices"


def model(node: Node) -> Iterator[Finding]:
    """One known model on the whole node."""
    if not node.has_devices:
        return
    models = sorted({device.model or device.name or "unknown" for device in node.facts.devices})
    yield judged(
        len(models) == 1,
        "fail",
        "gpu.model",
        listed(models),
        "one model",
        "a job runs at the pace of its slowest device",
        "start processes on devices of one model: *_VISIBLE_DEVICES",
    )
    for device in node.facts.devices:
        if device.model is None:
            name = f"{device.name or 'no name'} (device id {device.device_id:#x})" if device.device_id else device.name
            yield unknown(
                "gpu.profile",
                f"no profile describes {name}",
                "a known model",
                "floors and settings come from it",
                "--preflight-ignore gpu.profile, or add a profile of this model",
                subject=_named(device),
            )


def memory(node: Node) -> Iterator[Finding]:
    """As much memory as the model has."""
    for device, profile in node.profiles:
        least = (profile.memory_bytes or 0) * (1 - MEMORY_TOLERANCE)
        if not profile.memory_bytes:
            continue
        expected = f"about {table.size(profile.memory_bytes)}"
        if device.memory_bytes is None:
            yield info("gpu.memory", "not told by the driver", expected, subject=_named(device))
            continue
        yield judged(
            device.memory_bytes >= least,
            "fail",
            "gpu.memory",
            table.size(device.memory_bytes),
            expected,
            f"what {profile.model} has, by its profile",
            "boot the node again; pages may be retired",
            subject=_named(device),
            value=device.memory_bytes,
        )


def partitions(node: Node) -> Iterator[Finding]:
    """Every card divided alike, and no part of one missing."""
    devices = node.facts.devices
    if not devices:
        return
    modes = Counter(f"{device.partition_mode or '-'}/{device.memory_mode or '-'}" for device in devices)
    if any(device.partition_mode for device in devices):
        yield judged(
            len(modes) == 1,
            "fail",
            "gpu.partition_mode",
            listed(sorted(modes)),
            "the same on every card",
            "ranks would have different devices",
            "`amd-smi set --compute-partition SPX`, on all cards",
        )
    usual = Counter(len(device.partitions) for device in devices).most_common(1)[0][0]
    profiles = {device.index: profile for device, profile in node.profiles}
    for device in devices:
        wanted = _wanted_partitions(device, profiles.get(device.index), usual)
        there = len(device.partitions)
        if there == wanted == 1:
            continue
        yield judged(
            there >= wanted,
            "fail",
            "gpu.partitions",
            f"{there} of {wanted}",
            str(wanted),
            f"{device.partition_mode or 'as the other cards'}",
            "set the partition mode again; boot the node again",
            subject=_named(device),
            value=there,
        )


def _wanted_partitions(device: Device, profile: Profile | None, usual: int) -> int:
    mode = (device.partition_mode or "").upper()
    if profile and mode == "CPX":
        return profile.xcds
    if profile and mode in MODE_PARTITIONS:
        return MODE_PARTITIONS[mode] * profile.devices_per_card
    return max(usual, profile.devices_per_card if profile else 1)


def pcie_link(node: Node) -> Iterator[Finding]:
    """Each card's link as fast and as wide as it can be."""
    known = {device.index: profile for device, profile in node.profiles}
    for device in node.facts.devices:
        link, profile = device.pcie, known.get(device.index)
        speed = _most(link.max_speed_gts, profile.pcie_gts if profile else None)
        width = _most(link.max_width, profile.pcie_width if profile else None)
        subject = _named(device)
        reason = f"copies from the host run over it ({SAFE})"
        if link.speed_gts is None or link.width is None:
            yield info("gpu.pcie_link", "not told by the kernel", reason, subject=subject)
            continue
        if speed is None or width is None:
            yield info("gpu.pcie_link", f"{link.speed_gts:g} GT/s x{link.width}", reason, subject=subject)
            continue
        is_wide, is_fast = link.width >= width, link.speed_gts >= speed
        saves_power = is_wide and device.vendor == "nvidia"
        yield judged(
            is_wide and is_fast,
            "info" if saves_power else "fail",
            "gpu.pcie_link",
            f"{link.speed_gts:g} GT/s x{link.width}",
            f"{speed:g} GT/s x{width:g}",
            "an idle NVIDIA device lowers its speed to save power" if saves_power else reason,
            "reseat the card or its riser; see `lspci -vv` for the slot that limits it",
            subject=subject,
        )


def _most(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def links(node: Node) -> Iterator[Finding]:
    """Every pair of cards of one hive is linked directly."""
    cards = [device for device, profile in node.profiles if (profile.hive_size or 1) > 1]
    if len(cards) < 2:
        return
    size = max(profile.hive_size or 1 for _, profile in node.profiles)
    kind = "NVLink" if cards[0].vendor == "nvidia" else "xGMI"
    joined = {frozenset((link.first, link.second)) for link in node.facts.links if link.kind != "pcie"}
    reason = f"collectives run over {kind}; a usual server of this model has hives of {size}"
    if not joined:
        yield unknown(
            "gpu.links",
            f"no {kind} link is told",
            "every pair of a hive",
            reason,
            "`nvidia-smi topo -m` and `nvidia-smi nvlink -s`" if kind == "NVLink" else "`amd-smi topology`",
        )
        return
    hives: dict[str, list[int]] = {}
    for device in cards:
        hives.setdefault(device.hive or f"{kind} node", []).append(device.index)
    missing = [
        f"{first}-{second}"
        for hive in hives.values()
        for place, first in enumerate(hive)
        for second in hive[place + 1 :]
        if frozenset((first, second)) not in joined
    ]
    yield judged(
        not missing,
        "fail",
        "gpu.links",
        f"no link between {listed(missing)}" if missing else f"every pair by {kind}",
        "every pair of a hive",
        reason,
        "boot the node again; a card or its bridge may be loose",
        value=len(joined),
    )
    wanted = -(-len(cards) // size)
    yield judged(
        len(hives) <= wanted,
        "fail",
        "gpu.hives",
        f"cards by hive: {listed(map(len, hives.values()))}",
        f"{wanted} of up to {size}",
        reason,
        "boot the node again; the firmware builds hives",
        value=len(hives),
    )


def affinity(node: Node) -> Iterator[Finding]:
    """An RDMA device on the NUMA node of each card."""
    if not node.has_rdma:
        return
    near = {nic.numa_node for nic in node.facts.rdma if any(port.is_active for port in nic.ports)}
    apart = [device for device in node.facts.devices if device.numa_node is not None and device.numa_node not in near]
    if node.has_devices:
        yield judged(
            not apart,
            "warn",
            "gpu.nic_affinity",
            f"no active NIC near {listed(map(_named, apart))}" if apart else "an active NIC on every card's NUMA node",
            "an active NIC on every card's NUMA node",
            "transfers between nodes otherwise cross the sockets",
            "bring that NIC up, or place it at the other root",
        )


def readings(node: Node) -> Iterator[Finding]:
    """What could not be read of the devices, or on which two sources disagree."""
    for problem in node.facts.problems:
        if problem.where.startswith(("GPU", "/sys/class/kfd", "/sys/class/drm", "/proc/driver/nvidia")):
            yield judged(
                False,
                "warn",
                "gpu.reading",
                problem.problem,
                "read, and the same by every source",
                "decisions are made from it",
                "run as root, or look at the device with its own tool",
                subject=problem.where,
            )


def _named(device: Device) -> str:
    return f"GPU {device.index}"


CHECKS = (count, model, memory, partitions, pcie_link, links, affinity, readings)
