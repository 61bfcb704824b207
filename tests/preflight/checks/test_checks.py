"""Each check that needs no load has a node that passes it and one that does not."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fakes import cli, tools
from machines import tree
from primus.config.source import read_package_yaml
from primus.machine import profile as profiles
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import (
    Cpu,
    Device,
    Gid,
    Interface,
    Limits,
    Link,
    MachineFacts,
    MachineProblem,
    Memory,
    Partition,
    PcieLink,
    RdmaDevice,
    RdmaPort,
    Software,
)
from primus.machine.health import DeviceHealth, Health
from primus.machine.health import read_health as machine_health
from primus.machine.probe import probe
from primus.machine.tools.vitals import Process, RowRemapping, ToolCall
from primus.machine.tree import FileTree
from primus.preflight import run_checks as check
from primus.preflight.checks import (
    gpu,
    gpu_health,
    host,
    kernel_log,
    network,
    nic_health,
    ports,
    software,
    storage,
    torch_devices,
)
from primus.preflight.findings.finding import CheckFinding, Status, find_worst_status
from primus.preflight.findings.node import NodeExpectations, PreflightNode
from primus.preflight.findings.thresholds import Thresholds

GIB = 1 << 30
MI300X = profiles.find_profile("mi300x")


SEVEN_PARTITIONS = tuple(Partition(index=i) for i in range(7))


def link(speed_gts: float, width: int, max_speed_gts: float = 32.0) -> PcieLink:
    return PcieLink(speed_gts=speed_gts, width=width, max_speed_gts=max_speed_gts, max_width=16)


def card(index: int, **changes: Any) -> Device:
    """A healthy MI300X."""
    fields: dict[str, Any] = {
        "index": index,
        "vendor": "amd",
        "model": "MI300X",
        "memory_bytes": MI300X.memory_bytes,
        "partitions": (Partition(index=index),),
        "partition_mode": "SPX",
        "memory_mode": "NPS1",
        "hive": "a",
        "numa_node": index // 2,
        "pcie": link(32.0, 16),
    }
    return Device(**(fields | changes))


def port(**changes: Any) -> RdmaPort:
    """A healthy 400G RoCE port."""
    fields: dict[str, Any] = {
        "state": "ACTIVE",
        "physical_state": "LinkUp",
        "rate_gbps": 400.0,
        "link_layer": "Ethernet",
        "gids": (Gid(1, "fe80::1", "RoCE v2"),),
    }
    return RdmaPort(**(fields | changes))


def nic(name: str, *ports: RdmaPort, **changes: Any) -> RdmaDevice:
    return RdmaDevice(name=name, ports=ports or (port(),), **({"numa_node": 0, "firmware": "28.39"} | changes))


def rails(number: int, first: int = 0, *, is_off: bool = False, function: int = 0) -> tuple[RdmaDevice, ...]:
    """Adapters of one kind, each in a slot of its own."""
    state = port(state="DOWN", physical_state="Disabled") if is_off else port()
    return tuple(
        nic(f"mlx5_{index}{function or ''}", state, kind="mellanox", bdf=f"0000:{index + 16:02x}:00.{function}")
        for index in range(first, first + number)
    )


CARDS = tuple(card(index) for index in range(4))
LINKS = tuple(Link(kind="xgmi", first=a, second=b) for a in range(4) for b in range(a))
NICS = (nic("mlx5_0"), nic("mlx5_1", numa_node=1))
GPUS = MachineFacts(devices=CARDS, links=LINKS, rdma=NICS)


def node(facts: MachineFacts | None = None, root: Path = Path("/nowhere"), **fields: Any) -> PreflightNode:
    return PreflightNode(facts=facts or MachineFacts(), tree=FileTree(root), **fields)


def with_card(**changes: Any) -> PreflightNode:
    """The four cards, of which GPU 2 differs."""
    return node(structs.replace(GPUS, devices=(*CARDS[:2], card(2, **changes), CARDS[3])))


def vitals(**changes: Any) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    """The check of what tools say, with values that are good but for `changes`."""
    good: dict[str, Any] = {
        "temperature_c": 60.0,
        "power_cap_w": 750.0,
        "memory_used_bytes": 300 << 20,
        "activity_percent": 0.0,
        "ecc_correctable": 3,
        "ecc_uncorrectable": 0,
        "bad_pages": 0,
        "pending_pages": 0,
        "throttle": (),
        "pcie_replays": 0,
        "processes": (),
    }
    calls = changes.pop("calls", (ToolCall(tool="amd-smi metric", seconds=0.4),))
    devices = (DeviceHealth(index=0, **(good | changes)), DeviceHealth(index=1, **good))
    return lambda where: gpu_health.judge_health(where, Health(devices=devices, calls=calls))


REPAIRED = vitals(
    remapping=RowRemapping(
        corrected=3, uncorrected=2, is_pending=False, has_failed=False, banks={"max": 600, "partial": 1, "low": 0}
    )
)
"""A card whose rows were replaced, which is a repair."""


def log(text: str) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    return lambda _: kernel_log.find_signatures(text.splitlines(), 12)


def counters(after: int) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    return lambda _: nic_health.find_grown_counters(
        {"mlx5_0 port 1": {"symbol_error": 5}}, {"mlx5_0 port 1": {"symbol_error": after}}
    )


def pauses(*, is_loaded: bool) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    before, after = (
        nic_health.parse_statistics(f"NIC statistics:\n     rx_prio3_pause: {n}\n     tx_bytes: {n}") for n in (1, 2)
    )
    return lambda _: nic_health.find_grown_counters({"eth0": before}, {"eth0": after}, is_loaded=is_loaded)


def nic_says(text: str) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    return lambda _: iter([nic_health.judge_self_test("eth0", text, "")])


def torch_sees(count: int, *apart: tuple[int, int]) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    return lambda where: iter([torch_devices.judge_peers(where, torch_devices.TorchDeviceView(count, apart))])


def smart(text: str) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    return lambda _: iter([host.judge_drive("nvme0", text, Thresholds())])


def acs(text: str) -> Callable[[PreflightNode], Iterator[CheckFinding]]:
    return lambda _: iter([host.judge_acs(host.find_redirecting_bridges(text))])


Check = Callable[[PreflightNode], Iterator[CheckFinding]]
BROKEN = (ToolCall(tool="amd-smi", seconds=0.1, problem="its output cannot be understood"),)
GOOD_LIMITS = Limits(memlock_bytes=None, shm_bytes=64 * GIB)
SMALL_LIMITS = Limits(memlock_bytes=8 << 20, shm_bytes=64 << 20)
BOOT = "BOOT_IMAGE=/vmlinuz pci=realloc=off iommu=pt"
ETH0, ETH1 = Interface(name="eth0", state="up"), Interface(name="eth1", state="down")
SEVERAL = ClusterLayout(nproc=8, nnodes=2, node_rank=1, master_addr="203.0.113.7", master_port=1234)

CASES: list[tuple[str, Status, Check, PreflightNode, PreflightNode]] = [
    # name, status of the bad node, check, good node, bad node
    ("host.memory", "warn", host.check_memory, node(MachineFacts(memory=Memory(total_bytes=100, available_bytes=50))),
     node(MachineFacts(memory=Memory(total_bytes=100, available_bytes=5)))),
    ("host.memory", "unknown", host.check_memory,
     node(MachineFacts(memory=Memory(total_bytes=100, available_bytes=50))), node()),
    ("host.memlock", "fail", host.check_limits, node(MachineFacts(limits=GOOD_LIMITS, rdma=NICS)),
     node(MachineFacts(limits=SMALL_LIMITS, rdma=NICS))),
    ("host.memlock", "info", host.check_limits, node(MachineFacts(limits=GOOD_LIMITS)),
     node(MachineFacts(limits=SMALL_LIMITS))),
    ("host.shm", "fail", host.check_limits, node(structs.replace(GPUS, limits=GOOD_LIMITS)),
     node(structs.replace(GPUS, limits=SMALL_LIMITS))),
    ("host.shm", "warn", host.check_limits, node(MachineFacts(limits=GOOD_LIMITS)),
     node(MachineFacts(limits=SMALL_LIMITS))),
    ("host.boot_arguments", "warn", host.check_boot_arguments,
     node(structs.replace(GPUS, software=Software(boot_arguments=BOOT))),
     node(structs.replace(GPUS, software=Software(boot_arguments="quiet")))),
    ("host.governor", "warn", host.check_governors, node(MachineFacts(cpu=Cpu(governors={"performance": 8}))),
     node(MachineFacts(cpu=Cpu(governors={"performance": 7, "powersave": 1})))),
    ("gpu.count", "fail", gpu.check_count, node(GPUS, expected=NodeExpectations(gpus=4)),
     node(GPUS, expected=NodeExpectations(gpus=8))),
    ("gpu.count", "fail", gpu.check_count, node(), node(expected=NodeExpectations(gpus=8))),
    ("gpu.count", "fail", gpu.check_count, node(GPUS, expected=NodeExpectations(gpus=4)),
     node(MachineFacts(devices=(card(0, partitions=()),)))),
    ("gpu.count", "fail", gpu.check_count,
     node(structs.replace(GPUS, devices=(*CARDS, *(card(i) for i in range(4, 8))))),
     node(structs.replace(GPUS, devices=(*CARDS, *(card(i) for i in range(4, 7)))))),
    ("gpu.count", "warn", gpu.check_count, node(structs.replace(GPUS, devices=CARDS[:1])), node(GPUS)),
    ("gpu.count", "warn", gpu.check_count,
     node(MachineFacts(devices=tuple(card(i, model="GB200") for i in range(4)))),
     node(MachineFacts(devices=tuple(card(i, model="H100") for i in range(2))))),
    ("gpu.driver", "fail", gpu.check_undriven, node(GPUS), with_card(partitions=())),
    ("gpu.driver", "warn", gpu.check_undriven, node(GPUS),
     node(structs.replace(with_card(partitions=()).facts, container="docker"))),
    ("gpu.model", "fail", gpu.check_model, node(GPUS), with_card(model="MI308X")),
    ("gpu.profile", "unknown", gpu.check_model, node(GPUS), with_card(model=None, name="Aldebaran")),
    ("gpu.memory", "fail", gpu.check_memory, node(GPUS), with_card(memory_bytes=128 * GIB)),
    ("gpu.partition_mode", "fail", gpu.check_partitions, node(GPUS), with_card(partition_mode="DPX")),
    ("gpu.partitions", "fail", gpu.check_partitions, node(GPUS),
     node(MachineFacts(devices=(card(0, partition_mode="CPX", partitions=SEVEN_PARTITIONS),)))),
    ("gpu.pcie_link", "fail", gpu.check_pcie_link, node(GPUS), with_card(pcie=link(16.0, 16))),
    ("gpu.pcie_link", "fail", gpu.check_pcie_link, node(GPUS), with_card(pcie=link(32.0, 8))),
    ("gpu.pcie_link", "warn", gpu.check_pcie_link, node(GPUS), with_card(pcie=link(16.0, 16, 16.0))),
    ("gpu.link_width", "fail", gpu.check_links, node(GPUS),
     node(structs.replace(GPUS, links=tuple(structs.replace(k, num_links=1 + bool(i)) for i, k in enumerate(LINKS))))),
    ("network.pcie_link", "fail", ports.check_pcie_link, node(GPUS),
     node(MachineFacts(rdma=(nic("mlx5_0", pcie=link(32.0, 8)),)))),
    # These links carry the rate, but not what their ports support.
    ("network.pcie_link", "fail", ports.check_pcie_link, node(GPUS),
     node(MachineFacts(rdma=(nic("mlx5_0", port(rate_gbps=100.0), pcie=link(32.0, 8)),)))),
    ("network.pcie_link", "fail", ports.check_pcie_link, node(GPUS),
     node(MachineFacts(rdma=(nic("mlx5_0", port(rate_gbps=100.0), pcie=link(16.0, 16)),)))),
    ("network.pcie_link", "warn", ports.check_pcie_link,
     node(MachineFacts(rdma=(nic("mlx5_0", pcie=link(32.0, 16)),))),
     node(MachineFacts(rdma=(nic("mlx5_0", pcie=link(16.0, 16, 16.0)),)))),
    ("gpu.links", "fail", gpu.check_links, node(GPUS), node(structs.replace(GPUS, links=LINKS[1:]))),
    ("gpu.links", "unknown", gpu.check_links, node(GPUS), node(structs.replace(GPUS, links=()))),
    ("gpu.hives", "fail", gpu.check_links, node(GPUS), with_card(hive="b")),
    ("gpu.nic_affinity", "warn", gpu.check_affinity, node(GPUS), node(structs.replace(GPUS, rdma=NICS[:1]))),
    ("gpu.reading", "warn", gpu.check_readings, node(GPUS),
     node(structs.replace(GPUS, problems=(MachineProblem("GPU 6", "partition .7 is missing"),)))),
    ("network.rdma_port", "fail", ports.check_rdma, node(GPUS),
     node(MachineFacts(rdma=(*NICS, nic("mlx5_2", port(state="DOWN", physical_state="Polling")))))),
    ("network.rdma_disabled", "warn", ports.check_rdma,
     node(structs.replace(GPUS, rdma=(*rails(4), *rails(2, first=4, is_off=True)))),
     node(structs.replace(GPUS, rdma=(*rails(3), *rails(1, first=3, is_off=True))))),
    ("network.rdma_disabled", "warn", ports.check_rdma,
     node(structs.replace(GPUS, rdma=(*rails(2), *rails(2, is_off=True, function=1)))),
     node(structs.replace(GPUS, rdma=(*rails(3), *rails(1, first=3, is_off=True))))),
    ("network.rdma_rate", "fail", ports.check_rdma, node(GPUS),
     node(MachineFacts(rdma=(*NICS, nic("mlx5_2", port(rate_gbps=200.0)))))),
    ("network.gid", "fail", ports.check_rdma, node(GPUS),
     node(MachineFacts(rdma=(nic("mlx5_2", port(gids=(Gid(0, "fe80::1", "RoCE v1"),))),)))),
    ("network.rdma_count", "fail", ports.check_rdma, node(GPUS, expected=NodeExpectations(rdma_nics=2)),
     node(GPUS, expected=NodeExpectations(rdma_nics=8))),
    ("network.rdma_count", "fail", ports.check_rdma, node(GPUS), node(environ={"PRIMUS_EXPECT_IB": "1"})),
    ("network.rdma_count", "fail", ports.check_rdma, node(GPUS),
     node(GPUS, expected=NodeExpectations(rdma_nic_allowlist="bnxt"))),
    ("network.rdma_port", "fail", ports.check_rdma, node(GPUS),
     node(MachineFacts(rdma=(*NICS, nic("mlx5_2", port(state="DOWN", physical_state="Polling", rate_gbps=10.0)))))),
    ("network.interface", "fail", network.check_expressions,
     node(MachineFacts(interfaces=(ETH0, ETH1)), environ={"NCCL_SOCKET_IFNAME": "^lo,docker"}),
     node(MachineFacts(interfaces=(ETH0, ETH1)), environ={"NCCL_SOCKET_IFNAME": "=eth1"})),
    ("network.interface", "fail", network.check_expressions,
     node(MachineFacts(interfaces=(ETH0,)), environ={"GLOO_SOCKET_IFNAME": "eth0"}),
     node(MachineFacts(interfaces=(ETH0,)), environ={"GLOO_SOCKET_IFNAME": "10.1.2.3"})),
    ("network.hca", "fail", network.check_expressions, node(GPUS, environ={"NCCL_IB_HCA": "=mlx5_0:1"}),
     node(GPUS, environ={"NCCL_IB_HCA": "=mlx5_0:2"})),
    ("network.route", "warn", network.check_route, node(MachineFacts(master_interface="eth0"), layout=SEVERAL),
     node(MachineFacts(master_interface="eth0"), layout=SEVERAL, environ={"NCCL_SOCKET_IFNAME": "eth1"})),
    ("network.route", "unknown", network.check_route, node(MachineFacts(master_interface="eth0"), layout=SEVERAL),
     node(layout=SEVERAL)),
    ("network.interfaces", "fail", network.check_interfaces, node(MachineFacts(interfaces=(ETH0,)), layout=SEVERAL),
     node(MachineFacts(interfaces=(ETH1,)), layout=SEVERAL)),
    ("network.firmware", "warn", ports.check_firmware, node(GPUS),
     node(MachineFacts(rdma=(NICS[0], nic("mlx5_1", firmware="28.40"))))),
    ("network.environment", "warn", network.check_environment, node(environ={"NCCL_IB_DISABLE": "1"}),
     node(environ={"NCCL_IB_DISABLE": "1", "PRIMUS_EXPECT_IB": "1"})),
    ("network.environment", "warn", network.check_environment, node(GPUS, environ={"NCCL_IB_GID_INDEX": "1"}),
     node(GPUS, environ={"NCCL_IB_GID_INDEX": "3"})),
    ("software.tool", "fail", software.check_tools, node(expected=NodeExpectations(tools=(sys.executable,))),
     node(expected=NodeExpectations(tools=("no-such-program",)))),
]  # fmt: skip

READINGS: list[tuple[str, Status, Check, Check, PreflightNode]] = [
    # name, status of the bad readings, check of good ones, check of bad ones, node
    ("host.pcie_acs", "warn", acs("00:01.0 PCI bridge\n\tACSCtl:\tSrcValid-"),
     acs("00:01.0 PCI bridge\n\tACSCtl:\tSrcValid+ TransBlk-"), node()),
    ("host.drives", "fail", smart('{"critical_warning": 0, "media_errors": 0}'),
     smart('{"critical_warning": 4, "media_errors": 0}'), node()),
    ("host.drives", "warn", smart('{"num_err_log_entries": 100}'), smart('{"num_err_log_entries": 101}'), node()),
    ("host.drives", "unknown", smart("{}"), smart("nvme: N/A"), node()),
    ("gpu.tool", "fail", vitals(), vitals(calls=(ToolCall(tool="amd-smi", seconds=30.0),)), node(GPUS)),
    ("gpu.tool", "warn", vitals(), vitals(calls=(ToolCall(tool="amd-smi", seconds=2.0),)), node(GPUS)),
    ("gpu.tool", "warn", vitals(), vitals(calls=BROKEN), node(GPUS)),
    ("gpu.tool", "unknown", vitals(), vitals(calls=BROKEN, ecc_uncorrectable=None), node(GPUS)),
    ("gpu.tool", "warn", vitals(), vitals(calls=()), node(GPUS, Path("/"))),
    ("gpu.tool", "unknown", vitals(), vitals(calls=(), processes=None), node(GPUS, Path("/"))),
    ("gpu.memory_used", "unknown", vitals(), vitals(memory_used_bytes=None, sources={"power_w": "amd-smi"}),
     node(GPUS, Path("/"))),
    ("gpu.peer_access", "fail", torch_sees(4), torch_sees(4, (0, 2)), node(GPUS)),
    ("gpu.peer_access", "info", torch_sees(4), torch_sees(2, (0, 1)), with_card(hive="b")),
    ("gpu.processes", "fail", vitals(processes=(Process(pid=7, name="gpuagent"),)),
     vitals(processes=(Process(pid=7, name="python", memory_bytes=0),)), node(GPUS)),
    ("gpu.memory_used", "fail", vitals(), vitals(memory_used_bytes=3 * GIB), node(GPUS)),
    ("gpu.activity", "warn", vitals(), vitals(activity_percent=90.0), node(GPUS)),
    ("gpu.ecc_uncorrectable", "fail", vitals(), vitals(ecc_uncorrectable=1), node(GPUS)),
    ("gpu.ecc_correctable", "warn", vitals(), vitals(ecc_correctable=10_000), node(GPUS)),
    ("gpu.ecc_uncorrectable", "warn", vitals(), vitals(ecc_uncorrectable=1, recovery_action="None"), node(GPUS)),
    ("gpu.bad_pages", "warn", vitals(), vitals(bad_pages=1), node(GPUS)),
    ("gpu.bad_pages", "warn", vitals(), vitals(bad_pages=255, bad_page_threshold=256), node(GPUS)),
    ("gpu.bad_pages", "fail", vitals(), vitals(bad_pages=256, bad_page_threshold=256), node(GPUS)),
    ("gpu.bad_pages", "fail", vitals(), vitals(bad_pages=9, has_exceeded_bad_pages=True), node(GPUS)),
    ("gpu.bad_pages", "fail", vitals(bad_pages=None, has_exceeded_bad_pages=False),
     vitals(bad_pages=None, has_exceeded_bad_pages=True), node(GPUS)),
    ("gpu.pending_pages", "warn", vitals(), vitals(pending_pages=1), node(GPUS)),
    ("gpu.unreservable_pages", "fail", vitals(), vitals(unreservable_pages=1), node(GPUS)),
    ("gpu.remap_failure", "fail", REPAIRED, vitals(remapping=RowRemapping(has_failed=True)), node(GPUS)),
    ("gpu.remap_pending", "warn", REPAIRED, vitals(remapping=RowRemapping(is_pending=True)), node(GPUS)),
    ("gpu.remap_reserve", "warn", REPAIRED, vitals(remapping=RowRemapping(banks={"low": 1})), node(GPUS)),
    ("gpu.remap_reserve", "warn", REPAIRED, vitals(remapping=RowRemapping(banks={"none": 1})), node(GPUS)),
    ("gpu.sram_errors", "fail", vitals(), vitals(has_exceeded_sram_errors=True), node(GPUS)),
    ("gpu.recovery_action", "fail", vitals(recovery_action="None"), vitals(recovery_action="Reset"), node(GPUS)),
    ("gpu.pcie_replays", "warn", vitals(), vitals(pcie_replays=1001), node(GPUS)),
    ("gpu.temperature", "fail", vitals(), vitals(temperature_c=100.0), node(GPUS)),
    ("gpu.throttle", "fail", vitals(throttle=("ppt",)), vitals(throttle=("socket_thermal",)), node(GPUS)),
    ("gpu.power_cap", "fail", vitals(), vitals(power_cap_w=550.0), node(GPUS)),
    ("network.errors", "warn", counters(5), counters(6), node()),
    ("network.errors", "warn", pauses(is_loaded=True), pauses(is_loaded=False), node()),
    ("network.self_test", "warn", nic_says("The test result is PASS"),
     nic_says("The test result is FAIL\nThe test extra info:\nLink Test \t 1"), node()),
]  # fmt: skip


ALL_CASES = [(name, status, check, fit, check, unfit) for name, status, check, fit, unfit in CASES] + [
    (name, status, good, where, bad, where) for name, status, good, bad, where in READINGS
]


@pytest.mark.parametrize(
    ("name", "status", "good", "fit", "bad", "unfit"), ALL_CASES, ids=[f"{c[0]}-{c[1]}" for c in ALL_CASES]
)
def test_a_check_tells_a_good_node_from_a_bad_one(
    name: str, status: Status, good: Check, fit: PreflightNode, bad: Check, unfit: PreflightNode
) -> None:
    assert find_worst_status(finding for finding in good(fit) if finding.check == name) in ("ok", "info")
    found = [finding for finding in bad(unfit) if finding.check == name]
    assert find_worst_status(found) == status
    for finding in found:
        assert finding.measured
        assert finding.advice or finding.status in ("ok", "info")


LOG = {
    "amdgpu 0000:05:00.0: amdgpu: poison is created": "fail",
    "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.": "fail",
    "NVRM: Xid (PCI:0000:05:00): 31, pid=7, MMU Fault": "warn",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s!\n" * 3: "warn",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s!\n" * 2: "ok",
    "amdgpu 0000:05:00.0: ring sdma0 timeout": "warn",
    "amdgpu 0000:05:00.0: reset init context\n" * 9: "ok",
    "pcieport 0000:00:01.0: AER: Corrected error received, severity=Corrected": "ok",
    "EXT4-fs (vda): mounted filesystem": "ok",
    "igc 0000:03:00.0 enp3s0: NIC Link is Down\nigc 0000:03:00.0 enp3s0: NIC Link is Up 2500 Mbps": "ok",
    "igc 0000:03:00.0 enp3s0: NIC Link is Down\nigc 0000:04:00.0 enp4s0: NIC Link is Up 2500 Mbps": "warn",
    "ixgbe 0000:3b:00.0 eth1: NIC Link is Down\nixgbe 0000:3b:00.0 eth1: NIC Link is Up 10 Gbps\n" * 4: "ok",
    "ixgbe 0000:3b:00.0 eth1: NIC Link is Down\nixgbe 0000:3b:00.0 eth1: NIC Link is Up 10 Gbps\n" * 5: "warn",
    "EDAC MC1: 1 CE memory read error on CPU_SrcID#1_Ha#0_Chan#1_DIMM#1\n" * 9: "ok",
    "EDAC MC1: 0 CE memory read error on CPU_SrcID#1_Ha#0_Chan#1_DIMM#1\n" * 10: "warn",
    "EDAC MC1: 10 CE memory read error on CPU_SrcID#1_Ha#0_Chan#1_DIMM#1": "warn",
    "blk_update_request: I/O error, dev loop7, sector 0 op 0x1:(WRITE) flags 0x800 phys_seg 0 prio class 0": "ok",
}


@pytest.mark.parametrize(("text", "status"), LOG.items(), ids=[text[:30].strip() for text in LOG])
def test_the_kernel_log_is_judged_by_what_the_lines_mean(text: str, status: Status) -> None:
    assert find_worst_status(kernel_log.find_signatures(text.splitlines(), 12)) == status


GENUINE = [line.split("\t") for line in (Path(__file__).parent / "kernel_log.tsv").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("status", "source", "text"), GENUINE, ids=[text[:60] for _, _, text in GENUINE])
def test_a_genuine_line_of_the_kernel_log_has_its_status(status: Status, source: str, text: str) -> None:
    assert source
    found = list(kernel_log.find_signatures([text], 12))
    assert find_worst_status(found) == status, found


def test_an_error_of_a_gpu_counts_until_the_driver_says_that_it_has_recovered() -> None:
    failed = [f"NVRM: Xid (PCI:0000:{bus}:00): 95, pid=7, Uncontained: LTC TAG (0x2,0x0)" for bus in ("02", "03")]
    recovered = (
        "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    )
    (finding,) = kernel_log.find_signatures([*failed, recovered], 12)
    assert finding.status == "fail" and "0000:03:00" in finding.measured and finding.measured.startswith("1 times")
    assert find_worst_status(kernel_log.find_signatures([recovered, *failed[:1]], 12)) == "fail"


def test_lines_of_the_kernel_log_from_before_the_window_do_not_count() -> None:
    lines = ["[  100.0] kernel panic", "[ 9000.0] fine", "[ 9001.0] kernel panic"]
    assert kernel_log.select_recent_lines(lines, 5000.0) == lines[1:]


RECORDED = {
    "mi210-two-hives": set(),
    "mi300x-8": set(),
    "mi308x-cpx": set(),
    "mi355x-8": set(),
    "mi300x-cpx": {"gpu.partitions"},
}
"""Checks that each recorded machine fails: of one the driver lost a partition."""


@pytest.mark.parametrize(("name", "failing"), RECORDED.items())
def test_recorded_machines_fail_for_what_is_wrong_with_them(tmp_path: Path, name: str, failing: set[str]) -> None:
    folder = tree.HERE / name
    root = folder if folder.is_dir() else tree.grow(name, tmp_path)
    recorded = node(probe(root), root)
    found = [finding for some in (*gpu.CHECKS, *ports.CHECKS) for finding in some(recorded)]
    assert {finding.check for finding in found if finding.status in ("fail", "unknown")} == failing


def remove_gpu_from_driver(root: Path) -> None:
    shutil.rmtree(root / "sys/class/kfd/kfd/topology/nodes/9")


def remove_kfd(root: Path) -> None:
    (root / "dev").mkdir()


BROKEN = [
    (remove_gpu_from_driver, "gpu.driver", "no driver shows GPU 7 (0000:e5:00.0)"),
    (remove_kfd, "gpu.access", "/dev/kfd does not exist"),
]


@pytest.mark.parametrize(("damage", "check", "measured"), BROKEN, ids=[each[1] for each in BROKEN])
def test_one_fault_of_a_whole_machine_is_one_finding(
    tmp_path: Path, damage: Callable[[Path], None], check: str, measured: str
) -> None:
    root = tmp_path / "machine"
    shutil.copytree(tree.HERE / "mi300x-8", root, symlinks=True)
    damage(root)
    words = ["--json", "direct", "--", "preflight", "--gpu"]
    done = cli.run(*words, cwd=tmp_path, PRIMUS_MACHINE_ROOT=str(root), CUDA_VISIBLE_DEVICES=None)
    findings = json.loads(done.stdout)["report"]["nodes"][0]["findings"]
    failing = {each["check"]: each["measured"] for each in findings if each["status"] == "fail"}
    assert list(failing) == [check] and measured in failing[check]
    assert done.returncode == 3


def bind_drivers(root: Path, driver: str, *, but: str = "") -> None:
    for folder in (root / "sys/bus/pci/devices").iterdir():
        if folder.name != but and (folder / "class").is_file():
            (folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


GONE = b"\xff" * 64
PRESENT = b"\x02\x10\xa1\x74" + bytes(60)


@pytest.mark.parametrize("container", [None, "docker"])
@pytest.mark.parametrize(
    ("bound", "config", "status", "said"),
    [
        (False, PRESENT, "fail", "GPU 7 (0000:e5:00.0: no driver is bound to it)"),
        (True, GONE, "fail", "GPU 7 (0000:e5:00.0: it does not answer on the bus)"),
        (True, PRESENT, None, "GPU 7 (0000:e5:00.0)"),
    ],
    ids=["amdgpu gave up", "off the bus", "not assigned"],
)
def test_a_gpu_that_failed_on_the_bus_is_a_failure_in_a_container_too(
    tmp_path: Path, container: str | None, bound: bool, config: bytes, status: Status | None, said: str
) -> None:
    root = tmp_path / "machine"
    shutil.copytree(tree.HERE / "mi300x-8", root, symlinks=True)
    remove_gpu_from_driver(root)
    bind_drivers(root, "amdgpu", but="" if bound else "0000:e5:00.0")
    (root / "sys/bus/pci/devices/0000:e5:00.0/config").write_bytes(config)
    facts = structs.replace(probe(root), container=container)
    (found,) = gpu.check_undriven(node(facts, root))
    assert found.status == (status or ("warn" if container else "fail"))
    assert found.measured == f"no driver shows {said}"


def test_a_gpu_that_left_the_bus_fails_although_its_driver_still_lists_it(tmp_path: Path) -> None:
    root = tree.grow("h100-8", tmp_path)
    assert not list(gpu.check_undriven(node(probe(root), root)))
    (root / "sys/bus/pci/devices/0000:9d:00.0/config").write_bytes(GONE)
    (found,) = gpu.check_undriven(node(probe(root), root))
    assert (found.status, found.value) == ("fail", 1)
    assert "0000:9d:00.0: it does not answer on the bus" in found.measured


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    def grow(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        return tmp_path

    return grow


KERNEL_SETTINGS = [
    ("host.numa_balancing", "proc/sys/kernel/numa_balancing", "0", "1", "warn"),
    ("host.hugepages", "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never", "always madvise [never]",
     "warn"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "good", "bad", "status"), KERNEL_SETTINGS)
def test_kernel_settings_are_read_from_their_files(
    kernel: Callable[[dict[str, str]], Path], name: str, file: str, good: str, bad: str, status: Status
) -> None:
    for text, expected in ((good, "ok"), (bad, status)):
        grown = kernel({file: text})
        found = [finding for finding in host.check_kernel_settings(node(GPUS, grown)) if finding.check == name]
        assert [finding.status for finding in found] == [expected]


def test_the_one_processor_that_saves_power_is_named(kernel: Callable[[dict[str, str]], Path]) -> None:
    grown = kernel(
        {f"sys/devices/system/cpu/cpu{i}/cpufreq/scaling_governor": "performance" for i in range(12)}
        | {"sys/devices/system/cpu/cpu10/cpufreq/scaling_governor": "powersave"}
    )
    (finding,) = host.check_governors(node(MachineFacts(cpu=Cpu(governors={"performance": 11, "powersave": 1})), grown))
    assert (finding.status, finding.measured) == ("warn", "powersave: CPU 10")


def test_a_clock_daemon_is_found_among_the_processes(kernel: Callable[[dict[str, str]], Path]) -> None:
    grown = kernel({"proc/12/comm": "bash"})
    assert [finding.status for finding in host.check_clock(node(root=grown, layout=SEVERAL))] == ["warn"]
    kernel({"proc/13/comm": "chronyd"})
    assert [finding.measured for finding in host.check_clock(node(root=grown, layout=SEVERAL))] == ["chronyd"]


def test_management_ports_are_left_out_and_named() -> None:
    front = nic("bnxt_re0", port(rate_gbps=100.0), kind="broadcom")
    facts = MachineFacts(rdma=(*NICS, nic("mlx5_2", port(rate_gbps=25.0)), nic("mlx5_bond_0"), front))
    found = {finding.check: finding for finding in ports.check_rdma(node(facts))}
    assert found["network.rdma_excluded"].measured == (
        "mlx5_2 port 1 (25 of 400 Gb/s), mlx5_bond_0 port 1 (in a bond), bnxt_re0 port 1 (100 of 400 Gb/s)"
    )
    assert found["network.rdma_count"].value == 2


TORCH = "__version__ = '2.9.1'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"


def nvidia(driver: str | None, toolkit: str | None = None) -> MachineFacts:
    return MachineFacts(
        devices=(Device(index=0, vendor="nvidia"),), software=Software(nvidia_driver=driver, cuda=toolkit)
    )


@pytest.mark.parametrize(
    ("facts", "cuda", "hip", "expected"),
    [
        (GPUS, "None", "'6.4'", {"software.torch": "ok"}),
        (GPUS, "'12.8'", "None", {"software.torch": "fail"}),
        (GPUS, "None", "None", {"software.torch": "fail"}),
        (nvidia("550.54.15"), "'12.8'", "None", {"software.torch": "ok", "software.cuda_driver": "ok"}),
        (nvidia("550.54.15"), "'13.0'", "None", {"software.torch": "ok", "software.cuda_driver": "fail"}),
        (nvidia("535.161.08", "13.0"), "'13.0'", "None", {"software.torch": "ok", "software.cuda_driver": "fail"}),
        (nvidia("580.65.06", "11.8"), "'13.0'", "None", {"software.torch": "ok", "software.cuda_driver": "ok"}),
        (nvidia("470.82.01"), "'11.8'", "None", {"software.torch": "ok", "software.cuda_driver": "ok"}),
        (nvidia(None, "12.4"), "'13.0'", "None", {"software.torch": "ok", "software.cuda_driver": "info"}),
        (MachineFacts(), "None", "None", {"software.torch": "info"}),
    ],
)
def test_pytorch_must_be_built_for_the_devices(
    tmp_path: Path, facts: MachineFacts, cuda: str, hip: str, expected: dict[str, str]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(TORCH.format(cuda=cuda, hip=hip))
    found = software.find_torch([str(tmp_path / "nowhere"), str(tmp_path)])
    assert {one.check: one.status for one in software.judge_torch(node(facts), found)} == expected


def test_a_package_for_forward_compatibility_lets_an_older_driver_pass_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(TORCH.format(cuda="'13.0'", hip="None"))
    library = tmp_path / "usr/local/cuda-13.0/compat/lib.real/libcuda.so.580.65.06"
    library.parent.mkdir(parents=True)
    library.touch()
    where = node(nvidia("535.161.08"), tmp_path)
    found = software.judge_torch(where, software.find_torch([str(tmp_path)]))
    assert {one.check: one.status for one in found}["software.cuda_driver"] == "warn"


def test_a_folder_that_cannot_be_written_fails_and_nothing_is_left_in_one_that_can(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folders = ((str(tmp_path / "new" / "deep"), "workspace"), ("/proc/1", "report"), ("/proc/2", "data"))
    found = list(storage.check_folders(node(expected=NodeExpectations(folders=folders))))
    by_check = {(finding.check, finding.subject.split()[0]): finding.status for finding in found}
    assert by_check["storage.writable", "workspace"] == "ok"
    assert by_check["storage.writable", "report"] == "fail"
    assert by_check["storage.writable", "data"] == "warn"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_network_file_system_is_named_by_the_longest_mount_point(tmp_path: Path) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    assert storage.find_file_system(tmp_path, mounts) == "nfs4"
    assert storage.find_file_system(Path("/"), mounts) == "ext4"


def test_a_program_that_hangs_costs_its_limit_and_leaves_no_child(tmp_path: Path) -> None:
    stub = tmp_path / "slow-smi"
    pid_file = tmp_path / "pid"
    stub.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {pid_file}\nwait\n")
    stub.chmod(0o755)
    where = node(expected=NodeExpectations(tools=("slow-smi",)), environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    began = time.monotonic()
    answer = where.run_program(["slow-smi"], 0.5)
    assert answer.state == "slow"
    assert time.monotonic() - began < 5
    child = int(pid_file.read_text())
    assert tools.is_gone(child), "the stub's own child is still there"


class AsLive(FileTree):
    """A tree that passes for the running machine, so that programs are asked as well."""

    is_live = True


def live(tmp_path: Path, facts: MachineFacts, **programs: str) -> PreflightNode:
    """This machine with other facts, and a PATH of programs whose text is a shell script."""
    for name, script in programs.items():
        tools.tool(tmp_path / "bin", name.replace("_", "-"), script)
    return node(facts, Path("/"), environ={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, is_root=True)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("""echo '{"count": 4}'""", "ok"),
        ("""echo a warning; echo '{"count": 3}'""", "fail"),
        ("echo 'RuntimeError: no HIP GPUs' >&2; exit 1", "fail"),
        ("echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "info"),
    ],
)
def test_pytorch_is_asked_in_a_process_of_its_own(tmp_path: Path, script: str, status: Status) -> None:
    found = {
        one.check: one.status
        for one in torch_devices.check_torch_devices(live(tmp_path, GPUS, python=script), "python")
    }
    assert found["gpu.torch_count"] == status
    assert found.get("gpu.peer_access", "ok") in ("ok", "info")


@pytest.mark.parametrize(
    "said",
    ["", "[", "{}", '{"gpu_data": "N/A"}', '[{"gpu": "N/A", "temperature": {"hotspot": "N/A"}}]', "Segmentation fault"],
)
def test_a_tool_that_prints_rubbish_never_makes_a_node_fit(tmp_path: Path, said: str) -> None:
    (tmp_path / "said").write_text(said)
    where = live(tmp_path, GPUS, amd_smi=f"cat {tmp_path}/said")
    found = {one.check: one.status for one in gpu_health.judge_health(where, machine_health(GPUS, where.environ, 2.0))}
    assert "unknown" in found.values(), found
    assert "fail" not in found.values(), found


def test_rows_that_were_replaced_are_no_fault() -> None:
    assert find_worst_status(REPAIRED(node(GPUS))) in ("ok", "info")


def test_a_device_of_which_an_answering_tool_says_nothing_is_never_ok(tmp_path: Path) -> None:
    where = live(tmp_path, GPUS)
    told = DeviceHealth(index=0, memory_used_bytes=0, ecc_uncorrectable=0, processes=(), sources={"processes": "x"})
    read = Health(devices=(told, DeviceHealth(index=1)), calls=(ToolCall(tool="nvidia-smi --query-gpu", seconds=0.1),))
    found = {(one.check, one.subject): one.status for one in gpu_health.judge_health(where, read)}
    assert (found["gpu.memory_used", "GPU 0"], found["gpu.memory_used", "GPU 1"]) == ("ok", "unknown")


def test_a_device_without_memory_of_its_own_is_fit(tmp_path: Path) -> None:
    gb10 = DeviceHealth(index=0, shares_host_memory=True, processes=(), ecc_uncorrectable=0, sources={"processes": "x"})
    read = Health(devices=(gb10,), calls=(ToolCall(tool="nvidia-smi --query-gpu", seconds=0.1),))
    assert find_worst_status(gpu_health.judge_health(live(tmp_path, GPUS), read)) in ("ok", "info")


def test_a_tool_that_hangs_costs_its_limit_once(tmp_path: Path) -> None:
    where = live(tmp_path, GPUS, amd_smi=f"echo $$ >> {tmp_path}/pids; exec sleep 60", python="exit 1")
    began = time.monotonic()
    found = list(gpu_health.check_live(structs.replace(where, limits=Thresholds(smi_limit_s=0.5))))
    assert [one.status for one in found if one.check == "gpu.tool"] == ["fail"], found
    assert time.monotonic() - began < 30  # with an import of PyTorch, which takes seconds on a busy machine
    assert all(tools.is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_drives_are_asked_one_by_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("nvme0", "nvme1", "nvme-fabrics"):
        (root / "sys/class/nvme" / name).mkdir(parents=True)
    asked = """case $2 in /dev/nvme0) echo '{"media_errors": 0}';; *) echo 'no such device' >&2; exit 1;; esac"""
    where = structs.replace(live(tmp_path, MachineFacts(), nvme=asked), tree=AsLive(root))
    assert [(one.subject, one.status) for one in host.check_drives(where)] == [("nvme0", "ok"), ("nvme1", "info")]
    assert [one.status for one in host.check_drives(structs.replace(where, is_root=False))] == ["info"]


@pytest.mark.parametrize(("name", "status"), [("libc.so.6", "ok"), ("libnone.so", "warn")])
def test_a_network_plugin_is_loaded_as_a_worker_will(tmp_path: Path, name: str, status: Status) -> None:
    where = live(tmp_path, GPUS)
    found = software.check_libraries(structs.replace(where, environ={**where.environ, "NCCL_NET_PLUGIN": name}))
    assert {one.check: one.status for one in found}["software.net_plugin"] == status


def test_slingshot_needs_a_plugin_that_loads(tmp_path: Path) -> None:
    where = live(tmp_path, structs.replace(GPUS, rdma=(nic("cxi0", kind="slingshot"),)))
    assert {one.check: one.status for one in software.check_libraries(where)}["software.net_plugin"] == "warn"
    library = ctypes.util.find_library("m")
    source = next(path for folder in ("/lib", "/usr/lib") for path in Path(folder).rglob(str(library)))
    (tmp_path / "librccl-net.so").symlink_to(source)
    there = structs.replace(where, environ={**where.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert {one.check: one.status for one in software.check_libraries(there)}["software.net_plugin"] == "ok"


def test_statistics_of_interfaces_are_read_once_a_tool_is_there(tmp_path: Path) -> None:
    facts = MachineFacts(rdma=(nic("mlx5_0", interface="eth7"),))
    asked = 'echo "NIC statistics:"; echo "     rx_discards_phy: 4"; echo "     rx_bytes: 9"'
    assert nic_health.read_counters(live(tmp_path, facts, ethtool=asked))["eth7"] == {"rx_discards_phy": 4}


def test_no_check_hides_that_it_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: PreflightNode) -> Iterator[CheckFinding]:
        raise ValueError("not a number")
        yield

    monkeypatch.setitem(check.CHECKS, "host", (broken,))
    report = check.run(node(), ("host",))
    assert [(finding.check, finding.status) for finding in report.findings] == [("host.broken", "fail")]


def test_the_limit_of_all_checks_lets_tools_and_pytorch_use_up_theirs() -> None:
    where = node(GPUS)
    assert check.compute_limit_s(where) > where.limits.smi_limit_s + torch_devices.compute_limit_s(where) >= 90
    parts = tuple(Partition(index=index) for index in range(64))
    divided = node(structs.replace(GPUS, devices=(structs.replace(CARDS[0], partitions=parts),)))
    assert torch_devices.compute_limit_s(divided) > torch_devices.compute_limit_s(where)


def test_a_check_that_never_ends_is_left_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def stuck(_: PreflightNode) -> Iterator[CheckFinding]:
        end.wait(30)
        yield from ()

    monkeypatch.setitem(check.CHECKS, "host", (stuck,))
    report = check.run(node(), ("host",), limit_s=0.2)
    end.set()
    assert [(finding.check, finding.status) for finding in report.findings] == [("host.stuck", "fail")]
    assert report.duration_s < 5


def test_a_laptop_without_accelerators_is_fit() -> None:
    laptop = MachineFacts(
        host="laptop.lan",
        memory=Memory(total_bytes=16 * GIB, available_bytes=8 * GIB, swap_bytes=0),
        limits=Limits(memlock_bytes=8 << 20, shm_bytes=8 * GIB),
        interfaces=(ETH0,),
    )
    report = check.run(node(laptop, expected=NodeExpectations(folders=(("/tmp", "workspace"),))))
    assert report.host == "laptop"
    assert [f for f in report.findings if f.status in ("fail", "unknown") and f.check != "storage.free"] == []


def test_the_name_of_the_master_is_known_and_its_port_is_free_where_node_0_listens() -> None:
    def find(**changes: Any) -> dict[str, tuple[Status, str]]:
        layout = structs.replace(SEVERAL, **{"node_rank": 0, "master_addr": "localhost", **changes})
        return {each.check: (each.status, each.measured) for each in network.check_rendezvous(node(layout=layout))}

    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        taken = find(master_port=port)
        assert taken["network.name"][0] == "ok" and taken["network.name"][1] in (
            "localhost is 127.0.0.1", "localhost is ::1",
        )  # fmt: skip
        assert taken["network.port"][0] == "fail"
        assert find(master_port=port, node_rank=1).keys() == {"network.name"}, "node 0 listens"
    assert find(master_port=port)["network.port"][0] == "ok"
    assert find(master_port=None).keys() == {"network.name"}, "one node chooses a free port"
    unknown = find(master_addr="")["network.name"]
    assert unknown == ("fail", " is unknown")


@pytest.mark.parametrize("changes", [{"node_rank": 0}, {"nnodes": 1}, {"master_addr": "localhost"}])
def test_the_route_to_the_master_is_judged_on_the_nodes_that_need_it(changes: dict[str, Any]) -> None:
    def find(layout: ClusterLayout) -> list[Status]:
        where = node(MachineFacts(master_interface="eth0"), layout=layout, environ={"NCCL_SOCKET_IFNAME": "eth1"})
        return [each.status for each in network.check_route(where)]

    assert find(SEVERAL) == ["warn"] and find(structs.replace(SEVERAL, **changes)) == []


@pytest.mark.parametrize("reason", ["sw_power_cap", "ppt", "SW_Power_Cap"])
def test_a_device_at_its_power_limit_is_healthy(reason: str) -> None:
    held = [each for each in vitals(throttle=(reason,))(node(GPUS)) if each.check == "gpu.throttle"]
    assert held and find_worst_status(held) == "ok"


@pytest.mark.parametrize(
    ("name", "status"),
    [("/usr/bin/dcgm-exporter", "ok"), ("rocm-smi-daemon", "ok"), ("rocm-smi-daemo", "fail"), ("dcgm-export", "fail")],
)
def test_a_program_that_only_monitors_is_known_by_its_whole_name(name: str, status: Status) -> None:
    found = [
        each for each in vitals(processes=(Process(pid=7, name=name),))(node(GPUS)) if each.check == "gpu.processes"
    ]
    assert find_worst_status(found) == status
    assert [each.measured for each in found] == [f"{name} (7)" if status == "fail" else "none"]


def test_a_name_that_the_kernel_has_cut_is_known_and_this_process_does_not_count() -> None:
    running = (Process(pid=7, name="rocm-smi-daemon-of-us"[:15]), Process(pid=os.getpid(), name="python3"))
    found = [each for each in vitals(processes=running)(node(GPUS)) if each.check == "gpu.processes"]
    assert find_worst_status(found) == "ok"


def test_a_program_that_the_user_allows_is_known_by_the_name_that_the_kernel_has_cut() -> None:
    allowed = node(GPUS, expected=NodeExpectations(allowed_processes=("our-gpu-monitoring-agent",)))
    for name, status in (("our-gpu-monitor", "ok"), ("our-gpu-monito", "fail")):
        findings = vitals(processes=(Process(pid=7, name=name),))(allowed)
        assert find_worst_status(each for each in findings if each.check == "gpu.processes") == status


STACKS = [
    ({"nvidia-nccl-cu12": "2.29.2"}, None, {}, None, "nvidia-nccl-cu12 2.29.2"),
    ({"nvidia-nccl-cu12": "2.29.3"}, None, {}, None, ""),
    ({"torch": "2.14.0"}, "10.0.1", {}, "gfx950", "torch 2.14.0"),
    ({"torch": "2.14.0"}, "10.0.1", {}, "gfx942", ""),
    ({"torch": "2.14.0"}, "9.2.0", {}, "gfx950", ""),
    ({"torch": "2.6.0+rocm6.2.4"}, "6.2.4", {}, "gfx942", "torch 2.6.0+rocm6.2.4"),
    ({"torch": "2.6.0"}, None, {}, None, ""),
    ({"torch": "2.9.0"}, "7.0", {"PYTORCH_TUNABLEOP_ENABLED": "1"}, "gfx942", "torch 2.9.0"),
    ({"torch": "2.9.0"}, "7.0", {"PYTORCH_TUNABLEOP_ENABLED": "0"}, "gfx942", ""),
    ({"torch": "2.9.0"}, "7.0", {"PYTORCH_TUNABLEOP_ENABLED": "1", "HIPBLASLT_WORKSPACE_SIZE": "9"}, "gfx942", ""),
    ({"primus-turbo": "0.1.1"}, None, {}, None, "primus-turbo 0.1.1"),
]


@pytest.mark.parametrize(("installed", "hip", "environ", "architecture", "expected"), STACKS)
def test_a_version_that_is_known_to_be_slow_or_wrong_is_named(
    installed: dict[str, str],
    hip: str | None,
    environ: dict[str, str],
    architecture: str | None,
    expected: str,
    tmp_path: Path,
) -> None:
    version = tmp_path / "torch" / "version.py"
    version.parent.mkdir()
    version.write_text(f"__version__ = {installed.get('torch', '2.9.0')!r}\nhip = {hip!r}\ncuda = None\n")
    devices = (Device(index=0, vendor="amd", architecture=architecture),) if architecture else ()
    where = node(MachineFacts(devices=devices), environ=environ)
    known = read_package_yaml(software.KNOWN_STACKS, list[software.KnownStack])
    [finding] = software.judge_stacks(where, known, installed, software.find_torch([str(tmp_path)]))
    assert finding.status == ("warn" if expected else "info")
    assert (finding.measured if expected else "") == expected
    assert not expected or "#" in finding.reason
