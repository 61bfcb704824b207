"""The rule that keeps texts in one language."""

from __future__ import annotations

from typing import Any

from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules.rule import Rule
from primus.errors import UsageError


class Language(Rule, frozen=True, kw_only=True, tag="language"):
    """Removes texts that are not in a language, as identified by pycld2 (Compact Language Detector 2).

    FineWeb requires a score of 0.65 from fastText, whose model is a download. CLD2 returns the share of the text in the
    language, so that the results differ for mixed and short texts.
    """

    language: str = "en"
    """Code of the language: ISO 639-1."""
    min_share: float = 0.65
    """Minimum share of the text in the language."""

    def start(self) -> None:
        """Import pycld2 and check the language.

        Raises:
            UsageError: pycld2 is not installed, or does not support the language.
        """
        known = {code for _, code in _import_pycld2().LANGUAGES}
        if self.language not in known:
            raise UsageError(f"rule language: pycld2 does not know '{self.language}'", "give a code like en, de or zh")

    def identity(self) -> dict[str, object]:
        """The version of pycld2."""
        return {"pycld2": getattr(_import_pycld2(), "VERSION", "")}

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the share of the text in the language."""
        detect = _import_pycld2().detect

        def judge(document: int) -> tuple[str, float, float] | None:
            share = _detect_share(detect, _import_pycld2().error, block.texts[document], self.language)
            return ("min_share", share, self.min_share) if share < self.min_share else None

        block.remove_where(self.name, judge)


def _detect_share(detect: Any, error: type[Exception], text: str, language: str) -> float:
    try:
        _, _, found = detect(text)
    except error:  # CLD2 rejects control characters
        _, _, found = detect("".join(character for character in text if character.isprintable() or character.isspace()))
    share: float = max((percent / 100 for _, code, percent, _ in found if code == language), default=0.0)
    return share


def _import_pycld2() -> Any:
    try:
        import pycld2  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError("rule language needs the package pycld2", "pip install pycld2") from None
    return pycld2
