"""Cut long texts into pieces whose concatenated ids are the ids of the whole text."""

from __future__ import annotations

import re

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_O200K_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = "|".join(word + CONTRACTIONS + "?" for word in _WORDS) + r"|\p{N}{1,3}" + _O200K_REST
TEKKEN = "|".join(_WORDS) + r"|\p{N}" + _O200K_REST
PATTERNS = {"gpt2": GPT2, "cl100k": CL100K, "qwen2": QWEN2, "o200k": O200K, "tekken": TEKKEN}
"""Patterns by which tokenizers split a text before they merge bytes. Sources: GPT-2's encoder.py; the tokenizer.json of
Llama 3, Qwen 2 and Mistral NeMo; tiktoken_ext/openai_public.py without its possessive quantifiers, because Oniguruma
reads ``{1,3}+`` as a repetition."""

_BORDER = re.compile(
    # In none of the patterns does a match continue from a non-whitespace character to whitespace, except to line ends
    # after punctuation. A cut is therefore safe before a space, and before any whitespace after a letter or digit.
    "(?<=\\S)(?= )|(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])(?=[\\t\\n\\r])"
)


def cut_text(text: str, size: int) -> list[str]:
    """Cut `text` into pieces of at least `size` characters, for a tokenizer that is `cuttable`."""
    if len(text) <= size:
        return [text]
    pieces = []
    start = 0
    while (found := _BORDER.search(text, start + max(size, 1))) is not None:
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]
