"""Downloads single files of the Hugging Face Hub and verifies their checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from primus.data.catalog.hub import HubFile, SplitListing
from primus.errors import PrimusError
from primus.web import hub

CHUNK = 1 << 20


def download_file(listing: SplitListing, file: HubFile, folder: Path, count: Callable[[int], None]) -> None:
    """Download a file into `folder` and verify it.

    Raises:
        PrimusError: The hub does not respond, or the file is damaged; a damaged file is removed.
    """
    path = folder / file.path
    if path.exists():
        path.unlink()  # not recorded as complete
    download_from_hub(listing, file, folder=folder, count=count)
    _verify_file(path, file)


def download_from_hub(listing: SplitListing, file: HubFile, **options: Any) -> Path:
    """Download a file to a folder or into the hub's cache; see `primus.web.hub.download_file` for the options."""
    return hub.download_file(listing.repo, file.path, "dataset", revision=listing.revision, **options)


def _verify_file(path: Path, file: HubFile) -> None:
    """Compare a file with the hub's size and checksum.

    Raises:
        PrimusError: The file differs and was removed.
    """
    kind, _, expected = file.checksum.partition(":")
    # Small files are git blobs, whose SHA-1 includes a header with the size.
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    if path.stat().st_size != file.bytes or (expected and digest.hexdigest() != expected):
        path.unlink()
        raise PrimusError(
            f"{path}: corrupt download from {hub.read_hub_endpoint()}",
            "run the command again; the other files are kept",
        )


def build_stream_url(listing: SplitListing, file: HubFile) -> str:
    return f"hf://datasets/{listing.repo}@{quote(listing.revision, safe='')}/{file.path}"
