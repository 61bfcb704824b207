"""A tokenizer.json: its vocabulary, its steps before the model, and its identity."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct

from primus.data.tokenizers.cuts import GPT2, PATTERNS

LARGE = ("vocab", "merges")
"""Parts of ``model`` that an outline leaves undecoded."""


class AddedToken(Struct, frozen=True):
    """A token that is found in a text before the model splits it."""

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class TokenizerJson:
    """A decoded tokenizer.json. It stays as it is written: each library and version has fields of its own.

    Args:
        fields: The decoded file.

    Raises:
        msgspec.MsgspecError: An added token has no content or no id.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.model: Mapping[str, Any] = fields.get("model", {})
        self.added_tokens = msgspec.convert(fields.get("added_tokens", []), list[AddedToken])

    @classmethod
    def decode(cls, content: bytes) -> TokenizerJson:
        """Decode the content of a file.

        Raises:
            msgspec.MsgspecError: The content is not a JSON object.
        """
        return cls(msgspec.json.decode(content, type=dict[str, Any]))

    @classmethod
    def decode_outline(cls, content: bytes) -> TokenizerJson:
        """Decode all but the `LARGE` parts of the model, which stay `msgspec.Raw`: in a tenth of the time.

        Raises:
            msgspec.MsgspecError: The content is not a JSON object.
        """
        parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(parts.pop("model"), type=dict[str, msgspec.Raw]) if "model" in parts else {}
        decoded = {name: value if name in LARGE else msgspec.json.decode(value) for name, value in model.items()}
        return cls({name: msgspec.json.decode(value) for name, value in parts.items()} | {"model": decoded})

    def encode(self, **replaced: object) -> bytes:
        """The content of a file, with some fields replaced."""
        return msgspec.json.encode({**self.fields, **replaced})

    def collect_vocabulary(self) -> dict[str, int]:
        """Id of each token, added tokens included."""
        listed = self.model.get("vocab", {})
        if isinstance(listed, list):  # unigram model: pieces with their scores, in the order of their ids
            listed = {piece: number for number, (piece, _) in enumerate(listed)}
        return listed | {token.content: token.id for token in self.added_tokens}

    def compute_fingerprint(self) -> str:
        """Identity of the tokenizer; see `primus.data.tokenizers.content.fingerprint_content`."""
        vocabulary = self.model.get("vocab")
        if isinstance(vocabulary, dict):  # the vocabulary of a unigram model is a list already
            vocabulary = sorted(vocabulary.items(), key=itemgetter(1, 0))
        parts = [
            *(self.fields.get(key) for key in ("normalizer", "pre_tokenizer")),
            sorted((token.id, token.content, token.special) for token in self.added_tokens),
            *(
                self.model.get("type", "BPE"),
                *(bool(self.model.get(key)) for key in ("ignore_merges", "byte_fallback")),
            ),
            vocabulary,
            [merge if isinstance(merge, str) else " ".join(merge) for merge in self.model.get("merges", [])],
        ]
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()

    def join_merges(self) -> TokenizerJson:
        """The older form with each merge as one string, which is faster to read.

        Returns itself if a token contains a space, which that form cannot express, or if merges are not pairs.
        """
        merges = self.model.get("merges")
        if not isinstance(merges, list) or set(map(type, merges)) != {list}:
            return self
        try:
            joined = list(map(" ".join, merges))
        except TypeError:
            return self
        if " ".join(joined).count(" ") != 2 * len(joined) - 1:
            return self
        return TokenizerJson({**self.fields, "model": {**self.model, "merges": joined}})

    def has_plain_normalizer(self) -> bool:
        """Whether texts are normalized to NFC at most."""
        return (self.fields.get("normalizer") or {"type": "NFC"}) == {"type": "NFC"}

    def is_cuttable(self) -> bool:
        """Whether it splits by one of `cuts.PATTERNS`, and none of its other steps looks across a cut."""
        patterns = self.list_patterns()
        return (
            len(patterns) == 1
            and patterns[0] in PATTERNS.values()
            and self.has_plain_normalizer()
            and not any(token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in self.added_tokens)
        )

    def list_patterns(self) -> list[str]:
        """The patterns that are applied in turn to split a text; empty if it is split in another way."""
        step = self.fields.get("pre_tokenizer") or {}
        *splits, last = step.get("pretokenizers") or [step] if step.get("type") == "Sequence" else [step]
        if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
            return []
        if last.get("use_regex", True):
            return [] if splits else [GPT2]
        if any(split.get("behavior") != "Isolated" or split.get("invert") for split in splits):
            return []
        patterns = [split["pattern"].get("Regex", "") for split in splits]
        return patterns if all(patterns) else []
