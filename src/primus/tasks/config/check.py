"""Check an experiment file without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus import experiment
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config check`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    stage: str | None = None
    """Module to check, such as post_trainer (default: the only one in the file)."""


def run(options: Options, context: TaskContext) -> None:
    """Print that the experiment is valid.

    Raises:
        UsageError: It is not.
    """
    resolved = experiment.resolve_experiment(Path(options.config), context.overrides, context.environ, options.stage)
    trainer = resolved.experiment.trainer
    text = f"{options.config}: valid ({trainer.framework}, {resolved.experiment.exp_name})"
    value = {"config": options.config, "valid": True, "framework": trainer.framework, "notes": resolved.notes}
    context.result(value, "\n".join([text, *(f"  note: {note}" for note in resolved.notes)]))
