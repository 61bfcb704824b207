"""Errors that hardware counts are found since boot and under load, in every block that has a counter."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from fakes.nodes import node as build_facts
from primus.machine.facts import MachineFacts, Software
from primus.machine.tree import FileTree
from primus.preflight.checks import error_counts, peer_memory
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode

FACTS = build_facts(num_cards=2, num_adapters=2)
FACTS = structs.replace(
    FACTS, rdma=tuple(structs.replace(device, interface=f"eth{i}") for i, device in enumerate(FACTS.rdma))
)
GPU_1, NIC_0 = FACTS.devices[1].bdf, FACTS.rdma[0].bdf
COUNTERS = {
    "sys/devices/system/edac/mc/mc0/ce_count": "0\n",
    "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    f"sys/bus/pci/devices/{GPU_1}/ras/umc_err_count": "ue: 0\nce: 5\nde: 0\n",
    f"sys/bus/pci/devices/{GPU_1}/ras/gfx_err_count": "ue: 0\nce: 0\n",
    f"sys/bus/pci/devices/{GPU_1}/ras/xgmi_wafl_err_count": "ue: 0\nce: 0\n",
    f"sys/bus/pci/devices/{GPU_1}/aer_dev_correctable": "RxErr 0\nBadTLP 0\nTOTAL_ERR_COR 0\n",
    f"sys/bus/pci/devices/{NIC_0}/aer_dev_fatal": "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0\n",
    "sys/class/net/eth0/carrier_down_count": "1\n",
}
FAULTS = {
    "an uncorrectable error of memory": (
        "sys/devices/system/edac/mc/mc0/ue_count", "1\n", ("host.memory_errors", "mc0"), "fail", "fail",
    ),
    "many corrected errors of memory": (
        "sys/devices/system/edac/mc/mc0/ce_count", "4000\n", ("host.memory_errors", "mc0"), "warn", "warn",
    ),
    "an uncorrectable error of the graphics block": (
        f"sys/bus/pci/devices/{GPU_1}/ras/gfx_err_count", "ue: 2\nce: 0\n", ("gpu.ras_errors", "GPU 1"), "fail", "fail",
    ),
    "errors of xGMI": (
        f"sys/bus/pci/devices/{GPU_1}/ras/xgmi_wafl_err_count", "ue: 1\nce: 9\n", ("gpu.ras_errors", "GPU 1"), "fail",
        "fail",
    ),
    "corrected errors of a device's PCIe link": (
        f"sys/bus/pci/devices/{GPU_1}/aer_dev_correctable", "RxErr 9\nTOTAL_ERR_COR 5000\n",
        ("host.pcie_errors", "GPU 1"), "warn", "warn",
    ),
    "a fatal error of an adapter's PCIe link": (
        f"sys/bus/pci/devices/{NIC_0}/aer_dev_fatal", "DLP 1\nTOTAL_ERR_FATAL 1\n", ("host.pcie_errors", "mlx5_0"),
        "warn", "fail",
    ),
    "a link that goes down under load": (
        "sys/class/net/eth0/carrier_down_count", "2\n", ("network.link_flaps", "eth0"), None, "fail",
    ),
}  # fmt: skip


def write(folder: Path, files: dict[str, str]) -> PreflightNode:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return PreflightNode(facts=FACTS, tree=FileTree(folder))


def since_boot(node: PreflightNode) -> Iterator[CheckFinding]:
    for check in (*error_counts.HOST_CHECKS, *error_counts.GPU_CHECKS):
        yield from check(node)


def statuses(findings: Iterator[CheckFinding]) -> dict[tuple[str, str], str]:
    return {(one.check, one.subject): one.status for one in findings if one.status not in ("ok", "info")}


def test_a_node_without_errors_passes_and_nothing_grows(tmp_path: Path) -> None:
    node = write(tmp_path, COUNTERS)
    assert {one.check for one in since_boot(node)} == {"host.memory_errors", "host.pcie_errors", "gpu.ras_errors"}
    assert statuses(since_boot(node)) == {}
    counts = error_counts.read_counts(node)
    assert len(counts) == 9  # all but the block of memory, which gpu.ecc_* has
    assert not list(error_counts.find_grown_counts(counts, error_counts.read_counts(node)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_counted_error_is_found_since_boot_and_under_load(tmp_path: Path, fault: str) -> None:
    path, text, name, at_rest, loaded = FAULTS[fault]
    before = error_counts.read_counts(write(tmp_path, COUNTERS))
    node = write(tmp_path, {path: text})
    assert statuses(since_boot(node)).get(name) == at_rest
    growth = list(error_counts.find_grown_counts(before, error_counts.read_counts(node)))
    assert [((one.check, one.subject), one.status) for one in growth] == [(name, loaded)]
    assert growth[0].advice


def test_as_many_corrected_errors_as_the_limit_are_accepted(tmp_path: Path) -> None:
    place = "sys/devices/system/edac/mc/mc0/ce_count"
    judged = [
        statuses(error_counts.check_host_memory(write(tmp_path / str(count), {**COUNTERS, place: f"{count}\n"})))
        for count in (1000, 1001)
    ]
    assert judged == [{}, {("host.memory_errors", "mc0"): "warn"}]


def test_a_counter_that_was_reset_counts_from_zero(tmp_path: Path) -> None:
    path = "sys/devices/system/edac/mc/mc0/ce_count"
    before = error_counts.read_counts(write(tmp_path, {path: "900\n"}))
    (growth,) = error_counts.find_grown_counts(before, error_counts.read_counts(write(tmp_path, {path: "3\n"})))
    assert growth.measured == "ce +3 under load"


NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6a1f)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 0

\t Link 1: Replay Errors: 3
\t Link 1: Recovery Errors: {}
\t Link 1: CRC Errors: 12

GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77c0)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 0
\t Link 0: CRC Errors: 0
"""


