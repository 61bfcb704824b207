"""The interface and the RDMA ports of a launch, and what is said of those that the user chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from machines.tree import HERE, grow
from primus.machine.facts import Device, Gid, Interface, MachineFacts, RdmaDevice, RdmaPort
from primus.machine.network.selection import Network, choose_network, select_names, validate_network_variables
from primus.machine.probe import probe

IPV4 = "0000:0000:0000:0000:0000:ffff:c0a8:640b"
LOCAL = "fe80:0000:0000:0000:5e6f:69ff:fe00:0011"
INTERFACES = (
    Interface(name="lo", kind="loopback", addresses=("127.0.0.1",)),
    Interface(name="eth0", state="up", addresses=("10.0.0.11", "fd10::11")),
    Interface(name="eth1", state="down"),
    Interface(name="docker0", kind="bridge", state="up", addresses=("172.17.0.1",)),
    Interface(name="bond0", kind="bond", state="up"),
    Interface(name="ens1", state="up", master="bond0"),
)


def recorded(name: str, folder: Path) -> MachineFacts:
    return probe(grow(name, folder), {})


def port(name: str, *, rate: float = 400.0, is_up: bool = True, gid: int | None = 3, **fields: object) -> RdmaDevice:
    gids = (Gid(0, LOCAL, "IB/RoCE v1"), Gid(1, LOCAL, "RoCE v2"))
    gids += (Gid(gid - 1, IPV4, "IB/RoCE v1"), Gid(gid, IPV4, "RoCE v2")) if gid else ()
    state, physical = ("ACTIVE", "LinkUp") if is_up else ("DOWN", "Polling")
    values = {"kind": "mellanox", "hca_type": "MT4129", **fields}
    only = RdmaPort(state=state, physical_state=physical, rate_gbps=rate, link_layer="Ethernet", gids=gids)
    return RdmaDevice(name=name, ports=(only,), **values)  # type: ignore[arg-type]


def chosen(*devices: RdmaDevice, nnodes: int = 2, **environ: str) -> Network:
    return choose_network(MachineFacts(rdma=devices, interfaces=INTERFACES, master_interface="eth0"), nnodes, environ)


def test_on_one_node_nothing_is_set_but_the_ports_are_known() -> None:
    network = choose_network(probe(HERE / "mi300x-8", {}, master="10.10.0.12"), 1, {})
    assert (network.interface, network.hcas, network.gid_index, network.warnings) == (None, (), None, ())
    assert len(network.ports) == 8


def test_on_several_nodes_the_recorded_machine_uses_its_eight_data_adapters() -> None:
    network = choose_network(probe(HERE / "mi300x-8", {}, master="10.10.0.12"), 2, {"PRIMUS_EXPECT_IB": "1"})
    assert network.interface == "eth0"
    assert network.hcas == tuple(f"bnxt_re{i}:1" for i in range(8))
    assert (network.nic_kind, network.gid_index, network.warnings) == ("broadcom", None, ())
    assert dict(network.excluded) == {
        "mlx5_0:1": "100 of 400 Gb/s, not for data",
        "mlx5_bond_0:1": "a bond",
        "ens14f0np0": "belongs to bond0",
        "ens14f1np1": "belongs to bond0",
    }
    assert set(network.reasons) == {"interface", "hcas", "gid_index", "nic_kind"}


@pytest.mark.parametrize(
    ("name", "numbers", "gid_index"),
    [
        ("h100-infiniband", (0, 3, 4, 5, 6, 9, 10, 11), None),
        ("h100-roce-faults", (0, 3, 4, 6, 9, 10), 3),
        ("a100-infiniband", tuple(range(8)), None),
    ],
)
def test_data_ports_of_published_nodes(
    tmp_path: Path, name: str, numbers: tuple[int, ...], gid_index: int | None
) -> None:
    network = choose_network(recorded(name, tmp_path), 2, {})
    assert network.hcas == tuple(f"mlx5_{number}:1" for number in numbers)
    assert (network.gid_index, network.nic_kind) == (gid_index, "mellanox")


@pytest.mark.parametrize(("environ", "expected"), [({"PRIMUS_EXPECT_IB": "8"}, None), ({}, 8)])
def test_missing_data_ports_are_named(tmp_path: Path, environ: dict[str, str], expected: int | None) -> None:
    network = choose_network(recorded("h100-roce-faults", tmp_path), 2, environ, expected)
    assert "6 of 8 expected RDMA ports are active: mlx5_5 Disabled, mlx5_11 Polling" in network.warnings
    assert dict(network.excluded)["mlx5_11:1"] == "DOWN, Polling"


def test_a_node_as_expected_gets_no_warning(tmp_path: Path) -> None:
    network = choose_network(recorded("h100-infiniband", tmp_path), 2, {"PRIMUS_EXPECT_IB": "8"})
    assert not any("RDMA" in warning for warning in network.warnings)


def test_ports_are_expected_as_many_as_there_are_cards() -> None:
    cards = (Device(index=0, vendor="amd"), Device(index=1, vendor="amd"))
    facts = MachineFacts(rdma=(port("mlx5_0"), port("mlx5_1", is_up=False)), devices=cards, master_interface="eth0")
    assert choose_network(facts, 2, {"PRIMUS_EXPECT_IB": "1"}).warnings == (
        "1 of 2 expected RDMA ports are active: mlx5_1 Polling",
    )
    assert choose_network(facts, 2, {"PRIMUS_EXPECT_IB": "0"}).warnings == ()


def test_without_an_active_port_the_user_is_warned() -> None:
    network = chosen(port("mlx5_0", is_up=False))
    assert network.hcas == () and network.nic_kind is None
    assert any("no RDMA port is active" in warning and "mlx5_0 Polling" in warning for warning in network.warnings)
    assert chosen().warnings == ()  # a node without adapters and cards has nothing to miss


def test_members_and_masters_of_a_bond_are_left_out() -> None:
    network = chosen(
        port("mlx5_bond_0"), port("mlx5_1", interface="bond0"), port("mlx5_2", interface="ens1"), port("mlx5_3")
    )
    assert network.hcas == ("mlx5_3:1",)
    assert dict(network.excluded)["mlx5_2:1"] == "belongs to bond0"


def test_of_ports_as_fast_those_that_share_a_root_with_a_card_are_for_data() -> None:
    devices = tuple(port(f"mlx5_{i}", pci_path=(f"pci0000:{i:02}", "x")) for i in (10, 2, 1))

    def choose(root: str, *others: RdmaDevice) -> Network:
        card = Device(index=0, vendor="nvidia", pci_path=(root, "y"))
        return choose_network(MachineFacts(devices=(card,), rdma=(*devices, *others)), 2, {})

    network = choose("pci0000:10", port("mlx5_3"))
    assert network.hcas == ("mlx5_3:1", "mlx5_10:1")  # where mlx5_3 is nobody knows
    assert network.excluded[0] == ("mlx5_1:1", "shares no PCI root with a GPU, not for data")
    assert choose("pci0000:20").hcas == ("mlx5_1:1", "mlx5_2:1", "mlx5_10:1"), "no port shares a root with a card"


def test_the_gid_index_is_the_lowest_for_roce_v2_over_ipv4_on_all_ports() -> None:
    assert chosen(port("mlx5_0", gid=5), port("mlx5_1", gid=5)).gid_index == 5
    unequal = chosen(port("mlx5_0", gid=3), port("mlx5_1", gid=5))
    assert unequal.gid_index is None and "mlx5_0:1 3, mlx5_1:1 5" in unequal.warnings[0]
    partly = chosen(port("mlx5_0", gid=3), port("mlx5_1", gid=None))
    assert partly.gid_index is None and "mlx5_1:1 none" in partly.warnings[0]
    without = chosen(port("mlx5_0", gid=None))
    assert without.gid_index is None and "RoCE v2" in without.warnings[0]


@pytest.mark.parametrize("kind", ["ainic", "broadcom"])
def test_other_adapters_gid_index_is_left_to_their_profile(kind: str) -> None:
    network = chosen(port("x0", kind=kind))
    assert (network.nic_kind, network.gid_index, network.warnings) == (kind, None, ())


def test_the_user_can_say_that_the_adapters_are_ainic() -> None:
    assert chosen(port("rocep1s0", kind=None), USING_AINIC="1").nic_kind == "ainic"


@pytest.mark.parametrize("name", ["lo", "docker0", "veth12", "br-5d3", "virbr0", "cni0", "flannel.1", "cali4a"])
def test_an_interface_of_this_host_only_is_never_chosen(name: str) -> None:
    network = choose_network(MachineFacts(master_interface=name), 2, {})
    assert network.interface is None
    assert name in network.warnings[0] and "MASTER_ADDR" in network.warnings[0]


def test_an_interface_whose_name_only_begins_alike_is_chosen() -> None:
    assert choose_network(MachineFacts(master_interface="lom1"), 2, {}).interface == "lom1"


def test_the_bond_is_chosen_rather_than_its_member() -> None:
    assert choose_network(MachineFacts(interfaces=INTERFACES, master_interface="ens1"), 2, {}).interface == "bond0"


def test_without_a_known_way_the_interface_is_left_unset() -> None:
    network = choose_network(MachineFacts(interfaces=INTERFACES), 2, {})
    assert network.interface is None and "not set" in network.warnings[0]


HCAS = ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("mlx5_1", ["mlx5_1:1", "mlx5_1:2", "mlx5_10:1"]),
        ("=mlx5_1", ["mlx5_1:1", "mlx5_1:2"]),
        ("=mlx5_1:2", ["mlx5_1:2"]),
        ("=mlx5_0:1,mlx5_10:1", ["mlx5_0:1", "mlx5_10:1"]),
        ("^mlx5_1", ["mlx5_0:1"]),
        ("^=mlx5_1", ["mlx5_0:1", "mlx5_10:1"]),
        ("mlx5", HCAS),
        (",mlx5_0,", ["mlx5_0:1"]),
        ("mlx5_0:x", []),
        ("", HCAS),
        ("^", []),
        (" mlx5_0", []),
    ],
)
def test_an_expression_selects_as_nccl_does(expression: str, names: list[str]) -> None:
    assert select_names(expression, HCAS) == names


def slowly(expression: str, names: list[str]) -> list[str]:
    """Character by character, as NCCL's parseStringList and matchIfList go about it."""
    deny = exact = False
    position = 0
    if expression[:1] == "^":
        deny, position = True, 1
    if expression[position : position + 1] == "=":
        exact, position = True, position + 1
    entries: list[tuple[str, int]] = []
    text, number, in_port = "", "", False
    for character in expression[position:] + ",":
        if character == ",":
            if text:
                entries.append((text, int(number or 0) if in_port else -1))
            text, number, in_port = "", "", False
        elif in_port:
            number += character
        elif character == ":":
            in_port = True
        else:
            text += character
    found = []
    for name in names:
        device, _, own = name.partition(":")
        hit = not entries
        for entry, wanted in entries:
            same = device == entry if exact else device[: len(entry)] == entry
            if same and (wanted == -1 or not own or int(own) == wanted):
                hit = True
        if hit != deny:
            found.append(name)
    return found


