"""How the processes of a run share the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass

from primus.config.checks import data_parallel_size
from primus.config.schema import ParallelConfig, TrainingConfig
from primus.data.training.loader import num_micro_batches
from primus.errors import UsageError


@dataclass(frozen=True)
class TitanLayout:
    """Processes and sequences of a step."""

    data_size: int
    """Processes that get different sequences."""
    global_batch_size: int
    """Sequences of a step, of all processes together."""
    local_batch_size: int
    """Sequences of one call of the model: a micro batch, or with a pipeline all of the step."""
    num_micro_batches: int
    """Micro batches of one process in a step."""


def plan_layout(training: TrainingConfig, parallel: ParallelConfig, world: int) -> TitanLayout:
    """The layout of `world` processes.

    Raises:
        UsageError: The processes or the batch do not divide.
    """
    stages = parallel.pipeline_model_parallel_size
    data_size = data_parallel_size(parallel, world)
    global_batch_size = training.global_batch_size or training.micro_batch_size * data_size
    count = num_micro_batches(global_batch_size, training.micro_batch_size, data_size)
    if count < stages:
        raise UsageError(
            f"global_batch_size {global_batch_size}: a pipeline of {stages} stages needs as many micro batches in a"
            f" step, and each replica has {count}",
            f"use at least {training.micro_batch_size * data_size * stages}",
        )
    return TitanLayout(
        data_size=data_size,
        global_batch_size=global_batch_size,
        local_batch_size=training.micro_batch_size * (count if stages > 1 else 1),
        num_micro_batches=count,
    )
