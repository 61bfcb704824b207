"""What `data prepare` writes beside the tokens, last: where they come from, their tokenizer and their checksums."""

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


class TokenizerFacts(Struct, frozen=True, kw_only=True):
    """The tokenizer of a token file."""

    name: str
    """As it was asked for: a path, a hub name or ``bpe:VOCAB``."""
    file: str
    """Copy of its tokenizer.json, relative to the manifest."""
    fingerprint: str
    """See `primus.data.tokenizers.content.fingerprint_content`."""
    vocab_size: int
    """Largest token id + 1."""
    eod: str | None
    """Token that ends a document."""
    eod_id: int | None
    """Its id."""


class InputFacts(Struct, frozen=True, kw_only=True):
    """One input: a file, a folder or a named dataset."""

    path: str
    """As it was given; ``dataset:NAME`` for a named dataset."""
    files: int = 0
    """Files that were read."""
    bytes: int = 0
    """Their size."""
    version: str = ""
    """Of a named dataset."""
    stamp: str = ""
    """Of the sizes and times of its files: where it is the same, they need not be read to know that they are."""
    sha256: str
    """Of the names and checksums of its files, or of a dataset's name and version."""


class FileFacts(Struct, frozen=True, kw_only=True):
    """One written file."""

    bytes: int
    """Its size."""
    xxh3: str = ""
    """Its checksum, xxh3_128; empty where an older version wrote it."""


class EncodeRecipe(Struct, frozen=True, kw_only=True):
    """Settings that decide which tokens an input becomes."""

    json_key: str = "text"
    """Field of a record that holds the text."""
    append_eod: bool = True
    """End each document with the end-of-document token."""
    add_special_tokens: bool = False
    """Add what the tokenizer's own template puts around a text."""
    parse_special_tokens: bool = False
    """Turn a special token that a text spells out into its id."""
    text_documents: str = "file"
    """What is a document in a .txt file."""
    max_bad: int = 0
    """Bad documents that may be left out."""
    shuffle_seed: int | None = None
    """Seed of the order of documents; None for that of the input."""
    split_sentences: str | None = None
    """Language in which documents are divided into sentences, each a sequence; None where they are not."""
    keep_newlines: bool = False
    """Keep white space between sentences."""


class TokenFileManifest(Struct, frozen=True, kw_only=True):
    """Everything known about one pair of .bin and .idx."""

    version: int = 2
    """Version of this format."""
    primus: str = ""
    """Version of the package that wrote it."""
    tokenizer: TokenizerFacts
    """Its tokenizer."""
    recipe: EncodeRecipe = EncodeRecipe()
    """Settings that it was made with."""
    inputs: list[InputFacts] = []
    """What it was made from."""
    documents: int
    """Documents."""
    sequences: int
    """Sequences; more than documents where a long text was cut."""
    tokens: int
    """Tokens, with end-of-document tokens."""
    characters: int = 0
    """Characters of text."""
    max_token_id: int
    """Largest token id that occurs."""
    dtype: str
    """Type of the stored tokens."""
    empty_documents: int = 0
    """Documents without text, left out."""
    bad_documents: int = 0
    """Bad documents, left out and listed in ``PREFIX.bad.jsonl``."""
    special_strings: int = 0
    """How often a text spells out the end-of-document token."""
    bin: FileFacts
    """The tokens."""
    idx: FileFacts
    """The index."""
    fingerprint: str = ""
    """Identity of the tokens and documents, whatever files hold them; see `primus.data.megatron.fingerprint`."""
    pieces: str = ""
    """Checksums of equal parts of the tokens, for telling where they differ; see `Fingerprint.pieces`."""


def manifest_path(prefix: Path) -> Path:
    """File of the manifest of the tokens at `prefix`."""
    return prefix.with_name(prefix.name + ".manifest.json")


def read_manifest(prefix: Path) -> TokenFileManifest | None:
    """The manifest of the tokens at `prefix`; None where something else wrote them.

    Raises:
        UsageError: The manifest is damaged, or is not of the files beside it.
    """
    path = manifest_path(prefix)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=TokenFileManifest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: damaged manifest, {error}", "prepare the data again with --overwrite") from None
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
    """Content of a manifest's file."""
    return msgspec.json.format(msgspec.json.encode(redact_tree(msgspec.to_builtins(manifest))), indent=2) + b"\n"


def fingerprint_tokens(prefix: Path, manifest: TokenFileManifest | None) -> str:
    """Identity of the tokens at `prefix` that a run records: what its samples are made of and in which order.

    That of the stream, with the index where documents are cut into several sequences, which training shuffles; without
    a manifest, or with one of an older version, that of evenly spread samples of both files.
    """
    if not manifest or not manifest.fingerprint:
        return f"sampled-sha256:{_hash_values(*map(_hash_sampled_bytes, (bin_path(prefix), idx_path(prefix))))}"
    if manifest.sequences == manifest.documents:
        return manifest.fingerprint
    return combine_fingerprints(manifest.fingerprint, manifest.idx.xxh3)


def combine_fingerprints(*fingerprints: str) -> str:
    """Identity of several things in this order."""
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
