"""The host around the devices: processors, memory, limits, software, and who started us."""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from primus.machine.facts import Cpu, Limits, Memory, Software
from primus.machine.tree import Tree, as_int, natural
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
"""Variable that each scheduler sets in a job. The first counts: spur sets Slurm's as well (ROCm/spur), and a batch
scheduler inside a pod is the nearer one."""
CONTAINER_VARIABLES = {
    "APPTAINER_CONTAINER": "apptainer",
    "SINGULARITY_CONTAINER": "apptainer",
    "ENROOT_ROOTFS": "enroot",
    "KUBERNETES_SERVICE_HOST": "kubernetes",
}
CONTAINER_FILES = {".singularity.d/labels.json": "apptainer", "run/.containerenv": "podman", ".dockerenv": "docker"}
CONTAINER_GROUPS = {"kubepods": "kubernetes", "libpod": "podman", "docker": "docker"}
"""Part of a control group's path."""


def name(tree: Tree) -> str:
    """Name of the host; empty where nothing says it."""
    return tree.text("proc/sys/kernel/hostname") or tree.text("etc/hostname") or ""


def cpu(tree: Tree, environ: Mapping[str, str]) -> Cpu:
    """The processors. `usable` heeds the process's affinity (on the running machine) and its control group's quota."""
    text = tree.text("proc/cpuinfo") or ""
    sockets, cores = _sockets_and_cores(tree, text)
    threads = _online(tree) or len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or None
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    nodes = [node for node in tree.names("sys/devices/system/node") if re.fullmatch(r"node\d+", node)]
    return Cpu(
        model=model[1].strip() if model else _arm_model(text),
        architecture=_architecture(tree, text),
        sockets=sockets,
        cores=cores,
        threads=threads,
        usable=_usable(tree, threads),
        numa_nodes=len(nodes) or None,
        governors=_governors(tree),
    )


def _sockets_and_cores(tree: Tree, cpuinfo: str) -> tuple[int | None, int | None]:
    """By /proc/cpuinfo; on Arm, whose file tells neither, by the topology of each processor."""
    sockets = len(set(re.findall(r"^physical id\s*:\s*(\d+)", cpuinfo, re.MULTILINE)))
    per_socket = re.search(r"^cpu cores\s*:\s*(\d{1,9})$", cpuinfo, re.MULTILINE)
    if sockets:
        return sockets, int(per_socket[1]) * sockets if per_socket else None
    folders = [f"{CPUS}/{cpu}/topology" for cpu in tree.names(CPUS) if re.fullmatch(r"cpu\d+", cpu)]
    places = {(tree.text(f"{folder}/physical_package_id"), tree.text(f"{folder}/core_id")) for folder in folders}
    known = {place for place in places if place[0] and place[1]}
    return len({package for package, _ in known}) or None, len(known) or None


