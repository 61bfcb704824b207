"""The chat template of a tokenizer: messages as text, and which of it the model writes.

A template is code, so that it runs in a sandbox. Templates for training mark what the model writes by
`{% generation %}` (transformers, utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from primus.data.instruction.examples import Message
from primus.data.tokenizers.sibling_files import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    ReadFile,
    SiblingConfig,
    get_token,
    read_config,
)
from primus.errors import UsageError

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what a template marks; Unicode keeps these two out of texts."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A chat template that is compiled on first use.

    Args:
        name: Of the tokenizer, for messages.
        text: The template.
        tokens: Special tokens by their name in templates, such as `bos_token`.
    """

    def __init__(self, name: str, text: str, tokens: Mapping[str, str]) -> None:
        self.text = text
        self._name, self._tokens = name, tokens
        self._compiled: Any = None

    def render(self, messages: list[Message], adds_answer: bool = False) -> str:
        """The text of messages; `adds_answer` adds the beginning of an answer.

        Raises:
            UsageError: The template is invalid, or refuses the messages.
        """
        return "".join(text for text, _ in self.render_parts(messages, adds_answer))

    def render_parts(self, messages: list[Message], adds_answer: bool = False) -> list[tuple[str, bool]]:
        """The text in parts, and whether the template marks each as written by the model; see `render`."""
        first, *marked = self._render(messages, adds_answer).split(BEGIN)
        parts = [(first, False)]
        for part in marked:
            written, _, after = part.partition(END)
            parts += [(written, True), (after, False)]
        return [(text, is_marked) for text, is_marked in parts if text]

    def _render(self, messages: list[Message], adds_answer: bool) -> str:
        import jinja2

        if self._compiled is None:
            self._compiled = _compile(self._name, self.text)
        try:
            text: str = self._compiled.render(messages=messages, add_generation_prompt=adds_answer, **self._tokens)
        except jinja2.TemplateError as error:
            raise UsageError(
                f"{self._name}: its chat template refuses the messages: {error}", "change the data"
            ) from None
        return text


def read_chat_template(read: ReadFile, name: str) -> ChatTemplate | None:
    """The chat template among the files of a tokenizer; None if there is none.

    Raises:
        UsageError: tokenizer_config.json is damaged.
    """
    config = read_config(read, name, TOKENIZER_CONFIG)
    text = _choose_template(read, config)
    if text is None:
        return None
    return ChatTemplate(name, text, {key: get_token(getattr(config, key)) for key in SPECIAL_TOKENS})


def build_missing_template_error(where: str, name: str) -> UsageError:
    """The error of a conversation for which the tokenizer `name` has no chat template."""
    return UsageError(
        f"{where}: the tokenizer {name} has no chat template for messages",
        f"add {CHAT_TEMPLATE} to its folder, or write rows with prompt and completion",
    )


def _choose_template(read: ReadFile, config: SiblingConfig) -> str | None:
    own = read(CHAT_TEMPLATE)
    if own is not None:
        return own.decode("utf-8")
    found = config.chat_template
    if isinstance(found, list):  # several by name
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _compile(name: str, template: str) -> Any:
    """A template as transformers compiles it."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _build_marker()]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UsageError(f"{name}: its chat template is invalid: {error}", "save the tokenizer again") from None


def _build_marker() -> Any:
    """The tag `{% generation %}` around what the model writes."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END))
            return nodes.Scope([begin, *body, end], lineno=line)

    return GenerationTag
