"""Check that Transformers can train an experiment; needs no tensor library."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from primus.config.schema import Experiment
from primus.engine_keys import KeyRule, check_key_rules, read_key_rules
from primus.errors import UsageError
from primus.session.checks import check_loop, check_session


@cache
def read_huggingface_rules() -> dict[str, KeyRule]:
    """What this engine does with each key."""
    return read_key_rules(Path(__file__).parent)


def check_experiment(experiment: Experiment) -> None:
    """Accept an experiment that this engine can train.

    Raises:
        UsageError: It asks for something that is not supported; names the key and the fix.
    """
    trainer = experiment.trainer
    check_key_rules("huggingface", read_huggingface_rules(), trainer)
    if trainer.backend_args:
        names = ", ".join(sorted(trainer.backend_args))
        raise UsageError(f"backend_args: huggingface takes no backend arguments, found {names}", "remove them")
    check_session(trainer, "huggingface")
    check_loop(trainer, "huggingface")
