"""What a rule is: its thresholds as fields, and a function that removes or changes documents by them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from primus.data.filter.cleaning.block import DocumentBlock


class Rule(Struct, frozen=True, kw_only=True, tag_field="rule"):
    """One rule with its thresholds; a threshold of None is switched off."""

    @property
    def name(self) -> str:
        """Name in a recipe."""
        return str(self.__struct_config__.tag)

    def start(self) -> None:
        """Load what is needed once.

        Raises:
            UsageError: A package or file is missing.
        """

    def apply(self, block: DocumentBlock) -> None:
        """Remove documents of a block, or change their texts; a function of the thresholds and each text alone."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What decides what it does, beyond its thresholds: content of files, versions of libraries."""
        return {}
