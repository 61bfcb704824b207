"""The host: processors, memory, limits, software, container and scheduler."""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from primus.machine.facts import Cpu, Limits, Memory, Software
from primus.machine.tree import FileTree, build_sort_key, parse_int
from primus.process import count_usable_cpus

CPUS = "sys/devices/system/cpu"
CGROUP = "sys/fs/cgroup"
ARM_PARTS = {
    (0x41, 0xD0C): "Arm Neoverse-N1",
    (0x41, 0xD40): "Arm Neoverse-V1",
    (0x41, 0xD49): "Arm Neoverse-N2",
    (0x41, 0xD4F): "Arm Neoverse-V2",
    (0x41, 0xD83): "Arm Neoverse-V3AE",
    (0x41, 0xD84): "Arm Neoverse-V3",
    (0x41, 0xD8E): "Arm Neoverse-N3",
    (0x46, 0x001): "Fujitsu A64FX",
    (0xC0, 0xAC3): "Ampere-1",
}
"""Server processors by implementer and part (util-linux sys-utils/lscpu-arm.c); Grace is a Neoverse-V2."""
SCHEDULERS = {
    "SPUR_JOB_ID": "spur",
    "SLURM_JOB_ID": "slurm",
    "PBS_JOBID": "pbs",
    "LSB_JOBID": "lsf",
    "FLUX_JOB_ID": "flux",
    "KUBERNETES_SERVICE_HOST": "kubernetes",
}
"""Variable that each scheduler sets in a job. The first match wins: spur also sets Slurm's (ROCm/spur), and inside a
pod a batch scheduler takes precedence."""
CONTAINER_VARIABLES = {
    "APPTAINER_CONTAINER": "apptainer",
    "SINGULARITY_CONTAINER": "apptainer",
    "ENROOT_ROOTFS": "enroot",
    "KUBERNETES_SERVICE_HOST": "kubernetes",
}
CONTAINER_FILES = {".singularity.d/labels.json": "apptainer", "run/.containerenv": "podman", ".dockerenv": "docker"}
CONTAINER_GROUPS = {"kubepods": "kubernetes", "libpod": "podman", "docker": "docker"}
"""Part of a control group's path."""


def read_host_name(tree: FileTree) -> str:
    """Host name; empty if unknown."""
    return tree.read_text("proc/sys/kernel/hostname") or tree.read_text("etc/hostname") or ""


def read_cpu(tree: FileTree, environ: Mapping[str, str]) -> Cpu:
    """The processors. `usable` respects the process's affinity (on the running machine) and its control group's
    quota."""
    text = tree.read_text("proc/cpuinfo") or ""
    sockets, cores = _count_sockets_and_cores(tree, text)
    threads = _count_online_cpus(tree) or len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or None
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    nodes = [node for node in tree.list_names("sys/devices/system/node") if re.fullmatch(r"node\d+", node)]
    return Cpu(
        model=model[1].strip() if model else _find_arm_model(text),
        architecture=_read_architecture(tree, text),
        sockets=sockets,
        cores=cores,
        threads=threads,
        usable=_count_usable_cpus(tree, threads),
        numa_nodes=len(nodes) or None,
        governors=_count_governors(tree),
    )


def _count_sockets_and_cores(tree: FileTree, cpuinfo: str) -> tuple[int | None, int | None]:
    """Sockets and cores from /proc/cpuinfo; on Arm, which lacks them there, from the topology of each processor."""
    sockets = len(set(re.findall(r"^physical id\s*:\s*(\d+)", cpuinfo, re.MULTILINE)))
    per_socket = re.search(r"^cpu cores\s*:\s*(\d{1,9})$", cpuinfo, re.MULTILINE)
    if sockets:
        return sockets, int(per_socket[1]) * sockets if per_socket else None
    folders = [f"{CPUS}/{cpu}/topology" for cpu in tree.list_names(CPUS) if re.fullmatch(r"cpu\d+", cpu)]
    places = {
        (tree.read_text(f"{folder}/physical_package_id"), tree.read_text(f"{folder}/core_id")) for folder in folders
    }
    known = {place for place in places if place[0] and place[1]}
    return len({package for package, _ in known}) or None, len(known) or None


