"""Split the text of a bash script into commands of words, quotes kept; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

OPERATORS = (";;", "&&", "||", "|&", "&>>", "&>", ">&", "<&", ";", "|", "&", "(", ")", "<<<", "<<", ">>", ">", "<")
"""Operators of bash that end a word, the longest first."""
_NAME_BEFORE_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")


class ShellToken(Struct, frozen=True):
    """A word or an operator of a script."""

    text: str
    line: int
    is_operator: bool = False
    items: tuple[str, ...] | None = None
    """Words of an array: `NAME=( ... )` has the text ``NAME=``."""


class ShellSyntaxError(ValueError):
    """The script is not bash, or is cut off; the message has the line."""


def split_tokens(text: str) -> Iterator[ShellToken]:
    """Words and operators of a script; a newline is the operator ``;``.

    Raises:
        ShellSyntaxError: A quote or bracket is not closed.
    """
    return iter(_Scanner(_drop_here_documents(text.replace("\r\n", "\n"))).scan())


def _drop_here_documents(text: str) -> str:
    """`text` with empty lines in the place of here documents, which hold no arguments."""
    kept: list[str] = []
    end = ""
    for line in text.split("\n"):
        if end:
            end = "" if line.strip() == end else end
            kept.append("")
            continue
        match = _HERE_DOCUMENT.search(line)
        if match and not line.lstrip().startswith("#"):
            end = match[2]
        kept.append(line)
    return "\n".join(kept)


class _Scanner:
    """Reads a script character by character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.tokens: list[ShellToken] = []

    def scan(self) -> list[ShellToken]:
        while self.position < len(self.text):
            self.scan_token()
        return self.tokens

    def find_line(self, position: int | None = None) -> int:
        return self.text.count("\n", 0, self.position if position is None else position) + 1

    def scan_token(self) -> None:
        letter = self.text[self.position]
        if letter == "\n":
            self.add_operator(";", 1)
        elif not self.skip_blank():
            operator = next((each for each in OPERATORS if self.text.startswith(each, self.position)), None)
            if operator:
                self.add_operator(operator, len(operator))
            else:
                self.add_word()

    def skip_blank(self) -> bool:
        """Skip a blank, a continued line or a comment; whether there was one."""
        letter = self.text[self.position]
        if letter in " \t":
            self.position += 1
        elif self.text.startswith("\\\n", self.position):
            self.position += 2
        elif letter == "#":
            end = self.text.find("\n", self.position)
            self.position = len(self.text) if end < 0 else end
        else:
            return False
        return True

    def add_operator(self, text: str, length: int) -> None:
        self.tokens.append(ShellToken(text, self.find_line(), is_operator=True))
        self.position += length

    def add_word(self) -> None:
        line = self.find_line()
        word = self.read_word(" \t\n;&|()<>")
        if _NAME_BEFORE_ARRAY.search(word) and self.text.startswith("(", self.position):
            self.position += 1
            self.tokens.append(ShellToken(word, line, items=tuple(self.read_array(line))))
            return
        if word.isdigit() and self.text.startswith(("<", ">"), self.position):
            return  # the file number of a redirection: 2>&1
        self.tokens.append(ShellToken(word, line))

    def read_array(self, line: int) -> Iterator[str]:
        """Words up to the closing bracket of an array."""
        while True:
            if self.position >= len(self.text):
                raise ShellSyntaxError(f"line {line}: the array is not closed by ')'")
            letter = self.text[self.position]
            if letter == ")":
                self.position += 1
                return
            if letter == "\n":
                self.position += 1
            elif not self.skip_blank():
                yield self.read_word(" \t\n)")

    def read_word(self, ends: str) -> str:
        """One word with its quotes, up to a character of `ends`."""
        start = self.position
        while self.position < len(self.text) and self.text[self.position] not in ends:
            self.skip_part()
        if self.position == start:  # an operator inside an array
            self.position += 1
        return self.text[start : self.position].replace("\\\n", "")

    def skip_part(self) -> None:
        """Move over one character, or over what a quote, `${`, `$(` or a backquote opens."""
        letter = self.text[self.position]
        if letter == "\\":
            self.position += 2
        elif letter == "'":
            self.skip_to("'")
        elif letter == '"':
            self.skip_double_quotes()
        elif letter == "`":
            self.skip_to("`")
        elif self.text.startswith(("$(", "${"), self.position):
            self.skip_brackets()
        else:
            self.position += 1

    def skip_to(self, end: str) -> None:
        found = self.text.find(end, self.position + 1)
        if found < 0:
            raise ShellSyntaxError(f"line {self.find_line()}: {end} is not closed")
        self.position = found + 1

    def skip_double_quotes(self) -> None:
        start = self.position
        self.position += 1
        while self.position < len(self.text) and self.text[self.position] != '"':
            if self.text[self.position] == "'":
                self.position += 1
            else:
                self.skip_part()
        if self.position >= len(self.text):
            raise ShellSyntaxError(f'line {self.find_line(start)}: " is not closed')
        self.position += 1

    def skip_brackets(self) -> None:
        """Move over `$(...)`, `$((...))` or `${...}`."""
        start = self.position
        opening = self.text[start + 1]
        closing = ")" if opening == "(" else "}"
        self.position += 2
        depth = 1
        while depth:
            if self.position >= len(self.text):
                raise ShellSyntaxError(f"line {self.find_line(start)}: ${opening} is not closed by {closing}")
            letter = self.text[self.position]
            if letter == opening and opening == "(":
                depth += 1
                self.position += 1
            elif letter == closing:
                depth -= 1
                self.position += 1
            else:
                self.skip_part()
