"""Turn a file of Megatron-LM, torchtitan, MaxText, Axolotl, LLaMA-Factory or Hugging Face into an experiment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from primus.config.flags import Positional, PositionalList
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.read_file import read_command_line, read_foreign_file
from primus.config.imports.write_file import format_result, replace_values
from primus.config.overrides import is_known, parse_overrides
from primus.config.source import strip_origins
from primus.errors import PrimusError, UsageError
from primus.experiment import resolve_experiment
from primus.runs.files import write_text
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config import`."""

    file: Positional
    """Bash script or quoted command line of Megatron-LM or MaxText, torchtitan TOML or Python file, YAML file of
    MaxText, Axolotl or LLaMA-Factory, or config.json."""
    args: PositionalList = []
    """Arguments of a script: import run.sh dsw 7B."""
    output: str | None = None
    """Output file (default: standard output)."""
    function: str | None = None
    """Function of a Python file that returns the configuration (default: the only one)."""
    force: bool = False
    """Overwrite an existing file."""


def run(options: Options, context: TaskContext) -> None:
    """Print or write the experiment or model preset; values without a key are comments in it and warnings.

    An experiment that `config check` would refuse is written, too, with a warning that says why.

    Raises:
        UsageError: The file cannot be read, is of another kind, or lacks part of the model.
    """
    args = [word for word in options.args if not _is_override(word)]
    changes = [word for word in options.args if _is_override(word)]
    config = _read_file(options, tuple(args), context.environ)
    replace_values(config, strip_origins(parse_overrides([*changes, *context.overrides])))
    text = format_result(config)
    target = Path(options.output) if options.output else None
    if target is not None and target.exists() and not options.force:
        raise UsageError(f"{target} exists", "--force replaces it")
    refusal = _find_refusal(config, text, target or Path("result"), context.environ)
    if target is not None:
        write_text(target, text)
    _report_warnings(config)
    if refusal:
        print(f"primus-cli: `config check` refuses the result: {refusal}", file=sys.stderr)
    result = _describe_result(config, text) | {"refused": refusal}
    if target is None:
        context.result(result, text.rstrip("\n"))
    else:
        context.result(result | {"file": str(target)}, f"wrote {target}")


def _read_file(options: Options, args: tuple[str, ...], environ: Mapping[str, str]) -> ForeignConfig:
    path = Path(options.file)
    if " " in options.file and not path.exists():
        return read_command_line(options.file, environ)
    return read_foreign_file(path, environ, options.function, args)


def _is_override(word: str) -> bool:
    name, is_assigned, _ = word.partition("=")
    return bool(is_assigned) and is_known(name)


def _find_refusal(config: ForeignConfig, text: str, target: Path, environ: Mapping[str, str]) -> str | None:
    """Why the experiment cannot be trained as it is, with its lines in `target`; None if it can, and for a model."""
    if config.framework is None:
        return None
    with TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.yaml"
        write_text(file, text)
        try:
            resolve_experiment(file, (), environ)
        except PrimusError as error:
            return error.problem.replace(str(file), str(target))
    return None


def _report_warnings(config: ForeignConfig) -> None:
    for other in config.warnings:
        value = "" if other.value is None else f" {other.value}"
        print(f"primus-cli: {other.key}{value}: {other.reason}", file=sys.stderr)


def _describe_result(config: ForeignConfig, text: str) -> dict[str, object]:
    return {
        "origin": config.origin,
        "kind": "model" if config.framework is None else "experiment",
        "framework": config.framework,
        "not_imported": [{"key": each.key, "value": each.value, "reason": each.reason} for each in config.others],
        "text": text,
    }
