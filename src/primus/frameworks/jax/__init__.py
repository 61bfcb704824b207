"""JAX: a small engine of this package on jax and optax, sharded over the devices of one process or several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

ENGINES = ("jax",)
"""The engine that `train` drives."""


def check(experiment: Experiment) -> None:
    """Accept an experiment that JAX can train; needs no tensor library.

    Raises:
        UsageError: The experiment asks for something that is not supported; names the key and the fix.
    """
    from primus.session.checks import check_engine  # not for the other parts, which import this package

    check_engine(experiment, "jax", Path(__file__).parent)


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.frameworks.jax.engine import run

    run.train(experiment, attempt)
