"""The rules by name, in their usual order in recipes."""

from __future__ import annotations

from primus.data.filter.cleaning.rules.c4 import C4
from primus.data.filter.cleaning.rules.language import Language
from primus.data.filter.cleaning.rules.lists import BadWords, Urls
from primus.data.filter.cleaning.rules.quality import FinewebQuality, GopherQuality, Length, LongLines
from primus.data.filter.cleaning.rules.repetition import GopherRepetition
from primus.data.filter.cleaning.rules.rule import Rule
from primus.data.filter.cleaning.rules.unicode_repair import UnicodeRepair

RULES: dict[str, type[Rule]] = {
    rule.__struct_config__.tag: rule  # type: ignore[misc]
    for rule in (
        Urls, UnicodeRepair, Length, Language, GopherRepetition, GopherQuality, C4, FinewebQuality, LongLines, BadWords,
    )
}  # fmt: skip
