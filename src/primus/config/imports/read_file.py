"""Recognize the kind of a file of another framework, and read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.hugging_face import read_model_config
from primus.config.imports.launch_line import is_launch_text
from primus.config.imports.launch_script import read_launch_script
from primus.frameworks.maxtext.import_file import is_maxtext, read_maxtext
from primus.frameworks.torchtitan.python_file import is_titan_python, read_titan_python
from primus.frameworks.torchtitan.import_file import read_titan_settings
from primus.config.source import read_yaml, strip_origins
from primus.config.text_file import format_path, read_config_text
from primus.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = (
    "a script of Megatron-LM or MaxText, a torchtitan TOML or Python file, a MaxText YAML or a Hugging Face config.json"
)

_OTHER_JSON = {
    "weight_map": "the index of sharded weights; give the config.json next to it",
    "added_tokens": "a tokenizer; give the config.json next to it",
    "chat_template": "a tokenizer's configuration; give the config.json next to it",
    "tokenizer_class": "a tokenizer's configuration; give the config.json next to it",
    "max_new_tokens": "a generation configuration; give the config.json next to it",
    "do_sample": "a generation configuration; give the config.json next to it",
    "_from_model_config": "a generation configuration; give the config.json next to it",
    "zero_optimization": "a DeepSpeed configuration; its model is described elsewhere",
    "ffn_dim_multiplier": "Meta's params.json; give the config.json of the Hugging Face version of the model",
}
"""What a JSON file without `model_type` is, by a key in it."""


def read_foreign_file(
    path: Path, environ: Mapping[str, str], function: str | None = None, args: tuple[str, ...] = ()
) -> ForeignConfig:
    """Read a file of another framework.

    Args:
        path: The file, or a folder with a config.json.
        environ: Variables that a script may use.
        function: Function of a Python file that returns the configuration.
        args: Arguments of a script.

    Raises:
        UsageError: The file is missing, cut off, or of a kind that primus does not read; says what it is.
    """
    path = path / "config.json" if path.is_dir() else path
    shown = format_path(path)
    try:
        return _read_by_kind(path, shown, environ, function, args)
    except (TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:
        # A list in the place of a mapping, and the like: files of others have no schema to check them by.
        raise UsageError(f"{shown}: a value has an unexpected type: {error}") from None


def read_command_line(text: str, environ: Mapping[str, str]) -> ForeignConfig:
    """Read a command line that would be typed in this folder.

    Raises:
        UsageError: It starts no training that primus can import.
    """
    return read_launch_script(f"{text}\n", "the command line", "imported", Path("command_line.sh"), (), environ)


def _read_by_kind(
    path: Path, shown: str, environ: Mapping[str, str], function: str | None, args: tuple[str, ...]
) -> ForeignConfig:
    text = read_config_text(path, shown)
    if not text.strip():
        raise UsageError(f"{shown} is empty", f"give {KINDS}")
    name = _make_name(path)
    suffix = path.suffix.lower()
    if suffix == ".json" or (not suffix and text.lstrip().startswith("{")):
        return read_model_config(_parse_model_json(text, shown), shown, name)
    if suffix == ".toml":
        return _read_titan_toml(text, shown, name)
    if suffix == ".py":
        return _read_titan_python(text, shown, name, function)
    if suffix in (".yaml", ".yml"):
        return _read_yaml_file(path, shown, name)
    if is_launch_text(text) or suffix in (".sh", ".bash", ".sbatch", ".slurm"):
        return read_launch_script(text.replace("\r\n", "\n"), shown, name, path, args, environ)
    raise UsageError(f"{shown}: not a file that primus can import", f"give {KINDS}")


def _make_name(path: Path) -> str:
    """Name of the result: that of the file, or of the folder of a config.json."""
    stem = path.absolute().parent.name if path.name == "config.json" else path.stem
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in stem).strip("._") or "imported"


def _parse_model_json(text: str, shown: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip())
        problem = "is cut off" if is_cut else f"not JSON: {error.msg}"
        raise UsageError(f"{shown}:{error.lineno}: {problem}", "copy the whole file again" if is_cut else "") from None
    except RecursionError:
        raise UsageError(f"{shown}: nested too deeply") from None
    if not isinstance(values, dict):
        raise UsageError(f"{shown}: expected a mapping, found a {type(values).__name__}", f"give {KINDS}")
    if "model_type" not in values:
        kind = next((what for key, what in _OTHER_JSON.items() if key in values), None)
        problem = f"{shown}: this is {kind.partition(';')[0]}" if kind else f"{shown}: it has no model_type"
        raise UsageError(problem, kind.partition("; ")[2] if kind else "give the config.json of a Hugging Face model")
    return values


def parse_toml(text: str, shown: str) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        UsageError: It is not TOML, or is cut off.
    """
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{shown}: not TOML: {error}", "check whether the file is complete") from None
    except RecursionError:
        raise UsageError(f"{shown}: nested too deeply") from None


def is_titan_toml(path: Path) -> bool:
    """Whether a file is a configuration of torchtitan in TOML."""
    try:
        return bool(tomllib.loads(path.read_text(encoding="utf-8-sig")).keys() & _TITAN_SECTIONS)
    except (OSError, ValueError, RecursionError):
        return False


def _read_titan_toml(text: str, shown: str, name: str) -> ForeignConfig:
    values = parse_toml(text, shown)
    if not values.keys() & _TITAN_SECTIONS:
        found = ", ".join(list(values)[:5])
        raise UsageError(f"{shown}: not a configuration of torchtitan (it has {found or 'no keys'})", f"give {KINDS}")
    target = ForeignConfig(origin=f"torchtitan TOML {shown}", name=name, framework="torchtitan")
    read_titan_settings(values, target, is_toml=True)
    return target


_TITAN_SECTIONS = {"model", "training", "optimizer", "parallelism", "lr_scheduler", "job", "checkpoint"}


def _read_titan_python(text: str, shown: str, name: str, function: str | None) -> ForeignConfig:
    if not is_titan_python(text):
        raise UsageError(f"{shown}: not a configuration of torchtitan (no Trainer.Config)", f"give {KINDS}")
    target = ForeignConfig(origin=f"torchtitan configuration {shown}", name=function or name, framework="torchtitan")
    tree = read_titan_python(text, shown, function, target)
    read_titan_settings(tree, target)
    return target


def _read_yaml_file(path: Path, shown: str, name: str) -> ForeignConfig:
    values = strip_origins(read_yaml(path, None, shown))
    if "modules" in values or "work_group" in values:
        raise UsageError(f"{shown}: this is an experiment file already", f"use it as it is: --config {shown}")
    if is_maxtext(values):
        return read_maxtext(values, shown, name)
    if {"recipe", "trainer"} & values.keys() or "_target_" in str(values):
        raise UsageError(f"{shown}: this looks like a recipe of NeMo", "NeMo recipes cannot be imported")
    raise UsageError(f"{shown}: not a file that primus can import", f"give {KINDS}")
