"""Learn the secrets of this process, and write texts, variables and command lines without them."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from primus.redaction.fingerprint import fingerprint_key
from primus.redaction.forms import MASK, Naming, Span, cover, find_secrets
from primus.redaction.harmless import is_harmless_variable
from primus.redaction.names import is_secret_name

_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
SHORTEST = 4
"""Minimum length of a value that is masked, unless it is a common word or number; as a whole word only."""
SHORTEST_ANYWHERE = 8
"""Minimum length of a value that is masked inside of words, too."""
SHORTEST_WORD = 6
"""Minimum length of a value that consists of letters only."""
SHORTEST_NUMBER = 10
COMMON = frozenset(
    "true false none null auto default disabled enabled anonymous unknown password secret changeme localhost"
    " pretrain posttrain preflight benchmark kubernetes container quickstart pre_trainer post_trainer native"
    " required optional username production development public private direct docker podman master worker"
    " output config backend machine compute running planned failed interrupted damaged session latest".split()
)
"""Common values that are never masked, because they protect nothing."""


class KnownSecrets:
    """Values of secrets, in every encoding that text may contain."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._literals: tuple[str, ...] = ()
        self._patterns: tuple[re.Pattern[str], ...] = ()
        self._is_stale = False

    def add(self, value: str) -> None:
        """Learn a value, unless masking it would hide ordinary text."""
        # Lines of a multi-line secret are also known alone; the header and footer of a PEM block are not secret.
        for each in (value, value.strip(), *(line.strip() for line in value.splitlines() if "-----" not in line)):
            if each not in self._values and is_distinctive(each):
                self._values.add(each)
                self._is_stale = True

    def find(self, text: str) -> Iterator[Span]:
        """Spans of `text` that equal one of the values."""
        if self._is_stale:
            self._prepare()
        for literal in self._literals:
            if literal in text:
                begin = text.find(literal)
                while begin >= 0:
                    yield begin, begin + len(literal)
                    begin = text.find(literal, begin + len(literal))
        for pattern in self._patterns:
            yield from (found.span() for found in pattern.finditer(text))

    def literals(self) -> tuple[str, ...]:
        """The values in all encodings, for a fast scan of files."""
        if self._is_stale:
            self._prepare()
        return (*self._literals, *(value for value in self._values if len(value) < SHORTEST_ANYWHERE))

    def copy(self) -> KnownSecrets:
        other = KnownSecrets()
        other._values = set(self._values)
        # The copy builds its own patterns when it is first used.
        other._is_stale = True
        return other

    def _prepare(self) -> None:
        literals: set[str] = set()
        patterns = []
        for value in self._values:
            if len(value) < SHORTEST_ANYWHERE:
                patterns.append(re.compile(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])"))
                continue
            literals |= set(_list_forms(value))
            words = value.split()
            if len(words) > 1:  # YAML may fold text between them
                patterns.append(re.compile(r"(?:\s|\\[nrt]|\\\s*\n\s*\\?)+".join(map(re.escape, words))))
        self._literals = tuple(literals)
        self._patterns = tuple(patterns)
        self._is_stale = False


def is_distinctive(value: str) -> bool:
    """Whether `value` in other text is most likely the secret: not a number, a common word or an existing path."""
    if len(value) < SHORTEST or value.lower() in COMMON or "<secret>" in value:
        return False
    if _is_number(value):
        return value.isdigit() and len(value) >= SHORTEST_NUMBER
    if len(value) < SHORTEST_WORD and value.isalpha():
        return False
    return not (value.startswith(("/", "~/", "./", "../")) and os.path.exists(os.path.expanduser(value)))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _list_forms(value: str) -> Iterator[str]:
    """`value` as JSON, Python, shells, YAML, URLs and HTTP headers write it."""
    import base64  # imported only if there is a secret: every command imports this module
    import json

    data = value.encode("utf-8", "surrogateescape")
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield value.replace("'", "''")
    yield value.replace("'", "'\"'\"'")
    yield value.replace("'", "'\\''")
    yield value.encode("ascii", "backslashreplace").decode()
    yield urllib.parse.quote(data, safe="")
    yield urllib.parse.quote(data)
    yield urllib.parse.quote_plus(data)
    yield urllib.parse.unquote(value)
    yield (
        value.replace("&", "&amp;")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace('"', "&quot;")
        .replace("'", "&#x27;")
    )
    yield data.hex()
    for shift in range(3):  # base64 of a text that contains it, such as `user:password`
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            core = encode(b"\0" * shift + data).decode().rstrip("=")
            whole = core[4 * bool(shift) :][: -1 if (len(data) + shift) % 3 else None]
            if len(whole) >= SHORTEST_ANYWHERE:
                yield whole


