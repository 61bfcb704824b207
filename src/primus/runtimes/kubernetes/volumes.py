"""Parse the volumes of the pods."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus.errors import UsageError


class PodVolume(Struct, frozen=True):
    """A folder that is mounted in the pods."""

    source: str
    """Name of a claim, or an absolute path of the node."""
    path: str
    is_read_only: bool = False


def parse_volumes(words: Sequence[str]) -> list[PodVolume]:
    """The volumes in `--volume`.

    Raises:
        UsageError: A volume is not CLAIM:/path or /on/node:/path, or two have the same path.
    """
    found = [_parse_volume(word) for word in words]
    paths = [volume.path for volume in found]
    for path in paths:
        if paths.count(path) > 1:
            raise UsageError(f"--volume: two volumes are mounted at {path}", "remove one, or change its path")
    return found


def list_writable_volumes(words: Sequence[str]) -> list[PodVolume]:
    """The volumes in `--volume` that can store a run folder."""
    return [volume for volume in parse_volumes(words) if not volume.is_read_only]


def _parse_volume(word: str) -> PodVolume:
    text = word.removesuffix(":ro")
    source, colon, path = text.partition(":")
    if not colon and text.startswith("/"):
        path = source
    if not source or not path.startswith("/") or ":" in path:
        raise UsageError(f"--volume {word}: expected CLAIM:/path or /on/node:/path", "for example --volume runs:/runs")
    return PodVolume(source, path.rstrip("/") or "/", text != word)
