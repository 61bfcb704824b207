"""Checksums of files: xxh3_128 where the package xxhash is installed, else blake2b of the standard library."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from primus.errors import PrimusError

XXH3 = "xxh3_128"
"""128 bits, not cryptographic: finds damage, at the speed of memory (xxhash.com)."""
BLAKE2B = "blake2b"
"""BLAKE2b (RFC 7693) with a digest of 16 bytes."""

XXHASH = "xxhash"
DIGEST_BYTES = 16
READ_BYTES = 8 << 20


def choose_algorithm() -> str:
    """The fastest algorithm that is installed."""
    return XXH3 if find_spec(XXHASH) else BLAKE2B


def compute_checksum(path: Path, algorithm: str) -> str:
    """Checksum of a file's content, in hexadecimal.

    Raises:
        PrimusError: The algorithm is not available here.
        OSError: The file cannot be read.
    """
    digest = create_hash(algorithm)
    # One buffer for all blocks: memory for each would be faulted in again.
    buffer = memoryview(bytearray(min(READ_BYTES, path.stat().st_size)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return str(digest.hexdigest())


def create_hash(algorithm: str) -> Any:
    """An object with `update` and `hexdigest`.

    Raises:
        PrimusError: The algorithm is not available here.
    """
    if algorithm == BLAKE2B:
        import hashlib  # loads OpenSSL: `config check` computes no checksum

        return hashlib.blake2b(digest_size=DIGEST_BYTES)
    if algorithm != XXH3:
        raise PrimusError(f"unknown checksum '{algorithm}'", "the checkpoint is of a newer version of primus")
    try:
        xxhash = import_module(XXHASH)
    except ImportError:
        raise PrimusError(
            f"the checksums of this checkpoint are {XXH3}, which needs the package xxhash", "pip install xxhash"
        ) from None
    return xxhash.xxh3_128()
