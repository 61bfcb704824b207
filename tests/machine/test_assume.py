"""A machine that was only named has what its profile says, and nothing that nobody knows."""

from __future__ import annotations

import pytest

from primus.errors import UsageError
from primus.machine import profile
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.network.selection import choose_network


def test_a_model_alone_is_a_usual_node() -> None:
    facts = build_assumed_machine("mi355x")
    assert facts.assumed and facts.model == "MI355X"
    assert len(facts.devices) == 8 and len(facts.partitions) == 8
    assert facts.devices[7].memory_bytes == 294896 * profile.MIB
    assert {device.hive for device in facts.devices} == {"0"}
    assert len(facts.links) == 28 and {link.kind for link in facts.links} == {"xgmi"}
    assert facts.interfaces == () and facts.rdma == ()


def test_a_card_of_two_dies_is_two_devices() -> None:
    facts = build_assumed_machine("MI250X:4")
    assert len(facts.devices) == 4
    assert [part.index for part in facts.partitions] == list(range(8))
    assert {part.compute_units for part in facts.partitions} == {110}
    assert {part.memory_bytes for part in facts.partitions} == {65520 * profile.MIB}
    assert len(build_assumed_machine("mi250x").partitions) == 8


def test_cards_are_linked_within_their_hives_only() -> None:
    facts = build_assumed_machine("mi210:8")
    assert {device.hive for device in facts.devices} == {"0", "1"}
    assert len(facts.links) == 2 * 6
    assert not any(link.first < 4 <= link.second for link in facts.links)
    assert build_assumed_machine("l40s:4").links == ()
    assert {link.kind for link in build_assumed_machine("h100:2").links} == {"nvlink"}


@pytest.mark.parametrize(
    ("kind", "first"), [("ainic", "ionic_0"), ("mellanox", "mlx5_0"), ("broadcom", "bnxt_re_0"), ("slingshot", "cxi0")]
)
def test_the_adapters_of_a_machine_can_be_named_too(kind: str, first: str) -> None:
    facts = build_assumed_machine("mi300x", kind)
    assert len(facts.rdma) == 8 and {device.kind for device in facts.rdma} == {kind}
    assert facts.rdma[0].name == first
    assert choose_network(facts, 2, {}).nic_kind == kind and not choose_network(facts, 2, {}).hcas


def test_adapters_that_are_not_known_name_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown NIC kind 'mellanx'") as error:
        build_assumed_machine("mi300x", "mellanx")
    assert "mellanox" in error.value.hint


def test_a_rack_of_72_is_assumed_tray_by_tray() -> None:
    assert len(build_assumed_machine("gb200").devices) == 4


def test_a_machine_without_gpus_is_called_cpu() -> None:
    assert build_assumed_machine("cpu").devices == ()
    assert build_assumed_machine("cpu").assumed


def test_the_largest_node_has_72_cards() -> None:
    assert len(build_assumed_machine("gb200:72").devices) == 72


@pytest.mark.parametrize("count", ["0", "73", "-1", "eight", "", "8.0", "8:8", "1e1"])
def test_a_wrong_number_of_cards_is_refused(count: str) -> None:
    with pytest.raises(UsageError, match="invalid number of GPUs"):
        build_assumed_machine(f"mi300x:{count}")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("mi355", "did you mean 'mi355x'?"),
        ("h10", "did you mean 'h100'?"),
        ("cpus", "did you mean 'cpu'?"),
        ("", "a100"),
    ],
)
def test_a_model_that_is_not_known_names_the_nearest(word: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"unknown GPU model '{word}'") as error:
        build_assumed_machine(word)
    assert hint in error.value.hint


GPUS = [model for model in profile.load_all_profiles() if model.vendor != "cpu"]


@pytest.mark.parametrize("model", GPUS, ids=lambda one: one.model)
def test_every_model_can_be_assumed(model: profile.Profile) -> None:
    device = build_assumed_machine(f"{profile.format_typed_name(model)}:1").devices[0]
    assert (device.model, device.architecture) == (model.model, model.architecture)
    found = profile.find_profile_by_name(device.name)
    assert found is not None and found.model == model.model
