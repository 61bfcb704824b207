"""Write an experiment as a file of `counting`."""

from __future__ import annotations

from primus.config.exports.foreign_text import ForeignText
from primus.config.load import Resolved

TARGET = "counting"
FILE_NAME = "counts.yaml"


def format_file(resolved: Resolved, preset: str | None) -> ForeignText:
    """The number of steps and the stride; counting needs no other setting."""
    trainer = resolved.experiment.trainer
    stride = trainer.backend_args.get("stride", 1)
    return ForeignText(f"counts: {trainer.training.train_iters}\nstride: {stride}\n")
