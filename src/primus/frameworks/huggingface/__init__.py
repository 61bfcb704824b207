"""Hugging Face Transformers: its modelling code, trained by PyTorch with our loop, to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

ENGINES = ("huggingface",)
"""The engine that `train` drives."""
USES_TORCH = True
"""The launch checks that the installed PyTorch can use the machine's accelerators."""


def check(experiment: Experiment) -> None:
    """Accept an experiment that can be trained with Transformers; needs no tensor library.

    Raises:
        UsageError: The experiment asks for something that is not supported; names the key and the fix.
    """
    from primus.session.checks import check_engine  # not for the other parts, which import this package

    check_engine(experiment, "huggingface", Path(__file__).parent)


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    from primus.frameworks.huggingface.engine import run

    run.train(experiment, attempt)
