"""TorchTitan: its trainer, built from Python, with the data, schedule, reports and checkpoints of primus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.frameworks.torchtitan.support import check as check

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

ENGINES = ("torchtitan",)
"""The engine that `train` drives."""
USES_TORCH = True
"""The launch checks that the installed PyTorch can use the machine's accelerators."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.frameworks.torchtitan.engine import run

    run.train(experiment, attempt)
