"""Split documents into sentences with nltk's Punkt, like ``--split-sentences`` of Megatron-LM's preprocess_data.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from primus.errors import UsageError

MOST_CHARACTERS = 1_000_000
"""Characters that are split at a time (Encoder.split in Megatron-LM, tools/preprocess_data.py)."""


def split_sentences(text: str, language: str, keep_newlines: bool) -> list[str]:
    """Sentences of a text.

    Args:
        text: The text.
        language: Name of a Punkt model, such as ``english``.
        keep_newlines: Whether to keep white space between sentences.

    Raises:
        UsageError: nltk or the model is not installed.
    """
    splitter = load_splitter(language, keep_newlines)
    parts = (text[start : start + MOST_CHARACTERS] for start in range(0, len(text), MOST_CHARACTERS))
    return [sentence for part in parts for sentence in splitter.tokenize(part)]


@lru_cache(maxsize=4)
def load_splitter(language: str, keep_newlines: bool) -> Any:
    """Load the Punkt splitter of a language.

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
    """Punkt's language variables with a period pattern in which the white space after a sentence belongs to it."""
    pattern: str = punkt.PunktLanguageVars._period_context_fmt
    look_ahead, space = "(?=(?P<after_tok>", r"\s+(?P<next_tok>"
    if pattern.count(look_ahead) != 1 or pattern.count(space) != 1:
        raise UsageError(
            "--keep-newlines: this version of nltk uses another pattern for periods", "pip install nltk==3.9.1"
        )
    changed = pattern.replace(look_ahead, rf"\s*{look_ahead}").replace(space, "(?P<next_tok>")
    return type("KeepingVariables", (punkt.PunktLanguageVars,), {"_period_context_fmt": changed})
