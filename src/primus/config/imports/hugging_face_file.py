"""The values of a `config.json` of Hugging Face, each of which is read or reported."""

from __future__ import annotations

from typing import Any

from primus.config.imports.foreign_config import ForeignConfig


class HuggingFaceFile:
    """The values of a config.json, each of which is read or reported."""

    def __init__(self, values: dict[str, Any], target: ForeignConfig, defaults: dict[str, Any]) -> None:
        self.values = defaults | {key: value for key, value in values.items() if value is not None}
        self.target = target
        self.unread = set(values)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which then counts as read; null means the default."""
        self.unread.discard(key)
        return self.values.get(key, default)

    def copy_keys(self, names: dict[str, str]) -> None:
        """Copy values under our names where the file has them."""
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
