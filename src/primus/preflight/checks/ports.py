"""Checks of the RDMA ports: selection, state, and the problems that the ports and their NICs report."""

from __future__ import annotations

from collections.abc import Iterator, Set

from primus.machine.facts import RdmaDevice, RdmaPort
from primus.machine.network import selection as machine_network
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names, format_pcie
from primus.preflight.findings.rules import About, report_info

MAX_NICS = 3
ENCODING = 128 / 130
"""Share of payload in a PCIe symbol from 8 GT/s on (PCI Express base specification)."""
PAYLOAD = 0.95
"""Share of a port's rate that its PCIe link must carry: 100 Gb/s ports are sold for 16 GT/s x8 slots of 126 Gb/s, 200
Gb/s ports for x16, 400 Gb/s ports for 32 GT/s x16; a generation less carries half."""
LOW_RATE_GBPS = 100.0
"""Slower RDMA ports are management ports if faster ones exist (AMD-AGI/Primus node_smoke)."""


def list_counted_ports(node: PreflightNode) -> tuple[list[tuple[RdmaDevice, RdmaPort]], list[str]]:
    """The RDMA ports that a job would use, and the excluded ports with reasons.

    The allow-list decides, else NCCL_IB_HCA, else the properties of the ports: disabled ports, members of a bond and
    ports slower than the others are management ports. A slower port of the fast kind of NIC is a degraded data port;
    the rate of a port that is down is not meaningful.
    """
    ports = [(device, port) for device in node.facts.rdma for port in device.ports]
    chosen = node.expected.rdma_nic_allowlist or node.environ.get("NCCL_IB_HCA")
    if chosen:
        names = machine_network.select_names(chosen, [f"{device.name}:{port.number}" for device, port in ports])
        kept = [(device, port) for device, port in ports if f"{device.name}:{port.number}" in names]
        return kept, [f"{format_port_name(*pair)} (not in {chosen})" for pair in ports if pair not in kept]
    fastest = max((port.rate_gbps or 0 for _, port in ports), default=0)
    fast_kinds = {_find_kind(device) for device, port in ports if port.rate_gbps == fastest}
    bonded = {interface.name for interface in node.facts.interfaces if interface.kind == "bond" or interface.master}
    kept, left_out = [], []
    for device, port in ports:
        reason = ""
        if port.physical_state in ("Disabled", "Sleep"):
            reason = port.physical_state
        elif 0 < (port.rate_gbps or 0) < _compute_data_rate(device, port, fastest, fast_kinds):
            reason = f"{port.rate_gbps:g} of {fastest:g} Gb/s" if fastest >= LOW_RATE_GBPS else ""
        elif device.interface in bonded or "bond" in device.name:
            reason = "in a bond"
        if reason:
            left_out.append(f"{format_port_name(device, port)} ({reason})")
        else:
            kept.append((device, port))
    return kept, left_out


def _compute_data_rate(device: RdmaDevice, port: RdmaPort, fastest: float, fast_kinds: Set[str | None]) -> float:
    """Minimum rate of a data port; a port with a lower rate is a management port."""
    if _find_kind(device) not in fast_kinds:
        return fastest
    return LOW_RATE_GBPS if port.is_active else 0.0


def _find_kind(device: RdmaDevice) -> str | None:
    return device.hca_type or device.kind


def check_rdma(node: PreflightNode) -> Iterator[CheckFinding]:
    """The RDMA ports have the expected number, are active, equally fast, and have a usable GID."""
    kept, left_out = list_counted_ports(node)
    asked, wanted = node.expected.rdma_nics, node.environ.get("PRIMUS_EXPECT_IB", "")
    source = "--expected-rdma-nics" if asked is not None else "$PRIMUS_EXPECT_IB"
    if asked is None and wanted.isdecimal() and int(wanted) > 1:
        asked = int(wanted)
    needs_rdma = wanted in ("1", "true", "yes")
    if left_out:
        reason = "excluded by an allowlist or NCCL_IB_HCA, or a management port"
        yield report_info("network.rdma_excluded", format_names(left_out), reason)
    if asked is not None or needs_rdma or (node.facts.rdma and not kept):
        active = {device.name for device, port in kept if port.is_active}
        words = {
            "active": len(active),
            "wanted": "at least one" if asked is None else asked,
            "asked_by": source if asked is not None or needs_rdma else "the node has RDMA devices",
            "value": len(active),
        }
        yield node.judge("network.rdma_count", len(active) == asked if asked is not None else active, **words)
    elif not node.facts.rdma:
        yield report_info("network.rdma_count", "none", "nodes then communicate over TCP sockets", value=0)
    else:
        yield node.judge("network.rdma_count/any", True, str(len(kept)), value=len(kept))
    yield from _report_disabled_nics(node, kept)
    fastest = max((port.rate_gbps or 0 for _, port in kept), default=0)
    for device, port in kept:
        yield from _judge_port(node, device, port, fastest)


