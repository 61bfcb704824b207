"""Processes that compute together, each with a function of a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def in_processes(count: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    """Call `function(rank, folder, *args)` in `count` processes of one group; raises what one of them raised."""
    multiprocessing.spawn(_member, (count, function, folder, *args), nprocs=count)


def _member(rank: int, count: int, function: Callable[..., None], folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)
    function(rank, folder, *args)
    dist.destroy_process_group()
    os._exit(0)  # for the reason that primus.process.run_until_end has
