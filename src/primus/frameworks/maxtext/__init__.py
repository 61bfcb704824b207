"""MaxText: its model, optimizer and training step, with the data, schedule, reports and checkpoints of primus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.frameworks.maxtext.support import check as check

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

ENGINES = ("maxtext",)
"""The engine that `train` drives."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.frameworks.maxtext.engine import run

    run.train(experiment, attempt)
