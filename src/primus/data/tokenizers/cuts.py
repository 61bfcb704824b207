"""Long texts in pieces that a tokenizer encodes as it encodes the whole."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from primus.data.tokenizer import is_json

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
"""How tokenizers split a text before they merge bytes; GPT-2's encoder.py, tiktoken_ext/openai_public.py without its
possessive quantifiers, of which Oniguruma reads ``{1,3}+`` as a repetition, and the tokenizer.json of Llama 3, Qwen 2
and Mistral NeMo."""

_BORDER = re.compile(
    # None of the patterns has a match that goes on with a space or other whitespace after a character that is none,
    # but for line ends after punctuation; so before a space, and before any whitespace after a plain letter or digit.
    "(?<=\\S)(?= )|(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])(?=[\\t\\n\\r])"
)


def cut(text: str, size: int, content: bytes) -> list[str]:
    """`text` in pieces of at least `size` characters where it can be cut; see `Tokenizer.safe_cuts`."""
    if len(text) <= size or not _cuttable(content):
        return [text]
    pieces = []
    start = 0
    while (found := _BORDER.search(text, start + size)) is not None:
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


@lru_cache(maxsize=4)
def _cuttable(content: bytes) -> bool:
    """Whether a tokenizer splits by one of `PATTERNS`, and nothing else of it looks beyond a border."""
    if not is_json(content):
        return False
    described = json.loads(content)
    added = described.get("added_tokens", [])
    return (
        split_pattern(described) in PATTERNS.values()
        and (described.get("normalizer") or {"type": "NFC"}) == {"type": "NFC"}
        and not any(token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"]) for token in added)
    )


def split_pattern(described: dict[str, Any]) -> str | None:
    """The pattern by which a tokenizer.json splits, each match a piece; None where it splits in another way."""
    step = described.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    if any(step.get("add_prefix_space") for step in steps):
        return None
    if [step.get("type") for step in steps] == ["ByteLevel"] and steps[0].get("use_regex", True):
        return GPT2
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex", True):
        return None
    split = steps[0]
    pattern: str | None = split["pattern"].get("Regex")
    return pattern if split.get("behavior") == "Isolated" and not split.get("invert") else None
