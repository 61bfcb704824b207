"""One process that trains by the engine's methods, without a session: `engine_process.py REQUESTS.json RESULTS.json`.

A request has the trainer's groups, the steps to take, and checkpoints to load and save; rank 0 writes the results.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from primus import registry
from primus.checkpoint.weights import TensorDict
from primus.config.schema import Trainer
from primus.patch import PATCHES

PATCHES_OF_ENGINE = (
    "megatron-core-cpu",
    "megatron-core-torch-parts",
    "megatron-core-checkpoint-queue",
    "torch-cpu-norm",
)


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    from primus.backends.megatron.backend_settings import group_settings
    from primus.backends.megatron.batches import BatchOptions
    from primus.backends.megatron.engine import MegatronEngine, build_core_parts

    trainer = msgspec.convert(request["trainer"], Trainer)
    eod_id = request.get("eod_id")
    options = BatchOptions(eod_id if trainer.data.eod_mask_loss else None, trainer.data.reset_attention_mask, eod_id)
    cpu = torch.device("cpu")
    size = trainer.training.global_batch_size
    assert size
    parts = build_core_parts(trainer, cpu, size, extra=group_settings(trainer.backend_args))
    engine = MegatronEngine(trainer, cpu, size, options, parts)
    if "weights" in request:
        engine.load_weights(TensorDict(torch.load(request["weights"], weights_only=True)))
    if "load" in request:
        engine.load(Path(request["load"]))
    steps = np.load(request["tokens"])
    found: dict[str, Any] = {"data_size": engine.data_size, "steps": [], "rates": []}
    for number in range(request.get("first", 1), request["last"] + 1):
        rate = request["rates"][number - 1] * request.get("factor", {}).get(str(number), 1)
        values = engine.step(split_batches(steps[number - 1], trainer, engine), rate)
        found["steps"].append([values.loss, values.grad_norm, values.skipped])
        found["rates"].append(values.learning_rate)
    if request.get("evaluate"):
        found["evaluation"] = engine.evaluate(split_batches(steps[0], trainer, engine))
    if "save" in request:
        if dist.get_rank() == 0:
            Path(request["save"]).mkdir()
        dist.barrier()
        engine.save(Path(request["save"]))
    found["memory"] = engine.read_memory()
    engine.close()
    return found


def split_batches(tokens: Any, trainer: Trainer, engine: Any) -> list[Any]:
    """Micro batches of this process: ranks take them in turn."""
    size = trainer.training.micro_batch_size
    micro = tokens.reshape(-1, size, tokens.shape[-1])
    return list(micro[engine.data_rank :: engine.data_size])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for patch in PATCHES_OF_ENGINE:
        registry.load_plug_in(PATCHES, patch).apply()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=os.environ["STORE"])
    requests = json.loads(Path(sys.argv[1]).read_text())
    results = [run_request(request) for request in requests]
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
