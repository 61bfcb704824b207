"""Volumes of the pods, as they are typed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus.errors import UsageError


class Volume(Struct, frozen=True):
    """A folder that the pods see."""

    source: str
    """A claim, or an absolute path of the node."""
    path: str
    is_read_only: bool = False


def parsed(words: Sequence[str]) -> list[Volume]:
    """The volumes of `--volume`.

    Raises:
        UsageError: One is not CLAIM:/path or /on/node:/path, or two have the same path.
    """
    found = [_parsed(word) for word in words]
    paths = [volume.path for volume in found]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"--volume: two volumes at {path}")
    return found


def writable(words: Sequence[str]) -> list[Volume]:
    """Those of the volumes of `--volume` that can hold a run folder."""
    return [volume for volume in parsed(words) if not volume.is_read_only]


def _parsed(word: str) -> Volume:
    text = word.removesuffix(":ro")
    source, colon, path = text.partition(":")
    if not colon and text.startswith("/"):
        path = source
    if not source or not path.startswith("/") or ":" in path:
        raise UsageError(f"--volume {word}: expected CLAIM:/path or /on/node:/path", "--volume runs:/runs")
    return Volume(source, path.rstrip("/") or "/", text != word)
