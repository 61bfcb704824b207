"""MaxText: its model, optimizer and training step, with the data, schedule, reports and checkpoints of primus."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

ENGINES = ("maxtext",)
"""The engine that `train` drives."""


def check(experiment: Experiment) -> None:
    """Accept an experiment that can be trained; needs no tensor library.

    Raises:
        UsageError: The experiment asks for something that is not supported; names the key and the fix.
    """
    from primus.frameworks.maxtext import support  # not for the other parts, which import this package

    support.check(experiment)


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.frameworks.maxtext.engine import run

    run.train(experiment, attempt)
