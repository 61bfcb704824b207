"""The device of a worker process: its accelerator, or the CPU if requested or without one; its cache
and free memory."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch

from primus.errors import UnfitError
from primus.machine.accelerators import choose_device_type
from primus.machine.facts import DeviceKind
from primus.machine.host.kernel_counters import read_free_memory
from primus.measure.devices.memory import read_host_cache_bytes
from primus.process import count_usable_cpus

LARGEST_CACHE_BYTES = 256 * 2**20
"""Assumed for an unknown device: the Infinity Cache of AMD Instinct, the largest one (AMD CDNA 3 white paper)."""
HOST_SHARE = 0.1
"""Share of the host's free memory for the arrays of all its processes."""
QUICK_HOST_BYTES = 96 * 2**20
"""Limit of the arrays of one process on a CPU in quick mode; filling larger ones takes seconds."""
DEVICE_SHARE = 0.5
"""Share of a device's free memory."""


def own_device(local_rank: int, environ: Mapping[str, str], asked: DeviceKind = "auto") -> torch.device:
    """The device of the process `local_rank` of this node; it becomes the current device.

    Raises:
        UnfitError: The machine has accelerators that PyTorch cannot use, or fewer than processes.
    """
    num_visible = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    error = "" if num_visible or asked == "cpu" else _read_torch_error()
    if choose_device_type(asked, num_visible, environ, error) == "cpu":
        return torch.device("cpu")
    if local_rank >= num_visible:
        raise UnfitError(
            f"local rank {local_rank} has no device: {num_visible} visible",
            "start at most that many processes (--nproc), or check CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", local_rank)
    # Before the first allocation: otherwise every process would open a context on device 0.
    torch.cuda.set_device(device)
    return device


def _read_torch_error() -> str:
    """PyTorch's own error for why it sees no device."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return ""


def share_cores(environ: Mapping[str, str], num_local: int) -> None:
    """Divide the cores among the `num_local` processes of a node, unless $OMP_NUM_THREADS is set.

    torch starts one thread per core in every process otherwise, and they compete.
    """
    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(max(1, count_usable_cpus() // num_local))


def find_cache_bytes(device: torch.device, known_bytes: int | None) -> int:
    """Size of the last-level cache of `device`.

    Args:
        known_bytes: From the device's profile; None if it is not known.
    """
    if device.type == "cpu":
        return read_host_cache_bytes()
    return known_bytes or LARGEST_CACHE_BYTES


def find_free_bytes(device: torch.device) -> int:
    """Free memory of `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = read_free_memory()  # the limit of a container counts, which psutil does not know
    return int(psutil.virtual_memory().available) if free is None else free


def find_array_bytes(device: torch.device, num_local: int, *, is_quick: bool = False) -> int:
    """Memory for the arrays of this process, one of `num_local` on its node."""
    if device.type == "cuda":
        return int(find_free_bytes(device) * DEVICE_SHARE)
    found = int(find_free_bytes(device) * HOST_SHARE) // num_local
    return min(found, QUICK_HOST_BYTES) if is_quick else found
