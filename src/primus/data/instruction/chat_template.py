"""The chat template of a tokenizer: messages as text, and which of it the model writes.

A template is code, so that it runs in a sandbox, which also limits its loops. Templates for training mark what the
model writes by `{% generation %}` (transformers, utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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

Tools = list[object] | None
BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what a template marks; Unicode keeps these two out of texts."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MOST_ROUNDS = 100_000
"""Rounds of all loops of a template in one rendering, a second: a thousand messages take some thousands."""
COUNT_ROUND = "count_round_of_loop"
"""Name of the function that each round of a loop calls."""
MOST_CHARACTERS = 10_000_000
"""Length of a text that a template may make by multiplication."""


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
        self._rounds = 0

    def render(self, messages: list[Message], adds_answer: bool = False, tools: Tools = None) -> str:
        """The text of messages; `adds_answer` adds the beginning of an answer.

        Raises:
            UsageError: The template is invalid, or refuses the messages.
        """
        return "".join(text for text, _ in self.render_parts(messages, adds_answer, tools))

    def render_parts(
        self, messages: list[Message], adds_answer: bool = False, tools: Tools = None
    ) -> list[tuple[str, bool]]:
        """The text in parts, and whether the template marks each as written by the model; see `render`."""
        first, *marked = self._render(messages, adds_answer, tools).split(BEGIN)
        parts = [(first, False)]
        for part in marked:
            written, _, after = part.partition(END)
            parts += [(written, True), (after, False)]
        return [(text, is_marked) for text, is_marked in parts if text]

    def _render(self, messages: list[Message], adds_answer: bool, tools: Tools) -> str:
        if self._compiled is None:
            self._compiled = _compile(self._name, self.text, self._count_round)
        self._rounds = 0
        try:
            text: str = self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=adds_answer, **self._tokens
            )
        except _list_template_errors() as error:
            raise UsageError(
                f"{self._name}: its chat template refuses the messages: {error or type(error).__name__}",
                "change the data",
            ) from None
        return text

    def _count_round(self) -> str:
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            raise OverflowError(f"its loops take more than {MOST_ROUNDS:,} rounds")
        return ""


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


def _list_template_errors() -> tuple[type[Exception], ...]:
    """What the code of a template may raise; RuntimeError is a recursion of its macros."""
    import jinja2

    common = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
    return (jinja2.TemplateError, *common)


def _compile(name: str, template: str, count_round: Callable[[], str]) -> Any:
    """A template as transformers compiles it."""
    import jinja2

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = _build_environment()
    environment.globals |= {"raise_exception": raise_exception, COUNT_ROUND: count_round}
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise UsageError(f"{name}: its chat template is invalid: {error}", "save the tokenizer again") from None


def _build_environment() -> Any:
    """A sandbox without files to import, in which loops and texts have a limit."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(each) if isinstance(each, str | list | tuple) else each for each in (left, right)]
            if operator == "**" or sizes[0] * sizes[1] > MOST_CHARACTERS:
                raise OverflowError(f"{operator} makes too much")
            return super().call_binop(context, operator, left, right)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            parsed = super()._parse(source, name, filename)
            for loop in parsed.find_all(nodes.For):
                count = nodes.Call(nodes.Name(COUNT_ROUND, "load"), [], [], None, None)
                loop.body.insert(0, nodes.Output([count], lineno=loop.lineno))
            parsed.set_environment(self)
            return parsed

    return BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _build_marker()]
    )


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
