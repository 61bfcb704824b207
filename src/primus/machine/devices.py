"""The accelerators that a process may use: their number from a few files, or the devices from the facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path

from primus.machine.facts import MachineFacts, Partition
from primus.machine.tree import LARGEST, parse_int

AMD_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that limit what a process sees of AMD devices: the ROCm runtime applies all three, one after the other."""
NVIDIA_VISIBLE = ("CUDA_VISIBLE_DEVICES",)
MIG = "MIG"
"""Partition mode of an NVIDIA GPU in MIG mode."""


def count_devices(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Number of AMD or NVIDIA devices that a process may use; 0 on a machine without any.

    AMD devices are the nodes of the kernel's KFD topology that have SIMDs; NVIDIA devices are the folders of the
    driver's /proc/driver/nvidia/gpus. On a machine with both, AMD devices count
    only if a profile describes one; otherwise they are integrated graphics, as in `probe`.

    Args:
        environ: Where the `*_VISIBLE_DEVICES` variables are looked up.
        root: Root of the file system, another folder in tests.
    """
    amd, nvidia = _read_amd_device_ids(root), _count_nvidia_devices(root)
    is_amd = bool(amd) and (not nvidia or _has_instinct(amd))
    if not is_amd and nvidia and _list_mig_minors(root):
        return _count_mig_devices(environ, root, nvidia)
    limits = [
        _count_listed_devices(environ[name]) for name in (AMD_VISIBLE if is_amd else NVIDIA_VISIBLE) if name in environ
    ]
    return min([len(amd) if is_amd else nvidia, *limits])


def _count_mig_devices(environ: Mapping[str, str], root: Path, gpus: int) -> int:
    """Number of devices that CUDA shows: the GPUs without MIG; if all have MIG, one instance, unless instances are
    selected by UUID."""
    whole = gpus - len(_list_mig_minors(root))
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return whole or 1
    words = [word.strip() for word in text.split(",")]
    parts = next((index for index, word in enumerate(words) if not word.upper().startswith("MIG-")), len(words))
    return parts or min(_count_listed_devices(text), whole or 1)


def _list_mig_minors(root: Path) -> set[str]:
    """Minor numbers of the NVIDIA GPUs that have MIG compute instances."""
    instances = root.glob("proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*")
    return {path.parts[-4] for path in instances}


def list_usable_devices(facts: MachineFacts, environ: Mapping[str, str]) -> tuple[Partition, ...]:
    """Devices that a process may use, in its own numbering; each variable selects from what the previous one left.

    A list ends at its first invalid entry: an unknown index or UUID, or a repeated one
    (CUDA programming guide, environment variables; ROCm, GPU isolation techniques).
    """
    # A container may not see how the GPUs are divided, but the instances that it may use.
    names_instances = environ.get("CUDA_VISIBLE_DEVICES", "").strip().upper().startswith("MIG-")
    if names_instances or any(device.partition_mode == MIG for device in facts.devices):
        return _list_usable_mig_parts(facts, environ)
    if not facts.devices:
        return ()
    found = facts.partitions
    is_amd = any(device.vendor == "amd" for device in facts.devices)
    for name in AMD_VISIBLE if is_amd else NVIDIA_VISIBLE:
        if name in environ:
            found = _choose_partitions(found, environ[name])
    return found


def _list_usable_mig_parts(facts: MachineFacts, environ: Mapping[str, str]) -> tuple[Partition, ...]:
    """Devices that CUDA shows if some NVIDIA GPUs have MIG: instances selected by UUID, GPUs without MIG, or one
    instance of the GPUs with MIG (NVIDIA MIG user guide, CUDA device enumeration)."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    words = [word.strip() for word in (text or "").split(",")]
    named = list(takewhile(lambda word: word.upper().startswith("MIG-"), words))
    if named:
        return tuple(_find_mig_part(facts, word, index) for index, word in enumerate(dict.fromkeys(named)))
    whole = tuple(part for device in facts.devices if device.partition_mode != MIG for part in device.partitions)
    found = whole or facts.partitions[:1]
    return found if text is None else _choose_partitions(found, text)


def _find_mig_part(facts: MachineFacts, word: str, index: int) -> Partition:
    """A MIG instance by its own UUID, or in the older form by its GPU's: MIG-GPU-UUID/INSTANCE/INSTANCE."""
    gpu = word[4:].partition("/")[0].lower()
    parents = [device for device in facts.devices if device.uuid and device.uuid.lower() == gpu]
    return Partition(index=index, bdf=parents[0].bdf if parents else None, uuid=word)


def _choose_partitions(found: tuple[Partition, ...], text: str) -> tuple[Partition, ...]:
    chosen: list[Partition] = []
    for word in text.split(","):
        named = _find_partition(found, word.strip())
        if named is None or named in chosen:
            break
        chosen.append(named)
    return tuple(chosen)


def _find_partition(found: tuple[Partition, ...], word: str) -> Partition | None:
    """The device of an index, a UUID or an unambiguous UUID prefix."""
    if word.isdecimal():
        index = parse_int(word)
        return found[index] if index is not None and index < len(found) else None
    uuid = word.lower().removeprefix("gpu-")
    matching = [part for part in found if uuid and (part.uuid or "").lower().removeprefix("gpu-").startswith(uuid)]
    return matching[0] if len(matching) == 1 and word.lower().startswith("gpu-") else None


def _count_listed_devices(text: str) -> int:
    """Devices in the value of a variable, up to the first invalid entry, as in the runtimes."""
    words = [word.strip() for word in text.split(",")]
    return next((index for index, word in enumerate(words) if word in ("", "-1", "NoDevFiles")), len(words))


def _read_amd_device_ids(root: Path) -> list[int]:
    """PCI device id of each node that computes."""
    nodes = [_read_numbers(file) for file in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")]
    return [node.get("device_id", 0) for node in nodes if 0 < node.get("simd_count", 0) < LARGEST]


def _read_numbers(file: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in file.read_text(errors="replace").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and re.fullmatch(r"\d{1,40}", line[1])}


def _has_instinct(device_ids: Iterable[int]) -> bool:
    from primus.machine import profile  # rarely needed: most machines have GPUs of one vendor

    return any(profile.find_profile_by_id("amd", number) for number in device_ids)


def _count_nvidia_devices(root: Path) -> int:
    return sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*"))
