"""torchtitan: PyTorch's own parallelism, with Primus-Turbo's kernels on AMD."""

from __future__ import annotations

from primus.machine.profile import Library, Profile, Setting
from primus.machine.workload import JobWorkload

LIBRARIES: tuple[Library, ...] = ("primus turbo",)


def list_settings(workload: JobWorkload, device: Profile | None) -> dict[str, Setting]:
    """No variables: FSDP2 overlaps best with the defaults of CUDA, HIP and NCCL."""
    return {}