_known = [KnownSecrets()]
"""Stack of scopes; the last one is in use."""


@contextmanager
def scope() -> Iterator[None]:
    """Forget secrets that are learned while open; for tests, which run several commands in one process."""
    _known.append(_known[-1].copy())
    try:
        yield
    finally:
        _known.pop()


NUMBERS = frozenset((int, float, bool, type(None)))
"""Types of JSON values that hold no text."""
HIDDEN_VARIABLE = "PRIMUS_HIDDEN_VARIABLES"
"""Variable with the names of secret variables whose names do not indicate it, for processes on other machines."""


def learn(variables: Mapping[str, str]) -> None:
    """Learn the secrets among variables: by name, and by form inside any value."""
    hidden = variables.get(HIDDEN_VARIABLE, "").split(",")
    for name, value in variables.items():
        if is_secret_name(name) or name in hidden:
            _known[-1].add(value)
        learn_value(value, is_secret=False)


def learn_value(value: str, *, is_secret: bool = True) -> None:
    """Learn a secret, or the parts of a text that are secret by form."""
    if is_secret:
        _known[-1].add(value)
    for begin, end in find_secrets(value, "assigned", is_value=True):
        secret = value[begin:end]
        _known[-1].add(secret)
        _known[-1].add(urllib.parse.unquote(secret))


REFERENCES = frozenset(("--secret", "--pull-secret", "--pull_secret"))
"""Options whose values are names of secrets in a Kubernetes cluster."""


def learn_args(args: Iterable[str]) -> None:
    """Learn the values of secret options and assignments on a command line."""
    is_next = False
    for arg in args:
        name, equals, value = arg.partition("=")
        if name in REFERENCES:
            is_next = False
            continue
        if is_next and not arg.startswith("--"):
            learn_value(arg)
        elif equals:
            inner = value.partition("=")
            learn({name.lstrip("-"): value, **({inner[0]: inner[2]} if inner[1] else {})})
        else:
            learn_value(arg, is_secret=False)
        is_next = arg.startswith("--") and not equals and is_secret_name(arg)


def holds_secret(text: str) -> bool:
    """Whether `text` contains a known secret, or one by its form."""
    return redact(text) != text


def redact(text: str) -> str:
    """`text` without secrets that are known by value or by form."""
    return cover(text, [*_known[-1].find(text), *find_secrets(text)]) if text else text


def redact_log_text(text: str, *, assigned_only: bool = False) -> str:
    """`text` of a log or script without secrets, including values after secret names."""
    naming: Naming = "assigned" if assigned_only else "any"
    return cover(text, [*_known[-1].find(text), *find_secrets(text, naming)]) if text else text


def redact_tree(value: Any) -> Any:
    """JSON values with every string redacted, keys included.

    Most trees contain no secret. One search in all strings, joined by line feeds, shows that: no form of a secret is
    recognized by the end of its text, so that joining hides none.
    """
    return _redact_strings(value) if holds_secret("\n".join(_list_strings(value))) else value


def _list_strings(value: Any) -> list[str]:
    strings: list[str] = []
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            strings.append(item)
        elif isinstance(item, Mapping):
            rest += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            # Most long lists are of numbers.
            rest += () if set(map(type, item)) <= NUMBERS else item
    return strings


def _redact_strings(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {_redact_strings(key): _redact_strings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact_strings(item) for item in value]
    return value


def list_known_literals() -> tuple[str, ...]:
    """Every form of every value that is known."""
    return _known[-1].literals()


def redact_value(name: str, value: str) -> str:
    """`value` of the variable, option or key `name`, or the mask; other values without their secret parts."""
    if is_secret_name(name):
        return MASK
    inner = _ASSIGNMENT.fullmatch(value)
    if inner and is_secret_name(inner[1]):
        return f"{inner[1]}={MASK}"
    return redact_log_text(value, assigned_only=True)


def hide_inherited_value(name: str, value: str) -> str:
    """`value` of a variable that the user's shell happens to have: as `redact_value` if it is harmless, the mask for
    the name of a secret, else a fingerprint."""
    if is_secret_name(name) or is_harmless_variable(name, value):
        return redact_value(name, value)
    return fingerprint_key.compute(name, value)


def redact_args(args: Iterable[str]) -> list[str]:
    """A command line without the values of secret options and assignments, and without secrets in any other value."""
    shown: list[str] = []
    is_next = False
    for arg in args:
        match = _ASSIGNMENT.fullmatch(arg)
        if is_next and not arg.startswith("--"):
            shown.append(MASK)
        elif match:
            shown.append(f"{match[1]}={redact_value(match[1], match[2])}")
        else:
            shown.append(redact(arg))
        is_next = arg.startswith("--") and "=" not in arg and is_secret_name(arg)
    return shown
