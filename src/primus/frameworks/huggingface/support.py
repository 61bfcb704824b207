"""Check that Transformers can train an experiment; needs no tensor library."""

from __future__ import annotations

from pathlib import Path

from primus.config.schema import Experiment
from primus.session.checks import check_engine


def check(experiment: Experiment) -> None:
    """Accept an experiment that Transformers can train.

    Raises:
        UsageError: It asks for something that is not supported; names the key and the fix.
    """
    check_engine(experiment, Path(__file__).parent)
