"""The base of rules: thresholds as fields, and a function that removes or changes documents."""

from __future__ import annotations

from msgspec import Struct

from primus.data.filter.cleaning.block import DocumentBlock


class Rule(Struct, frozen=True, kw_only=True, tag_field="rule"):
    """One rule with its thresholds; None disables a threshold."""

    @property
    def name(self) -> str:
        """Name in a recipe."""
        return str(self.__struct_config__.tag)

    def start(self) -> None:
        """Load files and packages, and compile kernels, once.

        Raises:
            UsageError: A package or file is missing.
        """

    def apply(self, block: DocumentBlock) -> None:
        """Remove documents of a block, or change their texts, as a function of the thresholds and each text."""
        raise NotImplementedError

    def identity(self) -> dict[str, object]:
        """Settings that affect the result in addition to the thresholds: content of files, versions of libraries."""
        return {}
