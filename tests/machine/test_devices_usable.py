"""What a process may use follows the visibility variables as the runtimes apply them."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines.tree import HERE, grow
from primus.machine.devices import count_devices, list_usable_devices
from primus.machine.facts import Device, MachineFacts, Partition, Vendor
from primus.machine.probe import probe


def machine(vendor: Vendor, *uuids: str) -> MachineFacts:
    parts = [Partition(index=index, uuid=uuid) for index, uuid in enumerate(uuids)]
    return MachineFacts(devices=tuple(Device(index=p.index, vendor=vendor, partitions=(p,)) for p in parts))


AMD = machine("amd", "3cbe002bd3b644c5", "3cbe002bd3b648ad", "7fde002bd3b64c95", "9abc002bd3b6507d")
NVIDIA = machine("nvidia", "GPU-8d1b0f3e-0000", "GPU-8d1b99aa-0000", "GPU-99aa0000-0000")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "3,1,0", "HIP_VISIBLE_DEVICES": "1,2"}, [1, 0]),
        ({"ROCR_VISIBLE_DEVICES": "3,1,0", "HIP_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "1"}, [0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-7fde002bd3b64c95,0"}, [2, 0]),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"HIP_VISIBLE_DEVICES": "1,1,2"}, [1]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_amd_variables_choose_one_after_the_other(environ: dict[str, str], expected: list[int]) -> None:
    assert [part.index for part in list_usable_devices(AMD, environ)] == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2,0", [2, 0]),
        ("GPU-99aa,1", [2, 1]),
        ("GPU-8d1b,2", []),  # fits two devices
        ("99aa", []),
        ("GPU-", []),
        ("NoDevFiles", []),
    ],
)
def test_nvidia_takes_indexes_and_beginnings_of_uuids(value: str, expected: list[int]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value, "ROCR_VISIBLE_DEVICES": "0"}
    assert [part.index for part in list_usable_devices(NVIDIA, environ)] == expected


def test_a_machine_without_devices_offers_none() -> None:
    assert list_usable_devices(MachineFacts(), {"CUDA_VISIBLE_DEVICES": "0"}) == ()


RECORDED = sorted(file.stem for file in HERE.glob("*.txt"))
LISTS = ({}, {"ROCR_VISIBLE_DEVICES": "0,1,2"}, {"CUDA_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("name", RECORDED)
def test_the_cheap_count_agrees_with_the_facts_of_every_recorded_machine(name: str, tmp_path: Path) -> None:
    root = grow(name, tmp_path)
    facts = probe(root)
    for environ in LISTS:
        assert count_devices(environ, root) == len(list_usable_devices(facts, environ)), environ


@pytest.mark.parametrize("simds", ["8", "1" + "0" * 30])
def test_the_processors_graphics_beside_nvidia_devices_are_not_counted(simds: str, tmp_path: Path) -> None:
    root = grow("h100-8", tmp_path)
    node = root / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "properties").write_text(f"simd_count {simds}\nsimd_per_cu 4\nvendor_id 4098\ndevice_id 5710\n")
    facts = probe(root)
    for environ in LISTS:
        assert count_devices(environ, root) == len(list_usable_devices(facts, environ)), environ
    assert count_devices({}, root) == 8


def divided(tmp_path: Path, *minors: int) -> Path:
    """Eight H100, of which some are divided into two parts that compute."""
    root = grow("h100-8", tmp_path)
    for number, folder in enumerate(sorted((root / "proc/driver/nvidia/gpus").iterdir())):
        with (folder / "information").open("a") as file:
            file.write(f"Device Minor: \t {number}\n")
    for minor in minors:
        for instance in ("gi1/ci0", "gi2/ci0"):
            part = root / f"proc/driver/nvidia/capabilities/gpu{minor}/mig/{instance}"
            part.mkdir(parents=True)
            (part / "access").write_text("DeviceFileMinor: 12\n")
    return root


@pytest.mark.parametrize(
    ("minors", "visible", "number"),
    [
        (range(8), None, 1),
        (range(8), "MIG-4a5b6c7d-0000-0000-0000-000000000000", 1),
        (range(8), "MIG-GPU-8d1b0f3e-0000/1/0", 1),
        (range(8), "MIG-4a5b6c7d-0000,MIG-4a5b6c7d-0001", 2),
        ([0], None, 7),
        ([0], "1,2", 2),
        ([], "MIG-4a5b6c7d-0000-0000-0000-000000000000", 1),
        ([], None, 8),
    ],
)
def test_a_part_of_a_divided_card_is_a_device(
    tmp_path: Path, minors: list[int], visible: str | None, number: int
) -> None:
    root = divided(tmp_path, *minors)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    facts = probe(root)
    assert [device.partition_mode == "MIG" for device in facts.devices] == [index in minors for index in range(8)]
    assert len(list_usable_devices(facts, environ)) == count_devices(environ, root) == number
