"""MaxText: its model, optimizer and training step, with the data, schedule, reports and checkpoints of primus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.backends.maxtext.support import check_experiment
from primus.config.schema import Experiment

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt

ENGINES = ("maxtext",)
"""The engine that `train` drives."""


def check(experiment: Experiment) -> None:
    """Accept an experiment that MaxText can train; needs no tensor library.

    Raises:
        UsageError: The experiment asks for something that is not supported; names the key and the fix.
    """
    check_experiment(experiment)


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.backends.maxtext import run

    run.train(experiment, attempt)
