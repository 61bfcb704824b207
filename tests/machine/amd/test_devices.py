"""AMD cards are read from recorded KFD trees; the expected counts are those of the published trees."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from machines.tree import HERE, grow
from primus.machine.facts import MachineFacts
from primus.machine.probe import probe

NODES = "sys/class/kfd/kfd/topology/nodes"
MI300X_8 = HERE / "mi300x-8"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The root of a recorded machine, grown once."""
    grown: dict[str, Path] = {}

    def root(name: str) -> Path:
        if name not in grown:
            grown[name] = grow(name, tmp_path_factory.mktemp(name))
        return grown[name]

    return root


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the MI300X machine that a test may damage."""
    return Path(shutil.copytree(MI300X_8 / "sys", tmp_path / "sys", symlinks=True)).parent


def problems(facts: MachineFacts) -> str:
    return "\n".join(f"{problem.where}: {problem.problem}" for problem in facts.problems)


def buses(facts: MachineFacts) -> list[str]:
    return [str(device.bdf)[:-5].removeprefix("0000:") for device in facts.devices]


def kinds(facts: MachineFacts) -> dict[str, int]:
    return {kind: sum(link.kind == kind for link in facts.links) for kind in ("xgmi", "pcie", "nvlink")}


def test_eight_undivided_cards_are_eight_devices() -> None:
    facts = probe(MI300X_8)
    assert facts.model == "MI300X" and len(facts.devices) == len(facts.partitions) == 8
    device = facts.devices[0]
    assert (device.architecture, device.compute_units, device.memory_bytes) == ("gfx942", 304, 206141652992)
    assert (device.partition_mode, device.memory_mode, device.numa_node) == ("SPX", "NPS1", 0)
    assert (device.pcie.speed_gts, device.pcie.width, device.pcie.max_width) == (32.0, 16, 16)
    assert facts.devices[7].numa_node == 1
    assert kinds(facts)["xgmi"] == 28 and len({device.hive for device in facts.devices}) == 1
    assert not [problem for problem in facts.problems if "kfd" in problem.where or "GPU" in problem.where]
    assert device.sources["compute_units"] == "kfd" and device.sources["pcie"] == "pci"


def test_two_hives_of_four_are_no_mesh_of_eight(recorded: Callable[[str], Path]) -> None:
    facts = probe(recorded("mi210-two-hives"))
    assert facts.model == "MI210" and buses(facts) == ["63", "43", "03", "26", "e3", "c3", "83", "a3"]
    assert {(device.architecture, device.compute_units) for device in facts.devices} == {("gfx90a", 104)}
    hives = [device.hive for device in facts.devices]
    assert len(set(hives)) == 2 and hives.count(hives[0]) == 4
    assert kinds(facts) == {"xgmi": 12, "pcie": 16, "nvlink": 0}
    assert {link.bandwidth_mb_per_s for link in facts.links if link.kind == "xgmi"} == {50000}
    assert {link.bandwidth_mb_per_s for link in facts.links if link.kind == "pcie"} == {None}
    assert [part.render_minor for part in facts.partitions] == list(range(128, 136))
    assert {device.partition_mode for device in facts.devices} == {None}


def test_partitions_in_two_domains_are_grouped_into_cards(recorded: Callable[[str], Path]) -> None:
    facts = probe(recorded("mi308x-cpx"))
    assert facts.model == "MI308X" and len(facts.devices) == 8 and len(facts.partitions) == 32
    assert buses(facts) == ["0a", "80", "a4", "c8", "0001:0b", "0001:81", "0001:a5", "0001:c9"]
    assert {(device.compute_units, device.memory_bytes) for device in facts.devices} == {(80, 206141652992)}
    sizes = [part.memory_bytes for part in facts.devices[0].partitions]
    assert sizes == [51539607552] * 3 + [51522830336]
    assert sum(part.memory_bytes or 0 for part in facts.partitions) == 1649133223936
    assert {device.partition_mode for device in facts.devices} == {"CPX"}
    assert facts.partitions[-1].render_minor == 187
    assert kinds(facts) == {"xgmi": 28, "pcie": 0, "nvlink": 0} and facts.links[0].bandwidth_mb_per_s is None


def test_a_missing_partition_is_reported_with_its_card(recorded: Callable[[str], Path]) -> None:
    facts = probe(recorded("mi300x-cpx"))
    assert len(facts.partitions) == 63 and [len(device.partitions) for device in facts.devices] == [8] * 7 + [7]
    assert {part.compute_units for part in facts.partitions} == {38}
    assert [device.compute_units for device in facts.devices] == [304] * 7 + [266]
    assert [part.render_minor for part in facts.partitions] == list(range(128, 191))
    assert "GPU 7 (0000:e5:00.0): 7 of 8 partitions (CPX)" in problems(facts)
    assert facts.devices[0].memory_bytes is None and kinds(facts)["xgmi"] == 28


def test_two_nodes_with_one_address_are_a_problem(recorded: Callable[[str], Path]) -> None:
    facts = probe(recorded("vega10-copy"))
    assert len(facts.devices) == 2 and facts.model is None
    assert {(device.compute_units, device.memory_bytes) for device in facts.devices} == {(64, 17163091968)}
    assert "nodes 1, 2 have the same address 0000:19:00.0" in problems(facts)
    assert "nodes 1, 2 have the same gpu_id 13261" in problems(facts)


def test_an_mi355x_is_known_by_its_id(recorded: Callable[[str], Path]) -> None:
    facts = probe(recorded("mi355x-8"))
    assert facts.model == "MI355X"
    assert {(d.architecture, d.compute_units, d.memory_bytes) for d in facts.devices} == {("gfx950", 256, 294896 << 20)}


def test_both_dies_of_an_mi250x_are_one_card(broken: Path) -> None:
    for properties in (broken / NODES).glob("*/properties"):
        text = properties.read_text().replace("device_id 29857", "device_id 29704").replace("num_xcc 8", "num_xcc 1")
        properties.write_text(text.replace("simd_count 1216", "simd_count 440"))
    facts = probe(broken)
    assert facts.model == "MI250X" and len(facts.devices) == 4 and len(facts.partitions) == 8
    assert {device.compute_units for device in facts.devices} == {220}
    assert [part.index for part in facts.devices[1].partitions] == [2, 3]
    for node in range(2, 10):
        shutil.rmtree(broken / NODES / str(node) / "mem_banks")
    for file in (broken / "sys/bus/pci/devices").glob("*/mem_info_vram_total"):
        file.write_text(f"{65520 << 20}\n")
    assert {device.memory_bytes for device in probe(broken).devices} == {131040 << 20}
    shutil.rmtree(broken / NODES / "9")
    assert "one die of a GPU with 2" in problems(probe(broken))


def test_an_oems_name_does_not_change_the_model(broken: Path) -> None:
    (broken / "sys/bus/pci/devices/0000:05:00.0/product_name").write_text("AMD Radeon Graphics\n")
    device = probe(broken).devices[0]
    assert (device.model, device.name) == ("MI300X", "AMD Radeon Graphics")


def test_cards_without_a_driver_are_known_by_the_bus(broken: Path) -> None:
    shutil.rmtree(broken / "sys/class/kfd")
    facts = probe(broken)
    assert facts.model == "MI300X" and len(facts.devices) == 8 and not facts.partitions
    assert problems(facts).count("but the amdgpu driver is not loaded") == 8


def test_half_the_cards_gone_are_named(broken: Path) -> None:
    for node in range(6, 10):
        shutil.rmtree(broken / NODES / str(node))
    facts = probe(broken)
    assert len(facts.devices) == 8 and len(facts.partitions) == 4
    assert problems(facts).count("the GPU failed, fell off") == 4
    assert "0000:e5:00.0" in problems(facts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is missing or empty"),
        ("simd_count\n", "'simd_count' is not a key with a number"),
        ("simd_count many\n", "'simd_count many' is not a key with a number"),
        ("simd_count -4\n", "simd_count -4 is out of range"),
        (f"simd_count {10**30}\n", "is out of range"),
    ],
)
def test_damaged_properties_cost_one_card_and_are_told(broken: Path, text: str, said: str) -> None:
    (broken / NODES / "5/properties").write_text(text)
    facts = probe(broken)
    assert len(facts.partitions) == 7 and said in problems(facts)


def test_unreadable_properties_are_told(broken: Path) -> None:
    (broken / NODES / "5/properties").unlink()
    (broken / NODES / "5/properties").mkdir()
    facts = probe(broken)
    assert len(facts.partitions) == 7 and "nodes/5/properties: cannot be read" in problems(facts)


def test_a_link_that_one_side_does_not_know_is_told(broken: Path) -> None:
    for file in (broken / NODES / "2/io_links").glob("*/properties"):
        if "node_to 3\n" in file.read_text():
            file.unlink()
    assert "only one end reports the link of GPU 0 and GPU 1" in problems(probe(broken))


def test_a_tree_without_devices_has_none_and_no_problem(tmp_path: Path) -> None:
    node = tmp_path / NODES / "0"
    node.mkdir(parents=True)
    (node / "properties").write_text("cpu_cores_count 64\nsimd_count 0\n")
    facts = probe(tmp_path)
    assert facts.devices == () and facts.links == () and "kfd" not in problems(facts)


def test_a_degraded_link_shows_now_and_maximum(broken: Path) -> None:
    folder = broken / "sys/bus/pci/devices/0000:05:00.0"
    (folder / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("8\n")
    (folder / "max_link_width").write_text("255\n")
    pcie = probe(broken).devices[0].pcie
    assert (pcie.speed_gts, pcie.max_speed_gts, pcie.width, pcie.max_width) == (16.0, 32.0, 8, None)


def test_two_counts_of_memory_that_differ_are_both_told(broken: Path) -> None:
    (broken / "sys/bus/pci/devices/0000:05:00.0/mem_info_vram_total").write_text("103070826496\n")
    facts = probe(broken)
    assert facts.devices[0].memory_bytes == 206141652992
    assert "memory is 206141652992 B by kfd, 103070826496 B by drm" in problems(facts)


@pytest.mark.parametrize("name", ["mi300x-8", "mi308x-cpx", "mi300x-cpx"])
def test_a_probe_takes_at_most_100_ms_of_cpu(name: str, recorded: Callable[[str], Path]) -> None:
    root = MI300X_8 if name == "mi300x-8" else recorded(name)
    assert statistics.median(_cpu_s(root) for _ in range(5)) <= 0.1


def _cpu_s(root: Path) -> float:
    began = time.process_time()
    probe(root, {"PATH": os.defpath})
    return time.process_time() - began


def divided(root: Path, device_id: int, num_partitions: int, dies_each: int) -> MachineFacts:
    """A machine with one card in as many partitions."""
    for number in range(num_partitions):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number + 1}"
        node.mkdir(parents=True)
        (node / "properties").write_text(
            f"simd_count 16\nsimd_per_cu 4\ndevice_id {device_id}\nlocation_id {1280 + number}\n"
            f"unique_id 7\nnum_xcc {dies_each}\ngfx_target_version 90402\n"
        )
    return probe(root)


@pytest.mark.parametrize(
    ("device_id", "num_partitions", "dies_each", "mode"),
    [
        (0x74A0, 1, 6, "SPX"),
        (0x74A0, 3, 2, "TPX"),
        (0x74A0, 6, 1, "CPX"),
        (0x74A1, 2, 4, "DPX"),
        (0x74A1, 4, 2, "QPX"),
        (0x74A1, 8, 1, "CPX"),
        (0x74A2, 2, 2, "DPX"),
        (0x74A2, 4, 1, "CPX"),
        (0x75A3, 4, 2, "QPX"),
    ],
)
def test_the_mode_of_a_divided_card_follows_from_the_dies_of_its_partitions(
    device_id: int, num_partitions: int, dies_each: int, mode: str, tmp_path: Path
) -> None:
    facts = divided(tmp_path, device_id, num_partitions, dies_each)
    (card,) = facts.devices
    assert (card.partition_mode, len(card.partitions)) == (mode, num_partitions)
    assert not [problem for problem in facts.problems if "partitions" in problem.problem]


def test_a_card_in_three_partitions_that_shows_two_lacks_one(tmp_path: Path) -> None:
    facts = divided(tmp_path, 0x74A0, 2, 2)
    assert "2 of 3 partitions (TPX)" in [problem.problem for problem in facts.problems]
