"""A file of another framework before it is known whose file it is."""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path

from primus.config.source import ConfigValue, read_yaml, strip_origins
from primus.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class ForeignFile:
    """A file that `config import` reads.

    Args:
        path: Its path.
        shown: Its name in messages.
        name: Name of the experiment that it becomes.
        text: Its text.
        function: Function of a Python file that returns the configuration.
    """

    def __init__(self, path: Path, shown: str, name: str, text: str, function: str | None = None) -> None:
        self.path, self.shown, self.name, self.text, self.function = path, shown, name, text, function
        self.suffix = path.suffix.lower()

    @cached_property
    def values(self) -> dict[str, ConfigValue]:
        """The values of a YAML or TOML file; empty for other files.

        Raises:
            UsageError: The file is cut off, or not of its kind.
        """
        if self.suffix in (".yaml", ".yml"):
            return strip_origins(read_yaml(self.path, None, self.shown))
        if self.suffix != ".toml":
            return {}
        try:
            values: dict[str, ConfigValue] = tomllib.loads(self.text)
            return values
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{self.shown}: not TOML: {error}", "check whether the file is complete") from None
        except RecursionError:
            raise UsageError(f"{self.shown}: nested too deeply") from None
