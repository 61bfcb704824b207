"""A process group of one process that stands for many: collectives return at once and exchange nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextmanager
def join_fake_group(rank: int, world: int) -> Iterator[None]:
    """Be `rank` of `world` for the duration of a `with`; nothing for a process alone."""
    if world == 1:
        yield
        return
    # Of torch's own tests, and the backend of torchtitan's `comm.mode: fake_backend`.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers results with the meshes of this group, which equal those of the next one.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
