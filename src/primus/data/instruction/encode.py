"""Tokens of an example, and which of them the loss counts: those of answers, with the token that ends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.data.instruction.chat_template import ChatTemplate, build_missing_template_error, read_chat_template
from primus.data.instruction.examples import Example, Message
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.sibling_files import open_siblings
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError


class EncodedExample(NamedTuple):
    """Tokens of an example."""

    tokens: NDArray[np.int64]
    is_counted: NDArray[np.bool_]
    """Whether the prediction of a token counts."""


class ExampleEncoder:
    """Encodes examples with one tokenizer.

    Args:
        name: Of the tokenizer: a folder or a name on the hub; its chat template renders messages.

    Raises:
        UsageError: The tokenizer does not exist or is damaged.
    """

    def __init__(self, name: str) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(name, parse_special_tokens=True, follow_declared=True)
        self.name = name
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
        parts = split_conversation(example.messages, self.template, self.tokenizer.special_strings, where)
        # Each part by itself, as a server encodes the prompt before the model continues it.
        return join_parts([(self.tokenizer.encode(text), counts) for text, counts in parts])

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
        text = self.template.render(messages, True)
        turn_end = find_turn_end(self.template, self.tokenizer.special_strings)
        return text, self.tokenizer.encode(text), [*ends, *(self.tokenizer.encode(turn_end) if turn_end else ())]


def split_conversation(
    messages: list[Message], template: ChatTemplate, specials: Sequence[str], where: str
) -> list[tuple[str, bool]]:
    """The text of a conversation in parts, and whether each is an answer with the token that ends it.

    What a template writes behind that token, such as a newline, is not of the answer: a model that is asked stops
    before it.

    Args:
        messages: The conversation.
        template: Renders it.
        specials: Special tokens, one of which may end an answer.
        where: The row, for messages.

    Raises:
        UsageError: The template changes earlier messages when later ones follow, so that answers have no place.
    """
    marked = template.render_parts(messages)
    if any(is_answer for _, is_answer in marked):
        return marked
    whole, position = "".join(text for text, _ in marked), 0
    parts: list[tuple[str, bool]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = template.render(messages[:number], True), template.render(messages[: number + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            if number == len(messages) - 1 or position:
                raise _build_template_error(where)
            continue  # an earlier answer that the template shortens: only the later ones count
        answer = cut_after_end(after[len(before) :], specials)
        parts += [(whole[position : len(before)], False), (answer, True)]
        position = len(before) + len(answer)
    if not parts:
        raise _build_template_error(where)
    return [(text, counts) for text, counts in [*parts, (whole[position:], False)] if text]


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


def _build_template_error(where: str) -> UsageError:
    return UsageError(
        f"{where}: the chat template changes earlier messages, so that answers cannot be told from prompts",
        "write one row for each answer: prompt (a list of messages) and completion",
    )


def join_parts(parts: list[tuple[list[int], bool]]) -> EncodedExample:
    """An example of parts, each of which counts or does not."""
    tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in parts])
    counted = np.concatenate([np.full(len(ids), counts, dtype=np.bool_) for ids, counts in parts])
    counted[:1] = False  # nothing predicts the first token
    return EncodedExample(tokens, counted)