NAME = st.sampled_from(["mlx5_0", "mlx5_1", "mlx5_10", "mlx5_bond_0", "eth0", "e", "ib0"])
PORTED = st.builds(lambda name, port: f"{name}{port}", NAME, st.sampled_from(["", ":1", ":2", ":10"]))
ENTRY = st.one_of(PORTED, st.sampled_from(["", "mlx5", "m", "eth"]))


@given(
    st.sampled_from(["", "^", "=", "^="]),
    st.lists(ENTRY, max_size=4),
    st.lists(PORTED, max_size=6),
)
def test_selection_agrees_with_a_plain_reference(prefix: str, entries: list[str], names: list[str]) -> None:
    expression = prefix + ",".join(entries)
    assert select_names(expression, names) == slowly(expression, names)


def told(**environ: str) -> tuple[str, ...]:
    devices = (port("mlx5_0"), port("mlx5_1", is_up=False))
    return validate_network_variables(environ, MachineFacts(interfaces=INTERFACES, rdma=devices))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NCCL_SOCKET_IFNAME": ""},
        {"NCCL_SOCKET_IFNAME": "eth0"},
        {"NCCL_SOCKET_IFNAME": "^lo,docker"},
        {"NCCL_SOCKET_IFNAME": "=bond0,eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"NCCL_IB_HCA": "=mlx5_0:1"},
        {"NCCL_IB_HCA": "^mlx5_1"},
    ],
)
def test_a_good_choice_is_not_commented(environ: dict[str, str]) -> None:
    assert told(**environ) == ()


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME=ib0 matches no interface"),
        ({"NCCL_SOCKET_IFNAME": "lo,docker"}, "selects only lo, docker0, which other nodes cannot reach"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, "selects eth1, which is down"),
        (
            {"NCCL_SOCKET_IFNAME": "10.0.0.11"},
            "10.0.0.11 is an IP address, not the name of an interface; eth0 holds it",
        ),
        ({"GLOO_SOCKET_IFNAME": "fd10:0::11"}, "is an IP address, not the name of an interface; eth0 holds it"),
        ({"GLOO_SOCKET_IFNAME": "10.0.0.1"}, "10.0.0.1 is an IP address, not the name of an interface"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth matches no interface"),
        ({"NCCL_IB_HCA": "mlx4"}, "NCCL_IB_HCA=mlx4 matches no RDMA port; available: mlx5_0:1, mlx5_1:1"),
        ({"NCCL_IB_HCA": "mlx5"}, "selects mlx5_1:1 (DOWN, Polling), which is not active"),
        ({"NCCL_IB_HCA": "^mlx5_0"}, "selects mlx5_1:1 (DOWN, Polling), which is not active"),
        ({"NCCL_IB_HCA": "10.0.0.11"}, "is an IP address, not the name of an RDMA device; eth0 holds it"),
    ],
)
def test_a_bad_choice_is_explained(environ: dict[str, str], part: str) -> None:
    (warning,) = told(**environ)
    assert part in warning


def test_an_address_is_compared_as_a_whole() -> None:
    (warning,) = told(NCCL_SOCKET_IFNAME="10.0.0.1")
    assert "holds it" not in warning


def test_what_is_not_known_is_not_judged() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "mlx4"}
    assert validate_network_variables(environ, MachineFacts(assumed=True)) == ()


def test_a_dry_run_says_that_the_interface_is_chosen_on_the_node() -> None:
    facts = MachineFacts(interfaces=INTERFACES, rdma=(port("mlx5_0"),), files_only=True)
    assert "chosen on the node" in choose_network(facts, 2, {}).warnings[0]
    assert "is not set" in choose_network(structs.replace(facts, files_only=False), 2, {}).warnings[0]


def test_nothing_is_chosen_for_a_machine_that_was_only_named() -> None:
    facts = MachineFacts(assumed=True)
    assert choose_network(facts, 1, {}) == Network()
    several = choose_network(facts, 2, {})
    assert several == Network(warnings=several.warnings)
    assert "of an assumed machine is unknown" in several.warnings[0]
