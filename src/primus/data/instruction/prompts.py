"""Read prompts that a model is to answer, and number their completions.

A sample is one completion that is to be generated: [number, row, update]. Samples of consecutive numbers have the same
prompt, `num_generations` of them. Where rollouts serve several updates, the same numbers follow each other as often.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from primus.config.schema import DataConfig
from primus.config.token_files import parse_weighted_sources
from primus.data.instruction.chat_template import build_missing_template_error
from primus.data.instruction.encode import ExampleEncoder, find_turn_end
from primus.data.instruction.examples import Message, read_rows
from primus.data.permutation import mix_numbers, permute_position
from primus.data.training.dataset import Datasets
from primus.data.training.packing import Piece, TokenFileProgress
from primus.errors import UsageError

NUMBER, ROW, UPDATE = range(3)
"""Columns of a sample: of the completion in the run, its prompt, and the update with it, from 0."""
VERSION = 1
"""Of the order of samples: a run must not resume with another one."""


class PromptRow(NamedTuple):
    """A row of the data."""

    prompt: str | list[Message]
    """A text, or messages."""
    columns: Mapping[str, Any]
    """The whole row, which rewards are given: its `answer`, and whatever else it has."""


@dataclass(frozen=True)
class EncodedPrompts:
    """All prompts that fit, as the model sees them."""

    texts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    columns: Sequence[Mapping[str, Any]]
    ends: frozenset[int]
    """Tokens that end a completion."""


class Schedule(NamedTuple):
    """How prompts become samples."""

    global_batch_size: int
    num_generations: int
    updates_per_rollout: int


class PromptDataset:
    """An endless sequence of samples; implements `primus.data.training.packing.Dataset`."""

    def __init__(self, prompts: EncodedPrompts, schedule: Schedule, seed: int) -> None:
        self.prompts, self._schedule, self._seed = prompts, schedule, seed
        self.samples_per_epoch = len(prompts.tokens) * schedule.num_generations * schedule.updates_per_rollout

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        size, num_generations, num_updates = self._schedule
        step, place = divmod(index, size)
        number = step // num_updates * size + place
        epoch, position = divmod(number // num_generations, len(self.prompts.tokens))
        row = permute_position(position, len(self.prompts.tokens), mix_numbers(self._seed, epoch))
        return np.array([number, row, step % num_updates], dtype=np.int64)

    def find_pieces(self, index: int) -> list[Piece]:
        """None: the tokens come from no token file."""
        return []

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """None: the tokens come from no token file."""
        return []


def read_prompts(source: str) -> Iterator[PromptRow]:
    """The prompts of a JSONL file, or of the split `train` of a dataset of the hub (``hf:OWNER/NAME``).

    Raises:
        UsageError: The file does not exist, or a row is damaged or has no prompt; names the line.
        PrimusError: The dataset cannot be loaded.
    """
    for number, row in enumerate(read_rows(source), 1):
        yield parse_prompt(row, f"{source}:{number}")


def parse_prompt(row: object, where: str) -> PromptRow:
    """The prompt in a row: its column `prompt`, or `question` (GSM8K).

    Raises:
        UsageError: There is none, it is empty, or it is neither a text nor a list of messages.
    """
    found = row.get("prompt", row.get("question")) if isinstance(row, Mapping) else None
    if found is None or not isinstance(row, Mapping):
        raise UsageError(f"{where}: no prompt", 'form: {"prompt": "1+2=", "answer": "3"}, and columns for the rewards')
    is_messages = isinstance(found, list) and all(isinstance(each, Mapping) and "role" in each for each in found)
    if not isinstance(found, str) and not is_messages:
        raise UsageError(f"{where}: the prompt is neither a text nor a list of messages", "write a text")
    if not (found.strip() if isinstance(found, str) else found):
        raise UsageError(f"{where}: the prompt is empty", "remove the row")
    return PromptRow(found, row)


def open_prompt_datasets(
    data: DataConfig, vocab_size: int, seq_length: int, seed: int, max_new_tokens: int, schedule: Schedule
) -> Datasets:
    """Open the prompts of `sft_data_path`; those that leave no room for `max_new_tokens` are skipped.

    Raises:
        UsageError: A file is missing or damaged, no prompt fits, or the tokenizer is missing or larger than the model's
            vocabulary.
    """
    assert data.sft_data_path
    if not data.tokenizer_model:
        raise UsageError("sft_data_path needs a tokenizer", "set tokenizer_model: a folder or a hub name")
    encoder = ExampleEncoder(data.tokenizer_model)
    if encoder.tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"the tokenizer {data.tokenizer_model} has ids up to {encoder.tokenizer.vocab_size - 1}, but the model's"
            f" vocab_size is {vocab_size}",
            "name the tokenizer of the model",
        )
    sources = parse_weighted_sources(data.sft_data_path, "sft_data_path")
    if any(weight is not None for _, weight in sources):
        raise UsageError("sft_data_path: prompts have no weights", "name the files without weights")
    names = [source for source, _ in sources]
    prompts = encode_prompts(names, encoder, seq_length - max_new_tokens)
    dataset = PromptDataset(prompts, schedule, seed)
    facts = [VERSION, encoder.tokenizer.fingerprint, schedule, prompts.tokens, prompts.columns]
    return Datasets(
        train=dataset,
        valid=None,
        no_valid="rewards are of training only",
        test=None,
        tokenizer_path=data.tokenizer_model,
        eod_id=encoder.tokenizer.eod_id,
        fingerprint=hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16],
        num_examples=len(prompts.tokens),
    )


def encode_prompts(sources: Sequence[str], encoder: ExampleEncoder, most_tokens: int) -> EncodedPrompts:
    """The prompts of all sources that have at most `most_tokens`.

    Raises:
        UsageError: A row is damaged, there is no chat template for messages, or no prompt is left.
    """
    texts, tokens, columns, num_dropped = [], [], [], 0
    ends = set() if encoder.tokenizer.eod_id is None else {encoder.tokenizer.eod_id}
    located = ((f"{source}:{n}", row) for source in sources for n, row in enumerate(read_prompts(source), 1))
    for where, row in located:
        if isinstance(row.prompt, str):
            text = row.prompt
            begin = [] if encoder.tokenizer.bos_id is None else [encoder.tokenizer.bos_id]
        elif encoder.template is None:
            raise build_missing_template_error(where, encoder.name)
        else:
            text, begin = encoder.template.render(row.prompt, True), []
            turn_end = find_turn_end(encoder.template, encoder.tokenizer.special_strings)
            ends |= set(encoder.tokenizer.encode(turn_end)) if turn_end else set()
        found = [*begin, *encoder.tokenizer.encode(text)]
        if len(found) > most_tokens:
            num_dropped += 1
            continue
        texts.append(text)
        tokens.append(found)
        columns.append(dict(row.columns))
    named = ", ".join(sources)
    if num_dropped:
        print(f"{named}: {num_dropped} prompts are longer than seq_length - max_new_tokens and are skipped")
    if not tokens:
        raise UsageError(
            f"{named}: no prompt has at most {most_tokens} tokens", "raise seq_length, or lower max_new_tokens"
        )
    return EncodedPrompts(texts, tokens, columns, frozenset(ends))
