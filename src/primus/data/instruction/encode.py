"""Tokens of an example, and which of them the loss counts: those of answers, with the token that ends them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.data.instruction.chat_template import ChatTemplate, build_missing_template_error, read_chat_template
from primus.data.instruction.examples import Example, Message
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.sibling_files import open_siblings
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

TrainOn = Literal["all", "last"]
"""Which messages of the assistant count, where they do not say it: all, or the last of a conversation."""


class EncodedExample(NamedTuple):
    """Tokens of an example."""

    tokens: NDArray[np.int64]
    is_counted: NDArray[np.bool_]
    """Whether the prediction of a token counts."""
    num_lost: int = 0
    """Answers that do not count because the chat template shortens them when later messages follow."""


@dataclass(frozen=True)
class EncodedExamples:
    """All examples of a file, one after the other."""

    tokens: NDArray[np.int32]
    is_counted: NDArray[np.bool_]
    starts: NDArray[np.int64]
    """First token of each example, and the number of tokens at the end."""
    num_lost: int
    """See `EncodedExample`; of all."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> EncodedExample:
        part = slice(self.starts[number], self.starts[number + 1])
        return EncodedExample(self.tokens[part].astype(np.int64), self.is_counted[part])


def join_examples(found: Sequence[EncodedExample]) -> EncodedExamples:
    """Examples, at least one, in one piece."""
    return EncodedExamples(
        np.concatenate([each.tokens for each in found]).astype(np.int32),
        np.concatenate([each.is_counted for each in found]),
        np.asarray([0, *itertools.accumulate(len(each.tokens) for each in found)], dtype=np.int64),
        sum(each.num_lost for each in found),
    )


class ExampleEncoder:
    """Encodes examples with one tokenizer.

    Args:
        name: Of the tokenizer: a folder or a name on the hub; its chat template renders messages.
        train_on: Which messages of the assistant count, where they do not say it.

    Raises:
        UsageError: The tokenizer does not exist or is damaged.
    """

    def __init__(self, name: str, train_on: TrainOn = "all") -> None:
        self.tokenizer: Tokenizer = load_tokenizer(name, parse_special_tokens=True, follow_declared=True)
        self.name, self.train_on = name, train_on
        self.template = read_chat_template(open_siblings(name), name)

    def encode(self, example: Example, where: str) -> EncodedExample:
        """Tokens of an example.

        Raises:
            UsageError: The example is a conversation and the tokenizer has no chat template for it.
        """
        if example.messages is None:
            end = [] if self.tokenizer.eod_id is None else [self.tokenizer.eod_id]
            begin = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
            prompt, answer = self.tokenizer.encode(example.prompt), self.tokenizer.encode(example.completion)
            return join_parts([([*begin, *prompt], False), ([*answer, *end], True)])
        if self.template is None:
            raise build_missing_template_error(where, self.name)
        parts, num_lost = split_conversation(
            example, self.train_on, self.template, self.tokenizer.special_strings, where
        )
        # Each part by itself, as a server encodes the prompt before the model continues it.
        joined = join_parts([(self.tokenizer.encode(text), counts) for text, counts in parts])
        return joined._replace(num_lost=num_lost)

    def encode_prompt(self, example: Example, asked: str) -> tuple[str, list[int], list[int]]:
        """A prompt in the form of an example, its ids, and the ids at which an answer to it ends.

        Args:
            example: Its own prompt is taken where none is asked.
            asked: What the user says, or the text to continue.

        Raises:
            UsageError: The chat template refuses the messages.
        """
        ends = [] if self.tokenizer.eod_id is None else [self.tokenizer.eod_id]
        if example.messages is None or self.template is None:
            begin = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
            text = asked or example.prompt
            return text, [*begin, *self.tokenizer.encode(text)], ends
        roles = [message["role"] for message in example.messages]
        messages = example.messages[: roles.index("assistant")]
        if asked:
            messages = [*(each for each in messages if each["role"] == "system"), {"role": "user", "content": asked}]
        text = self.template.render(messages, True, example.tools)
        turn_end = find_turn_end(self.template, self.tokenizer.special_strings)
        return text, self.tokenizer.encode(text), [*ends, *(self.tokenizer.encode(turn_end) if turn_end else ())]