def _find_arm_model(cpuinfo: str) -> str:
    """Name of an Arm processor by its implementer and part; `unknown` if the table lacks it."""
    found = re.search(r"^CPU implementer\s*:\s*(0x[0-9a-f]+)$.*?^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.M | re.S)
    return ARM_PARTS.get((int(found[1], 16), int(found[2], 16)), "unknown") if found else "unknown"


def read_memory(tree: FileTree) -> Memory:
    """Host memory, and the control group's limit if it is less than that."""
    values = {
        key: int(kib) * 1024
        for key, kib in re.findall(r"^(\w+):\s+(\d{1,18}) kB", tree.read_text("proc/meminfo") or "", re.MULTILINE)
    }
    total = values.get("MemTotal")
    limits = [parse_int(text) for text in _read_group_files(tree, "memory", "memory.max", "memory.limit_in_bytes")]
    limit = min((limit for limit in limits if limit is not None), default=None)
    return Memory(
        total_bytes=total,
        available_bytes=values.get("MemAvailable"),
        swap_bytes=values.get("SwapTotal"),
        limit_bytes=limit if limit is not None and (total is None or limit < total) else None,
    )


def read_limits(tree: FileTree) -> Limits:
    """Soft limits of this process; of a recorded machine, those of the process that recorded it."""
    if tree.is_live:
        return _read_live_limits(tree)
    text = tree.read_text("proc/self/limits")
    if text is None:
        tree.note_problem("proc/self/limits", "does not exist: limits are unknown")
        return Limits()
    tree.note_problem("dev/shm", "its size is unknown on a recorded machine")
    return Limits(
        memlock_bytes=_read_recorded_limit(text, "locked memory"), nofile=_read_recorded_limit(text, "open files")
    )


def read_software(tree: FileTree) -> Software:
    """Versions of installed software, from files only."""
    kernel = tree.read_text("proc/sys/kernel/osrelease") or None
    return Software(
        os=_read_os_name(tree),
        kernel=kernel,
        boot_arguments=tree.read_text("proc/cmdline") or None,
        python=".".join(map(str, sys.version_info[:3])) if tree.is_live else None,
        amd_driver=_read_amd_driver(tree, kernel),
        nvidia_driver=_read_nvidia_driver(tree),
        rocm=_find_rocm_version(tree),
        cuda=_find_cuda_version(tree),
    )


def detect_container(tree: FileTree, environ: Mapping[str, str]) -> str | None:
    """Kind of container that this process runs in, if any."""
    for variable, kind in CONTAINER_VARIABLES.items():
        if environ.get(variable):
            return kind
    group = tree.read_text("proc/self/cgroup") or ""
    by_file = (kind for file, kind in CONTAINER_FILES.items() if tree.read_text(file) is not None)
    by_group = (kind for part, kind in CONTAINER_GROUPS.items() if part in group)
    found = next(by_group, None) or next(by_file, None)
    return found or ("enroot" if _is_enroot(tree) else environ.get("container") or None)


def detect_scheduler(environ: Mapping[str, str]) -> str | None:
    """Scheduler that started this process, if any."""
    return next((kind for variable, kind in SCHEDULERS.items() if environ.get(variable)), None)


def _count_online_cpus(tree: FileTree) -> int:
    """Processors of a list such as ``0-95,192-287``."""
    text = tree.read_text(f"{CPUS}/online") or ""
    ranges = re.findall(r"\b(\d{1,9})(?:-(\d{1,9}))?\b", text)
    return sum(int(last or first) - int(first) + 1 for first, last in ranges)


def _read_architecture(tree: FileTree, cpuinfo: str) -> str:
    if tree.is_live:
        return os.uname().machine
    if re.search(r"^flags\s*:.*\blm\b", cpuinfo, re.MULTILINE):
        return "x86_64"
    return "aarch64" if re.search(r"^CPU implementer\s*:", cpuinfo, re.MULTILINE) else "unknown"


def _count_usable_cpus(tree: FileTree, threads: int | None) -> int | None:
    counts = [count_usable_cpus() if tree.is_live else threads]
    counts += [math.ceil(quota) for quota in _read_cpu_quotas(tree)]
    return min((count for count in counts if count), default=None)


def _read_cpu_quotas(tree: FileTree) -> Iterator[float]:
    """Processors' time that each control group around this process allows, in processors."""
    # Each group around the process may limit it: the caller uses the smallest quota. Version 2 has both values in one
    # file.
    for folder in _list_group_folders(tree, "cpu"):
        quota, _, period = (tree.read_text(f"{folder}/cpu.max") or "").partition(" ")
        quota = quota or tree.read_text(f"{folder}/cpu.cfs_quota_us") or ""
        period = period or tree.read_text(f"{folder}/cpu.cfs_period_us") or ""
        allowed, of = parse_int(quota) or 0, parse_int(period) or 0
        if allowed > 0 and of > 0:
            yield allowed / of


def _count_governors(tree: FileTree) -> dict[str, int]:
    if not tree.list_names(f"{CPUS}/cpufreq"):
        return {}
    cpus = [cpu for cpu in tree.list_names(CPUS) if re.fullmatch(r"cpu\d+", cpu)]
    governors = [tree.read_text(f"{CPUS}/{cpu}/cpufreq/scaling_governor") for cpu in cpus]
    return dict(Counter(governor for governor in governors if governor))


def _read_group_files(tree: FileTree, controller: str, *files: str) -> Iterator[str]:
    for folder in _list_group_folders(tree, controller):
        yield from (text for file in files if (text := tree.read_text(f"{folder}/{file}")))


def _list_group_folders(tree: FileTree, controller: str) -> Iterator[str]:
    """Folders of the process's control group and of those around it, of version 2 and of a `controller` of version 1;
    inside a container its own group is mounted at the root."""
    for line in (tree.read_text("proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = f"{CGROUP}/{controller}" if controllers else CGROUP
        folder = PurePosixPath(path.lstrip("/"))
        if ".." not in folder.parts:
            yield from (f"{mount}/{part}" for part in (folder, *folder.parents) if str(part) != ".")
        yield mount


def _read_live_limits(tree: FileTree) -> Limits:
    import resource

    def soft(kind: int) -> int | None:
        value = resource.getrlimit(kind)[0]
        return None if value == resource.RLIM_INFINITY else value

    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108  the device that PyTorch's data loaders share memory through
    except OSError as error:
        tree.note_problem("dev/shm", f"its size is unknown: {error.strerror}")
        shm_bytes = None
    else:
        shm_bytes = shm.f_blocks * shm.f_frsize
    return Limits(memlock_bytes=soft(resource.RLIMIT_MEMLOCK), nofile=soft(resource.RLIMIT_NOFILE), shm_bytes=shm_bytes)


def _read_recorded_limit(text: str, what: str) -> int | None:
    match = re.search(rf"^Max {what}\s+(\d{{1,20}})\b", text, re.MULTILINE)
    return int(match[1]) if match else None


def _read_os_name(tree: FileTree) -> str | None:
    text = tree.read_text("etc/os-release") or tree.read_text("usr/lib/os-release") or ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', text, re.MULTILINE)
    return match[1] if match else None


def _read_amd_driver(tree: FileTree, kernel: str | None) -> str | None:
    """Version of the amdgpu module; the in-tree module has the kernel's."""
    if not tree.list_names("sys/module/amdgpu"):
        return None
    return tree.read_text("sys/module/amdgpu/version") or f"in-tree {kernel or ''}".strip()


def _read_nvidia_driver(tree: FileTree) -> str | None:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", (tree.read_text("proc/driver/nvidia/version") or "") + " ")
    return match[1] if match else tree.read_text("sys/module/nvidia/version") or None


def _find_rocm_version(tree: FileTree) -> str | None:
    """Version of ROCm in /opt/rocm, else in the newest /opt/rocm-*; a runtime-only installation may lack the file
    `version` and have one for a component, or only the directory's name."""
    folders = [entry for entry in tree.list_names("opt") if re.fullmatch(r"rocm(-[\d.]+)?", entry)]
    for folder in _sort_newest_first(folders):
        files = sorted(file for file in tree.list_names(f"opt/{folder}/.info") if file.startswith("version"))
        version = next((text for file in files if (text := tree.read_text(f"opt/{folder}/.info/{file}"))), None)
        if version or folder.startswith("rocm-"):
            return version or folder.removeprefix("rocm-")
    return None


def _sort_newest_first(folders: list[str]) -> list[str]:
    """Directories: `rocm`, the administrator's choice, and those such as `rocm-6.2.0`."""
    return sorted(folders, key=lambda folder: ("-" not in folder, build_sort_key(folder)), reverse=True)


def _find_cuda_version(tree: FileTree) -> str | None:
    folders = [entry for entry in tree.list_names("usr/local") if re.fullmatch(r"cuda(-[\d.]+)?", entry)]
    for folder in _sort_newest_first(folders):
        text = tree.read_text(f"usr/local/{folder}/version.json") or tree.read_text(f"usr/local/{folder}/version.txt")
        match = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"|CUDA Version ([\d.]+)', text or "")
        if match:
            return match[1] or match[2]
    return None


def _is_enroot(tree: FileTree) -> bool:
    """Whether the root file system is a directory of enroot or pyxis."""
    rows = [line.split() for line in (tree.read_text("proc/self/mountinfo") or "").splitlines()]
    return any(len(row) > 4 and row[4] == "/" and re.search("enroot|pyxis", row[3]) for row in rows)
