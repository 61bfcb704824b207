"""Decode a tokenizer.json only as far as needed: the vocabulary and the merges are nearly all of its content."""

from __future__ import annotations

from typing import Any

import msgspec

LARGE = ("vocab", "merges")
"""Parts of ``model`` that an outline leaves undecoded."""


def decode_outline(content: bytes) -> dict[str, Any]:
    """Decode a tokenizer.json with the `LARGE` parts of the model as `msgspec.Raw`, in a tenth of the time.

    Raises:
        msgspec.MsgspecError: The content is not a JSON object.
    """
    parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(parts.pop("model"), type=dict[str, msgspec.Raw]) if "model" in parts else {}
    small = {name: msgspec.json.decode(value) for name, value in model.items() if name not in LARGE}
    large = {name: model[name] for name in LARGE if name in model}
    return {name: msgspec.json.decode(value) for name, value in parts.items()} | {"model": small | large}


def collect_vocabulary(described: dict[str, Any]) -> dict[str, int]:
    """Id of each token of a decoded tokenizer.json, added tokens included."""
    listed = described["model"].get("vocab", {})
    if isinstance(listed, list):  # unigram model: pieces with their scores, in the order of their ids
        listed = {piece: number for number, (piece, _) in enumerate(listed)}
    return listed | {token["content"]: token["id"] for token in described.get("added_tokens", [])}


def join_merges(described: dict[str, Any]) -> dict[str, Any]:
    """Convert a decoded tokenizer.json to the older form with each merge as one string, which is faster to read.

    Returns the input unchanged if a token contains a space, which that form cannot express, or if merges are not pairs.
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
