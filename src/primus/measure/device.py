"""The device of a worker process: its accelerator, or the CPU if requested or if there is no accelerator."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from primus.errors import UnfitError
from primus.machine.accelerators import choose_device_type
from primus.machine.facts import DeviceKind


def own_device(local_rank: int, environ: Mapping[str, str], asked: DeviceKind = "auto") -> torch.device:
    """The device of the process `local_rank` of this node; it becomes the current device.

    Raises:
        UnfitError: The machine has accelerators that PyTorch cannot use, or fewer than processes.
    """
    num_visible = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    error = "" if num_visible or asked == "cpu" else _error_of_torch()
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


def _error_of_torch() -> str:
    """PyTorch's own error for why it sees no device."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return ""
