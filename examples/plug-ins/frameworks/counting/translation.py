"""Settings of `counting` in experiment files: `counts` is the number of steps."""

from __future__ import annotations

from collections.abc import Iterable

from primus.config.source import Tree
from primus.config.translation.foreign_settings import (
    ForeignSettings,
    LayerContext,
    TranslatedSettings,
    Translator,
    rename_keys,
)

RENAMED = {"counts": "train_iters"}


class CountingTranslator(Translator):
    """Translation of `framework: counting`."""

    framework = "counting"

    def rename(self, settings: Tree) -> Tree:
        return rename_keys(settings, RENAMED)

    def translate(self, settings: Tree, context: LayerContext) -> TranslatedSettings:
        return ForeignSettings(settings, context.typed).finish()

    def list_known_keys(self) -> Iterable[str]:
        return RENAMED


def create_translator() -> CountingTranslator:
    """The translation of the settings of one experiment file."""
    return CountingTranslator()