def test_an_nvlink_that_was_recovered_is_named_and_what_was_resent_is_not_a_fault() -> None:
    assert {
        one.status for one in error_counts.judge_nvlink_counts(error_counts.parse_nvlink_counts(NVLINK.format(0)))
    } == {"ok"}
    found = list(error_counts.judge_nvlink_counts(error_counts.parse_nvlink_counts(NVLINK.format(2))))
    assert [(one.subject, one.status) for one in found] == [("GPU 0", "warn"), ("GPU 1", "ok")]
    assert "link 1 recovery 2" in found[0].measured
    (grown,) = error_counts.find_grown_counts(
        error_counts.parse_nvlink_counts(NVLINK.format(0)), error_counts.parse_nvlink_counts(NVLINK.format(1))
    )
    assert (grown.status, grown.measured) == ("fail", "link 1 recovery +1 under load")


QUERY = """\
==============NVSMI LOG==============

Driver Version                            : 550.54.15
Attached GPUs                             : 2
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 0
    Processes                             : None

GPU 00000000:43:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Fabric
        State                             : {}
        Status                            : {}
    Processes                             : None
"""


@pytest.mark.parametrize(
    ("state", "status", "judged"),
    [
        ("Completed", "Success", "ok"),
        ("N/A", "N/A", "ok"),
        ("In Progress", "N/A", "fail"),
        ("Completed", "System not yet initialized", "fail"),
    ],
)
def test_a_device_that_the_fabric_manager_has_not_set_up_is_named(state: str, status: str, judged: str) -> None:
    found = list(error_counts.judge_fabric(QUERY.format(state, status)))
    assert [(one.subject, one.status) for one in found] == [("GPU 0", "ok"), ("GPU 1", judged)]


def test_a_fabric_with_degraded_bandwidth_is_named() -> None:
    health = "Success\n        Health\n            Summary : Unhealthy\n            Bandwidth : Degraded"
    found = list(error_counts.judge_fabric(QUERY.format("Completed", health)))
    assert [one.status for one in found] == ["ok", "fail"]
    assert found[1].measured == "Completed, Success, Summary Unhealthy, Bandwidth Degraded"


def test_the_traffic_of_newer_links_is_no_error() -> None:
    text = "GPU 0: NVIDIA B200 (UUID: GPU-1)\n\t Link 0: Tx packets: {}\n\t Link 0: Link recovery failed events: {}\n"
    before, after = (error_counts.parse_nvlink_counts(text.format(*counts)) for counts in ((10, 0), (900, 0)))
    assert not list(error_counts.find_grown_counts(before, after))
    (failed,) = error_counts.find_grown_counts(before, error_counts.parse_nvlink_counts(text.format(900, 1)))
    assert failed.status == "fail"


def test_a_driver_that_prints_no_fabric_is_not_judged() -> None:
    assert not list(error_counts.judge_fabric(QUERY.format("", "").replace("    Fabric\n", "")))


MODERN = Software(kernel="6.8.0-60-generic")
CONFIG = "CONFIG_PCI_P2PDMA=y\nCONFIG_DMABUF_MOVE_NOTIFY={}\n"
PEERS: dict[str, tuple[MachineFacts, dict[str, str], list[str]]] = {
    "amd dma-buf": (FACTS, {"boot/config-6.8.0-60-generic": CONFIG.format("y")}, ["ok"]),
    "amd option off": (FACTS, {"boot/config-6.8.0-60-generic": CONFIG.format("n")}, ["fail"]),
    "amd peer client": (FACTS, {"sys/kernel/mm/memory_peers/amdkfd/version": "1.0\n"}, ["ok"]),
    "amd kernel symbol": (FACTS, {"proc/kallsyms": "0 T foo\n0 T ib_register_peer_memory_client [ib_core]\n"}, ["ok"]),
    "amd unreadable": (FACTS, {}, ["info"]),
    "no adapters": (build_facts(num_adapters=0), {}, []),
    "nvidia module": (build_facts(num_links=18), {"sys/module/nvidia_peermem/version": "1"}, ["ok"]),
    "nvidia open driver": (
        build_facts(num_links=18), {"proc/driver/nvidia/version": "NVIDIA UNIX Open Kernel Module"}, ["ok"],
    ),
    "nvidia without either": (build_facts(num_links=18), {"sys/module/nvidia/version": "550"}, ["fail"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PEERS)
def test_direct_access_to_device_memory_needs_a_module_or_dma_buf(tmp_path: Path, case: str) -> None:
    facts, files, expected = PEERS[case]
    node = structs.replace(write(tmp_path, files), facts=structs.replace(facts, software=MODERN))
    assert [one.status for one in peer_memory.check_peer_memory(node)] == expected


def test_the_running_kernels_own_configuration_is_read(tmp_path: Path) -> None:
    node = structs.replace(write(tmp_path, {"proc/x": ""}), facts=structs.replace(FACTS, software=MODERN))
    with gzip.open(tmp_path / "proc/config.gz", "wt") as file:
        file.write(CONFIG.format("y"))
    assert [one.status for one in peer_memory.check_peer_memory(node)] == ["ok"]
