"""The megatron backend: Megatron-LM and megatron-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.config.schema import Experiment
from primus.errors import PrimusError, UsageError

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt


def check(experiment: Experiment) -> None:
    """Accept an experiment that Megatron-LM can train; needs no tensor library.

    Raises:
        UsageError: The model has something that Megatron-LM does not have; names the field.
    """
    spec = experiment.trainer.model
    if spec.global_kv_channels is not None or spec.moe_parallel_dense:
        raise UsageError("global_kv_channels: megatron does not support heads of several widths", "use another model")


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run.

    Raises:
        PrimusError: Always; the driver is not part of this version.
    """
    raise PrimusError("framework megatron: its driver is not available yet", "use framework: native")
