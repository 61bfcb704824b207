"""Read the files and commands of `counting`: YAML with `counts`, and `count.py --counts 9`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile
from primus.config.source import parse_scalar

FORMATS = "a YAML file of counting"
COMMANDS = "counting"
MODEL = "mine_1B"


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """The experiment of a file with `counts`; None if it has none."""
    if "counts" not in file.values:
        return None
    target = ForeignConfig(origin=f"file of counting {file.shown}", name=file.name, framework="counting")
    _read_values(file.values, target)
    return target


def find_arguments(words: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Values by argument of `count.py`; None for another command."""
    program = next((at for at, word in enumerate(words) if word.endswith("count.py")), None)
    if program is None:
        return None
    arguments = words[program + 1 :]
    return {name: (value,) for name, value in zip(arguments[::2], arguments[1::2], strict=False)}


def read_arguments(arguments: Mapping[str, Sequence[str]], target: ForeignConfig) -> None:
    """Set the keys of `target` from the arguments of `count.py`."""
    _read_values({name.removeprefix("--"): parse_scalar(values[0]) for name, values in arguments.items()}, target)


def _read_values(values: Mapping[str, Any], target: ForeignConfig) -> None:
    target.settings["model"] = MODEL
    for name, value in values.items():
        if name in ("counts", "stride"):
            target.set_key("train_iters" if name == "counts" else name, value)
        else:
            target.add_other(name, value, "counting has no such setting")
