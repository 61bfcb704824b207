"""Samples of instruction data: tokens, the predictions that count, and the example of each token.

Legend: S sequence length; a sample has S + 1 tokens, of which the first S are inputs.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primus.config.schema import DataConfig
from primus.config.token_files import parse_split
from primus.data.atomic import hold_lock
from primus.data.instruction.encode import EncodedExample, ExampleEncoder
from primus.data.instruction.examples import HUB, read_examples
from primus.data.instruction.pairs import encode_pair, read_pairs
from primus.data.permutation import create_permutation, mix_numbers, permute_position
from primus.data.training.dataset import Datasets, split_borders
from primus.data.training.packing import Piece, TokenFileProgress
from primus.errors import UsageError
from primus.runs.files import write_bytes

TOKENS, COUNTED, EXAMPLE = range(3)
"""Rows of a sample [3, S + 1]: ids; 1 where the prediction of the token counts; number of the token's example in the
sample, from 1, or 0 for padding."""
VERSION = 2
"""Of the encoding and the order of samples: a run must not resume with another one."""
EXAMPLES_OF_PAIR = 2
"""The chosen answer, then the rejected one."""
OPEN_BINS = 64
"""Samples that packing fills at a time: more save little padding and search longer."""
LOCK_TIMEOUT_S = 3600.0
"""Longest wait for another process that tokenizes the same data: a million examples take minutes."""


@dataclass(frozen=True)
class EncodedExamples:
    """All examples of a file, one after the other."""

    tokens: NDArray[np.int32]
    is_counted: NDArray[np.bool_]
    starts: NDArray[np.int64]
    """First token of each example, and the number of tokens at the end."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> EncodedExample:
        part = slice(self.starts[number], self.starts[number + 1])
        return EncodedExample(self.tokens[part].astype(np.int64), self.is_counted[part])


