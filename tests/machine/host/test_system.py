"""What is said of the host comes from its own files, and what is not known stays open."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from machines.tree import HERE
from primus.machine.host import system as host
from primus.machine.network import interfaces, rdma
from primus.machine.tree import FileTree

RECORDED = HERE / "mi300x-8"


def tree_of(root: Path, **files: str) -> FileTree:
    """A tree with files whose names' slashes are written as `__`."""
    for name, text in files.items():
        write(root, name.replace("__", "/"), text)
    return FileTree(root)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_recorded_host_tells_its_processors() -> None:
    cpu = host.read_cpu(FileTree(RECORDED), {})
    assert cpu.model == "AMD EPYC 9654 96-Core Processor" and cpu.architecture == "x86_64"
    assert (cpu.sockets, cpu.cores, cpu.threads, cpu.usable, cpu.numa_nodes) == (2, 192, 192, 192, 2)
    assert cpu.governors == {"performance": 4}


def test_a_processor_of_arm_is_told_by_its_part_and_its_topology(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    each = "processor\t: {}\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd4f\n\n"
    (tmp_path / "proc/cpuinfo").write_text("".join(each.format(number) for number in range(8)))
    for number in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{number // 4}\n")
        (folder / "core_id").write_text(f"{number % 4}\n")
    found = host.read_cpu(FileTree(tmp_path), {})
    assert (found.model, found.architecture) == ("Arm Neoverse-V2", "aarch64")
    assert (found.sockets, found.cores, found.threads) == (2, 8, 8)


def test_every_processors_governor_counts(tmp_path: Path) -> None:
    for number, governor in enumerate(["performance", "powersave", "performance"]):
        write(tmp_path, f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor", governor)
    write(tmp_path, "sys/devices/system/cpu/cpufreq/policy0/affected_cpus", "0")
    assert host.read_cpu(FileTree(tmp_path), {}).governors == {"performance": 2, "powersave": 1}


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"job/cpu.max": "400000 100000", "cpu.max": "200000 100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/job/cpu.cfs_quota_us": "500000", "cpu/job/cpu.cfs_period_us": "100000"}, 5),
        ({"cpu.max": "N/A"}, 8),
    ],
)
def test_a_control_groups_quota_limits_what_is_usable(tmp_path: Path, files: dict[str, str], usable: int) -> None:
    tree = tree_of(tmp_path, sys__devices__system__cpu__online="0-5,8-9", proc__self__cgroup="3:cpu:/job\n0::/job\n")
    for path, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{path}", text)
    cpu = host.read_cpu(tree, {})
    assert (cpu.threads, cpu.usable) == (8, usable)


def test_memory_is_in_bytes() -> None:
    memory = host.read_memory(FileTree(RECORDED))
    assert memory.total_bytes == 2377907744 * 1024
    assert memory.swap_bytes == 8388604 * 1024 and memory.limit_bytes is None