def list_trained_messages(example: Example, train_on: TrainOn) -> list[int]:
    """The messages of a conversation that count: those that say so, and those that `train_on` chooses."""
    assert example.messages is not None
    answers = [number for number, message in enumerate(example.messages) if message["role"] == "assistant"]
    chosen, marks = answers if train_on == "all" else answers[-1:], dict(enumerate(example.trained))
    said = {number: marks.get(number) for number in answers}
    return [number for number, mark in said.items() if (number in chosen if mark is None else mark)]


def split_conversation(
    example: Example, train_on: TrainOn, template: ChatTemplate, specials: Sequence[str], where: str
) -> tuple[list[tuple[str, bool]], int]:
    """The text of a conversation in parts, with whether each counts; and the number of answers that are lost.

    An answer counts with the token that ends it. What a template writes behind that token, such as a newline, is not
    of the answer: a model that is asked stops before it.

    Args:
        example: The conversation.
        train_on: See `list_trained_messages`.
        template: Renders it.
        specials: Special tokens, one of which may end an answer.
        where: The row, for messages.

    Raises:
        UsageError: The template changes the last answer, or its marks belong to no messages.
    """
    assert example.messages is not None
    messages, trained = example.messages, list_trained_messages(example, train_on)
    rendered = template.render_parts(messages, tools=example.tools)
    if any(is_marked for _, is_marked in rendered):
        return _choose_marked(rendered, messages, trained, where), 0
    whole, position, num_lost = "".join(text for text, _ in rendered), 0, 0
    parts: list[tuple[str, bool]] = []
    for number in trained:
        before = template.render(messages[:number], True, example.tools)
        after = template.render(messages[: number + 1], False, example.tools)
        if not (whole.startswith(after) and after.startswith(before)):
            if number == len(messages) - 1:
                raise UsageError(
                    f"{where}: the chat template changes earlier messages, so that answers cannot be told from prompts",
                    "write one row for each answer: prompt (a list of messages) and completion",
                )
            num_lost += 1  # an earlier answer that the template shortens: only the later ones count
            continue
        answer = cut_after_end(after[len(before) :], specials)
        parts += [(whole[position : len(before)], False), (answer, True)]
        position = len(before) + len(answer)
    return [(text, counts) for text, counts in [*parts, (whole[position:], False)] if text], num_lost


def _choose_marked(
    rendered: list[tuple[str, bool]], messages: list[Message], trained: list[int], where: str
) -> list[tuple[str, bool]]:
    """What a template marks as written by the model, of the trained messages only."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if trained == answers:
        return rendered
    num_marked = sum(is_marked for _, is_marked in rendered)
    if num_marked != len(answers):
        raise UsageError(
            f"{where}: the chat template marks {num_marked} parts of {len(answers)} answers, of which not all count",
            "mark each answer once in the template ({% generation %}), or train on all answers",
        )
    counts = iter([number in trained for number in answers])
    return [(text, is_marked and next(counts)) for text, is_marked in rendered]


def cut_after_end(text: str, specials: Sequence[str]) -> str:
    """An answer as a template writes it, without the white space behind the token that ends it."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(tuple(specials)) else text


def find_turn_end(template: ChatTemplate, specials: tuple[str, ...]) -> str:
    """The token that a template writes behind an answer; empty if it writes none."""
    try:
        text = template.render([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    except UsageError:  # it needs other messages
        return ""
    text = cut_after_end(text, specials)
    return max((token for token in specials if text.endswith(token)), key=len, default="")


def join_parts(parts: list[tuple[list[int], bool]]) -> EncodedExample:
    """An example of parts, each of which counts or does not."""
    tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in parts])
    counted = np.concatenate([np.full(len(ids), counts, dtype=np.bool_) for ids, counts in parts])
    counted[:1] = False  # nothing predicts the first token
    return EncodedExample(tokens, counted)
