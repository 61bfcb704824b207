"""Write an experiment as a file of Megatron-LM, torchtitan, MaxText or Hugging Face that runs without primus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.config.exports.write_file import describe_lost, find_preset, format_foreign_file
from primus.config.load import load_experiment
from primus.errors import UsageError
from primus.models import model_checks
from primus.runs.files import write_text
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config export`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    to: str
    """Format: megatron-lm (a bash script), torchtitan (a Python module), maxtext (a YAML file), huggingface (the
    model's config.json), or that of a plug-in."""
    output: str | None = None
    """Output file (default: standard output)."""
    stage: str | None = None
    """Module to export, such as post_trainer (default: the only one in the file)."""
    force: bool = False
    """Overwrite an existing file."""


def run(options: Options, context: TaskContext) -> None:
    """Print or write the file; settings that it cannot hold are comments in it and warnings.

    Raises:
        UsageError: The experiment is invalid, or the framework has no such model.
    """
    resolved = load_experiment(Path(options.config), context.overrides, environ=context.environ, stage=options.stage)
    model_checks.check(resolved.experiment.trainer.model, resolved.origins)
    found = format_foreign_file(options.to, resolved, find_preset(resolved))
    for line in describe_lost(found.lost):
        print(f"primus-cli: {line}", file=sys.stderr)
    result = {"to": options.to, "lost": [{"key": each.key, "reason": each.reason} for each in found.lost]}
    if options.output is None:
        context.result(result | {"text": found.text}, found.text.rstrip("\n"))
        return
    target = Path(options.output)
    if target.exists() and not options.force:
        raise UsageError(f"{target} exists", "--force replaces it")
    write_text(target, found.text)
    context.result(result | {"file": str(target)}, f"wrote {target}")
