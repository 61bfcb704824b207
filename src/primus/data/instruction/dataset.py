"""Samples of instruction data: tokens, the predictions that count, and the example of each token.

Legend: S sequence length; a sample has S + 1 tokens, of which the first S are inputs.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.config.schema import DataConfig
from primus.config.token_files import parse_split, parse_weighted_sources
from primus.data.atomic import hold_lock
from primus.data.instruction.encode import EncodedExample, EncodedExamples, ExampleEncoder, join_examples
from primus.data.instruction.examples import HUB, read_examples
from primus.data.instruction.mask_check import check_masks, refuse_problems
from primus.data.instruction.pairs import encode_pair, read_pairs
from primus.data.mask_report import MaskReport
from primus.data.permutation import create_permutation, mix_numbers, permute_position
from primus.data.training.blending import BlendedDataset
from primus.data.training.dataset import Datasets, split_borders
from primus.data.training.packing import Dataset, Piece, TokenFileProgress
from primus.errors import UsageError
from primus.runs.files import write_bytes

TOKENS, COUNTED, EXAMPLE = range(3)
"""Rows of a sample [3, S + 1]: ids; 1 where the prediction of the token counts; number of the token's example in the
sample, from 1, or 0 for padding."""
VERSION = 3
"""Of the encoding and the order of samples: a run must not resume with another one."""
EXAMPLES_OF_PAIR = 2
"""The chosen answer, then the rejected one."""
MOST_FILES_OF_PAIRS = 2
"""Of training and of validation: references are kept by the place of a pair in both."""
MIXED = 2
"""Files from which on samples are mixed."""
Truncation = Literal["drop", "left", "right"]
OPEN_BINS = 64
"""Samples that packing fills at a time: more save little padding and search longer."""
LOCK_TIMEOUT_S = 3600.0
"""Longest wait for another process that tokenizes the same data: a million examples take minutes."""


class InstructionDataset:
    """An endless sequence of samples; implements `primus.data.training.packing.Dataset`.

    Args:
        examples: All examples of a file.
        numbers: The examples of this dataset.
        seq_length: S.
        padding: Token that fills a sample.
        seed: Of the order.
        packs: Whether a sample may have several examples.
        truncation: What happens to examples of more than S + 1 tokens: drop, or the end at which tokens are cut.
        pairs: The place of the first example among those of all files, where rows of the data are pairs: a row is two
            examples, which are numbered by their place in all samples. A pair that is too long is dropped, not cut.
        source: Name of the file, for a look at samples.
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
        truncation: Truncation = "right",
        pairs: int | None = None,
        source: str = "",
    ) -> None:
        self.source = source
        self._examples, self._length, self._padding, self._seed = examples, seq_length + 1, padding, seed
        self._first, self._per_row = pairs or 0, 1 if pairs is None else EXAMPLES_OF_PAIR
        self._truncation = "drop" if pairs is not None else truncation
        kept = [number for number in numbers if self._is_usable(number)]
        self.num_dropped = len(numbers) - len(kept)
        """Examples that are dropped, or have no answer within S + 1 tokens."""
        self._samples = self._pack(kept) if packs else [[number] for number in kept]
        self.samples_per_epoch = len(self._samples)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Rows [3, S + 1] of a sample."""
        sample = np.zeros((3, self._length), dtype=np.int64)
        sample[TOKENS] = self._padding
        end = 0
        for number, example in enumerate(self._list_examples(index), 1):
            found = self._truncate(self._examples[example])
            size = len(found.tokens)
            part = slice(end, end + size)
            sample[TOKENS, part], sample[COUNTED, part] = found.tokens, found.is_counted
            sample[EXAMPLE, part] = self._number_example(number, example)
            end += size
        return sample

    def list_rows(self, index: int) -> dict[int, int]:
        """Lines in the file, from 1, by the number of an example in a sample."""
        lines = [row + 1 for row in self._list_rows(index) for _ in self._find_examples(row)]
        numbers = [self._number_example(*each) for each in enumerate(self._list_examples(index), 1)]
        return dict(zip(numbers, lines, strict=True))

    def _list_rows(self, index: int) -> list[int]:
        epoch, position = divmod(index, self.samples_per_epoch)
        return self._samples[permute_position(position, self.samples_per_epoch, mix_numbers(self._seed, epoch))]

    def _list_examples(self, index: int) -> list[int]:
        return [example for row in self._list_rows(index) for example in self._find_examples(row)]

    def _number_example(self, place: int, example: int) -> int:
        return place if self._per_row == 1 else self._first + example + 1

    def _find_examples(self, row: int) -> range:
        return range(row * self._per_row, (row + 1) * self._per_row)

    def _is_usable(self, row: int) -> bool:
        """Whether an answer is left within S + 1 tokens; of a pair, both answers whole."""
        found = [self._examples[example] for example in self._find_examples(row)]
        if self._truncation == "drop" and sum(len(each.tokens) for each in found) > self._length:
            return False
        return all(self._truncate(each).is_counted.any() for each in found)

    def _truncate(self, found: EncodedExample) -> EncodedExample:
        if len(found.tokens) <= self._length:
            return found
        if self._truncation == "right":
            return EncodedExample(found.tokens[: self._length], found.is_counted[: self._length])
        is_counted = found.is_counted[-self._length :].copy()
        is_counted[0] = False  # nothing predicts the first token
        return EncodedExample(found.tokens[-self._length :], is_counted)

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
    data: DataConfig, vocab_size: int, seq_length: int, seed: int, *, are_pairs: bool = False, refuses: bool = True
) -> Datasets:
    """Open the samples of `sft_data_path`, tokenized on first use into a file below `data_path`.

    Args:
        data: Names the files.
        vocab_size: Of the model.
        seq_length: S.
        seed: Of the order.
        are_pairs: Whether each row has two answers to a prompt.
        refuses: Whether data is refused in which a check finds a problem; else it is only in the reports.

    Raises:
        UsageError: A file is missing or damaged, the tokenizer is missing or larger than the model's vocabulary, or
            a check of what counts finds a problem.
    """
    if not data.tokenizer_model:
        raise UsageError("sft_data_path needs a tokenizer", "set tokenizer_model: a folder or a hub name")
    encoder = ExampleEncoder(data.tokenizer_model, data.train_on)
    if encoder.tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"the tokenizer {data.tokenizer_model} has ids up to {encoder.tokenizer.vocab_size - 1}, but the model's"
            f" vocab_size is {vocab_size}",
            f"set vocab_size to {encoder.tokenizer.vocab_size} or more",
        )
    train, valid = (parse_weighted_sources(given, key) for key, given in _list_given(data))
    if are_pairs and len(train) + len(valid) > MOST_FILES_OF_PAIRS:
        raise UsageError("sft_data_path: preferences are learnt from one set", "join the files into one")
    files: list[_ExampleFile] = []
    for path, weight in [*train, *valid]:
        examples, name = load_encoded_examples(path, encoder, Path(data.data_path), are_pairs=are_pairs)
        report = check_masks(path, examples, encoder, seq_length, data.truncation, are_pairs=are_pairs)
        if refuses and not data.allow_mask_problems:
            refuse_problems(report)
        files.append(_ExampleFile(examples, name, weight, report))
    builder = _DatasetBuilder(data, seq_length, seed, encoder.tokenizer.eod_id or 0, are_pairs)
    own, other = files[: len(train)], files[len(train) :]
    parts = [_split_examples(each.num_rows(are_pairs), data, has_valid=bool(valid)) for each in own]
    train_set = builder.build(own, [part[0] for part in parts], 0)
    if train_set is None:
        what = "pair fits into" if are_pairs else "example has an answer within"
        raise UsageError(f"{own[0].report.source}: no {what} {seq_length + 1} tokens", "raise seq_length")
    for line in dict.fromkeys(line for each in files for line in each.report.list_notes()):
        print(line)
    if other:
        valid_set = builder.build(other, [range(each.num_rows(are_pairs)) for each in other], 1, len(own[0].examples))
        test_set = None
    else:
        valid_set, test_set = (builder.build(own, [part[place] for part in parts], place) for place in (1, 2))
    digest = hashlib.sha256("".join(f"{each.name}{each.weight or ''}" for each in files).encode()).hexdigest()[:16]
    how = f"{'packed' if data.packed_sequence else 'single'}-{data.truncation}"
    return Datasets(
        train=train_set,
        valid=valid_set,
        no_valid="" if valid_set else f"split '{data.split}' leaves no examples for it",
        test=test_set,
        tokenizer_path=data.tokenizer_model,
        eod_id=encoder.tokenizer.eod_id,
        fingerprint=f"{digest}-{'' if valid else data.split}-{how}-{VERSION}",
        num_examples=sum(len(each.examples) for each in files),
        mask_reports=tuple(dict.fromkeys(each.report for each in files)),
    )


class _ExampleFile(NamedTuple):
    """A file of instruction data."""

    examples: EncodedExamples
    name: str
    """Fingerprint of the content and the encoding."""
    weight: float | None
    """In a blend."""
    report: MaskReport

    def num_rows(self, are_pairs: bool) -> int:
        return len(self.examples) // (EXAMPLES_OF_PAIR if are_pairs else 1)


class _DatasetBuilder(NamedTuple):
    """Builds datasets of files."""

    data: DataConfig
    seq_length: int
    seed: int
    padding: int
    are_pairs: bool

    def build(
        self, files: Sequence[_ExampleFile], numbers: Sequence[range], part: int, first: int = 0
    ) -> Dataset | None:
        """Samples of the rows `numbers` of each file, mixed by weight; None if there are none."""
        found = [
            InstructionDataset(
                file.examples,
                rows,
                seq_length=self.seq_length,
                padding=self.padding,
                seed=self.seed + part,
                packs=self.data.packed_sequence,
                truncation="right" if self.data.truncation == "refuse" else self.data.truncation,
                pairs=first if self.are_pairs else None,
                source=file.report.source,
            )
            for file, rows in zip(files, numbers, strict=True)
        ]
        kept = [(each, file) for each, file in zip(found, files, strict=True) if each.samples_per_epoch]
        if len(kept) < MIXED:
            return kept[0][0] if kept else None
        # Without weights each file has the share of its samples.
        weights = [each.samples_per_epoch if file.weight is None else file.weight for each, file in kept]
        return BlendedDataset([each for each, _ in kept], weights)


def _list_given(data: DataConfig) -> list[tuple[str, str | list[str | float] | None]]:
    return [("sft_data_path", data.sft_data_path), ("sft_valid_data_path", data.sft_valid_data_path)]


def load_encoded_examples(
    source: str, encoder: ExampleEncoder, folder: Path, *, are_pairs: bool = False
) -> tuple[EncodedExamples, str]:
    """The examples of a source, and their fingerprint; tokenized once by one of the processes that ask."""
    digest = hashlib.sha256(
        f"{VERSION} {encoder.tokenizer.fingerprint} {encoder.template and encoder.template.text}"
        f" {encoder.train_on}".encode()
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
                _write_examples(path, encode_rows(source, encoder, are_pairs=are_pairs))
    with np.load(path, allow_pickle=False) as arrays:
        found = EncodedExamples(arrays["tokens"], arrays["is_counted"], arrays["starts"], int(arrays["num_lost"]))
    return found, name


def encode_rows(source: str, encoder: ExampleEncoder, *, are_pairs: bool) -> Iterator[EncodedExample]:
    """The examples of a source in its order; of pairs, both answers.

    Raises:
        UsageError: A row is damaged, or cannot be rendered.
    """
    if are_pairs:
        for number, pair in enumerate(read_pairs(source), 1):
            yield from encode_pair(pair, encoder, f"{source}:{number}")
        return
    for number, example in enumerate(read_examples(source), 1):
        yield encoder.encode(example, f"{source}:{number}")


def _read_source(source: str) -> bytes:
    try:
        return Path(os.path.expanduser(source)).read_bytes()
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}", "name a JSONL file in sft_data_path") from None


def _write_examples(path: Path, encoded: Iterator[EncodedExample]) -> None:
    found = list(encoded)
    if not found:
        raise UsageError("sft_data_path: the data has no examples", "name a file with one JSON object a line")
    buffer, joined = io.BytesIO(), join_examples(found)
    np.savez(
        buffer,
        tokens=joined.tokens,
        is_counted=joined.is_counted,
        starts=joined.starts,
        num_lost=np.int64(joined.num_lost),
    )
    write_bytes(path, buffer.getvalue())


def _split_examples(size: int, data: DataConfig, *, has_valid: bool) -> list[range]:
    """The examples of training, validation and test, in this order in the file."""
    if has_valid:
        return [range(size), range(0), range(0)]
    return [range(start, end) for start, end in itertools.pairwise(split_borders(size, parse_split(data.split)))]