def _arm_model(cpuinfo: str) -> str:
    """Name of an Arm processor by its implementer and part; `unknown` where the table has none."""
    found = re.search(r"^CPU implementer\s*:\s*(0x[0-9a-f]+)$.*?^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.M | re.S)
    return ARM_PARTS.get((int(found[1], 16), int(found[2], 16)), "unknown") if found else "unknown"


def memory(tree: Tree) -> Memory:
    """Host memory, and the control group's limit where it is less than that."""
    values = {
        key: int(kib) * 1024
        for key, kib in re.findall(r"^(\w+):\s+(\d{1,18}) kB", tree.text("proc/meminfo") or "", re.MULTILINE)
    }
    total = values.get("MemTotal")
    limits = [as_int(text) for text in _group_files(tree, "memory", "memory.max", "memory.limit_in_bytes")]
    limit = min((limit for limit in limits if limit is not None), default=None)
    return Memory(
        total_bytes=total,
        available_bytes=values.get("MemAvailable"),
        swap_bytes=values.get("SwapTotal"),
        limit_bytes=limit if limit is not None and (total is None or limit < total) else None,
    )


def limits(tree: Tree) -> Limits:
    """Soft limits of this process; of a recorded machine, those of the process that recorded it."""
    if tree.is_live:
        return _live_limits(tree)
    text = tree.text("proc/self/limits")
    if text is None:
        tree.note("proc/self/limits", "is not there: limits are unknown")
        return Limits()
    tree.note("dev/shm", "its size is unknown on a recorded machine")
    return Limits(memlock_bytes=_recorded_limit(text, "locked memory"), nofile=_recorded_limit(text, "open files"))


def software(tree: Tree) -> Software:
    """Versions of what is installed, from files only."""
    kernel = tree.text("proc/sys/kernel/osrelease") or None
    return Software(
        os=_os(tree),
        kernel=kernel,
        boot_arguments=tree.text("proc/cmdline") or None,
        python=".".join(map(str, sys.version_info[:3])) if tree.is_live else None,
        amd_driver=_amd_driver(tree, kernel),
        nvidia_driver=_nvidia_driver(tree),
        rocm=_rocm(tree),
        cuda=_cuda(tree),
    )


def container(tree: Tree, environ: Mapping[str, str]) -> str | None:
    """What kind of container this process is in, if any."""
    for variable, kind in CONTAINER_VARIABLES.items():
        if environ.get(variable):
            return kind
    group = tree.text("proc/self/cgroup") or ""
    by_file = (kind for file, kind in CONTAINER_FILES.items() if tree.text(file) is not None)
    by_group = (kind for part, kind in CONTAINER_GROUPS.items() if part in group)
    found = next(by_group, None) or next(by_file, None)
    return found or ("enroot" if _is_enroot(tree) else environ.get("container") or None)


def scheduler(environ: Mapping[str, str]) -> str | None:
    """Who started this process, if it is a job."""
    return next((kind for variable, kind in SCHEDULERS.items() if environ.get(variable)), None)


def _online(tree: Tree) -> int:
    """Processors of a list such as ``0-95,192-287``."""
    text = tree.text(f"{CPUS}/online") or ""
    ranges = re.findall(r"\b(\d{1,9})(?:-(\d{1,9}))?\b", text)
    return sum(int(last or first) - int(first) + 1 for first, last in ranges)


def _architecture(tree: Tree, cpuinfo: str) -> str:
    if tree.is_live:
        return os.uname().machine
    if re.search(r"^flags\s*:.*\blm\b", cpuinfo, re.MULTILINE):
        return "x86_64"
    return "aarch64" if re.search(r"^CPU implementer\s*:", cpuinfo, re.MULTILINE) else "unknown"


def _usable(tree: Tree, threads: int | None) -> int | None:
    counts = [count_usable_cpus() if tree.is_live else threads]
    counts += [math.ceil(quota) for quota in _quotas(tree)]
    return min((count for count in counts if count), default=None)


def _quotas(tree: Tree) -> Iterator[float]:
    """Processors' time that each control group around this process allows, in processors."""
    for folder in _group_folders(tree, "cpu"):
        quota, _, period = (tree.text(f"{folder}/cpu.max") or "").partition(" ")
        quota = quota or tree.text(f"{folder}/cpu.cfs_quota_us") or ""
        period = period or tree.text(f"{folder}/cpu.cfs_period_us") or ""
        allowed, of = as_int(quota) or 0, as_int(period) or 0
        if allowed > 0 and of > 0:
            yield allowed / of


def _governors(tree: Tree) -> dict[str, int]:
    if not tree.names(f"{CPUS}/cpufreq"):
        return {}
    cpus = [cpu for cpu in tree.names(CPUS) if re.fullmatch(r"cpu\d+", cpu)]
    governors = [tree.text(f"{CPUS}/{cpu}/cpufreq/scaling_governor") for cpu in cpus]
    return dict(Counter(governor for governor in governors if governor))


def _group_files(tree: Tree, controller: str, *files: str) -> Iterator[str]:
    for folder in _group_folders(tree, controller):
        yield from (text for file in files if (text := tree.text(f"{folder}/{file}")))


def _group_folders(tree: Tree, controller: str) -> Iterator[str]:
    """Folders of the process's control group and of those around it, of version 2 and of a `controller` of version 1;
    inside a container its own group is mounted at the top."""
    for line in (tree.text("proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = f"{CGROUP}/{controller}" if controllers else CGROUP
        folder = PurePosixPath(path.lstrip("/"))
        if ".." not in folder.parts:
            yield from (f"{mount}/{part}" for part in (folder, *folder.parents) if str(part) != ".")
        yield mount


def _live_limits(tree: Tree) -> Limits:
    import resource

    def soft(kind: int) -> int | None:
        value = resource.getrlimit(kind)[0]
        return None if value == resource.RLIM_INFINITY else value

    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108  the device that PyTorch's data loaders share memory through
    except OSError as error:
        tree.note("dev/shm", f"its size is unknown: {error.strerror}")
        shm_bytes = None
    else:
        shm_bytes = shm.f_blocks * shm.f_frsize
    return Limits(memlock_bytes=soft(resource.RLIMIT_MEMLOCK), nofile=soft(resource.RLIMIT_NOFILE), shm_bytes=shm_bytes)


def _recorded_limit(text: str, what: str) -> int | None:
    match = re.search(rf"^Max {what}\s+(\d{{1,20}})\b", text, re.MULTILINE)
    return int(match[1]) if match else None


def _os(tree: Tree) -> str | None:
    text = tree.text("etc/os-release") or tree.text("usr/lib/os-release") or ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', text, re.MULTILINE)
    return match[1] if match else None


def _amd_driver(tree: Tree, kernel: str | None) -> str | None:
    """Version of the amdgpu module; the one that is part of the kernel has none of its own."""
    if not tree.names("sys/module/amdgpu"):
        return None
    return tree.text("sys/module/amdgpu/version") or f"in-tree {kernel or ''}".strip()


def _nvidia_driver(tree: Tree) -> str | None:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", (tree.text("proc/driver/nvidia/version") or "") + " ")
    return match[1] if match else tree.text("sys/module/nvidia/version") or None


def _rocm(tree: Tree) -> str | None:
    """Version of ROCm in /opt/rocm, else in the newest /opt/rocm-*; an installation of libraries only may have no file
    `version` but one for a part of it, or only its folder's name."""
    folders = [entry for entry in tree.names("opt") if re.fullmatch(r"rocm(-[\d.]+)?", entry)]
    for folder in _newest_first(folders):
        files = sorted(file for file in tree.names(f"opt/{folder}/.info") if file.startswith("version"))
        version = next((text for file in files if (text := tree.text(f"opt/{folder}/.info/{file}"))), None)
        if version or folder.startswith("rocm-"):
            return version or folder.removeprefix("rocm-")
    return None


def _newest_first(folders: list[str]) -> list[str]:
    """Folders such as `rocm`, which whoever installed it has chosen, and `rocm-6.2.0`."""
    return sorted(folders, key=lambda folder: ("-" not in folder, natural(folder)), reverse=True)


def _cuda(tree: Tree) -> str | None:
    folders = [entry for entry in tree.names("usr/local") if re.fullmatch(r"cuda(-[\d.]+)?", entry)]
    for folder in _newest_first(folders):
        text = tree.text(f"usr/local/{folder}/version.json") or tree.text(f"usr/local/{folder}/version.txt")
        match = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"|CUDA Version ([\d.]+)', text or "")
        if match:
            return match[1] or match[2]
    return None


def _is_enroot(tree: Tree) -> bool:
    """Whether the root of the file system is a folder of enroot, or of pyxis above it."""
    rows = [line.split() for line in (tree.text("proc/self/mountinfo") or "").splitlines()]
    return any(len(row) > 4 and row[4] == "/" and re.search("enroot|pyxis", row[3]) for row in rows)
