"""Accelerators are counted from the kernel's files, limited by what the process may see."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.machine.devices import count_devices


def amd(root: Path, *simds: str) -> Path:
    for index, simd in enumerate(simds):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{index}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\nmem_banks_count 1\n")
    return root


def nvidia(root: Path, number: int) -> Path:
    for index in range(number):
        (root / f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0").mkdir(parents=True)
    return root


def test_a_machine_without_accelerators_has_none(tmp_path: Path) -> None:
    assert count_devices({}, tmp_path) == 0
    assert count_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_amd_devices_are_the_nodes_with_simds(tmp_path: Path) -> None:
    root = amd(tmp_path, "0", "0", "1216", "1216", "304")
    assert count_devices({}, root) == 3


def test_damaged_topology_files_count_nothing(tmp_path: Path) -> None:
    root = amd(tmp_path, "1216", "many")
    (root / "sys/class/kfd/kfd/topology/nodes/2/properties").mkdir(parents=True)
    (root / "sys/class/kfd/kfd/topology/nodes/3").mkdir()
    (root / "sys/class/kfd/kfd/topology/nodes/3/properties").write_bytes(b"simd_count \n\xff")
    assert count_devices({}, root) == 1


def test_nvidia_devices_are_the_folders_of_the_driver(tmp_path: Path) -> None:
    assert count_devices({}, nvidia(tmp_path, 2)) == 2


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,2,3"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8d1b,GPU-99aa"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ],
)
def test_nvidia_devices_are_limited_by_the_cuda_variable(tmp_path: Path, environ: dict[str, str], number: int) -> None:
    assert count_devices(environ, nvidia(tmp_path, 4)) == number


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, 1),
    ],
)
def test_amd_devices_are_limited_by_every_variable(tmp_path: Path, environ: dict[str, str], number: int) -> None:
    assert count_devices(environ, amd(tmp_path, *["1216"] * 4)) == number
