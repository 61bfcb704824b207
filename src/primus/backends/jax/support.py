"""Check that the JAX engine can train an experiment; needs no tensor library."""

from __future__ import annotations

from pathlib import Path

from primus.config.schema import Experiment
from primus.engine_keys import check_key_rules, read_key_rules
from primus.session.checks import check_loop, check_no_backend_args, check_session


def check_experiment(experiment: Experiment) -> None:
    """Accept an experiment that the JAX engine can train.

    Raises:
        UsageError: It asks for something that is not supported; names the key and the fix.
    """
    trainer = experiment.trainer
    check_key_rules("jax", read_key_rules(Path(__file__).parent), trainer)
    check_no_backend_args(trainer, "jax")
    check_session(trainer, "jax")
    check_loop(trainer, "jax")
