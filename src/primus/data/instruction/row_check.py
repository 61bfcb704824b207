"""Check the rows of instruction data before a launch: their form without a tokenizer, and what counts with one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from primus.config.schema import DataConfig, Trainer
from primus.config.token_files import parse_weighted_sources
from primus.data.instruction.chat_template import build_missing_template_error, read_chat_template
from primus.data.instruction.examples import HUB, Message, read_examples
from primus.data.instruction.pairs import read_pairs
from primus.data.instruction.policy_settings import learns_from_rewards
from primus.data.instruction.preference_settings import learns_preferences
from primus.data.instruction.prompts import read_prompts
from primus.data.tokenizers.sibling_files import open_siblings

CHECKED_ROWS = 10_000
"""Rows of a file that are read: 0.1 s."""
ENCODED_ROWS = 200
"""Rows of a file that are tokenized: 0.1 s."""


def check_rows(data: DataConfig, backend_args: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Check the first rows of local files, and that the tokenizer renders their conversations.

    Args:
        data: Names the files.
        backend_args: Settings of the framework, which say what the rows are.

    Returns:
        A note for each source with rows that only the workers check, when training begins.

    Raises:
        UsageError: A row is damaged, in none of the known forms, or a conversation without a chat template.
    """
    notes = []
    for source in list_sources(data):
        if source.startswith(HUB):
            notes.append(f"{source}: its rows are checked when training begins, not before the launch")
            continue
        conversation, rows = None, _read_conversations(source, backend_args)
        for number, messages in enumerate(islice(rows, CHECKED_ROWS), 1):
            if conversation is None and messages is not None:
                conversation = (f"{source}:{number}", messages)
        if conversation is not None:
            _check_template(data.tokenizer_model, *conversation)
        if next(rows, None) is not None:
            notes.append(f"{source}: rows after {CHECKED_ROWS:,} are checked when training begins")
    return notes


def check_first_masks(trainer: Trainer) -> list[str]:
    """Check what counts in the first rows of local files, as the workers do with all; needs the tokenizer.

    Returns:
        Notes on the rows.

    Raises:
        UsageError: The check finds a problem.
    """
    from primus.data.instruction.dataset import encode_rows
    from primus.data.instruction.encode import ExampleEncoder, join_examples
    from primus.data.instruction.mask_check import check_masks, refuse_problems

    data, notes = trainer.data, list[str]()
    if learns_from_rewards(trainer.backend_args):
        return []  # what counts is what the model generates
    if data.tokenizer_model is None or not Path(os.path.expanduser(data.tokenizer_model)).exists():
        return [] if data.tokenizer_model is None else [f"{data.tokenizer_model}: not on this machine; masks unchecked"]
    encoder, are_pairs = ExampleEncoder(data.tokenizer_model, data.train_on), learns_preferences(trainer.backend_args)
    for source in list_sources(data):
        if source.startswith(HUB):
            continue
        encoded = list(islice(encode_rows(source, encoder, are_pairs=are_pairs), ENCODED_ROWS))
        if not encoded:
            continue
        length = trainer.training.seq_length
        report = check_masks(source, join_examples(encoded), encoder, length, data.truncation, are_pairs=are_pairs)
        if not data.allow_mask_problems:
            refuse_problems(report)
        notes += report.list_notes()
    return notes


def list_sources(data: DataConfig) -> list[str]:
    """The files of instruction data, and names on the hub."""
    given = {"sft_data_path": data.sft_data_path, "sft_valid_data_path": data.sft_valid_data_path}
    return [source for key, value in given.items() for source, _ in parse_weighted_sources(value, key)]


def _read_conversations(source: str, backend_args: Mapping[str, Any]) -> Iterator[list[Message] | None]:
    """The messages of each row; None for texts."""
    if learns_from_rewards(backend_args):
        return (None if isinstance(row.prompt, str) else row.prompt for row in read_prompts(source))
    if learns_preferences(backend_args):
        return (None if isinstance(pair.prompt, str) else [*pair.prompt, *pair.chosen] for pair in read_pairs(source))
    return (example.messages for example in read_examples(source))


def _check_template(name: str | None, where: str, messages: list[Message]) -> None:
    """Render a conversation by the template of a tokenizer on this machine; a name of the hub would be downloaded."""
    if name is None or not Path(os.path.expanduser(name)).exists():
        return
    template = read_chat_template(open_siblings(name), name)
    if template is None:
        raise build_missing_template_error(where, name)
    template.render(messages)
