"""Expand the variables of a bash script without executing it.

What only a run can tell (output of programs, unset variables, arguments of the script) becomes a mark in the text, so
that each word that depends on it is known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping

UNKNOWN = "\x00"
"""Encloses the description of a part that only a run can tell."""
_MARK = re.compile("\x00([^\x00]*)\x00")
_NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*])(\[[^\]]*\])?(.*)", re.DOTALL)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_EXPANSIONS = 10_000
"""Maximum number of expansions of one script; variables that repeat each other grow exponentially."""
LONGEST_VALUE = 1 << 20
"""Maximum length of an expanded value in characters."""


class ShellVariables:
    """Variables of a script, and what depends on a run."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.texts: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}
        self.expansions = 0

    def assign(self, name: str, word: str) -> None:
        """`NAME=word`, or `NAME+=word`."""
        is_added = name.endswith("+")
        name = name.removesuffix("+")
        value = "".join(self.expand_word(word)) if word else ""
        self.texts[name] = self._find_text(name, "") + value if is_added else value
        self.arrays.pop(name, None)

    def assign_array(self, name: str, words: tuple[str, ...]) -> None:
        """`NAME=(words)`, or `NAME+=(words)`."""
        is_added = name.endswith("+")
        name = name.removesuffix("+")
        values = [part for word in words for part in self.expand_words(word)]
        self.arrays[name] = [*self.arrays.get(name, []), *values] if is_added else values
        self.texts.pop(name, None)

    def mark_unknown(self, name: str, reason: str) -> None:
        """`name` has a value that only a run can tell."""
        self.texts[name] = f"{UNKNOWN}{reason}{UNKNOWN}"
        self.arrays.pop(name, None)

    def expand_word(self, word: str) -> list[str]:
        """`word` as one text, without splitting; a list of one."""
        return [" ".join(self.expand_words(word, split=False))]

    def expand_words(self, word: str, *, split: bool = True) -> list[str]:
        """The words that `word` becomes: unquoted variables are split at blanks, as bash does."""
        self.expansions += 1
        if self.expansions > MOST_EXPANSIONS:
            raise ValueError("its variables expand to too many words")
        return _WordExpansion(self, split).expand(word)

    def find_value(self, name: str) -> list[str] | None:
        """Value of a variable, an array's as several; None if it is not set."""
        if name in self.arrays:
            return self.arrays[name]
        if name in self.texts:
            return [self.texts[name]]
        if name in self.environ:
            return [self.environ[name]]
        return None

    def _find_text(self, name: str, default: str) -> str:
        value = self.find_value(name)
        return default if value is None else " ".join(value)

    def expand_parameter(self, inner: str) -> list[str]:
        """Value of `${inner}`."""
        match = _PARAMETER.fullmatch(inner)
        if not match:
            return [_describe_unknown(f"${{{inner}}}")]
        length, name, index, rest = match.groups()
        value = [] if name in ("@", "*") else self.find_value(name)
        if length:
            return [str(len(value or []) if index else len((value or [""])[0]))]
        if index and index not in ("[@]", "[*]") and value is not None:
            position = index[1:-1]
            value = [value[int(position)]] if position.isdigit() and int(position) < len(value) else None
        return self._apply_operator(name, value, rest)

    def _apply_operator(self, name: str, value: list[str] | None, rest: str) -> list[str]:
        """`${name:-default}` and its relatives."""
        is_empty = value is None or (rest.startswith(":") and "".join(value) == "")
        action = rest.removeprefix(":")[:1]
        other = rest.removeprefix(":")[1:]
        if not rest:
            return value if value is not None else [_describe_unknown(_format_variable(name))]
        if action in ("-", "="):
            found = self.expand_words(other, split=False) if is_empty else value or [""]
            if action == "=" and is_empty:
                self.texts[name] = " ".join(found)
            return found
        if action == "+":
            return [] if is_empty else self.expand_words(other, split=False)
        if action == "?":
            return value if value and not is_empty else [_describe_unknown(_format_variable(name))]
        if value is not None and len(value) == 1 and action in ("%", "#", "/", "^", ","):
            return [_edit_text(value[0], rest)]
        return [_describe_unknown(f"${{{name}{rest}}}")]

    def evaluate_arithmetic(self, text: str) -> str:
        """Value of `$((text))`."""
        plain = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda match: self._find_text(match[1], UNKNOWN), text)
        plain = plain.replace("/", "//") if "//" not in plain else plain
        try:
            return str(_calculate(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
            return _describe_unknown(f"$(({text}))")


class _WordExpansion:
    """Expands one word; quotes decide what is split."""

    def __init__(self, variables: ShellVariables, split: bool) -> None:
        self.variables = variables
        self.split = split
        self.words: list[str] = []
        self.current: str | None = None

    def expand(self, word: str) -> list[str]:
        position = 0
        while position < len(word):
            position = self.read_part(word, position)
        if self.current is not None:
            self.words.append(self.current)
        return self.words

    def append_text(self, text: str) -> None:
        self.current = (self.current or "") + text
        if len(self.current) > LONGEST_VALUE:
            raise ValueError("a variable expands to more than 1 MiB")

    def read_part(self, word: str, position: int) -> int:
        letter = word[position]
        if letter == "\\":
            self.append_text(word[position + 1 : position + 2])
            return position + 2
        if letter == "'":
            end = word.index("'", position + 1)
            self.append_text(word[position + 1 : end])
            return end + 1
        if letter == '"':
            return self.read_quoted(word, position + 1)
        if letter in "$`":
            values, end = self.read_variable(word, position)
            self.append_values(values, is_quoted=False)
            return end
        self.append_text(letter)
        return position + 1

    def read_quoted(self, word: str, position: int) -> int:
        """The text in double quotes; an array in it stays several words."""
        self.append_text("")
        while position < len(word) and word[position] != '"':
            letter = word[position]
            if letter == "\\" and word[position + 1] in '"\\$`\n':
                self.append_text(word[position + 1])
                position += 2
            elif letter in "$`":
                values, position = self.read_variable(word, position)
                self.append_values(values, is_quoted=True)
            else:
                self.append_text(letter)
                position += 1
        return position + 1

    def append_values(self, values: list[str], *, is_quoted: bool) -> None:
        parts = values
        if not is_quoted and self.split:
            parts = [part for value in values for part in _split_blanks(value)]
            if not parts:
                return
        for index, part in enumerate(parts):
            if index and self.split:
                self.words.append(self.current or "")
                self.current = None
            elif index:
                part = f" {part}"
            self.append_text(part)

    def read_variable(self, word: str, position: int) -> tuple[list[str], int]:
        """Value of what begins at `position`, and where it ends."""
        if word[position] == "`":
            end = word.find("`", position + 1) + 1 or len(word)
            return [_describe_unknown(word[position:end])], end
        if word.startswith("$((", position):
            end = _find_close(word, position + 1, "(", ")")
            return [self.variables.evaluate_arithmetic(word[position + 3 : end - 2])], end
        if word.startswith("$(", position):
            end = _find_close(word, position + 1, "(", ")")
            return [_describe_unknown(word[position:end])], end
        if word.startswith("${", position):
            end = _find_close(word, position + 1, "{", "}")
            return self.variables.expand_parameter(word[position + 2 : end - 1]), end
        match = _NAME.match(word, position + 1)
        if not match:
            return ["$"], position + 1
        if match[0] in ("@", "*"):  # further words of the command line, none here
            return [], match.end()
        value = self.variables.find_value(match[0])
        return value if value is not None else [_describe_unknown(_format_variable(match[0]))], match.end()


def _find_close(word: str, position: int, opening: str, closing: str) -> int:
    """Index behind the bracket that closes the one at `position`; brackets in double quotes do not count."""
    depth, is_quoted = 0, False
    while position < len(word):
        letter = word[position]
        if letter == "\\":
            position += 1
        elif letter == '"':
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (letter == opening) - (letter == closing)
        position += 1
        if depth == 0:
            return position
    return len(word)


def _split_blanks(value: str) -> list[str]:
    """`value` split at blanks outside of marks."""
    return [part.replace("\x01", " ") for part in _MARK.sub(lambda m: m[0].replace(" ", "\x01"), value).split()]


def _describe_unknown(source: str) -> str:
    return f"{UNKNOWN}{source.replace(UNKNOWN, '')}{UNKNOWN}"


def _format_variable(name: str) -> str:
    return f"${name}"


def find_unknown_parts(word: str) -> list[str]:
    """Parts of an expanded word that only a run can tell: ``$1``, ``$(date)``."""
    return _MARK.findall(word)


def format_unknown(word: str) -> str:
    """`word` with the marks as they stand in the script."""
    return _MARK.sub(lambda match: match[1], word)


def strip_unknown(word: str) -> str:
    """`word` without the parts that only a run can tell."""
    return _MARK.sub("", word)


def _edit_text(text: str, rest: str) -> str:
    """`${name%suffix}`, `${name#prefix}`, `${name/from/to}`, `${name^^}`, `${name,}` for plain patterns."""
    if rest[0] in "^,":
        change = str.upper if rest[0] == "^" else str.lower
        edited = {1: change(text[:1]) + text[1:], 2: change(text)} if rest == rest[0] * len(rest) else {}
        return edited.get(len(rest)) or _describe_unknown(f"${{...{rest}}}")
    if rest.startswith("/"):
        every = rest.startswith("//")
        old, _, new = rest.lstrip("/").partition("/")
        return text.replace(old, new) if every else text.replace(old, new, 1)
    pattern = rest.lstrip("%#")
    if any(letter in pattern for letter in "*?[$"):
        return _describe_unknown(f"${{...{rest}}}")
    return text.removesuffix(pattern) if rest.startswith("%") else text.removeprefix(pattern)


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right)))
    raise ValueError("not arithmetic")
