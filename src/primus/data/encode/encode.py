"""Stage that encodes the texts of a shard into token ids, sequence lengths and document ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from primus.data.encode import sentences, shuffle
from primus.data.megatron.indexed_dataset import Tokens, choose_smallest_dtype
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.readers import BadDocument, TextDocument
from primus.data.readers.shard import Shard
from primus.data.shards import inputs
from primus.data.shards.shard_queue import ShardOutput
from primus.data.tokenizers.canary import Canary, check_samples
from primus.data.tokenizers.tokenizer import Tokenizer

METHOD = 1
"""Version of the content of shard files. Increase it with each change of the content: files of another version are not
reused."""

BATCH_CHARACTERS = 1 << 21
"""Characters in a batch: large enough to amortize the calls of the tokenizer, a few tens of MB with its ids."""
BATCH_TEXTS = 4096
"""Maximum number of texts in a batch, which bounds the Python objects of very short texts."""
LONG_CHARACTERS = 1 << 22
"""Length above which a text is tokenized in pieces, to limit memory."""


class EncodeFacts(Struct, frozen=True, kw_only=True):
    """What the stage states about a shard, besides counts."""

    largest: int
    """Largest token id."""
    contents: list[str]
    """Checksums of its input; see `primus.data.shards.inputs.hash_contents`."""
    fast_failure: str = ""
    """First failure of the fast path."""


@dataclass(frozen=True)
class EncodedBatch:
    """Encoded sequences of a batch of texts."""

    tokens: Tokens
    """[sum of lengths] token ids of all sequences, concatenated."""
    lengths: NDArray[np.int32]
    """[n] tokens of each sequence."""
    ends_document: NDArray[np.bool_]
    """[n] whether a sequence is the last of its document."""
    characters: int
    """Number of characters of the texts."""
    empty: int
    """Number of documents without text; they have no sequence."""
    special_strings: int
    """Number of occurrences of the end-of-document token as text."""


@dataclass
class EncodeStage:
    """Encodes the documents of an input. The joined output of all shards does not depend on their borders."""

    tokenizer: Tokenizer
    recipe: EncodeRecipe
    fingerprints: dict[str, str]
    """Fingerprint of each input file; see `primus.data.shards.inputs.Inputs`."""
    identity: Any = field(init=False)
    _canary: Canary | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # The limit of bad documents does not change the content, so raising it reuses finished shards.
        recipe = msgspec.structs.replace(self.recipe, max_bad=0)
        tokenizer = self.tokenizer
        engine = "fast" if tokenizer.fast else "exact"  # --no-fast must not reuse shards of a wrong fast tokenizer
        self.identity = ["encode", METHOD, engine, tokenizer.fingerprint, tokenizer.eod, recipe, self.fingerprints]

    def start(self) -> None:
        """Prepare this process. May be called again in a forked worker."""
        # The processes use all cores; threads of the library would compete with them and would not survive a fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._canary = self._canary or Canary(self.tokenizer, self.recipe.add_special_tokens)

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Write a shard's files ``bin``, ``lengths`` (int32) and ``ends`` (a byte per sequence), shuffled if requested.

        Raises:
            PrimusError: An input file is damaged or has changed, or the fast tokenizer gives wrong ids.
        """
        output.durable = False  # merging verifies the checksum of every file, so a sync for each shard is not needed
        if self.recipe.shuffle_seed is None:
            with ExitStack() as stack:
                paths = [output.path(name) for name in ("bin", "lengths", "ends")]
                largest = self._encode_shard(shard, output, [stack.enter_context(path.open("wb")) for path in paths])
        else:
            with shuffle.open_unsorted_files(output) as files:
                largest = self._encode_shard(shard, output, files)
                for file in files:
                    file.flush()
                shuffle.sort_shard(output, shard.index, self.recipe.shuffle_seed, choose_stored_dtype(self.tokenizer))
        output.facts = EncodeFacts(
            largest=largest,
            contents=inputs.hash_contents(shard),
            fast_failure=self.tokenizer.fast.failure if self.tokenizer.fast else "",
        )
        # Last: a file that changes while it is read must not become a finished shard.
        for part in shard.parts:
            inputs.check_fingerprint(part.file, self.fingerprints[part.file])

    def _encode_shard(self, shard: Shard, output: ShardOutput, files: Sequence[BinaryIO]) -> int:
        """Write the tokens, lengths and ends of a shard into files, in input order; returns the largest token id."""
        tokens, lengths, ends = files
        largest = 0
        for batch in _group_batches(self._read_texts(shard, output)):
            encoded = encode_batch(batch, self.tokenizer, self.recipe, self._canary)
            largest = max(largest, int(encoded.tokens.max(initial=0)))
            tokens.write(encoded.tokens.data)
            lengths.write(encoded.lengths.data)
            ends.write(encoded.ends_document.data)
            output.add_counts(**_count_encoded(encoded))
        return largest

    def _read_texts(self, shard: Shard, output: ShardOutput) -> Iterator[TextDocument]:
        """Read the texts of a shard; bad documents are recorded and skipped."""
        cut = not self.recipe.add_special_tokens
        for part in shard.parts:
            for item in inputs.read_part(part, self.recipe.json_key, self.recipe.text_documents, cut, lists=True):
                if isinstance(item, BadDocument):
                    output.record_bad(item.where, item.reason)
                elif self.recipe.split_sentences:
                    yield from _split_sentences(item, self.recipe.split_sentences, self.recipe.keep_newlines)
                else:
                    yield item


