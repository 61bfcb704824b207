"""One forward and backward pass without memory for the model: on fake tensors, for what only looks at operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from primus.config.schema import Experiment
from primus.frameworks.native.engine.model import Transformer


def run_fake_step(experiment: Experiment, device: str, observer: AbstractContextManager[object]) -> None:
    """Run the passes of one micro batch inside of `observer`, a mode of torch's dispatcher.

    Args:
        experiment: What would be trained.
        device: ``cpu``, or ``cuda`` for the operators of an accelerator, which this machine need not have.
        observer: Sees every operator.
    """
    trainer = experiment.trainer
    training = trainer.training
    # A fake CUDA tensor needs a CUDA build in the backward pass; a meta tensor takes the same branches without one.
    place = torch.device("cpu" if device == "cpu" else "meta")
    with FakeTensorMode(allow_non_fake_inputs=True), nullcontext() if device == "cpu" else FusedAttention():
        with place:
            model = Transformer(trainer.model)
        model.configure(training)
        size = (training.micro_batch_size, training.seq_length)
        tokens, targets = (torch.zeros(size, dtype=torch.int64, device=place) for _ in range(2))
        scale = torch.ones((), device=place)
        with observer:
            model(tokens, targets, scale).backward()


class FusedAttention(TorchFunctionMode):
    """Attention as the one kernel that it is on an accelerator; on meta tensors torch splits it into products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            return query + 0 * (key.sum() + value.sum())
        return func(*args, **(kwargs or {}))
