"""A tokenizer.json, decoded no further than is needed: its vocabulary and merges are nearly all of it."""

from __future__ import annotations

from typing import Any

import msgspec

LARGE = ("vocab", "merges")
"""Parts of ``model`` that an outline has as JSON."""


def decode_outline(content: bytes) -> dict[str, Any]:
    """A tokenizer.json in which the `LARGE` parts of the model are `msgspec.Raw`; a tenth of the time of the whole.

    Raises:
        msgspec.MsgspecError: It is no such JSON.
    """
    parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts.pop("model"), type=dict[str, msgspec.Raw]) if "model" in parts else {}
    small = {name: msgspec.json.decode(value) for name, value in model.items() if name not in LARGE}
    large = {name: model[name] for name in LARGE if name in model}
    return {name: msgspec.json.decode(value) for name, value in parts.items()} | {"model": small | large}


def collect_vocabulary(described: dict[str, Any]) -> dict[str, int]:
    """Id of each token of a decoded tokenizer.json, added tokens included."""
    listed = described["model"].get("vocab", {})
    if isinstance(listed, list):  # of a unigram model: pieces with their scores, in the order of their ids
        listed = {piece: number for number, (piece, _) in enumerate(listed)}
    return listed | {token["content"]: token["id"] for token in described.get("added_tokens", [])}


def join_merges(described: dict[str, Any]) -> dict[str, Any]:
    """A decoded tokenizer.json with each merge as one string, the older form, which is faster to read.

    It is returned as it is where a token has a space, as that form cannot tell such merges, or the merges are no pairs.
    """
    model = described.get("model", {})
    merges = model.get("merges")
    if not isinstance(merges, list) or set(map(type, merges)) != {list}:
        return described
    try:
        joined = list(map(" ".join, merges))
    except TypeError:
        return described
    if " ".join(joined).count(" ") != 2 * len(joined) - 1:
        return described
    return {**described, "model": {**model, "merges": joined}}
