"""Turn a file of Megatron-LM, torchtitan, MaxText or Hugging Face into an experiment or model preset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec import Struct

from primus.config.flags import Positional
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import format_result, replace_values
from primus.config.overrides import parse_overrides
from primus.config.source import strip_origins
from primus.errors import UsageError
from primus.runs.files import write_text
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config import`."""

    file: Positional
    """Bash script or command line of Megatron-LM, torchtitan TOML or Python file, MaxText YAML, or config.json."""
    output: str | None = None
    """Output file (default: standard output)."""
    function: str | None = None
    """Function of a Python file that returns the configuration (default: the only one)."""
    force: bool = False
    """Overwrite an existing file."""


def run(options: Options, context: TaskContext) -> None:
    """Print or write the experiment or model preset; values without a key are comments in it and warnings.

    Raises:
        UsageError: The file cannot be read, is of another kind, or lacks part of the model.
    """
    config = read_foreign_file(Path(options.file), context.environ, options.function)
    replace_values(config, strip_origins(parse_overrides(context.overrides)))
    text = format_result(config)
    if options.output is None:
        _report_warnings(config)
        context.result(_describe_result(config, text), text.rstrip("\n"))
        return
    target = Path(options.output)
    if target.exists() and not options.force:
        raise UsageError(f"{target} exists", "--force replaces it")
    write_text(target, text)
    _report_warnings(config)
    context.result(_describe_result(config, text) | {"file": str(target)}, f"wrote {target}")


def _report_warnings(config: ForeignConfig) -> None:
    for other in config.warnings:
        value = "" if other.value is None else f" {other.value}"
        print(f"primus-cli: {other.key}{value}: {other.reason}", file=sys.stderr)


def _describe_result(config: ForeignConfig, text: str) -> dict[str, Any]:
    return {
        "origin": config.origin,
        "kind": "model" if config.framework is None else "experiment",
        "framework": config.framework,
        "not_imported": [{"key": each.key, "value": each.value, "reason": each.reason} for each in config.others],
        "text": text,
    }