def _report_disabled_nics(node: PreflightNode, kept: list[tuple[RdmaDevice, RdmaPort]]) -> Iterator[CheckFinding]:
    """Disabled NICs of the kind that carries data, if fewer of them than GPUs remain and no option states their
    number. A disabled second port of a NIC is not reported."""
    if node.expected.rdma_nics is not None or node.expected.rdma_nic_allowlist or node.environ.get("NCCL_IB_HCA"):
        return
    gpus, used = len(node.facts.devices), {_find_nic(device) for device, _ in kept}
    kinds = {_find_kind(device) for device, _ in kept}
    off = [
        device
        for device in node.facts.rdma
        if _find_kind(device) in kinds
        and _find_nic(device) not in used
        and all(port.physical_state in ("Disabled", "Sleep") for port in device.ports)
    ]
    if off and len(used) < gpus <= len(used) + len(off):
        shown = f"{len(used)} of {gpus}: {format_names(device.name for device in off)} disabled"
        yield node.judge("network.rdma_disabled", False, shown)


def _find_nic(device: RdmaDevice) -> str:
    """Common key of the ports of one NIC: the PCI address without the function."""
    return (device.bdf or device.name).partition(".")[0]


def _judge_port(node: PreflightNode, device: RdmaDevice, port: RdmaPort, fastest: float) -> Iterator[CheckFinding]:
    about = About(format_port_name(device, port))
    rate = f", {port.rate_gbps:g} Gb/s" if port.rate_gbps else ""
    yield node.judge("network.rdma_port", port.is_active, f"{port.state}, {port.physical_state}{rate}", about)
    if not port.is_active:
        return
    if (port.rate_gbps or 0) < fastest:
        yield node.judge("network.rdma_rate", False, f"{port.rate_gbps or 0:g} Gb/s", about, fastest=fastest)
    if port.link_layer == "Slingshot":
        return  # it has no GIDs
    is_ethernet = port.link_layer == "Ethernet"
    usable = [str(gid.index) for gid in port.gids if not is_ethernet or gid.kind == "RoCE v2"]
    words = {"kind": "RoCE v2" if is_ethernet else "valid", "number": len(port.gids)}
    yield node.judge("network.gid", bool(usable), ", ".join(usable), about, **words)


def format_port_name(device: RdmaDevice, port: RdmaPort) -> str:
    """Name of a port in findings."""
    return f"{device.name} port {port.number}"


def check_firmware(node: PreflightNode) -> Iterator[CheckFinding]:
    """All NICs of one kind have the same firmware."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for device in node.facts.rdma:
        if device.firmware:
            kinds.setdefault(device.hca_type or device.kind or "NIC", {}).setdefault(device.firmware, []).append(
                device.name
            )
    for kind, versions in sorted(kinds.items()):
        text = "; ".join(f"{version} on {format_names(names, MAX_NICS)}" for version, names in sorted(versions.items()))
        yield node.judge("network.firmware", len(versions) == 1, text, About(kind))


def check_pcie_link(node: PreflightNode) -> Iterator[CheckFinding]:
    """The slowest PCIe link between the host and each NIC has the speed that its ports support, and carries the NIC's
    rate."""
    rates: dict[str, float] = {}
    counted = [pair for pair in list_counted_ports(node)[0] if pair[1].is_active]
    for device, port in counted:
        rates[device.name] = max(rates.get(device.name, 0.0), port.rate_gbps or 0.0)
    for device in node.facts.rdma:
        if device.name in rates and device.pcie.speed_gts and device.pcie.width:
            yield _judge_pcie_link(node, device, rates[device.name])


def _judge_pcie_link(node: PreflightNode, device: RdmaDevice, rate_gbps: float) -> CheckFinding:
    link, about = device.pcie, About(device.name)
    speed, width = link.speed_gts or 0.0, link.width or 0
    carries_gbps = speed * width * ENCODING
    if speed < (link.max_speed_gts or 0) or width < (link.max_width or 0):
        wanted = f"{link.max_speed_gts or speed:g} GT/s x{link.max_width or width}"
        return node.judge("network.pcie_link", False, format_pcie(link), about, wanted=wanted)
    shown, is_right = f"{format_pcie(link)}, {carries_gbps:.0f} Gb/s", carries_gbps >= rate_gbps * PAYLOAD
    return node.judge("network.pcie_link/rate", is_right, shown, about, wanted=f"{rate_gbps:g}")


CHECKS = (check_rdma, check_firmware, check_pcie_link)
