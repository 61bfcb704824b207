"""The rule that repairs wrongly decoded text."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules.rule import Rule
from primus.errors import UsageError

SUSPECT = re.compile("[^\\t\\n -%'-~]")
"""Characters that ftfy may change: all except plain ASCII, and &, which begins an HTML entity."""


class UnicodeRepair(Rule, frozen=True, kw_only=True, tag="unicode_repair"):
    """Repairs mojibake, HTML entities, ligatures and control characters with ftfy; removes nothing.

    Only lines with a character that ftfy might change are passed to it, which is faster with the same result.
    """

    uncurl_quotes: bool = True
    """Replace typographic quotation marks with plain ones, as in FineWeb."""
    normalization: Literal["NFC", "NFKC"] | None = "NFC"
    """Unicode normal form of the repaired lines."""

    def start(self) -> None:
        """Import ftfy.

        Raises:
            UsageError: ftfy is not installed.
        """
        _import_ftfy()

    def identity(self) -> dict[str, object]:
        """The version of ftfy."""
        return {"ftfy": _import_ftfy().__version__}

    def apply(self, block: DocumentBlock) -> None:
        """Replace the texts with repaired ones."""
        repair = functools.partial(_repair_text, config=_build_config(self.uncurl_quotes, self.normalization))
        texts = [
            repair(text) if alive and SUSPECT.search(text) else text
            for text, alive in zip(block.texts, block.alive, strict=True)
        ]
        block.replace_texts(self.name, texts)


def _repair_text(text: str, config: Any) -> str:
    """Apply ``ftfy.fix_text`` to the lines of a text that may need it."""
    ftfy = _import_ftfy()
    pieces: list[str] = []
    done = 0
    markup = text.find("<")
    while match := SUSPECT.search(text, done):
        first = text.rfind("\n", done, match.start()) + 1 or done
        last = text.find("\n", match.start()) + 1 or len(text)
        # As ftfy does for a whole text, entities are kept from the line of the first <, because the text may be HTML.
        own = config._replace(unescape_html=False) if 0 <= markup < last else config
        pieces += text[done:first], ftfy.fix_text(text[first:last], own)
        done = last
    return "".join([*pieces, text[done:]])


@functools.cache
def _build_config(uncurl_quotes: bool, normalization: Any) -> Any:
    return _import_ftfy().TextFixerConfig(uncurl_quotes=uncurl_quotes, normalization=normalization, explain=False)


def _import_ftfy() -> Any:
    try:
        import ftfy
    except ImportError:
        raise UsageError("rule unicode_repair needs the package ftfy", "pip install ftfy") from None
    return ftfy
