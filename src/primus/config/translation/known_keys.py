"""What is known of another framework's settings, read from the data files that tools/ writes.

This module does without `from __future__ import annotations`, as config/schema.py does: msgspec would evaluate each
annotation, in every command that reads such settings.
"""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

Effect = Literal["numbers", "speed", "report", "checkpoint", "launch", "data", "other", "model"]
"""What a setting changes: what is trained (`numbers`), speed or memory, logs and metrics, how checkpoints are written,
how processes are supervised, the order of the data, other tasks and optimizers than the training of a language model by
Adam, or the shape of a model that has a preset of the same name here."""


class KnownKey(Struct, frozen=True, kw_only=True):
    """One setting of a framework: an argument of Megatron-LM, a field of torchtitan, a key of Primus."""

    effect: Effect = "numbers"
    default: Any = None
    """The framework's default; a list or an enumeration as text."""
    kind: Literal["int", "float", "bool", "str", "switch", "text"] = "text"
    """`switch` is a flag without a value, `text` is converted by the framework itself."""
    nargs: int | str | None = None
    """Number of values after the flag, as in argparse; None means one."""
    choices: list[Any] = []
    shipped: list[Any] = []
    """Other values that the framework's own presets have."""
    flags: list[str] = []
    """Spellings on the framework's command line."""
    stores: bool = True
    """Value that a switch stores."""
    first: str = ""
    """First release that has the setting, among those that the data covers."""
    last: str = ""
    """Last release that has it."""
    now: str = ""
    """Name in the release that the adapter is written for, where it was moved."""
    gone: str = ""
    """Why the release that the adapter is written for has no such setting."""


class KnownKeys(Struct, frozen=True, kw_only=True):
    """The settings of one framework."""

    keys: dict[str, KnownKey]
    versions: list[str] = []
    """Releases that the data covers, oldest first."""
    tokenizers: dict[str, int] = {}
    """Rows of the embedding of published models, by name on the Hugging Face Hub."""
    flavors: dict[str, list[str]] = {}
    """Model presets here by `name/flavor` of torchtitan."""


@cache
def read_known_keys(file: Path) -> KnownKeys:
    """The settings in a data file of a framework's folder, such as ``megatron/arguments.json``."""
    return msgspec.json.decode(file.read_bytes(), type=KnownKeys)
