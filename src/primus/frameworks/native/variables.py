"""The native backend: plain PyTorch, sharded by FSDP2, which needs CUDA's own number of queues to overlap."""

from __future__ import annotations

from primus.machine.profile import Library, Profile, Setting
from primus.machine.workload import JobWorkload

LIBRARIES: tuple[Library, ...] = ()


def list_settings(workload: JobWorkload, device: Profile | None) -> dict[str, Setting]:
    """No variables: FSDP2 overlaps best with the defaults of CUDA, HIP and NCCL."""
    return {}
