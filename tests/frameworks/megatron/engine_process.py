"""One process that trains by the engine's methods, without a session; see `engine_service`.

A request has the trainer's groups, the steps to take, and checkpoints to load and save.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from frameworks.engine_service import serve_requests, split_batches
from primus.checkpoint.weights import TensorDict
from primus.config.schema import Trainer

PATCHES_OF_ENGINE = (
    "megatron-core-cpu",
    "megatron-core-torch-parts",
    "megatron-core-checkpoint-queue",
    "torch-cpu-norm",
)


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    from primus.frameworks.megatron.backend_settings import group_settings
    from primus.frameworks.megatron.engine.batches import BatchOptions
    from primus.frameworks.megatron.engine.driver import MegatronEngine, build_core_parts

    trainer = msgspec.convert(request["trainer"], Trainer)
    eod_id = request.get("eod_id")
    options = BatchOptions(eod_id if trainer.data.eod_mask_loss else None, trainer.data.reset_attention_mask, eod_id)
    cpu = torch.device("cpu")
    size = trainer.training.global_batch_size
    assert size
    parts = build_core_parts(trainer, cpu, size, extra=group_settings(trainer.backend_args, ()))
    engine = MegatronEngine(trainer, cpu, size, options, parts)
    if "weights" in request:
        engine.load_weights(TensorDict(torch.load(request["weights"], weights_only=True)))
    if "load" in request:
        engine.load(Path(request["load"]))
    steps = np.load(request["tokens"])
    found: dict[str, Any] = {"data_size": engine.data_size, "steps": [], "rates": []}
    for number in range(request.get("first", 1), request["last"] + 1):
        rate = request["rates"][number - 1] * request.get("factor", {}).get(str(number), 1)
        with engine.watch_step() if not found["steps"] else nullcontext():
            values = engine.step(split_batches(steps[number - 1], trainer, engine), rate)
        if not found["steps"]:
            found["settings"] = {each.key: each.value for each in engine.read_settings()}
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


if __name__ == "__main__":
    serve_requests(run_request, PATCHES_OF_ENGINE, ["primus.frameworks.megatron.engine.driver"])
