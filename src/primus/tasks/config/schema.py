"""Print the schema of experiment files: JSON Schema for editors, or every key as Markdown."""

from __future__ import annotations

from msgspec import Struct

from primus.config import reference
from primus.runs.files import to_json
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config schema`."""

    framework: str | None = None
    """Backend whose own settings are included in the JSON Schema (default: those of all)."""
    text: bool = False
    """Print every key with its type, default and meaning as Markdown."""


def run(options: Options, context: TaskContext) -> None:
    """Print the schema."""
    schema = reference.format_json_schema(options.framework)
    context.result(schema, reference.format_markdown() if options.text else to_json(schema))
