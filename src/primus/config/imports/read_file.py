"""Recognize the kind of a file of another framework, and read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from primus import registry
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile
from primus.config.imports.hugging_face import read_model_config
from primus.config.imports.launch_line import find_launches
from primus.config.imports.launch_script import read_launch_script
from primus.config.source import ConfigValue
from primus.config.text_file import format_path, read_config_text
from primus.errors import UsageError
from primus.framework import IMPORTS

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
        raise UsageError(f"{shown} is empty", f"give {list_formats()}")
    name = _make_name(path)
    suffix = path.suffix.lower()
    if suffix == ".json" or (not suffix and text.lstrip().startswith("{")):
        return read_model_config(_parse_model_json(text, shown), shown, name)
    if suffix in (".toml", ".py", ".yaml", ".yml"):
        return _read_framework_file(ForeignFile(path, shown, name, text, function))
    if suffix in (".sh", ".bash", ".sbatch", ".slurm") or _is_launch_text(text):
        return read_launch_script(text.replace("\r\n", "\n"), shown, name, path, args, environ)
    raise UsageError(f"{shown}: not a file that primus can import", f"give {list_formats()}")


def _is_launch_text(text: str) -> bool:
    """Whether a framework knows the words of a text as those of its command."""
    found = find_launches([text.split()])
    return bool(found.launches or found.refused)


def _make_name(path: Path) -> str:
    """Name of the result: that of the file, or of the folder of a config.json."""
    stem = path.absolute().parent.name if path.name == "config.json" else path.stem
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in stem).strip("._") or "imported"


def _parse_model_json(text: str, shown: str) -> dict[str, ConfigValue]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip())
        problem = "is cut off" if is_cut else f"not JSON: {error.msg}"
        raise UsageError(f"{shown}:{error.lineno}: {problem}", "copy the whole file again" if is_cut else "") from None
    except RecursionError:
        raise UsageError(f"{shown}: nested too deeply") from None
    if not isinstance(values, dict):
        raise UsageError(f"{shown}: expected a mapping, found a {type(values).__name__}", f"give {list_formats()}")
    if "model_type" not in values:
        kind = next((what for key, what in _OTHER_JSON.items() if key in values), None)
        problem = f"{shown}: this is {kind.partition(';')[0]}" if kind else f"{shown}: it has no model_type"
        raise UsageError(problem, kind.partition("; ")[2] if kind else "give the config.json of a Hugging Face model")
    return values


def _read_framework_file(file: ForeignFile) -> ForeignConfig:
    """Read a file by the first framework whose file it is."""
    if "modules" in file.values or "work_group" in file.values:
        raise UsageError(f"{file.shown}: this is an experiment file already", f"use it as it is: --config {file.shown}")
    for name in registry.list_plug_ins(IMPORTS.name):
        if found := registry.load_plug_in(IMPORTS, name).read_file(file):
            return found
    keys = f" (it has {', '.join(list(file.values)[:5])})" if file.values else ""
    raise UsageError(f"{file.shown}: not a file that primus can import{keys}", f"give {list_formats()}")


def list_formats() -> str:
    """The files that can be imported, for messages."""
    plug_ins = [registry.load_plug_in(IMPORTS, name) for name in registry.list_plug_ins(IMPORTS.name)]
    return f"{', '.join(each.FORMATS for each in plug_ins if each.FORMATS)} or a Hugging Face config.json"
