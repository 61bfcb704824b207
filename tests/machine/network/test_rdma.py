"""RDMA devices are read from the kernel's files, and the same ones from the tools' output."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from machines.tree import HERE, grow
from primus.machine.facts import RdmaDevice
from primus.machine.network import rdma
from primus.machine.tree import FileTree

RECORDED = HERE / "mi300x-8"


def write(root: Path, files: dict[str, str]) -> FileTree:
    for path, text in files.items():
        (root / "sys/class/infiniband" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/class/infiniband" / path).write_text(text + "\n")
    return FileTree(root)


def said(root: Path, tool: str) -> str:
    """What a tool printed, in its own order of devices."""
    return "".join(file.read_text() for file in sorted((root / "tools" / tool).iterdir()))


def seen(devices: tuple[RdmaDevice, ...]) -> list[tuple[object, ...]]:
    return [
        (
            device.name,
            device.hca_type,
            device.firmware,
            port.state,
            port.physical_state,
            port.rate_gbps,
            port.link_layer,
        )
        for device in devices
        for port in device.ports
    ]


def test_a_recorded_node_shows_its_adapters_in_natural_order() -> None:
    tree = FileTree(RECORDED)
    devices = rdma.read_rdma_devices(tree)
    assert [device.name for device in devices] == [*(f"bnxt_re{i}" for i in range(8)), "mlx5_0", "mlx5_bond_0"]
    assert [device.interface for device in devices[:2]] == ["rdma0", "rdma1"]
    assert {device.kind for device in devices[:8]} == {"broadcom"}
    assert [device.numa_node for device in devices[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert devices[0].pci_path[0] == "pci0000:01" and devices[0].pci_path[-1] == devices[0].bdf == "0000:06:00.0"
    assert tree.problems == []


def test_empty_gids_are_left_out_with_their_index_kept() -> None:
    gids = rdma.read_rdma_devices(FileTree(RECORDED))[0].ports[0].gids
    assert [(gid.index, gid.kind) for gid in gids] == [
        (0, "IB/RoCE v1"), (1, "RoCE v2"), (2, "IB/RoCE v1"), (3, "RoCE v2"),
    ]  # fmt: skip


def test_gids_behind_a_gap_are_found(tmp_path: Path) -> None:
    port = "mlx5_0/ports/1"
    zero, full = "0000:0000:0000:0000:0000:0000:0000:0000", "0000:0000:0000:0000:0000:ffff:0a00:0001"
    files = {f"{port}/gids/{i}": full if i in (0, 9) else zero for i in range(64)}
    tree = write(tmp_path, files | {f"{port}/gid_attrs/types/9": "RoCE v2"})
    assert [(gid.index, gid.kind) for gid in rdma.read_rdma_devices(tree)[0].ports[0].gids] == [
        (0, "unknown"),
        (9, "RoCE v2"),
    ]


@pytest.mark.parametrize("name", ["h100-infiniband", "h100-roce-faults"])
def test_ibstat_tells_what_the_kernel_tells(tmp_path: Path, name: str) -> None:
    root = grow(name, tmp_path)
    told, problems = rdma.parse_rdma_devices(said(root, "ibstat"))
    assert seen(told) == seen(rdma.read_rdma_devices(FileTree(root)))
    assert len(told) == 12 and [device.name for device in told][-2:] == ["mlx5_10", "mlx5_11"]
    assert problems == ()


def test_the_states_of_a_faulty_node_are_kept_apart(tmp_path: Path) -> None:
    devices = {
        device.name: device.ports[0] for device in rdma.read_rdma_devices(FileTree(grow("h100-roce-faults", tmp_path)))
    }
    assert (devices["mlx5_5"].state, devices["mlx5_5"].physical_state) == ("DOWN", "Disabled")
    assert (devices["mlx5_11"].state, devices["mlx5_11"].physical_state) == ("DOWN", "Polling")
    assert sum(port.is_active for port in devices.values()) == 10


def test_ibstatus_tells_what_the_kernel_tells(tmp_path: Path) -> None:
    root = grow("a100-infiniband", tmp_path)
    told, problems = rdma.parse_rdma_devices(said(root, "ibstatus"), "ibstatus")
    ports = [(device.name, device.ports) for device in told]
    assert [(name, port[0].rate_gbps, port[0].is_active) for name, port in ports][-2:] == [
        ("mlx5_7", 200.0, True),
        ("mlx5_8", 40.0, True),
    ]
    assert [row[3:] for row in seen(told)] == [row[3:] for row in seen(rdma.read_rdma_devices(FileTree(root)))]
    assert problems == ()


def test_what_ibstat_said_before_it_failed_counts_and_the_failure_is_told(tmp_path: Path) -> None:
    root = grow("a100-infiniband", tmp_path)
    told, problems = rdma.parse_rdma_devices(said(root, "ibstat"))
    assert len(told) == 8 and all(device.ports[0].is_active for device in told)
    assert [problem.where for problem in problems] == ["ibstat"] and "mlx5_8" in problems[0].problem


def test_ibv_devinfo_is_understood() -> None:
    text = """hca_id:\tmlx5_12
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t22.38.1900
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
\t\t\tphys_state:\t\tDISABLED (3)
\t\tport:\t2
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tlink_layer:\t\tInfiniBand
"""
    (device,), _ = rdma.parse_rdma_devices(text, "ibv_devinfo")
    assert (device.name, device.kind, device.firmware) == ("mlx5_12", "mellanox", "22.38.1900")
    down, up = device.ports
    assert (down.number, down.state, down.physical_state, down.link_layer) == (1, "DOWN", "Disabled", "Ethernet")
    assert (up.number, up.is_active, up.link_layer) == (2, True, "InfiniBand")


@pytest.mark.parametrize(
    "text", ["", "ibpanic: no devices", "No IB devices found\n", "CA 'x", "port: 1\nstate: up", "\0"]
)
def test_other_output_is_no_device(text: str) -> None:
    assert rdma.parse_rdma_devices(text)[0] == ()


@pytest.mark.parametrize(
    ("vendor_id", "name", "kind"),
    [
        (0x15B3, "rdma0", "mellanox"),
        (0x14E4, "mlx5_0", "broadcom"),
        (0x1DD8, "rocep9s0", "ainic"),
        (None, "bnxt_re3", "broadcom"),
        (None, "ionic_0", "ainic"),
        (0x8086, "mlx5_0", None),
        (None, "irdma0", None),
    ],
)
def test_the_vendor_decides_before_the_name(vendor_id: int | None, name: str, kind: str | None) -> None:
    assert rdma.find_nic_kind(vendor_id, name) == kind


def test_a_device_without_most_files_is_still_one(tmp_path: Path) -> None:
    tree = write(tmp_path, {"mlx5_0/ports/1/state": "4: ACTIVE", "mlx5_0/ports/1/rate": "fast"})
    (device,) = rdma.read_rdma_devices(tree)
    assert (device.kind, device.hca_type, device.interface, device.bdf) == ("mellanox", None, None, None)
    assert device.ports[0].rate_gbps is None and not device.ports[0].is_active


def test_a_machine_without_adapters_has_none(tmp_path: Path) -> None:
    assert rdma.read_rdma_devices(FileTree(tmp_path)) == ()


def test_a_tool_that_fails_at_the_end_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ibstat"
    tool.write_text(
        "#!/bin/sh\nprintf \"CA 'mlx5_0'\\n\\tPort 1:\\n\\t\\tState: Active\\n\"\necho ibpanic: gone >&2\nexit 255\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tree = FileTree(tmp_path)
    (device,) = rdma._read_tools(tree)
    assert device.ports[0].is_active
    assert [problem.problem for problem in tree.problems] == ["ibpanic: gone"]


def test_a_tool_that_hangs_with_a_child_is_a_problem_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "ibstat"
    tool.write_text("#!/bin/sh\nsleep 60 &\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(rdma, "TOOL_LIMIT_S", 0.2)
    tree = FileTree(tmp_path)
    began = time.monotonic()
    assert rdma._read_tools(tree) == ()
    assert time.monotonic() - began < 5
    assert "gave no response" in tree.problems[0].problem
