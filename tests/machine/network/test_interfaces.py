"""Interfaces have their kind, state and addresses, and the right one leads to the master."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from machines.tree import HERE
from primus.machine.network import interfaces
from primus.machine.tree import FileTree

RECORDED = HERE / "mi300x-8"
HEADER = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


def recorded() -> dict[str, interfaces.Interface]:
    return {interface.name: interface for interface in interfaces.list_interfaces(FileTree(RECORDED))}


def way(master: str, root: Path = RECORDED) -> str | None:
    tree = FileTree(root)
    return interfaces.find_route(tree, interfaces.list_interfaces(tree), master)


def routed(root: Path, *rows: str) -> Path:
    (root / "proc/net").mkdir(parents=True, exist_ok=True)
    (root / "proc/net/route").write_text(HEADER + "".join(row + "\n" for row in rows))
    return root


def test_each_interface_has_its_kind() -> None:
    kinds = {name: interface.kind for name, interface in recorded().items()}
    assert kinds.pop("bond0") == "bond"
    assert kinds.pop("docker0") == "bridge"
    assert kinds.pop("lo") == "loopback"
    assert set(kinds.values()) == {"ethernet"} and len(kinds) == 12
    assert "bonding_masters" not in kinds


def test_an_interface_without_a_device_is_virtual_and_ipoib_is_infiniband(tmp_path: Path) -> None:
    for name, kind in (("veth1a2b", "1"), ("ib0", "32")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "type").write_text(kind)
    assert [(i.name, i.kind) for i in interfaces.list_interfaces(FileTree(tmp_path))] == [
        ("ib0", "infiniband"),
        ("veth1a2b", "virtual"),
    ]


def test_an_adapter_tells_its_link_and_its_place() -> None:
    rdma5 = recorded()["rdma5"]
    assert (rdma5.state, rdma5.speed_mbps, rdma5.mtu) == ("up", 400_000, 9000)
    assert (rdma5.bdf, rdma5.driver, rdma5.numa_node) == ("0000:a8:00.0", "bnxt_en", 1)
    assert recorded()["ens14f1np1"].master == "bond0"


def test_members_of_a_bond_are_known_without_links(tmp_path: Path) -> None:
    for path, text in {
        "bond0/bonding/slaves": "ens1 ens2",
        "ens1/type": "1",
        "br0/brif/ens3/x": "",
        "ens3/type": "1",
    }.items():
        file = tmp_path / "sys/class/net" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    masters = {i.name: i.master for i in interfaces.list_interfaces(FileTree(tmp_path))}
    assert masters == {"bond0": None, "br0": None, "ens1": "bond0", "ens3": "br0"}


@pytest.mark.parametrize("speed", ["-1", "0", "fast", ""])
def test_an_unknown_speed_is_none_and_no_problem(tmp_path: Path, speed: str) -> None:
    folder = tmp_path / "sys/class/net/eth0"
    folder.mkdir(parents=True)
    for name, text in {"type": "1", "operstate": "up", "speed": speed}.items():
        (folder / name).write_text(text)
    tree = FileTree(tmp_path)
    assert interfaces.list_interfaces(tree)[0].speed_mbps is None
    assert tree.problems == []


def test_addresses_come_from_the_kernels_tables() -> None:
    found = {name: interface.addresses for name, interface in recorded().items() if interface.addresses}
    assert found["eth0"] == ("10.10.0.11", "fd10::11", "fe80::5e6f:69ff:fe00:11")
    assert found["lo"] == ("127.0.0.1", "::1")
    assert found["rdma7"] == ("192.168.107.11",)
    assert found["bond0"] == ("10.20.0.11",)
    assert set(recorded()) - set(found) == {"ens14f0np0", "ens14f1np1"}


def test_an_address_that_could_be_of_two_interfaces_is_given_to_none(tmp_path: Path) -> None:
    row = "{}\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0"
    root = routed(tmp_path, row.format("rdma0"), row.format("rdma1"))
    (root / "proc/net/fib_trie").write_text("Local:\n  |-- 10.0.0.5\n     /32 host LOCAL\n")
    assert interfaces._read_recorded_v4_addresses(FileTree(root)) == []


@pytest.mark.parametrize(
    ("master", "interface"),
    [
        ("10.10.0.1", "eth0"),
        ("10.10.0.11", "eth0"),
        ("10.10.0.110", "eth0"),
        ("10.20.7.7", "bond0"),
        ("192.168.103.12", "rdma3"),
        ("192.168.103.11", "rdma3"),
        ("8.8.8.8", "eth0"),
        ("fd10::12", "eth0"),
        ("[fd10::11]", "eth0"),
        ("2001:db8::1", "eth0"),
        ("127.0.0.1", "lo"),
        ("::1", "lo"),
    ],
)
def test_the_way_to_an_address_is_that_of_the_routing_table(master: str, interface: str) -> None:
    assert way(master) == interface


def test_of_two_routes_the_narrower_wins_and_then_the_smaller_metric(tmp_path: Path) -> None:
    root = routed(
        tmp_path,
        "wide\t0000000A\t00000000\t0001\t0\t0\t1\t000000FF\t0\t0\t0",
        "slow\t0001000A\t00000000\t0001\t0\t0\t9\t00FFFFFF\t0\t0\t0",
        "fast\t0001000A\t00000000\t0001\t0\t0\t2\t00FFFFFF\t0\t0\t0",
        "dead\t0501000A\t00000000\t0200\t0\t0\t0\tFFFFFFFF\t0\t0\t0",
    )
    assert [way(host, root) for host in ("10.0.1.5", "10.0.2.5", "11.0.0.1")] == ["fast", "wide", None]


def test_nothing_that_leads_there_is_a_problem(tmp_path: Path) -> None:
    tree = FileTree(routed(tmp_path))
    assert interfaces.find_route(tree, (), "10.0.0.1") is None
    assert tree.problems[0].problem == "no route to 10.0.0.1"


def test_names_are_not_resolved_for_a_recorded_machine() -> None:
    tree = FileTree(RECORDED)
    assert interfaces.find_route(tree, (), "node-0") is None
    assert "node-0" in tree.problems[0].problem


@pytest.mark.parametrize("file", ["route", "ipv6_route", "if_inet6", "fib_trie"])
def test_damaged_tables_are_problems_and_no_more(tmp_path: Path, file: str) -> None:
    root = routed(tmp_path)
    (root / "proc/net" / file).write_text(
        "zz\n\ufffd\teth0 x y\n/32 host LOCAL\n|-- 1.2.3\n /32 host LOCAL\n" + "f " * 9 + "\n"
    )
    tree = FileTree(root)
    assert interfaces.find_route(tree, interfaces.list_interfaces(tree), "10.0.0.1") is None
    assert len(tree.problems) >= 1


def test_a_name_is_resolved_to_ipv4_before_ipv6() -> None:
    tree = FileTree(RECORDED)
    assert interfaces.find_route(tree, (), "node-0", lambda name: ["fd10::12", "10.20.0.9"]) == "bond0"
    assert interfaces.find_route(tree, (), "node-0", lambda name: ["127.0.1.1", "10.20.0.9"]) == "bond0"
    assert interfaces.find_route(tree, (), "node-0", lambda name: ["127.0.1.1"]) == "lo"


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(interfaces, "RESOLVE_LIMIT_S", 0.1)
    tree = FileTree(RECORDED)
    start = time.monotonic()
    assert interfaces.find_route(tree, (), "node-0", lambda name: [name] * never.wait(2.0)) is None
    assert time.monotonic() - start < 1.0
    assert "node-0" in tree.problems[0].problem
    never.set()


def test_on_the_running_machine_the_kernels_table_agrees_with_the_system() -> None:
    tree = FileTree()
    live = {i.name: i for i in interfaces.list_interfaces(tree)}
    assert "127.0.0.1" in live["lo"].addresses
    for name, address in interfaces._read_recorded_v4_addresses(tree):
        assert address in live[name].addresses
    assert interfaces.find_route(tree, live.values(), "localhost") == "lo"
