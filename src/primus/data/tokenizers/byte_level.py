"""Convert byte-level vocabularies of other libraries to a tokenizer.json with the same ids."""

from __future__ import annotations

import json
from collections.abc import Sequence

from primus.data.tokenizers.cuts import GPT2

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + place) for place, byte in enumerate(_OTHERS)}
"""Character that represents each byte in a tokenizer.json (bytes_to_unicode in GPT-2's encoder.py)."""


def from_ranks(ranks: dict[bytes, int], pattern: str, special: dict[str, int], before: Sequence[str] = ()) -> bytes:
    """Build a tokenizer.json that gives the same ids as tiktoken.

    tiktoken merges the pair that forms the token of the lowest rank. A tokenizer.json expresses that as a list of
    merges: every split of a token into two tokens, in the order of ranks. A piece that is itself a token is not split
    (TikTokenConverter in transformers' convert_slow_tokenizer.py). The special tokens are part of the vocabulary,
    because the `tokenizers` library would assign them new ids otherwise.

    Args:
        ranks: Rank of each token, which is also its id.
        pattern: Regular expression that matches the pieces, without possessive quantifiers.
        special: Id of each special token.
        before: Special tokens that the template adds before a text.
    """
    spelled = {token: "".join(map(LETTERS.__getitem__, token)) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()} | special
    merges = [
        (spelled[left], spelled[right])
        for token in sorted(ranks, key=ranks.__getitem__)
        for left, right in _find_splits(token, ranks)
    ]
    return build_tokenizer_json(vocabulary, merges, pattern, special, before, ignore_merges=True)


def from_vocabulary(vocabulary: bytes, merges: bytes) -> bytes:
    """Build a tokenizer.json from GPT-2's pair of files, vocab.json and merges.txt.

    Raises:
        ValueError: The content of a file is invalid.
    """
    ids = json.loads(vocabulary)
    lines = [line for line in merges.decode().splitlines() if line and not line.startswith("#version")]
    pairs = [(left, right) for left, right in (line.split(" ") for line in lines)]
    special = {token: number for token, number in ids.items() if token.startswith("<|") and token.endswith("|>")}
    return build_tokenizer_json(ids, pairs, GPT2, special, (), ignore_merges=False)


def build_tokenizer_json(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    pattern: str,
    special: dict[str, int],
    before: Sequence[str],
    ignore_merges: bool,
) -> bytes:
    """Build the tokenizer.json of a byte-level BPE."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern == GPT2}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    sequence = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, **plain} for token, number in sorted(special.items(), key=lambda t: t[1])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level if pattern == GPT2 else sequence,
        "post_processor": _build_template(before, special),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _find_splits(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens that form a token when joined, those with the lowest ranks first."""
    pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
    known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
    return sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _build_template(before: Sequence[str], special: dict[str, int]) -> dict[str, object] | None:
    if not before:
        return None
    tokens = [{"SpecialToken": {"id": token, "type_id": 0}} for token in before]
    sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": tokens + sequence,
        "pair": tokens + sequence + tokens + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [special[token]], "tokens": [token]} for token in before},
    }
