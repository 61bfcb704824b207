"""A checkpoint that continues texts and scores them: native's model with its weights, its tokenizer and template."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from primus.errors import UsageError
from primus.framework import FRAMEWORKS
from primus.model_source.hub_files import NAME_ONE, collect_hub_files
from primus.model_source.options import SourceOptions, open_source
from primus.registry import load_plug_in

if TYPE_CHECKING:
    from primus.data.instruction.examples import Message


class Answer(NamedTuple):
    """What follows a prompt."""

    prompt: str
    """As the model sees it."""
    text: str
    tokens: list[int]
    log_probabilities: list[float]
    stop_reason: str


class AnswerStyle(NamedTuple):
    """How answers are generated."""

    max_new_tokens: int
    is_chat: bool = False
    """Whether texts are what a user says, rendered by the chat template."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: Sequence[str] = ()
    """Texts before which an answer ends."""


class TextModel:
    """A checkpoint of any format, on a GPU if there is one.

    Args:
        given: The checkpoint, as a task is given it.
        options: How it is read.
        tokenizer: Instead of its own.

    Raises:
        UsageError: It has no tokenizer, or its model is not one that native computes.
        PrimusError: It is damaged.
    """

    def __init__(self, given: str, options: SourceOptions, tokenizer: str | None) -> None:
        self.name = tokenizer or given
        self.opened = open_source(given, options)
        exported = collect_hub_files(self.opened, "native", tokenizer)
        if exported.tokenizer is None:
            raise UsageError(f"{self.opened.found.folder}: no tokenizer: {exported.problem}", NAME_ONE)
        from primus.data.instruction.encode import ExampleEncoder
        from primus.data.tokenizers.sibling_files import GENERATION_CONFIG

        # Its files may be from several places; together they are those of an exported model.
        with tempfile.TemporaryDirectory() as folder:
            for name, content in exported.files.items():
                (Path(folder) / name).write_bytes(content)
            self.encoder = ExampleEncoder(folder)
        ends = json.loads(exported.files[GENERATION_CONFIG]).get("eos_token_id")
        self.ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        native: Any = load_plug_in(FRAMEWORKS, "native")
        self.native: Any = native.load_model(self.opened.spec, self.opened.weights)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text, with those that transformers adds."""
        ids: list[int] = self.encoder.tokenizer.exact.encode_batch([text], True)[0].tolist()
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without those that end an answer."""
        # The embeddings of a model may have more rows than its tokenizer has tokens.
        size = self.encoder.tokenizer.vocab_size
        return self.encoder.tokenizer.decode([token for token in tokens if token < size and token not in self.ends])

    def answer(self, prompts: Sequence[str | list[Message]], style: AnswerStyle, first: int = 0) -> list[Answer]:
        """Answers to a batch of prompts, of which the first one has the number `first` among all.

        Raises:
            UsageError: A prompt is empty or too long, or there is no chat template for it.
        """
        encoded = [self._encode_prompt(each, number, style) for number, each in enumerate(prompts, first + 1)]
        # Last tokens of an answer that can have a stop text: a token has a byte at least.
        tail = max((len(text.encode()) for text in style.stops), default=1) + 1

        def has_stop(tokens: Sequence[int]) -> bool:
            return _find_stop(self.decode(tokens[-tail:]), style.stops) is not None

        found = self.native.generate(
            [ids for _, ids in encoded],
            style.max_new_tokens,
            temperature=style.temperature,
            top_k=style.top_k,
            top_p=style.top_p,
            seed=style.seed + first,
            ends=self.ends,
            is_end=has_stop if style.stops else lambda _: False,
        )
        answers = []
        for (text, _), completion in zip(encoded, found.completions, strict=True):
            written = self.decode(completion.tokens)
            answers.append(Answer(text, written[: _find_stop(written, style.stops)], *completion))
        return answers

    def _encode_prompt(self, prompt: str | list[Message], number: int, style: AnswerStyle) -> tuple[str, list[int]]:
        """A prompt as the model sees it, and its tokens."""
        from primus.data.instruction.chat_template import build_missing_template_error

        if not prompt.strip() if isinstance(prompt, str) else not prompt:
            raise UsageError(f"prompt {number} is empty", "give a text to continue")
        if isinstance(prompt, str) and not style.is_chat:
            return prompt, self.encode_text(prompt)
        template = self.encoder.template
        if template is None:
            raise build_missing_template_error(f"prompt {number}", self.name)
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = template.render(messages, True)
        return text, self.encoder.tokenizer.encode(text)


def read_lines(given: str, option: str) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        UsageError: It cannot be read, or has none.
    """
    path = Path(os.path.expanduser(given))
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{path}: cannot be read: {reason}", f"name a text file in {option}") from None
    if not lines:
        raise UsageError(f"{path}: it is empty", f"name a file with one row a line in {option}")
    return lines


def read_prompts(given: str, option: str) -> Iterator[tuple[str | list[Message], dict[str, Any], str]]:
    """The prompts of a JSONL file: each with its whole row, and the place of the row.

    Raises:
        UsageError: The file cannot be read, or a row has no prompt; names the line.
    """
    for number, line in enumerate(read_lines(given, option), 1):
        where = f"{given}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}: not JSON: {error}", "write one JSON object a line") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        is_list = isinstance(prompt, list) and all(isinstance(each, dict) and "role" in each for each in prompt)
        if not (isinstance(prompt, str) or (is_list and prompt)):
            raise UsageError(
                f"{where}: a row needs a prompt", 'write {"prompt": TEXT, ...} or {"prompt": [messages], ...}'
            )
        yield prompt, row, where


def _find_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)