@pytest.mark.parametrize(
    ("path", "text", "limit"),
    [
        ("memory.max", "max", None),
        ("job/memory.max", "1073741824", 1 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712", None),
        ("memory/job/memory.limit_in_bytes", "2147483648", 2 << 30),
    ],
)
def test_a_memory_limit_counts_where_it_is_one(tmp_path: Path, path: str, text: str, limit: int | None) -> None:
    tree = tree_of(tmp_path, proc__meminfo="MemTotal: 8388608 kB\n", proc__self__cgroup="4:memory:/job\n0::/job\n")
    write(tmp_path, f"sys/fs/cgroup/{path}", text)
    assert host.read_memory(tree).limit_bytes == limit


def test_recorded_limits_are_those_of_the_process_that_recorded() -> None:
    tree = FileTree(RECORDED)
    limits = host.read_limits(tree)
    assert limits.memlock_bytes is None and limits.nofile == 1048576
    assert [problem.where for problem in tree.problems] == ["/dev/shm"]


def test_unknown_limits_are_a_problem(tmp_path: Path) -> None:
    tree = FileTree(tmp_path)
    host.read_limits(tree)
    assert "unknown" in tree.problems[0].problem


def test_the_running_machines_limits_are_the_processs() -> None:
    limits = host.read_limits(FileTree())
    assert limits.nofile == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.shm_bytes is None or limits.shm_bytes > 0
    assert 1 <= (host.read_cpu(FileTree(), {}).usable or 0) <= len(os.sched_getaffinity(0))


def test_software_is_told_from_files() -> None:
    software = host.read_software(FileTree(RECORDED))
    assert (software.os, software.kernel) == ("Ubuntu 22.04.4 LTS", "5.15.0-116-generic")
    assert (software.amd_driver, software.rocm) == ("6.8.5", "6.2.0-66")
    assert "iommu=pt" in (software.boot_arguments or "")
    assert (software.nvidia_driver, software.cuda) == (None, None)


def test_a_driver_of_the_kernels_own_is_called_so(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, proc__sys__kernel__osrelease="6.8.0", sys__module__amdgpu__refcnt="1")
    assert host.read_software(tree).amd_driver == "in-tree 6.8.0"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57  Release Build", "575.57"),
        ("garbage", None),
    ],
)
def test_the_nvidia_driver_is_known(tmp_path: Path, text: str, version: str | None) -> None:
    assert host.read_software(tree_of(tmp_path, proc__driver__nvidia__version=text)).nvidia_driver == version


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"rocm/.info/version": "6.4.1-83", "rocm-6.2.0/.info/version": "6.2.0-66"}, "6.4.1-83"),
        ({"rocm-6.2.0/.info/version": "6.2.0-66", "rocm-6.10.0/.info/version": "6.10.0-1"}, "6.10.0-1"),
        ({"rocm/.info/version-hip-libraries": "7.0.2-56"}, "7.0.2-56"),
        ({"rocm-7.1.0/lib/libamdhip64.so": ""}, "7.1.0"),
        ({"rocm/lib/libamdhip64.so": ""}, None),
    ],
)
def test_rocm_is_found_wherever_it_is(tmp_path: Path, files: dict[str, str], version: str | None) -> None:
    for path, text in files.items():
        write(tmp_path, f"opt/{path}", text)
    assert host.read_software(FileTree(tmp_path)).rocm == version


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.4.20240223"}, "x": {}}'}, "12.4.20240223"),
        ({"cuda/version.txt": "CUDA Version 10.2.89\n"}, "10.2.89"),
        ({"cuda-11.8/version.json": '{"cuda": {"version": "11.8.1"}}'}, "11.8.1"),
        ({"cuda/version.json": '{"cuda": '}, None),
    ],
)
def test_cuda_is_found_wherever_it_is(tmp_path: Path, files: dict[str, str], version: str | None) -> None:
    for path, text in files.items():
        write(tmp_path, f"usr/local/{path}", text)
    assert host.read_software(FileTree(tmp_path)).cuda == version


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, None),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"proc/self/cgroup": "0::/kubepods/besteffort/pod1"}, {}, "kubernetes"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({}, {"SINGULARITY_CONTAINER": "/x.sif"}, "apptainer"),
        ({"proc/self/mountinfo": "5 4 8:1 /data/enroot/pyxis_1 / rw - xfs /dev/sda rw"}, {}, "enroot"),
        ({"proc/self/mountinfo": "5 4 8:1 / / rw - xfs /dev/sda rw"}, {}, None),
        ({}, {"container": "lxc"}, "lxc"),
    ],
)
def test_the_container_around_is_known(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str | None
) -> None:
    for path, text in files.items():
        write(tmp_path, path, text)
    assert host.detect_container(FileTree(tmp_path), environ) == kind


@pytest.mark.parametrize(
    ("variable", "kind"),
    [
        ("SLURM_JOB_ID", "slurm"),
        ("KUBERNETES_SERVICE_HOST", "kubernetes"),
        ("PBS_JOBID", "pbs"),
        ("LSB_JOBID", "lsf"),
        ("FLUX_JOB_ID", "flux"),
        ("HOME", None),
    ],
)
def test_the_scheduler_is_known_by_its_job(variable: str, kind: str | None) -> None:
    assert host.detect_scheduler({variable: "1"}) == kind


def test_spur_is_not_taken_for_slurm_and_a_job_in_a_pod_is_a_job() -> None:
    assert host.detect_scheduler({"SLURM_JOB_ID": "4", "SPUR_JOB_ID": "4"}) == "spur"
    assert host.detect_scheduler({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": "4"}) == "slurm"


def test_an_empty_machine_is_unknown_rather_than_wrong(tmp_path: Path) -> None:
    tree = FileTree(tmp_path)
    cpu = host.read_cpu(tree, {})
    assert (cpu.model, cpu.sockets, cpu.cores, cpu.threads, cpu.usable, cpu.governors) == (
        "unknown", None, None, None, None, {},
    )  # fmt: skip
    assert host.read_memory(tree).total_bytes is None
    assert host.read_software(tree) == host.Software()
    assert host.read_host_name(tree) == ""
    assert tree.problems == []


def test_reading_a_host_takes_little_time() -> None:
    def read() -> None:
        tree = FileTree(RECORDED)
        interfaces.find_route(tree, interfaces.list_interfaces(tree), "10.10.0.12")
        rdma.read_rdma_devices(tree)
        (
            host.read_cpu(tree, {}),
            host.read_memory(tree),
            host.read_limits(tree),
            host.read_software(tree),
            host.detect_container(tree, {}),
        )

    read()
    times = []
    for _ in range(5):
        start = time.process_time()
        read()
        times.append(time.process_time() - start)
    assert min(times) < 0.03
