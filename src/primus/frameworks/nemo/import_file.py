"""Recognize a recipe of NeMo, which cannot be imported."""

from __future__ import annotations

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile
from primus.errors import UsageError

FORMATS = ""


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """None if the file is no recipe.

    Raises:
        UsageError: It is one.
    """
    if file.suffix in (".yaml", ".yml") and (
        {"recipe", "trainer"} & file.values.keys() or "_target_" in str(file.values)
    ):
        raise UsageError(f"{file.shown}: this looks like a recipe of NeMo", "NeMo recipes cannot be imported")
    return None
