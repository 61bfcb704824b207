"""Processes that compute together, each with a function of a test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessContext, start_processes

# Each process is forked from a server that has imported torch once: an import takes seconds of CPU time, that of what
# sharding and optimizers import later included. The server has the variables that its first caller had.
PRELOADED = "torch._dynamo torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.tensor"
multiprocessing.set_forkserver_preload([*PRELOADED.split(), "primus.worker", "primus.frameworks.native.engine.run"])


def start_in_processes(count: int, function: Callable[..., None], *args: Any) -> ProcessContext:
    """Start `count` processes that call `function(rank, *args)`."""
    return start_processes(function, args, nprocs=count, join=False, start_method="forkserver")  # type: ignore[return-value]


def in_processes(count: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    """Call `function(rank, folder, *args)` in `count` processes of one group; raises what one of them raised."""
    context = start_in_processes(count, _member, count, function, folder, *args)
    while not context.join():
        pass


def _member(rank: int, count: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    function(rank, folder, *args)
    dist.destroy_process_group()
    os._exit(0)  # for the reason that primus.process.run_until_end has
