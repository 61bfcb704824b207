"""Tokens of an example, and which of them the loss counts: those of answers, with the token that ends them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.data.instruction.examples import Example, Message
from primus.data.tokenizers import hub
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.tokenizer import Tokenizer
from primus.errors import UsageError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"

Render = Callable[[list[Message], bool], str]
"""Text of messages by the chat template; the second argument adds the beginning of an answer."""


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
        read = _open_files(name)
        config = _read_config(read, name)
        self.template = _choose_template(read, config)
        self._render = _build_renderer(name, self.template, config) if self.template else None

    def encode(self, example: Example, where: str) -> EncodedExample:
        """Tokens of an example.

        Raises:
            UsageError: The example is a conversation and the tokenizer has no chat template for it.
        """
        if example.messages is None:
            end = [] if self.tokenizer.eod_id is None else [self.tokenizer.eod_id]
            begin = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
            prompt, answer = self.tokenizer.encode(example.prompt), self.tokenizer.encode(example.completion)
            return _join([([*begin, *prompt], False), ([*answer, *end], True)])
        if self._render is None:
            raise UsageError(
                f"{where}: the tokenizer {self.name} has no chat template for messages",
                f"add {TEMPLATE_FILE} to its folder, or write rows with prompt and completion",
            )
        parts = split_conversation(example.messages, self._render, where)
        # Each part by itself, as a server encodes the prompt before the model continues it.
        return _join([(self.tokenizer.encode(text), counts) for text, counts in parts])


def split_conversation(messages: list[Message], render: Render, where: str) -> list[tuple[str, bool]]:
    """The text of a conversation in parts, and whether each is an answer.

    Raises:
        UsageError: The template changes earlier messages when later ones follow, so that answers have no place.
    """
    whole, position = render(messages, False), 0
    parts: list[tuple[str, bool]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:number], True), render(messages[: number + 1], False)
        if not (whole.startswith(after) and after.startswith(before)):
            if number == len(messages) - 1 or position:
                raise _build_template_error(where)
            continue  # an earlier answer that the template shortens: only the later ones count
        parts += [(whole[position : len(before)], False), (after[len(before) :], True)]
        position = len(after)
    if not parts:
        raise _build_template_error(where)
    return [(text, counts) for text, counts in [*parts, (whole[position:], False)] if text]


def _build_template_error(where: str) -> UsageError:
    return UsageError(
        f"{where}: the chat template changes earlier messages, so that answers cannot be told from prompts",
        "write one row for each answer: prompt (a list of messages) and completion",
    )


def _join(parts: list[tuple[list[int], bool]]) -> EncodedExample:
    tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in parts])
    counted = np.concatenate([np.full(len(ids), counts, dtype=np.bool_) for ids, counts in parts])
    counted[:1] = False  # nothing predicts the first token
    return EncodedExample(tokens, counted)


def _open_files(name: str) -> Callable[[str], bytes | None]:
    """Reads files next to a tokenizer, from its folder or the hub; None for one that does not exist."""
    path = Path(os.path.expanduser(name))
    if not path.exists():
        return lambda file: hub.read_optional(name, file, ask_hub=True)
    folder = path if path.is_dir() else path.parent
    return lambda file: (folder / file).read_bytes() if (folder / file).is_file() else None


def _read_config(read: Callable[[str], bytes | None], name: str) -> dict[str, Any]:
    content = read(CONFIG_FILE)
    try:
        found = json.loads(content) if content else {}
    except ValueError:
        raise UsageError(f"{name}: its {CONFIG_FILE} is damaged", "save or download it again") from None
    return found if isinstance(found, dict) else {}


def _choose_template(read: Callable[[str], bytes | None], config: dict[str, Any]) -> str | None:
    """The chat template of a tokenizer; None if it has none."""
    own = read(TEMPLATE_FILE)
    if own is not None:
        return own.decode("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _build_renderer(name: str, template: str, config: dict[str, Any]) -> Render:
    """Renders messages by a chat template as transformers does, in a sandbox: a template is code."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    tokens = {key: _get_text(config.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UsageError(f"{name}: its chat template is invalid: {error}", "save the tokenizer again") from None

    def render(messages: list[Message], adds_answer: bool) -> str:
        try:
            return compiled.render(messages=messages, add_generation_prompt=adds_answer, **tokens)
        except jinja2.TemplateError as error:
            raise UsageError(f"{name}: its chat template refuses the messages: {error}", "change the data") from None

    return render


def _get_text(token: object) -> str:
    """A special token of tokenizer_config.json: a text, or an object with its content."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""
