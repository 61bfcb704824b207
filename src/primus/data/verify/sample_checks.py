"""Finds the tokenizer of token files, and decodes documents and encodes them again."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
from msgspec import Struct

from primus.data.megatron.indexed_dataset import bin_path
from primus.data.megatron.manifest import TokenFileManifest
from primus.data.tokenizers.load import load_tokenizer, parse_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.data.verify.findings import DamagePlace, TokenFileFinding, build_finding
from primus.data.verify.index_checks import TokenFileIndex
from primus.errors import PrimusError

CHECKED = 16
"""Documents that are decoded and encoded again."""

SAMPLE_TOKENS = 4096
"""Maximum tokens of a document that are decoded."""

UNSTABLE_TOKENS = 64
"""Last tokens of a cut document, which may be encoded differently without the text after the cut."""

SIBLING_NAMES = (".tokenizer.json", ".tokenizer.model")


class TokenizerSource(Struct):
    """The tokenizer of token files, and its origin."""

    tokenizer: Tokenizer | None = None
    """The tokenizer; None if it is unknown."""
    name: str = ""
    """Name or path that it was loaded from."""


class DecodedSample(Struct, kw_only=True):
    """A decoded document."""

    document: int
    """Number of the document."""
    tokens: int
    """Number of its tokens."""
    text: str
    """Start of its text."""
    same: bool | None
    """Whether encoding the text gives the same tokens; None if it was not encoded."""


def load_asked_tokenizer(name: str | None) -> TokenizerSource:
    """Load the tokenizer that the user names.

    Raises:
        PrimusError: The tokenizer does not exist.
    """
    return TokenizerSource(load_tokenizer(name, fast=False), name) if name else TokenizerSource()


def find_tokenizer_source(
    prefix: Path, manifest: TokenFileManifest | None, given: TokenizerSource
) -> tuple[TokenizerSource, list[TokenFileFinding]]:
    """The tokenizer of the files at `prefix`, and findings about the copy in their folder.

    Args:
        prefix: Path without extension.
        manifest: Their manifest.
        given: The tokenizer that the user names, which has precedence.
    """
    sibling = prefix.parent / manifest.tokenizer.file if manifest else _find_sibling_tokenizer(prefix)
    if sibling is None:
        return given, []
    found, findings = _load_sibling_tokenizer(sibling, manifest)
    if manifest and given.tokenizer and given.tokenizer.fingerprint != manifest.tokenizer.fingerprint:
        problem = f"encoded by the tokenizer {manifest.tokenizer.name}, not by {given.name}"
        findings.append(build_finding("tokenizer", bin_path(prefix), problem))
    return given if given.tokenizer else found, findings


def check(
    index: TokenFileIndex, manifest: TokenFileManifest | None, source: TokenizerSource, seed: int
) -> tuple[list[DecodedSample], list[TokenFileFinding], list[str]]:
    """Decode documents drawn with `seed`, and encode their texts again.

    Args:
        index: The index, without damage.
        manifest: The manifest of the files.
        source: Their tokenizer.
        seed: Seed for the choice of documents.

    Returns:
        The documents, findings and notes.
    """
    size = bin_path(index.prefix).stat().st_size
    chosen = random.Random(seed).sample(range(index.num_documents), min(CHECKED, index.num_documents))
    samples = [decode_document(index, document, source.tokenizer, size, manifest) for document in chosen]
    tried = [sample for sample in samples if sample.same is not None]
    other = [sample for sample in tried if not sample.same]
    if not tried:
        return samples, [], []
    measured = f"{len(tried) - len(other)} of {len(tried)} decoded documents give the same tokens again"
    # Some tokenizers do not reproduce every text. Only a majority of differences means another tokenizer.
    if 2 * len(other) <= len(tried):
        named = f" (not {', '.join(str(sample.document) for sample in other)})" if other else ""
        return samples, [], [measured + named]
    starts = [int(index.compute_document_starts(sample.document, sample.document + 1, size)[0]) for sample in other]
    places = [DamagePlace(byte=byte, document=sample.document) for byte, sample in zip(starts, other, strict=True)]
    problem = f"only {measured}: the tokens are probably not from {source.name}"
    return samples, [build_finding("samples", bin_path(index.prefix), problem, *places)], []


def decode_document(
    index: TokenFileIndex,
    document: int,
    tokenizer: Tokenizer | None,
    num_bytes: int,
    manifest: TokenFileManifest | None,
) -> DecodedSample:
    """Decode one document; the index must be valid."""
    assert index.dtype is not None and tokenizer is not None
    first, last = (index.compute_document_starts(document, document + 2, num_bytes) // index.dtype.itemsize).tolist()
    tokens = np.memmap(bin_path(index.prefix), index.dtype, "r", shape=(num_bytes // index.dtype.itemsize,))
    ids: list[int] = tokens[first : min(last, first + SAMPLE_TOKENS)].tolist()
    text = tokenizer.decode_valid(ids)
    if text is None:
        return DecodedSample(document=document, tokens=last - first, text="", same=None)
    is_cut = len(ids) < last - first
    # The end-of-document token was appended by the tool, and encoding the text does not produce it.
    plain = ids[:-1] if not is_cut and ids and ids[-1] == tokenizer.eod_id else ids
    # Special tokens have no text, or the text of a special token encodes as plain characters: a comparison shows
    # nothing.
    same = None if _has_special(manifest) else _is_stable(plain, tokenizer, is_cut)
    return DecodedSample(document=document, tokens=last - first, text=text, same=same)


def _has_special(manifest: TokenFileManifest | None) -> bool:
    return bool(manifest and (manifest.recipe.add_special_tokens or manifest.recipe.parse_special_tokens))


def _is_stable(ids: list[int], tokenizer: Tokenizer, is_cut: bool) -> bool:
    again = tokenizer.encode(tokenizer.decode(ids))
    if not is_cut:
        return again == ids
    kept = len(ids) - UNSTABLE_TOKENS
    return again[:kept] == ids[:kept]


def _find_sibling_tokenizer(prefix: Path) -> Path | None:
    named = (prefix.with_name(prefix.name + suffix) for suffix in SIBLING_NAMES)
    return next((path for path in named if path.is_file()), None)


@lru_cache(maxsize=2)
def _from_content(content: bytes, eod: str | None) -> Tokenizer:
    """The tokenizer of a file, loaded once for all prefixes with the same file.

    Raises:
        PrimusError: The file is damaged.
    """
    return parse_tokenizer(content, "the tokenizer next to the files", eod, fast=False)


def _load_sibling_tokenizer(
    path: Path, manifest: TokenFileManifest | None
) -> tuple[TokenizerSource, list[TokenFileFinding]]:
    """Load the tokenizer in the folder of the files, and compare it with the manifest."""
    if not path.is_file():
        problem = "missing; the manifest names it as the tokenizer of the data"
        return TokenizerSource(), [build_finding("tokenizer", path, problem)]
    try:
        loaded = _from_content(path.read_bytes(), manifest.tokenizer.eod if manifest else None)
    except PrimusError as error:
        return TokenizerSource(), [build_finding("tokenizer", path, f"cannot be loaded: {error}")]
    source = TokenizerSource(loaded, str(path))
    if not manifest:
        return source, []
    for what, there, written in (
        ("fingerprint", loaded.fingerprint, manifest.tokenizer.fingerprint),
        ("size of the vocabulary", loaded.vocab_size, manifest.tokenizer.vocab_size),
        ("end-of-document token", loaded.eod_id, manifest.tokenizer.eod_id),
    ):
        if there != written:
            problem = f"differs from the tokenizer of the data: {what} {there}, but {written} in the manifest"
            return TokenizerSource(), [build_finding("tokenizer", path, problem)]
    return source, []
