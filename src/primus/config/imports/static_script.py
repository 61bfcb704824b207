"""Read the static part of a bash script where there is no sandbox: assignments and commands, in their order.

Nothing is executed, and no condition is evaluated: branches and loops are skipped, and said. What only a run can tell
(output of programs, unset variables, arguments of the script, what a branch assigns) is a mark in the text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

UNKNOWN = "\x00"
"""Encloses the description of a part that only a run can tell."""
_MARK = re.compile("\x00([^\x00]*)\x00")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"(\d*[<>]|&>)[<>&|]*[ \t]*")
_NAME = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[\d@*])(?:\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1.*\n(?:.*\n)*?[ \t]*\2[ \t]*$", re.MULTILINE)
_ENDS = " \t\n;&|()<>"
"""Characters that end a word outside of quotes."""
_DECLARATIONS = [["export"], ["declare"], ["local"], ["readonly"], ["typeset"], [":"]]
"""Words before an assignment."""
_BLOCKS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_KEYWORDS = {"then", "else", "elif", "do", "{", "}", "!", "function"}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_TEXT = 1 << 22
"""Maximum number of characters that all variables expand to; those that repeat each other grow exponentially."""


class StaticCommand(Struct, frozen=True):
    """A command with its words expanded."""

    line: int
    words: list[str]


class SkippedBlock(Struct):
    """A branch or loop."""

    line: int
    keyword: str
    flags: list[str] = field(default_factory=list)
    """Arguments in it."""


class StaticScript(Struct):
    """What can be read of a script without running it."""

    commands: list[StaticCommand] = field(default_factory=list)
    skipped: list[SkippedBlock] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    """Variables; those of an array are several."""


def read_static_script(text: str, environ: Mapping[str, str]) -> StaticScript:
    """The commands of a script outside of branches and loops.

    Raises:
        ValueError: A quote or bracket is not closed, or variables expand without bound.
    """
    script = StaticScript(values={name: [value] for name, value in environ.items()})
    lines = _HERE_DOCUMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    _Reader(lines, script).read_commands()
    return script


class _Reader:
    """Reads a text from `position` on; words are expanded as they are read."""

    def __init__(self, text: str, script: StaticScript, size: list[int] | None = None) -> None:
        self.text = text
        self.script = script
        self.position = 0
        self.blocks: list[str] = []
        """Words that end the branches and loops around this place, the innermost last."""
        self.size = size if size is not None else [0]
        """Number of characters that were expanded; one number for all readers of a script."""

    def read_commands(self) -> None:
        while self.position < len(self.text):
            self.read_command()

    def read_command(self) -> None:
        words: list[str] = []
        is_declaration = False
        line = self.find_line()
        while self.position < len(self.text):
            letter = self.text[self.position]
            if letter in " \t" or self.text.startswith("\\\n", self.position):
                self.position += 1 + (letter == "\\")
            elif letter == "#":
                self.skip_comment()
            elif match := _REDIRECTION.match(self.text, self.position):
                self.position = match.end()
                self.read_word()
            elif letter in _ENDS:
                self.position += 1
                break
            elif not words and (match := _ASSIGNMENT.match(self.text, self.position)):
                self.position = match.end()
                self.assign(match[1], bool(match[2]))
            else:
                words += self.read_word()
                is_declaration = is_declaration or words[:1] in _DECLARATIONS
                if is_declaration or (len(words) == 1 and self.read_keyword(words[0], line)):
                    words = []
        if words:
            self.add_command(words, line)

    def read_keyword(self, word: str, line: int) -> bool:
        """Whether a word at the place of a command is one of bash; begins and ends branches and loops."""
        if word in _BLOCKS:
            if not self.blocks:
                self.script.skipped.append(SkippedBlock(line, word))
            self.blocks.append(_BLOCKS[word])
            if word == "for" and (match := _NAME.match(self.text, self.position + 1)):
                self.script.values[match[0]] = [_describe_unknown(f"${match[0]}")]
        elif self.blocks and word == self.blocks[-1]:
            self.blocks.pop()
        elif word not in _KEYWORDS:
            return False
        return True

    def assign(self, name: str, is_added: bool) -> None:
        """`NAME=word` or `NAME=(words)`, and the same with `+=`; in a branch, only a run can tell the value."""
        start, line = self.position, self.find_line()
        if self.text.startswith("(", self.position):
            self.position += 1
            values = self.read_array(line)
        else:
            values = self.read_word(split=False) or [""]
        if self.blocks:
            self.add_flags(part for value in values for part in value.split())
            if not is_added and not re.match(rf"[\"']?\$\{{?{name}\b", self.text[start:]):
                self.script.values[name] = [_describe_unknown(f"${name}")]
            return
        old = self.script.values.get(name, [])
        is_array = self.text.startswith("(", start)
        self.script.values[name] = values if not is_added else [*old, *values] if is_array else ["".join(old + values)]

    def read_array(self, line: int) -> list[str]:
        values: list[str] = []
        while not self.text.startswith(")", self.position):
            if self.position >= len(self.text):
                raise ValueError(f"line {line}: the array is not closed by ')'")
            if self.text[self.position] == "#":
                self.skip_comment()
            elif self.text[self.position] in _ENDS:
                self.position += 1
            else:
                values += self.read_word()
        self.position += 1
        return values

    def add_command(self, words: list[str], line: int) -> None:
        """Keep a command; the text that `eval` or `bash -c` runs is read in its place."""
        if self.blocks:
            self.add_flags(words)
            return
        text = words[1:] if words[0] == "eval" else words[words.index("-c") + 1 :][:1] if "-c" in words else []
        is_shell = words[0] == "eval" or any(word.rpartition("/")[2] in ("bash", "sh") for word in words)
        if is_shell and text:  # without the marks: what they describe is read again
            _Reader(" ".join(text).replace(UNKNOWN, ""), self.script, self.size).read_commands()
            return
        self.script.commands.append(StaticCommand(line, words))

    def add_flags(self, words: Iterable[str]) -> None:
        self.script.skipped[-1].flags += [word.split()[0] for word in words if word.startswith("--")]

    def read_word(self, *, split: bool = True, ends: str = _ENDS) -> list[str]:
        """The words that one word becomes: unquoted variables are split at blanks, as bash does, or joined."""
        words: list[str] = []
        pieces: list[str] = []  # of the last word; a quote alone makes an empty one
        quote = -1
        while self.position < len(self.text) and (quote >= 0 or self.text[self.position] not in ends):
            letter = self.text[self.position]
            if letter == "'" and quote < 0:
                parts = [self.text[self.position + 1 : self.find_close("'")]]
                self.position += len(parts[0]) + 2
            elif letter == '"':
                quote = self.position if quote < 0 else -1
                parts = [""]
                self.position += 1
            elif letter == "\\":
                follower = self.text[self.position + 1 : self.position + 2]
                is_kept = quote >= 0 and follower not in '"\\$`\n'
                parts = [letter * is_kept + follower.strip("\n")]
                self.position += 2
            elif letter in "$`":
                parts = self.read_expansion()
                self.size[0] += sum(len(part) + 1 for part in parts)
                if self.size[0] > MOST_TEXT:
                    raise ValueError("its variables expand to more than 4 MiB")
                if quote < 0 and split:
                    parts = [part for value in parts for part in _split_blanks(value)]
            else:
                parts = [letter]
                self.position += 1
            if not split:
                parts = [" ".join(parts)] if parts else []
            if len(parts) > 1:
                words += ["".join([*pieces, parts[0]]), *parts[1:-1]]
                pieces.clear()
            pieces += parts[-1:]
        if quote >= 0:
            raise ValueError(f'line {self.find_line(quote)}: " is not closed')
        return [*words, "".join(pieces)] if pieces else words

    def read_expansion(self) -> list[str]:
        """Value of what `$` or a backquote begins."""
        start = self.position
        if self.text[start] == "`":
            self.position = self.find_close("`") + 1
            return [_describe_unknown(self.text[start : self.position])]
        if self.text.startswith(("$(", "${"), start):
            self.skip_brackets()
            whole = self.text[start : self.position]
            if whole.startswith("$(("):
                return [self.calculate(whole)]
            return self.expand_parameter(whole) if whole.startswith("${") else [_describe_unknown(whole)]
        match = _NAME.match(self.text, start + 1)
        self.position = match.end() if match else start + 1
        return self.expand_parameter(f"${{{match[0]}}}") if match else ["$"]

    def expand_parameter(self, whole: str) -> list[str]:
        """Value of `${name}`, `${name:-default}` and the like; other operators are left to a run."""
        match = _PARAMETER.fullmatch(whole[2:-1])
        if not match:
            return [_describe_unknown(whole)]
        name, action, other = match.groups()
        if name in ("@", "*"):  # further words of the command line, none here
            return []
        value = self.script.values.get(name)
        is_empty = value is None or (bool(action) and action.startswith(":") and not "".join(value))
        if action and action[-1] in "-=+" and is_empty == (action[-1] != "+"):
            found = _Reader(other, self.script, self.size).read_word(split=False, ends="") or [""]
            if action[-1] == "=":
                self.script.values[name] = found
            return found
        if action and action[-1] == "+":
            return []
        return [_describe_unknown(f"${name}")] if value is None else value

    def calculate(self, whole: str) -> str:
        """Value of `$((...))`."""
        plain = re.sub(
            r"\$?\{?\b([A-Za-z_]\w*)\}?",
            lambda match: " ".join(self.script.values.get(match[1], [UNKNOWN])),
            whole[3:-2],
        )
        try:
            return str(_calculate(ast.parse(re.sub(r"/+", "//", plain).strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
            return _describe_unknown(whole)

    def skip_brackets(self) -> None:
        """Move over `$(...)`, `$((...))` or `${...}`; brackets in quotes do not count."""
        start = self.position
        opening = self.text[start + 1]
        closing = ")" if opening == "(" else "}"
        self.position += 2
        depth, is_quoted = 1, False
        while depth:
            if self.position >= len(self.text):
                raise ValueError(f"line {self.find_line(start)}: ${opening} is not closed by {closing}")
            letter = self.text[self.position]
            if letter == "\\":
                self.position += 1
            elif letter == '"':
                is_quoted = not is_quoted
            elif letter == "'" and not is_quoted:
                self.position = self.find_close("'")
            elif not is_quoted:
                depth += (letter == opening) - (letter == closing)
            self.position += 1

    def find_close(self, quote: str) -> int:
        """Place of the quote that closes the one at `position`."""
        found = self.text.find(quote, self.position + 1)
        if found < 0:
            raise ValueError(f"line {self.find_line()}: {quote} is not closed")
        return found

    def skip_comment(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = end if end >= 0 else len(self.text)

    def find_line(self, position: int | None = None) -> int:
        return self.text.count("\n", 0, self.position if position is None else position) + 1


def _split_blanks(value: str) -> list[str]:
    """`value` split at blanks outside of marks."""
    return [part.replace("\x01", " ") for part in _MARK.sub(lambda m: m[0].replace(" ", "\x01"), value).split()]


def _describe_unknown(source: str) -> str:
    return f"{UNKNOWN}{source.replace(UNKNOWN, '')}{UNKNOWN}"


def find_unknown_parts(word: str) -> list[str]:
    """Parts of an expanded word that only a run can tell: ``$1``, ``$(date)``."""
    return _MARK.findall(word)


def format_unknown(word: str) -> str:
    """`word` with the marks as they stand in the script."""
    return _MARK.sub(lambda match: match[1], word)


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right)))
    raise ValueError("not arithmetic")