class InstructionDataset:
    """An endless sequence of samples; implements `primus.data.training.packing.Dataset`.

    Args:
        examples: All examples of a file.
        numbers: The examples of this dataset.
        seq_length: S.
        padding: Token that fills a sample.
        seed: Of the order.
        packs: Whether a sample may have several examples.
        pairs: The place of the first example among those of all files, where rows of the data are pairs: a row is two
            examples, which are numbered by their place in all samples. A pair that is too long is dropped, not cut.
    """

    def __init__(
        self,
        examples: EncodedExamples,
        numbers: Sequence[int],
        *,
        seq_length: int,
        padding: int,
        seed: int,
        packs: bool,
        pairs: int | None = None,
    ) -> None:
        self._examples, self._length, self._padding, self._seed = examples, seq_length + 1, padding, seed
        self._first, self._per_row = pairs or 0, 1 if pairs is None else EXAMPLES_OF_PAIR
        kept = [number for number in numbers if self._is_usable(number)]
        self.num_dropped = len(numbers) - len(kept)
        """Examples without an answer within S + 1 tokens."""
        self._samples = self._pack(kept) if packs else [[number] for number in kept]
        self.samples_per_epoch = len(self._samples)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Rows [3, S + 1] of a sample."""
        sample = np.zeros((3, self._length), dtype=np.int64)
        sample[TOKENS] = self._padding
        end = 0
        for number, example in enumerate(self._list_examples(index), 1):
            number = number if self._per_row == 1 else self._first + example + 1
            found = self._examples[example]
            size = min(len(found.tokens), self._length)
            part = slice(end, end + size)
            sample[TOKENS, part], sample[COUNTED, part] = found.tokens[:size], found.is_counted[:size]
            sample[EXAMPLE, part] = number
            end += size
        return sample

    def list_rows(self, index: int) -> list[int]:
        """Lines in the file, from 1, of the examples of a sample."""
        return [number + 1 for number in self._list_rows(index)]

    def _list_rows(self, index: int) -> list[int]:
        epoch, position = divmod(index, self.samples_per_epoch)
        return self._samples[permute_position(position, self.samples_per_epoch, mix_numbers(self._seed, epoch))]

    def _list_examples(self, index: int) -> list[int]:
        return [example for row in self._list_rows(index) for example in self._find_examples(row)]

    def _find_examples(self, row: int) -> range:
        return range(row * self._per_row, (row + 1) * self._per_row)

    def _is_usable(self, row: int) -> bool:
        """Whether an answer is within S + 1 tokens; of a pair, both answers whole."""
        found = [self._examples[example] for example in self._find_examples(row)]
        if self._per_row > 1 and sum(len(each.tokens) for each in found) > self._length:
            return False
        return all(each.is_counted[: self._length].any() for each in found)

    def find_pieces(self, index: int) -> list[Piece]:
        """None: the tokens come from no token file."""
        return []

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """None: the tokens come from no token file."""
        return []

    def _pack(self, numbers: Sequence[int]) -> list[list[int]]:
        """Examples by sample: each goes into the first of the open samples that has room."""
        starts = self._examples.starts[:: self._per_row]
        sizes = np.minimum(starts[1:] - starts[:-1], self._length)
        packed: list[list[int]] = []
        open_bins: list[tuple[int, list[int]]] = []
        for place in create_permutation(len(numbers), self._seed):
            number = numbers[place]
            size = int(sizes[number])
            for slot, (room, bin_examples) in enumerate(open_bins):
                if size <= room:
                    bin_examples.append(number)
                    open_bins[slot] = (room - size, bin_examples)
                    break
            else:
                packed.append([number])
                open_bins.append((self._length - size, packed[-1]))
                if len(open_bins) > OPEN_BINS:
                    open_bins.remove(min(open_bins, key=lambda found: found[0]))
        return packed


def open_instruction_datasets(
    data: DataConfig, vocab_size: int, seq_length: int, seed: int, *, are_pairs: bool = False
) -> Datasets:
    """Open the samples of `sft_data_path`, tokenized on first use into a file below `data_path`.

    Raises:
        UsageError: A file is missing or damaged, or the tokenizer is missing or larger than the model's vocabulary.
    """
    assert data.sft_data_path
    if not data.tokenizer_model:
        raise UsageError("sft_data_path needs a tokenizer", "set tokenizer_model: a folder or a hub name")
    encoder = ExampleEncoder(data.tokenizer_model)
    if encoder.tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"the tokenizer {data.tokenizer_model} has ids up to {encoder.tokenizer.vocab_size - 1}, but the model's"
            f" vocab_size is {vocab_size}",
            f"set vocab_size to {encoder.tokenizer.vocab_size} or more",
        )
    given = [path for path in (data.sft_data_path, data.sft_valid_data_path) if path]
    loaded = [load_encoded_examples(path, encoder, Path(data.data_path), are_pairs=are_pairs) for path in given]
    sizes = [len(examples) // (EXAMPLES_OF_PAIR if are_pairs else 1) for examples, _ in loaded]
    parts = _split_examples(sizes[0], data, has_valid=len(loaded) > 1)
    padding = encoder.tokenizer.eod_id or 0

    def build(source: EncodedExamples, numbers: Sequence[int], part: int) -> InstructionDataset | None:
        found = InstructionDataset(
            source,
            numbers,
            seq_length=seq_length,
            padding=padding,
            seed=seed + part,
            packs=data.packed_sequence,
            pairs=(0 if source is loaded[0][0] else len(loaded[0][0])) if are_pairs else None,
        )
        return found if found.samples_per_epoch else None

    train = build(loaded[0][0], parts[0], 0)
    if train is None:
        what = "pair fits into" if are_pairs else "example has an answer within"
        raise UsageError(f"{data.sft_data_path}: no {what} {seq_length + 1} tokens", "raise seq_length")
    if train.num_dropped:
        what = "pairs are longer than" if are_pairs else "examples have no answer within"
        print(f"{data.sft_data_path}: {train.num_dropped} {what} seq_length and are skipped")
    valid = build(loaded[-1][0], range(sizes[1]) if len(loaded) > 1 else parts[1], 1)
    test = build(loaded[0][0], parts[2], 2) if len(loaded) == 1 else None
    digest = hashlib.sha256("".join(name for _, name in loaded).encode()).hexdigest()[:16]
    split = "" if len(loaded) > 1 else data.split
    return Datasets(
        train=train,
        valid=valid,
        no_valid="" if valid else f"split '{data.split}' leaves no examples for it",
        test=test,
        tokenizer_path=data.tokenizer_model,
        eod_id=encoder.tokenizer.eod_id,
        fingerprint=f"{digest}-{split}-{'packed' if data.packed_sequence else 'single'}-{VERSION}",
        num_examples=sum(len(examples) for examples, _ in loaded),
    )


def load_encoded_examples(
    source: str, encoder: ExampleEncoder, folder: Path, *, are_pairs: bool = False
) -> tuple[EncodedExamples, str]:
    """The examples of a source, and their fingerprint; tokenized once by one of the processes that ask."""
    digest = hashlib.sha256(
        f"{VERSION} {encoder.tokenizer.fingerprint} {encoder.template and encoder.template.text}".encode()
    )
    digest.update(source.encode() if source.startswith(HUB) else _read_source(source))
    if are_pairs:
        digest.update(b"pairs")
    name = digest.hexdigest()[:32]
    path = folder / "instruction" / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with hold_lock(path.with_suffix(".lock"), LOCK_TIMEOUT_S):
            if not path.exists():
                _write_examples(path, _encode_pairs(source, encoder) if are_pairs else _encode_all(source, encoder))
    with np.load(path, allow_pickle=False) as arrays:
        found = EncodedExamples(arrays["tokens"], arrays["is_counted"], arrays["starts"])
    return found, name


def _read_source(source: str) -> bytes:
    try:
        return Path(os.path.expanduser(source)).read_bytes()
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}", "name a JSONL file in sft_data_path") from None


def _encode_all(source: str, encoder: ExampleEncoder) -> Iterator[EncodedExample]:
    for number, example in enumerate(read_examples(source), 1):
        yield encoder.encode(example, f"{source}:{number}")


def _encode_pairs(source: str, encoder: ExampleEncoder) -> Iterator[EncodedExample]:
    for number, pair in enumerate(read_pairs(source), 1):
        yield from encode_pair(pair, encoder, f"{source}:{number}")


def _write_examples(path: Path, encoded: Iterator[EncodedExample]) -> None:
    found = list(encoded)
    if not found:
        raise UsageError("sft_data_path: the data has no examples", "name a file with one JSON object a line")
    buffer = io.BytesIO()
    np.savez(
        buffer,
        tokens=np.concatenate([each.tokens for each in found]).astype(np.int32),
        is_counted=np.concatenate([each.is_counted for each in found]),
        starts=np.asarray([0, *itertools.accumulate(len(each.tokens) for each in found)], dtype=np.int64),
    )
    write_bytes(path, buffer.getvalue())


def _split_examples(size: int, data: DataConfig, *, has_valid: bool) -> list[range]:
    """The examples of training, validation and test, in this order in the file."""
    if has_valid:
        return [range(size), range(0), range(0)]
    return [range(start, end) for start, end in itertools.pairwise(split_borders(size, parse_split(data.split)))]
