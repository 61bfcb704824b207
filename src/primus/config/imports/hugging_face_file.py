"""The values of a `config.json` of Hugging Face, each of which is read or reported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.source import ConfigValue

NEEDED = (
    *(
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("vocab_size", "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
)
"""Keys of a shape: a default in the place of one is a warning."""


class FamilyDefaults(Struct, frozen=True):
    """What Hugging Face's configuration classes fill in."""

    transformers: str
    """Release of transformers."""
    families: dict[str, dict[str, bool | int | float | str]]
    """Defaults by key, by `model_type`."""


@cache
def read_family_defaults() -> FamilyDefaults:
    """The data that `tools/hugging_face_defaults.py` writes."""
    return msgspec.json.decode(Path(__file__).with_name("hugging_face_defaults.json").read_bytes(), type=FamilyDefaults)


class HuggingFaceFile:
    """The values of a config.json, each of which is read or reported.

    Args:
        values: The values of the file.
        target: Result.
        defaults: What transformers fills in for keys that the file does not have; null in the file is no value.
    """

    def __init__(
        self, values: dict[str, ConfigValue], target: ForeignConfig, defaults: Mapping[str, ConfigValue]
    ) -> None:
        self.values = {**defaults, **values}
        self.target = target
        self.unread = set(values)
        self._defaults = defaults.keys() - values.keys()

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which then counts as read; `default` where neither file nor family has one."""
        self.unread.discard(key)
        value = self.values.get(key)
        if key in self._defaults and value is not None:
            self._defaults.discard(key)
            if key in NEEDED:
                self.target.add_other(key, value, "not in the file; transformers fills it in")
            elif value is not False:
                self.target.defaults[key] = value
        return default if value is None else value

    def copy_keys(self, names: dict[str, str]) -> None:
        """Copy values under our names where the file or its family has them."""
        for key, ours in names.items():
            value = self.take(key)
            if value is not None:
                self.target.set_key(ours, value)

    def set_keys(self, **values: Any) -> None:
        self.target.model |= values

    def report(self, key: str, reason: str) -> None:
        """Report a value without a key here."""
        self.unread.discard(key)
        self.target.add_other(key, self.values.get(key), reason)
