"""Manifest of token files: their input, tokenizer and checksums. It is written last, so it marks a complete output."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.data.megatron.indexed_dataset import bin_path, idx_path
from primus.errors import UsageError
from primus.redaction import redact_tree

SAMPLED_PIECES = 64
SAMPLED_BYTES = 1 << 16
"""Number and size of the samples of a file without a manifest: 4 MiB in total, for a file of any size."""


class TokenizerFacts(Struct, frozen=True, kw_only=True):
    """The tokenizer of a token file."""

    name: str
    """Name given by the user: a path, a hub name or ``bpe:VOCAB``."""
    file: str
    """Copy of its tokenizer.json, relative to the manifest."""
    fingerprint: str
    """See `primus.data.tokenizers.content.fingerprint_content`."""
    vocab_size: int
    """Largest token id + 1."""
    eod: str | None
    """Token that ends a document."""
    eod_id: int | None
    """Id of `eod`."""


class InputFacts(Struct, frozen=True, kw_only=True):
    """One input: a file, a folder or a named dataset."""

    path: str
    """Path given by the user; ``dataset:NAME`` for a named dataset."""
    files: int = 0
    """Number of files."""
    bytes: int = 0
    """Total size of the files."""
    version: str = ""
    """Version of a named dataset."""
    stamp: str = ""
    """Digest of the sizes and modification times of the files; if it is unchanged, the files are not read again."""
    sha256: str
    """Digest of the names and checksums of the files, or of the name and version of a dataset."""


class FileFacts(Struct, frozen=True, kw_only=True):
    """Size and checksum of a written file."""

    bytes: int
    """Size of the file."""
    xxh3: str = ""
    """Checksum (xxh3_128); empty if an older version wrote the file."""


class EncodeRecipe(Struct, frozen=True, kw_only=True):
    """Settings that determine the tokens of an input."""

    json_key: str = "text"
    """Field of a record that holds the text."""
    append_eod: bool = True
    """End each document with the end-of-document token."""
    add_special_tokens: bool = False
    """Add what the tokenizer's own template puts around a text."""
    parse_special_tokens: bool = False
    """Turn a special token that a text spells out into its id."""
    text_documents: str = "file"
    """Unit of a document in a .txt file."""
    max_bad: int = 0
    """Maximum number of bad documents to skip."""
    shuffle_seed: int | None = None
    """Seed of the order of documents; None for that of the input."""
    split_sentences: str | None = None
    """Language in which documents are divided into sentences, each a sequence; None where they are not."""
    keep_newlines: bool = False
    """Keep white space between sentences."""


class TokenFileManifest(Struct, frozen=True, kw_only=True):
    """Manifest of one pair of .bin and .idx."""

    version: int = 2
    """Version of this format."""
    primus: str = ""
    """Version of the package that wrote it."""
    tokenizer: TokenizerFacts
    """Tokenizer of the files."""
    recipe: EncodeRecipe = EncodeRecipe()
    """Settings of the encode job."""
    inputs: list[InputFacts] = []
    """Inputs of the encode job."""
    documents: int
    """Number of documents."""
    sequences: int
    """Number of sequences; more than documents if long texts were cut."""
    tokens: int
    """Number of tokens, including end-of-document tokens."""
    characters: int = 0
    """Number of characters of text."""
    max_token_id: int
    """Largest token id that occurs."""
    dtype: str
    """Type of the stored tokens."""
    empty_documents: int = 0
    """Number of skipped documents without text."""
    bad_documents: int = 0
    """Number of skipped bad documents, which ``PREFIX.bad.jsonl`` lists."""
    special_strings: int = 0
    """Number of occurrences of the end-of-document token as text."""
    bin: FileFacts
    """The .bin file."""
    idx: FileFacts
    """The .idx file."""
    fingerprint: str = ""
    """Identity of the tokens and documents, independent of files; see `primus.data.megatron.fingerprint`."""
    pieces: str = ""
    """Checksums of equal parts of the tokens, to locate differences; see `Fingerprint.compute_pieces`."""


def manifest_path(prefix: Path) -> Path:
    """Path of the manifest of the tokens at `prefix`."""
    return prefix.with_name(prefix.name + ".manifest.json")


def read_manifest(prefix: Path) -> TokenFileManifest | None:
    """Read the manifest of the tokens at `prefix`; None if it does not exist.

    Raises:
        UsageError: The manifest is damaged, or does not match the files next to it.
    """
    path = manifest_path(prefix)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=TokenFileManifest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: damaged manifest: {error}", "prepare the data again with --overwrite") from None
    for file, facts in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        size = file.stat().st_size if file.is_file() else None
        if size != facts.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise UsageError(
                f"{file}: {found} instead of the {facts.bytes} bytes in its manifest",
                "copy all files of the prefix again, or prepare the data again with --overwrite",
            )
    return manifest


def encode_manifest(manifest: TokenFileManifest) -> bytes:
    """Encode a manifest as JSON, without secrets."""
    return msgspec.json.format(msgspec.json.encode(redact_tree(msgspec.to_builtins(manifest))), indent=2) + b"\n"


def fingerprint_tokens(prefix: Path, manifest: TokenFileManifest | None) -> str:
    """Identity of the tokens at `prefix` that a run records; it determines the samples and their order.

    It is the fingerprint of the stream. If documents are cut into several sequences, it includes the index, because
    training shuffles sequences. Without a manifest, or with one of an older version, it is a digest of evenly spaced
    samples of both files.
    """
    if not manifest or not manifest.fingerprint:
        return f"sampled-sha256:{_hash_values(*map(_hash_sampled_bytes, (bin_path(prefix), idx_path(prefix))))}"
    if manifest.sequences == manifest.documents:
        return manifest.fingerprint
    return combine_fingerprints(manifest.fingerprint, manifest.idx.xxh3)


def combine_fingerprints(*fingerprints: str) -> str:
    """Combined identity of several fingerprints in this order."""
    return fingerprints[0] if len(fingerprints) == 1 else f"sha256:{_hash_values(*fingerprints)}"


def _hash_values(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _hash_sampled_bytes(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for piece in range(SAMPLED_PIECES):
            file.seek(max(0, size - SAMPLED_BYTES) * piece // (SAMPLED_PIECES - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
