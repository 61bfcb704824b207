"""One forward and backward pass without memory for the model: on fake tensors, for what only looks at operators."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from primus.config.schema import Experiment
from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.ops import plan_accelerator
from primus.frameworks.native.support import read_own_settings
from primus.frameworks.native.training_settings import TrainingSettings


def run_fake_step(experiment: Experiment, device: str, observer: AbstractContextManager[object]) -> None:
    """Run the passes of one micro batch inside of `observer`, a mode of torch's dispatcher.

    Args:
        experiment: What would be trained.
        device: ``cpu``, or ``cuda`` for the operators of an accelerator, which this machine need not have.
        observer: Sees every operator.
    """
    trainer = experiment.trainer
    training = trainer.training
    with FakeTensorMode(allow_non_fake_inputs=True), plan_accelerator(None if device == "cpu" else "eager"):
        model = Transformer(trainer.model)
        model.configure(training, read_own_settings(trainer, TrainingSettings))
        size = (training.micro_batch_size, training.seq_length)
        tokens, targets = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        with observer:
            model(tokens, targets, torch.ones(())).backward()
