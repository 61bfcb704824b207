"""The rule that repairs text which was decoded wrongly."""

from __future__ import annotations

import functools
import re
from typing import Any, Literal

from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules.rule import Rule
from primus.errors import UsageError

SUSPECT = re.compile("[^\\t\\n -%'-~]")
"""What ftfy may change: all but plain ASCII without &, which begins an HTML entity."""


class UnicodeRepair(Rule, frozen=True, kw_only=True, tag="unicode_repair"):
    """Repairs mojibake, HTML entities, ligatures and control characters with ftfy; removes nothing.

    Only lines with a character that ftfy might change are given to it: the result is the same and comes sooner.
    """

    uncurl_quotes: bool = True
    """Make typographic quotation marks plain ones, as FineWeb has them."""
    normalization: Literal["NFC", "NFKC"] | None = "NFC"
    """Unicode normal form of the lines that are looked at."""

    def start(self) -> None:
        """Import once.

        Raises:
            UsageError: ftfy is not installed.
        """
        _import_ftfy()

    def identity(self) -> dict[str, Any]:
        """The version of ftfy."""
        return {"ftfy": _import_ftfy().__version__}

    def apply(self, block: DocumentBlock) -> None:
        """Change texts."""
        repair = functools.partial(_repair_text, config=_build_config(self.uncurl_quotes, self.normalization))
        texts = [
            repair(text) if alive and SUSPECT.search(text) else text
            for text, alive in zip(block.texts, block.alive, strict=True)
        ]
        block.replace_texts(self.name, texts)


def _repair_text(text: str, config: Any) -> str:
    """What ``ftfy.fix_text`` makes of a text."""
    ftfy = _import_ftfy()
    pieces: list[str] = []
    done = 0
    markup = text.find("<")
    while match := SUSPECT.search(text, done):
        first = text.rfind("\n", done, match.start()) + 1 or done
        last = text.find("\n", match.start()) + 1 or len(text)
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
