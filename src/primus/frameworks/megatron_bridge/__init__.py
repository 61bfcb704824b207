"""Megatron-Bridge: its models, weights and adapters on Megatron-Core, with the loop and the data of primus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.frameworks.megatron_bridge.settings import NAMES
from primus.frameworks.megatron_bridge.support import check as check

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

ENGINES = ("megatron-bridge",)
"""The engine that `train` drives."""
KEYS = NAMES
"""Settings of adapters and recipes."""
STAGES = ("pre_trainer", "post_trainer")
USES_TORCH = True
"""The launch checks that the installed PyTorch can use the machine's accelerators."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.frameworks.megatron_bridge.engine import run

    run.train(experiment, attempt)
