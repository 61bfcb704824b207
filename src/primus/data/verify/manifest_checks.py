"""Compares token files with their manifest."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from primus.data.megatron.fingerprint import CHUNK_TOKENS, PIECE_DIGITS, compute_pieces, count_chunks_in_piece
from primus.data.megatron.indexed_dataset import CODES, bin_path, idx_path
from primus.data.megatron.manifest import TokenFileManifest, manifest_path
from primus.data.shards import shard_queue
from primus.data.verify.findings import DamagePlace, TokenFileFinding, build_finding
from primus.data.verify.index_checks import BORDERS_BYTE, CODE_BYTE, SEQUENCES_BYTE, TokenFileIndex
from primus.data.verify.token_checks import TokenScan

TYPES = frozenset(np.dtype(kind).name for kind in CODES.values() if np.issubdtype(kind, np.integer))
"""Names of the valid token types."""


class TokenFileContents(NamedTuple):
    """Measured contents of token files."""

    dtype: str
    tokens: int
    documents: int
    sequences: int
    scan: TokenScan
    fingerprint: str
    """Hash of tokens and documents; empty if the index is damaged."""


def read_and_check_manifest(prefix: Path) -> tuple[TokenFileManifest | None, list[TokenFileFinding]]:
    """The manifest at `prefix`, also if its files differ from it; None if it is missing or damaged."""
    path = manifest_path(prefix)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=TokenFileManifest)
    except FileNotFoundError:
        return None, []
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return None, [build_finding("manifest", path, f"damaged manifest: {error}")]
    if manifest.dtype not in TYPES:
        return None, [build_finding("manifest", path, f"damaged manifest: unknown token type {manifest.dtype}")]
    return manifest, []


def check_dtype(prefix: Path, manifest: TokenFileManifest, index: TokenFileIndex) -> list[TokenFileFinding]:
    """Check that the token type of the index is that of the manifest."""
    name = index.dtype.name if index.dtype else "unknown"
    if name == manifest.dtype:
        return []
    problem = f"tokens of type {name}, but {manifest.dtype} in the manifest"
    return [build_finding("header", idx_path(prefix), problem, DamagePlace(byte=CODE_BYTE))]


def check(
    prefix: Path, manifest: TokenFileManifest, found: TokenFileContents, index: TokenFileIndex | None
) -> tuple[list[TokenFileFinding], bool]:
    """Compare sizes, numbers and checksums.

    Args:
        prefix: Path without extension.
        manifest: The manifest.
        found: Contents of the files.
        index: The index; None if it is damaged.

    Returns:
        The differences, and whether the tokens are known to be intact.
    """
    findings = (
        _check_complete(prefix, manifest) + _check_sizes(prefix, manifest) + _check_numbers(prefix, manifest, found)
    )
    tokens = _check_tokens(prefix, manifest, found, index)
    # A manifest without any checksum proves nothing.
    intact = bool(manifest.fingerprint or manifest.bin.xxh3) and not tokens
    if intact and found.scan.largest != manifest.max_token_id:
        problem = f"the largest token is {found.scan.largest:,}, but {manifest.max_token_id:,} in the manifest"
        findings.append(build_finding("manifest", manifest_path(prefix), problem))
    if (
        idx_path(prefix).is_file()
        and manifest.idx.xxh3
        and shard_queue.compute_checksum(idx_path(prefix)) != manifest.idx.xxh3
    ):
        findings.append(
            build_finding("checksum", idx_path(prefix), "the content has changed since it was written (xxh3)")
        )
    return findings + tokens, intact


def _check_complete(prefix: Path, manifest: TokenFileManifest) -> list[TokenFileFinding]:
    """Check that a manifest has all checksums; a manifest of an older version has none."""
    checksums = (manifest.fingerprint, manifest.pieces, manifest.bin.xxh3, manifest.idx.xxh3)
    missing = any((manifest.fingerprint, manifest.pieces)) and not all(checksums)
    return [build_finding("manifest", manifest_path(prefix), "one of its checksums is missing")] if missing else []


def _check_sizes(prefix: Path, manifest: TokenFileManifest) -> list[TokenFileFinding]:
    findings = []
    for path, facts in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        # A missing file has its own finding.
        size = path.stat().st_size if path.is_file() else facts.bytes
        if size != facts.bytes:
            problem = f"{size:,} bytes, but {facts.bytes:,} in the manifest"
            findings.append(build_finding("size", path, problem, DamagePlace(byte=min(size, facts.bytes))))
    return findings


def _check_numbers(prefix: Path, manifest: TokenFileManifest, found: TokenFileContents) -> list[TokenFileFinding]:
    findings = []
    for name, byte, number, written in (
        ("sequences", SEQUENCES_BYTE, found.sequences, manifest.sequences),
        ("documents", BORDERS_BYTE, found.documents, manifest.documents),
    ):
        if number and number != written:
            problem = f"{number:,} {name}, but {written:,} in the manifest"
            findings.append(build_finding("header", idx_path(prefix), problem, DamagePlace(byte=byte)))
    if found.tokens and found.tokens != manifest.tokens:
        problem = f"{found.tokens:,} tokens, but {manifest.tokens:,} in the manifest"
        findings.append(build_finding("size", bin_path(prefix), problem))
    return findings


def _check_tokens(
    prefix: Path, manifest: TokenFileManifest, found: TokenFileContents, index: TokenFileIndex | None
) -> list[TokenFileFinding]:
    """Check that the tokens are those that were written.

    With equal type and size, equal fingerprints mean equal bytes. The checksum of the whole .bin, which one process has
    to compute alone, is used only for manifests without a fingerprint.
    """
    path = bin_path(prefix)
    if not path.is_file():
        return []
    if not manifest.fingerprint:
        differs = bool(manifest.bin.xxh3) and shard_queue.compute_checksum(path) != manifest.bin.xxh3
        return (
            [build_finding("checksum", path, "the tokens have changed since they were written (xxh3)")]
            if differs
            else []
        )
    places = _find_changed_pieces(manifest, found, index)
    if places:
        size = _count_piece_tokens(manifest)
        problem = (
            f"tokens have changed since they were written, within the {size:,} tokens that follow each of these places"
        )
        return [build_finding("checksum", path, problem, *places)]
    if found.fingerprint and found.fingerprint != manifest.fingerprint:
        problem = f"fingerprint {found.fingerprint}, but {manifest.fingerprint} in the manifest"
        return [build_finding("checksum", path if not manifest.pieces else idx_path(prefix), problem)]
    return []


def _count_piece_tokens(manifest: TokenFileManifest) -> int:
    return CHUNK_TOKENS * count_chunks_in_piece(_count_chunks(manifest))


def _count_chunks(manifest: TokenFileManifest) -> int:
    return -(-manifest.tokens // CHUNK_TOKENS)


def _find_changed_pieces(
    manifest: TokenFileManifest, found: TokenFileContents, index: TokenFileIndex | None
) -> list[DamagePlace]:
    """First places of the parts of the stream whose checksum differs."""
    there, written = compute_pieces(found.scan.digests, _count_chunks(manifest)), manifest.pieces
    firsts = [
        start // PIECE_DIGITS * _count_piece_tokens(manifest)
        for start in range(0, min(len(there), len(written)), PIECE_DIGITS)
        if there[start : start + PIECE_DIGITS] != written[start : start + PIECE_DIGITS]
    ]
    return [_locate_token(first, found, index) for first in firsts]


def _locate_token(token: int, found: TokenFileContents, index: TokenFileIndex | None) -> DamagePlace:
    width = np.dtype(found.dtype).itemsize
    document = index.document_at(token * width, found.tokens * width) if index else None
    return DamagePlace(byte=token * width, document=document)
