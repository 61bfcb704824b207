"""The ranks of a measurement: their rendezvous, their nodes, and groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from primus.errors import UnfitError
from primus.machine.measurements import Scope
from primus.measure.network.collectives import RankGroup, gather_from_all
from primus.runs.attempt import Attempt

HOST_BACKENDS = ("gloo", "mpi")
"""Backends of torch.distributed whose buffers are in host memory here."""


def join_all_ranks(attempt: Attempt, device: torch.device, patience: timedelta) -> RankGroup:
    """All ranks, with a process group if there is more than one.

    Args:
        patience: Time after which a collective counts as hung.
    """
    world_size, on_gpu = attempt.world_size, device.type == "cuda"
    ranks = tuple(range(world_size))
    if world_size == 1:
        return RankGroup("all", ranks, 0, device, None)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=patience, device_id=device if on_gpu else None)
    return RankGroup("all", ranks, attempt.rank, device, dist.group.WORLD)


def create_group(
    scope: Scope,
    groups: Sequence[tuple[int, ...]],
    everyone: RankGroup,
    patience: timedelta,
    backend: str | None = None,
) -> RankGroup | None:
    """The group of this rank; all ranks must take part in creating each group.

    Args:
        backend: Of torch.distributed; None for that of `everyone`. Those without GPUs use buffers of the host.
    """
    own = None
    device = torch.device("cpu") if backend in HOST_BACKENDS else everyone.device
    for ranks in groups:
        handle = None
        if len(ranks) == everyone.size and backend is None:
            handle = everyone.handle
        elif len(ranks) > 1:
            # Every rank creates every group, also those that it does not belong to: new_group is a collective call.
            handle = dist.new_group(ranks, timeout=patience, backend=backend)
        if everyone.member in ranks:
            own = RankGroup(scope, ranks, ranks.index(everyone.member), device, handle)
    return own


def check_backend(backend: str, device: torch.device) -> None:
    """Check that this process can use a backend of torch.distributed.

    Raises:
        UnfitError: PyTorch was built without it, or it needs a GPU.
    """
    if not dist.is_backend_available(backend):
        raise UnfitError(f"the installed PyTorch has no backend {backend}", "use --backend gloo or --backend nccl")
    if backend == "nccl" and device.type != "cuda":
        raise UnfitError("the backend nccl needs GPUs", "use --backend gloo")


def list_nodes(first_rank: int, everyone: RankGroup) -> list[tuple[int, ...]]:
    """Ranks of each node; a collective call.

    Args:
        first_rank: First rank of this rank's node.
    """
    first_ranks = gather_from_all(first_rank, everyone)
    return [tuple(rank for rank, of in enumerate(first_ranks) if of == first) for first in sorted(set(first_ranks))]


def read_library_versions() -> dict[str, str]:
    """Versions of the libraries that compute and communicate."""
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in versions.items() if version}


def read_first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return next(iter(str(error).splitlines()), type(error).__name__)
