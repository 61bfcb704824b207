"""Serves tests in the interpreter of an engine: one process of several, which imports the engine once for many tests.

A line of the standard input is a JSON list of requests; one with `code` is a program. A fork answers them, so that no
request sees the state, the process groups and the threads of those before. Their results are a line of the standard
output of rank 0, and the other ranks answer with an empty list. What the engine prints goes to the standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from primus import registry
from primus.config.schema import Trainer
from primus.patch import PATCHES

RunRequest = Callable[[dict[str, Any]], dict[str, Any]]


def serve_requests(run_request: RunRequest, patches: Sequence[str], modules: Sequence[str]) -> None:
    """Answer until the standard input ends, or a request fails.

    Args:
        run_request: Gives the results of one.
        patches: To apply first.
        modules: To import first.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    for patch in patches:
        registry.load_plug_in(PATCHES, patch).apply()
    for module in modules:
        importlib.import_module(module)
    for number, line in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            results = run_requests(run_request, json.loads(line), f"{os.environ['STORE']}_{number}")
            print(json.dumps(results), file=answers, flush=True)
            os._exit(0)  # groups of processes, which engines do not destroy, may hinder an orderly end
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(1)


def run_requests(run_request: RunRequest, requests: list[dict[str, Any]], store: str) -> list[dict[str, Any]]:
    """The results of requests on rank 0, none on the others."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=store)
    results = [run_code(request["code"]) if "code" in request else run_request(request) for request in requests]
    dist.barrier()  # no process may still wait for this one
    return results if rank == 0 else []


def run_code(code: str) -> dict[str, Any]:
    """What a program prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__"})
    return {"printed": printed.getvalue()}


def split_batches(tokens: Any, trainer: Trainer, engine: Any) -> list[Any]:
    """Micro batches of this process: ranks take them in turn."""
    size = trainer.training.micro_batch_size
    micro = tokens.reshape(-1, size, tokens.shape[-1])
    return list(micro[engine.data_rank :: engine.data_size])