def choose_stored_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Type of the token ids in the files (little endian)."""
    return choose_smallest_dtype(tokenizer.vocab_size).newbyteorder("<")


def encode_batch(
    texts: list[TextDocument], tokenizer: Tokenizer, recipe: EncodeRecipe, canary: Canary | None = None
) -> EncodedBatch:
    """Encode one batch; `canary` compares a sample of it with the reference tokenizer."""
    # An empty piece of a longer document stays for now, because it may be the one that ends the document.
    kept = [text for text in texts if text.text or not (text.begins and text.ends)]
    strings = [text.text for text in kept]
    tokens, lengths = _tokenize_texts(strings, tokenizer, recipe.add_special_tokens)
    if canary:
        check_samples(
            tokenizer, canary.sample_batch(strings, tokens, lengths, lambda place: _format_rough_place(kept[place]))
        )
    empty = len(texts) - len(kept)
    ends = np.fromiter((text.ends for text in kept), np.bool_, len(kept))
    if len(lengths) and not lengths.all():
        stays, ends, without_tokens = _find_empty(kept, lengths)
        lengths, ends, empty = lengths[stays], ends[stays], empty + without_tokens
    if recipe.append_eod:
        assert tokenizer.eod_id is not None
        # A template that ends with the token has appended it to every sequence.
        has_end = recipe.add_special_tokens and _has_template_end(tokenizer)
        wanted = np.zeros_like(ends) if has_end else ends
        tokens, lengths = _append_eod(tokens, lengths, wanted, tokenizer.eod_id)
    return EncodedBatch(
        tokens=tokens,
        lengths=lengths.astype("<i4"),
        ends_document=ends,
        characters=sum(map(len, strings)),
        empty=empty,
        special_strings=sum(text.count(tokenizer.eod) for text in strings) if tokenizer.eod else 0,
    )


def _split_sentences(text: TextDocument, language: str, keep_newlines: bool) -> Iterator[TextDocument]:
    """Split a text, or a piece of a text, into sentences."""
    found = sentences.split_sentences(text.text, language, keep_newlines) or [""]
    for index, sentence in enumerate(found):
        begins, ends = text.begins and index == 0, text.ends and index == len(found) - 1
        yield TextDocument(sentence, begins, ends, None, text.part, text.number)


def _find_empty(
    texts: list[TextDocument], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], int]:
    """Find the pieces without tokens in a batch.

    The end of a document moves to its last piece that has tokens. If that piece is in an earlier batch, an empty piece
    is kept to mark the end.

    Returns:
        Which pieces to keep, which pieces end a document, and the number of documents without tokens.
    """
    stays, ends = lengths > 0, np.zeros(len(texts), np.bool_)
    without_tokens = start = 0
    for index, text in enumerate(texts):
        if not text.ends:
            continue
        with_tokens = np.flatnonzero(stays[start : index + 1])
        if len(with_tokens):
            ends[start + with_tokens[-1]] = True
        elif texts[start].begins:
            without_tokens += 1
        else:
            stays[index] = ends[index] = True
        start = index + 1
    return stays, ends, without_tokens


def _has_template_end(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's template ends with the end-of-document token."""
    ids, _ = tokenizer.encode_batch(["a"], add_special_tokens=True)
    return len(ids) > 0 and int(ids[-1]) == tokenizer.eod_id


def _format_rough_place(text: TextDocument) -> str:
    """Approximate location of a text, without counting the lines before it as `TextDocument.where` does."""
    return f"{text.part.file}: line or row {text.number} from {text.part.first}" if text.part else "a text"


def _tokenize_texts(
    strings: list[str], tokenizer: Tokenizer, add_special_tokens: bool
) -> tuple[Tokens, NDArray[np.int64]]:
    """Token ids of texts in the stored type. A long text, which is alone in its batch, is tokenized in pieces if the
    tokenizer allows it."""
    dtype = choose_stored_dtype(tokenizer)
    if len(strings) != 1 or len(strings[0]) <= LONG_CHARACTERS or add_special_tokens:
        tokens, lengths = tokenizer.encode_batch(strings, add_special_tokens)
        return tokens.astype(dtype), lengths
    pieces = tokenizer.cut_safely(strings[0], BATCH_CHARACTERS)[::-1]
    encoded = []
    while pieces:  # `pop` frees each piece once it is encoded
        encoded.append(tokenizer.encode_batch([pieces.pop()])[0].astype(dtype))
    joined = np.concatenate(encoded)
    return joined, np.array([len(joined)])


def _append_eod(
    tokens: Tokens, lengths: NDArray[np.int64], wanted: NDArray[np.bool_], eod_id: int
) -> tuple[Tokens, NDArray[np.int64]]:
    """Append an end-of-document token to each sequence that is marked in `wanted`."""
    return np.insert(tokens, np.cumsum(lengths)[wanted], eod_id), lengths + wanted


def _count_encoded(encoded: EncodedBatch) -> dict[str, int]:
    return {
        "documents": int(encoded.ends_document.sum()),
        "sequences": len(encoded.lengths),
        "tokens": len(encoded.tokens),
        "characters": encoded.characters,
        "empty": encoded.empty,
        "special_strings": encoded.special_strings,
    }


def _group_batches(texts: Iterable[TextDocument]) -> Iterator[list[TextDocument]]:
    batch: list[TextDocument] = []
    size = 0
    for text in texts:
        if batch and len(text.text) > LONG_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text.text)
        is_full = size >= BATCH_CHARACTERS or len(batch) >= BATCH_TEXTS
        if is_full and (text.ends or size >= LONG_CHARACTERS):  # keep a document together: see _find_empty
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
