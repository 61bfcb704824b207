"""One process that trains by the engine's methods, without a session; see `engine_service`.

A request has the trainer's groups, the steps to take, and checkpoints to load and save.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
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

PATCHES_OF_ENGINE = ("torchtitan-without-gpu", "pipeline-micro-batches", "torch-cpu-norm", "torch-cpu-log-softmax")


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    from primus.frameworks.torchtitan.engine.driver import TorchTitanEngine
    from primus.frameworks.torchtitan.engine.layout import plan_layout

    trainer = msgspec.convert(request["trainer"], Trainer)
    layout = plan_layout(trainer.training, trainer.parallel, dist.get_world_size())
    engine = TorchTitanEngine(
        trainer, layout, folder=Path(request["folder"]), device=torch.device("cpu"), eod_id=request.get("eod_id")
    )
    if "weights" in request:
        engine.load_weights(TensorDict(torch.load(request["weights"], weights_only=True)))
    if "load" in request:
        engine.load(Path(request["load"]))
    steps = np.load(request["tokens"])
    found: dict[str, Any] = {"data_size": engine.data_size, "steps": [], "weights_after": [], "rates": []}
    save_after = request.get("save_after")

    def evaluate_and_save() -> None:
        if request.get("evaluate"):
            found["evaluation"] = engine.evaluate(split_batches(steps[0], trainer, engine))
        if "save" in request:
            engine.save(Path(request["save"]))

    first = request.get("first", 1)
    for number in range(first, request["last"] + 1):
        batches = split_batches(steps[number - 1], trainer, engine)
        watch = nullcontext() if found["steps"] else engine.watch_step()
        with poison_weights(engine, number == request.get("poison")), watch:
            values = engine.step(batches, request["rates"][number - 1])
        if not found["steps"]:
            found["settings"] = {each.key: each.value for each in engine.read_settings()}
        found["rates"].append(values.learning_rate)
        found["steps"].append([values.loss, values.grad_norm, values.skipped])
        found["weights_after"].append(sum_weights(engine))
        if number == save_after:
            evaluate_and_save()
    if save_after is None:
        evaluate_and_save()
    if request.get("config"):
        config = engine._titan.config
        policy = config.activation_checkpoint
        found["config"] = {"training": asdict(config.training), "activation_checkpoint": policy._owner.__name__}
    found["memory"] = engine.read_memory()
    engine.close()
    return found


@contextmanager
def poison_weights(engine: Any, is_poisoned: bool) -> Iterator[None]:
    """Make the loss and the gradient of a step infinite by one weight, which is restored afterwards."""
    if not is_poisoned:
        yield
        return
    weight = engine.model.norm.weight.detach().to_local()
    before = weight.clone()
    weight[0] = float("inf")
    yield
    weight.copy_(before)


def sum_weights(engine: Any) -> float:
    """A number that changes with any weight."""
    return sum(float(weight.detach().to_local().double().square().sum()) for weight in engine.model.parameters())


if __name__ == "__main__":
    serve_requests(run_request, PATCHES_OF_ENGINE, ["primus.frameworks.torchtitan.engine.driver"])
