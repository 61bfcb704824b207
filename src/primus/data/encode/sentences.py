"""Documents divided into sentences by nltk's Punkt, as ``--split-sentences`` of Megatron-LM's script does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from primus.errors import UsageError

MOST_CHARACTERS = 1_000_000
"""Characters that are divided at a time (Encoder.split in Megatron-LM, tools/preprocess_data.py)."""


def split_sentences(text: str, language: str, keep_newlines: bool) -> list[str]:
    """Sentences of a text.

    Args:
        text: The text.
        language: Name of a Punkt model, such as ``english``.
        keep_newlines: Whether white space between sentences is kept.

    Raises:
        UsageError: nltk or the model is not installed.
    """
    splitter = load_splitter(language, keep_newlines)
    parts = (text[start : start + MOST_CHARACTERS] for start in range(0, len(text), MOST_CHARACTERS))
    return [sentence for part in parts for sentence in splitter.tokenize(part)]


@lru_cache(maxsize=4)
def load_splitter(language: str, keep_newlines: bool) -> Any:
    """The splitter of a language.

    Raises:
        UsageError: nltk or the model is not installed.
    """
    try:
        from nltk.tokenize import punkt  # type: ignore[import-not-found,import-untyped,unused-ignore]

        tokenizer_class = punkt.PunktTokenizer
    except (ImportError, AttributeError):
        raise UsageError(
            "--split-sentences needs the package nltk, 3.9 or newer", "pip install 'nltk>=3.9', or leave the option out"
        ) from None
    try:
        splitter = tokenizer_class(language)
    except (LookupError, ValueError, OSError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip("* ")), type(error).__name__)
        raise UsageError(
            f"--lang {language}: nltk has no Punkt model of this language ({reason})",
            "python -m nltk.downloader punkt_tab, in the folder that NLTK_DATA names",
        ) from None
    if not keep_newlines:
        return splitter

    return punkt.PunktSentenceTokenizer(train_text=splitter._params, lang_vars=_build_keeping_variables(punkt)())


def _build_keeping_variables(punkt: Any) -> Any:
    """Punkt's settings with another pattern of a period, in which the white space after it is of the sentence."""
    pattern: str = punkt.PunktLanguageVars._period_context_fmt
    look_ahead, space = "(?=(?P<after_tok>", r"\s+(?P<next_tok>"
    if pattern.count(look_ahead) != 1 or pattern.count(space) != 1:
        raise UsageError(
            "--keep-newlines: this version of nltk has another pattern of a period", "pip install nltk==3.9.1"
        )
    changed = pattern.replace(look_ahead, rf"\s*{look_ahead}").replace(space, "(?P<next_tok>")
    return type("KeepingVariables", (punkt.PunktLanguageVars,), {"_period_context_fmt": changed})
