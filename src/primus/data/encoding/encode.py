"""The stage that turns the texts of a shard into tokens, the lengths of its sequences, and which ends a document."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from primus.data.documents import Text
from primus.data.encoding import shuffle
from primus.data.indexed import Tokens, smallest_dtype
from primus.data.manifest import Recipe
from primus.data.pipeline import inputs
from primus.data.pipeline.shards import Shard
from primus.data.pipeline.work import Output
from primus.data.tokenizer import Tokenizer
from primus.data.tokenizers.canary import Canary, checked

METHOD = 1
"""Changes with whatever decides the bytes of a shard's files, so that those of another version are not taken."""

BATCH_CHARACTERS = 1 << 21
BATCH_TEXTS = 4096
LONG_CHARACTERS = 1 << 22
"""Length from which a text is tokenized in pieces, which take less memory."""


@dataclass(frozen=True)
class Encoded:
    """A batch of sequences."""

    tokens: Tokens
    """[sum of lengths] ids, one sequence after the other."""
    lengths: NDArray[np.int32]
    """[n] tokens of each sequence."""
    ends_document: NDArray[np.bool_]
    """[n] whether a sequence is the last of its document."""
    characters: int
    """Length of the texts."""
    empty: int
    """Documents without text, which have no sequence."""
    special_strings: int
    """How often a text spells out the end-of-document token."""


@dataclass
class EncodeStage:
    """Tokens of the documents of an input; the same for any shards of it, one after the other."""

    tokenizer: Tokenizer
    recipe: Recipe
    stamps: dict[str, str]
    """What tells of each file whether it has changed."""
    identity: Any = field(init=False)
    _canary: Canary | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        recipe = msgspec.structs.replace(self.recipe, max_bad=0)
        tokenizer = self.tokenizer
        engine = "fast" if tokenizer.fast else "exact"  # where the fast way was wrong, the other takes nothing of it
        self.identity = ["encode", METHOD, engine, tokenizer.fingerprint, tokenizer.eod, recipe, self.stamps]

    def start(self) -> None:
        """Processes are the parallelism: the library must not start threads beside."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._canary = self._canary or Canary(self.tokenizer, self.recipe.add_special_tokens)

    def run(self, shard: Shard, output: Output) -> None:
        """Write a shard's files ``bin``, ``lengths`` (int32) and ``ends`` (a byte for each sequence), sorted if asked.

        Raises:
            PrimusError: A file is damaged, or changed meanwhile, or the fast tokenizer is wrong.
        """
        output.durable = False  # merging checks every file
        if self.recipe.shuffle_seed is None:
            with ExitStack() as stack:
                names = ("bin", "lengths", "ends")
                self._encode(shard, output, [stack.enter_context(output.path(name).open("wb")) for name in names])
        else:
            with shuffle.unsorted_files(output) as files:
                self._encode(shard, output, files)
                for file in files:
                    file.flush()
                shuffle.sort_shard(output, shard.index, self.recipe.shuffle_seed, stored_dtype(self.tokenizer))
        if self.tokenizer.fast and self.tokenizer.fast.failure:
            output.facts["fast_failure"] = self.tokenizer.fast.failure
        output.facts["contents"] = inputs.contents(shard)
        for part in shard.parts:
            inputs.check_stamp(part.file, self.stamps[part.file])

    def _encode(self, shard: Shard, output: Output, files: Sequence[BinaryIO]) -> None:
        """Write tokens, lengths and ends of a shard into files, in the order of the input."""
        tokens, lengths, ends = files
        largest = 0
        for batch in _batches(self._texts(shard, output)):
            encoded = encode_batch(batch, self.tokenizer, self.recipe, self._canary)
            largest = max(largest, int(encoded.tokens.max(initial=0)))
            tokens.write(encoded.tokens.data)
            lengths.write(encoded.lengths.data)
            ends.write(encoded.ends_document.data)
            output.count(**_counts(encoded))
        output.facts["largest"] = largest

    def _texts(self, shard: Shard, output: Output) -> Iterator[Text]:
        """The texts of a shard; what is bad is left out, if it may be."""
        cut = not self.recipe.add_special_tokens
        for part in shard.parts:
            for item in inputs.read(part, self.recipe.json_key, self.recipe.text_documents, cut):
                if isinstance(item, Text):
                    yield item
                else:
                    output.bad(item.where, item.reason)


def stored_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Type of the tokens in the files."""
    return smallest_dtype(tokenizer.vocab_size).newbyteorder("<")


def encode_batch(texts: list[Text], tokenizer: Tokenizer, recipe: Recipe, canary: Canary | None = None) -> Encoded:
    """The tokens of one batch, of which `canary` takes a sample that is encoded again."""
    kept = [text for text in texts if text.text or not (text.begins and text.ends)]
    strings = [text.text for text in kept]
    tokens, lengths = _tokens(strings, tokenizer, recipe.add_special_tokens)
    if canary:
        checked(tokenizer, canary.sample(strings, tokens, lengths, lambda place: _rough_place(kept[place])))
    ends = np.fromiter((text.ends for text in kept), np.bool_, len(kept))
    if recipe.append_eod:
        assert tokenizer.eod_id is not None
        tokens, lengths = _with_eod(tokens, lengths, ends, tokenizer.eod_id, recipe.add_special_tokens)
    return Encoded(
        tokens=tokens,
        lengths=lengths.astype("<i4"),
        ends_document=ends,
        characters=sum(map(len, strings)),
        empty=len(texts) - len(kept),
        special_strings=sum(text.count(tokenizer.eod) for text in strings) if tokenizer.eod else 0,
    )


def _rough_place(text: Text) -> str:
    """Where a text is, without counting the lines before it as `Text.where` does."""
    return f"{text.part.file}: line or row {text.number} from {text.part.first}" if text.part else "a text"


def _tokens(strings: list[str], tokenizer: Tokenizer, add_special_tokens: bool) -> tuple[Tokens, NDArray[np.int64]]:
    """Token ids of texts as they are stored; a long text, which is alone, is tokenized in pieces if it may be."""
    dtype = stored_dtype(tokenizer)
    if len(strings) != 1 or len(strings[0]) <= LONG_CHARACTERS or add_special_tokens:
        tokens, lengths = tokenizer.encode_batch(strings, add_special_tokens)
        return tokens.astype(dtype), lengths
    pieces = tokenizer.safe_cuts(strings[0], BATCH_CHARACTERS)[::-1]
    encoded = []
    while pieces:  # each is given up when it is encoded
        encoded.append(tokenizer.encode_batch([pieces.pop()])[0].astype(dtype))
    joined = np.concatenate(encoded)
    return joined, np.array([len(joined)])


def _with_eod(
    tokens: Tokens, lengths: NDArray[np.int64], ends: NDArray[np.bool_], eod_id: int, from_template: bool
) -> tuple[Tokens, NDArray[np.int64]]:
    """The ids with one end-of-document token at the end of each document, also where a template has added it."""
    positions = np.cumsum(lengths)
    wanted = ends.copy()
    if from_template:
        wanted[lengths > 0] &= tokens[positions[lengths > 0] - 1] != eod_id
    return np.insert(tokens, positions[wanted], eod_id), lengths + wanted


def _counts(encoded: Encoded) -> dict[str, int]:
    return {
        "documents": int(encoded.ends_document.sum()),
        "sequences": len(encoded.lengths),
        "tokens": len(encoded.tokens),
        "characters": encoded.characters,
        "empty": encoded.empty,
        "special_strings": encoded.special_strings,
    }


def _batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    batch: list[Text] = []
    size = 0
    for text in texts:
        if batch and len(text.text) > LONG_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
