"""Write a commented experiment file for a model."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus import registry
from primus.config import template
from primus.config.flags import Positional
from primus.config.load import load_model
from primus.errors import UsageError
from primus.runs.files import write_text
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config init`."""

    model: Positional
    """Model preset, such as llama3.1_8B."""
    output: str | None = None
    """Output file (default: standard output)."""
    force: bool = False
    """Overwrite an existing file."""


def run(options: Options, context: TaskContext) -> None:
    """Print or write the starting file.

    Raises:
        UsageError: The model does not exist, or the file exists already.
    """
    file = registry.find_plug_in_file("models", options.model)
    name = file.stem if file else options.model
    text = template.format_starting_file(name, load_model(options.model))
    if options.output is None:
        print(text, end="")
        return
    target = Path(options.output)
    if target.exists() and not options.force:
        raise UsageError(f"{target} exists", "--force replaces it")
    write_text(target, text)
    context.result({"file": str(target)}, f"wrote {target}")
