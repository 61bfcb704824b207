"""Read and encode pairs of answers to one prompt, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from primus.data.instruction.chat_template import build_missing_template_error
from primus.data.instruction.encode import EncodedExample, ExampleEncoder, cut_after_end, join_parts
from primus.data.instruction.examples import Example, Message, read_rows
from primus.errors import UsageError

FORMS = (
    "prompt, chosen and rejected, which are texts or lists of messages; or chosen and rejected as whole conversations"
)


class AnswerPair(NamedTuple):
    """A prompt and two answers, all texts or all lists of messages."""

    prompt: Any
    chosen: Any
    rejected: Any


def read_pairs(source: str) -> Iterator[AnswerPair]:
    """The pairs of a JSONL file, or of the split `train` of a dataset of the hub (``hf:OWNER/NAME``).

    Raises:
        UsageError: The file does not exist, or a row is damaged or no pair; names the line.
        PrimusError: The dataset cannot be loaded.
    """
    for number, row in enumerate(read_rows(source), 1):
        yield parse_pair(row, f"{source}:{number}")


def parse_pair(row: object, where: str) -> AnswerPair:
    """The pair in a row.

    Raises:
        UsageError: The row has none of the forms, its prompt is empty, or its answers are equal.
    """
    if not isinstance(row, Mapping) or "chosen" not in row or "rejected" not in row:
        raise UsageError(f"{where}: not a pair of answers", f"forms: {FORMS}")
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if prompt is None and isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
    is_text = all(isinstance(each, str) for each in (prompt, chosen, rejected))
    is_list = all(_is_conversation(each) for each in (prompt, chosen, rejected))
    if not (is_text or is_list):
        raise UsageError(
            f"{where}: prompt, chosen and rejected are neither all texts nor all messages", f"forms: {FORMS}"
        )
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise UsageError(f"{where}: the prompt is empty", "remove the row")
    if not chosen or not rejected:
        raise UsageError(f"{where}: an answer is empty", "remove the row")
    if chosen == rejected:
        raise UsageError(f"{where}: chosen equals rejected, so nothing is preferred", "remove the row")
    return AnswerPair(prompt, chosen, rejected)


def encode_pair(pair: AnswerPair, encoder: ExampleEncoder, where: str) -> list[EncodedExample]:
    """The prompt with each answer, of which the answer counts.

    Raises:
        UsageError: There is no chat template, or it changes the prompt when an answer follows.
    """
    return [_encode(pair.prompt, answer, encoder, where) for answer in (pair.chosen, pair.rejected)]


def _encode(prompt: Any, answer: Any, encoder: ExampleEncoder, where: str) -> EncodedExample:
    if isinstance(prompt, str):
        return encoder.encode(Example(None, prompt, answer), where)
    if encoder.template is None:
        raise build_missing_template_error(where, encoder.name)
    before, after = encoder.template.render(prompt, True), encoder.template.render([*prompt, *answer])
    if not after.startswith(before):
        raise UsageError(
            f"{where}: the chat template changes the prompt when an answer follows", "write prompt and answers as texts"
        )
    written = cut_after_end(after[len(before) :], encoder.tokenizer.special_strings)
    return join_parts([(encoder.tokenizer.encode(before), False), (encoder.tokenizer.encode(written), True)])


def _split_prompt(chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
    """The messages that two conversations begin with, and what follows in each."""
    pairs = zip(chosen, rejected, strict=False)
    size = next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    return chosen[:size], chosen[size:], rejected[size:]


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) and "role" in each for each in value)
