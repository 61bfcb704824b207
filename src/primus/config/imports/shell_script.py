"""Interpret the static part of a bash script: assignments, arrays and branches; commands are collected, never run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from primus.config.imports.shell_variables import ShellVariables, find_unknown_parts, format_unknown, strip_unknown
from primus.config.imports.shell_words import ShellToken, split_tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*\+?)=(.*)", re.DOTALL)
_PREFIXES = {"export", "declare", "local", "readonly", "typeset", ":"}
"""Words before an assignment."""
_LOOPS = {"for": "done", "while": "done", "until": "done", "select": "done"}


class ShellCommand(Struct, frozen=True):
    """A command of the script with its words expanded."""

    words: list[str]
    line: int


class SkippedPart(Struct, frozen=True):
    """A part of the script whose execution only a run can tell."""

    line: int
    reason: str
    words: tuple[str, ...] = ()
    """Words in it, as written."""


class ShellScript(Struct):
    """Commands of a script in the order in which they would run."""

    commands: list[ShellCommand]
    skipped: list[SkippedPart]
    variables: ShellVariables


def interpret_script(text: str, environ: Mapping[str, str]) -> ShellScript:
    """The commands of a script, variables expanded.

    Raises:
        ValueError: The script is not bash, or expands without bound.
    """
    script = ShellScript([], [], ShellVariables(environ))
    _Interpreter(list(split_tokens(text)), script).run()
    return script


class _Interpreter:
    """Walks over the tokens; `index` is the next one."""

    def __init__(self, tokens: list[ShellToken], script: ShellScript) -> None:
        self.tokens = tokens
        self.index = 0
        self.script = script
        self.variables = script.variables

    def run(self) -> None:
        while self.index < len(self.tokens):
            self.run_statement()

    def run_statement(self) -> None:
        token = self.tokens[self.index]
        if token.is_operator or token.text in ("{", "}", "then", "else", "do", "!", "fi", "done"):
            self.index += 1
            return
        keyword: dict[str, Callable[[], None]] = {"if": self.run_if, "case": self.run_case, "function": self.skip_name}
        if token.text in keyword:
            keyword[token.text]()
        elif token.text in _LOOPS:
            self.skip_loop()
        else:
            self.run_command()

    def read_command(self) -> list[ShellToken]:
        """Tokens up to the operator that ends a command; redirections are dropped."""
        words: list[ShellToken] = []
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            if token.is_operator and token.text in _REDIRECTIONS:
                self.index += 2
                continue
            if token.is_operator:
                break
            words.append(token)
            self.index += 1
        return words

    def run_command(self) -> None:
        words = self.read_command()
        while words and words[0].text in _PREFIXES:
            words = [word for word in words[1:] if not word.text.startswith("-")]
            if words and not _ASSIGNMENT.match(words[0].text) and words[0].items is None:
                for word in words:
                    self.variables.expand_word(word.text)  # `: ${NAME:=value}` assigns
                return
        while words and (words[0].items is not None or _ASSIGNMENT.match(words[0].text)):
            self.assign(words.pop(0))
        if not words:
            return
        expanded = [part for word in words for part in self.expand_token(word)]
        if expanded:
            self.add_command(expanded, words[0].line)

    def expand_token(self, token: ShellToken) -> list[str]:
        return self.variables.expand_words(token.text)

    def assign(self, token: ShellToken) -> None:
        if token.items is not None:
            self.variables.assign_array(token.text.removesuffix("="), token.items)
            return
        match = _ASSIGNMENT.match(token.text)
        assert match, "it was matched before"
        self.variables.assign(match[1], match[2])

    def add_command(self, words: list[str], line: int) -> None:
        """Record a command; the text that `eval` or `bash -c` runs is interpreted in its place."""
        text = words[1:] if words[0] == "eval" else words[words.index("-c") + 1 :][:1] if "-c" in words else []
        is_shell = words[0] == "eval" or any(word.rpartition("/")[2] in ("bash", "sh") for word in words)
        if text and is_shell and any(" " in word for word in text):
            inner = _Interpreter(list(split_tokens(" ".join(text))), self.script)
            inner.run()
            return
        self.script.commands.append(ShellCommand(words, line))

    # Branches

    def run_if(self) -> None:
        """Run the branch whose condition holds; skip all where a condition depends on a run."""
        line = self.tokens[self.index].line
        branches = self.read_branches()
        for condition, body in branches:
            holds = True if condition is None else self.test_condition(condition)
            if holds is None:
                written = " ".join(token.text for token in condition or ())
                self.skip_tokens(line, f"depends on {written}", [token for _, body in branches for token in body])
                return
            if holds:
                _Interpreter(body, self.script).run()
                return

    def read_branches(self) -> list[tuple[list[ShellToken] | None, list[ShellToken]]]:
        """Condition and body of each branch of the `if` at `index`; the condition of `else` is None."""
        branches: list[tuple[list[ShellToken] | None, list[ShellToken]]] = []
        condition: list[ShellToken] | None = []
        body: list[ShellToken] = []
        target: list[ShellToken] = condition if condition is not None else body
        depth = 0
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            self.index += 1
            starts = self.starts_statement(self.index - 1)
            depth += (token.text == "if" and starts) - (token.text == "fi" and starts)
            if depth == 0:
                break
            if depth > 1 or not starts or token.text not in ("if", "then", "elif", "else"):
                target.append(token)
            elif token.text == "then":
                target = body
            elif token.text in ("elif", "else"):
                branches.append((condition, body))
                condition, body = ([] if token.text == "elif" else None), []
                target = body if condition is None else condition
        return [*branches, (condition, body)]

    def starts_statement(self, index: int) -> bool:
        """Whether the token at `index` begins a command, where keywords are keywords."""
        before = self.tokens[index - 1] if index else None
        return before is None or before.is_operator or before.text in ("then", "else", "do", "{", "!", "if", "elif")

    def test_condition(self, tokens: list[ShellToken]) -> bool | None:
        """Truth of `[ ... ]` or `[[ ... ]]`, several joined by && and ||; None if only a run can tell."""
        result: bool | None = None
        join = ""
        part: list[str] = []
        is_inside = False
        for token in [*tokens, ShellToken(";", 0, is_operator=True)]:
            if not (token.is_operator and token.text in ("&&", "||", ";")):
                part.append(token.text)
                continue
            if not part:
                continue
            is_inside = is_inside or part[0] in ("[", "[[", "test") or part[:2] in (["!", "["], ["!", "[["])
            value = self.evaluate_test([word for word in part if word not in _BRACKETS]) if is_inside else None
            is_inside = is_inside and part[-1] not in ("]", "]]") and part[0] != "test"
            result = _join_conditions(result, value, join) if join else value
            join, part = token.text, []
        return result

    def evaluate_test(self, words: list[str]) -> bool | None:
        """Truth of one test without its brackets."""
        if words[:1] == ["!"]:
            value = self.evaluate_test(words[1:])
            return None if value is None else not value
        return self.compare_words([self.variables.expand_word(word)[0] for word in words])

    def compare_words(self, words: list[str]) -> bool | None:
        if len(words) == 2 and words[0] in ("-z", "-n"):
            unknown = find_unknown_parts(words[1])
            # a variable that is not set is empty; another unknown part has an unknown length
            is_empty = all(part[1:].isidentifier() for part in unknown) and not strip_unknown(words[1])
            return None if unknown and not is_empty else is_empty == (words[0] == "-z")
        if any(find_unknown_parts(word) for word in words):
            return None
        if len(words) == 3 and words[1] in ("=", "==", "!="):
            return fnmatchcase(words[0], words[2]) == (words[1] != "!=")
        if len(words) == 3 and words[1] in _NUMBERS:
            try:
                return _NUMBERS[words[1]](int(words[0]), int(words[2]))
            except ValueError:
                return None
        if len(words) == 1:
            return words[0] != ""
        return None  # -f, -d and others ask the machine

    def run_case(self) -> None:
        """Run the branch of a `case` whose pattern fits; skip all where the word depends on a run."""
        line = self.tokens[self.index].line
        tokens = self.read_until("case", "esac")
        word = self.variables.expand_word(tokens[0].text)[0] if tokens else ""
        if find_unknown_parts(word):
            self.skip_tokens(line, f"depends on {format_unknown(word)}", tokens)
            return
        for patterns, body in _split_case(tokens[2:]):
            if any(fnmatchcase(word, self.variables.expand_word(pattern)[0]) for pattern in patterns):
                _Interpreter(body, self.script).run()
                return

    def read_until(self, start: str, end: str) -> list[ShellToken]:
        """Tokens between `start` at `index` and its `end`, nested ones included."""
        found: list[ShellToken] = []
        depth = 0
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            self.index += 1
            depth += (token.text == start) - (token.text == end)
            if depth == 0:
                break
            found.append(token)
        return found[1:]

    def skip_loop(self) -> None:
        """Run the body of a `for` loop once; skip other loops, which depend on a run."""
        token = self.tokens[self.index]
        found: list[ShellToken] = []
        depth = 0
        while self.index < len(self.tokens):
            each = self.tokens[self.index]
            self.index += 1
            depth += (each.text in _LOOPS and self.starts_statement(self.index - 1)) - (each.text == "done")
            if depth == 0:
                break
            found.append(each)
        body = next((index for index, each in enumerate(found) if each.text == "do"), None)
        if token.text == "for" and body is not None and found[1].text.isidentifier():
            # Once, with an unknown variable: a command in a loop has the same arguments but for that.
            self.variables.mark_unknown(found[1].text, f"${found[1].text}")
            _Interpreter(found[body + 1 :], self.script).run()
            return
        self.skip_tokens(token.line, f"is a '{token.text}' loop", found[1:])

    def skip_name(self) -> None:
        """A function's name; its body is read as if it ran where it is defined."""
        self.index += 2

    def skip_tokens(self, line: int, reason: str, tokens: list[ShellToken]) -> None:
        """Record a part that is not interpreted; variables that it assigns are unknown from here on."""
        words: list[str] = []
        for token in tokens:
            match = _ASSIGNMENT.match(token.text)
            if match and not token.is_operator:
                name = match[1].removesuffix("+")
                if token.items is None or not match[1].endswith("+"):
                    self.variables.mark_unknown(name, f"${name}")
            words += [*(token.items or ()), token.text]
        self.script.skipped.append(SkippedPart(line, reason, tuple(words)))


_REDIRECTIONS = ("<", ">", ">>", "<<", "<<<", ">&", "<&", "&>", "&>>")
_BRACKETS = ("[", "]", "[[", "]]", "test")
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


def _join_conditions(left: bool | None, right: bool | None, join: str) -> bool | None:
    if join == "&&":
        return False if left is False or right is False else None if left is None or right is None else True
    return True if left is True or right is True else None if left is None or right is None else False


def _split_case(tokens: list[ShellToken]) -> list[tuple[list[str], list[ShellToken]]]:
    """Patterns and body of each branch of a `case`, whose tokens begin behind `in`."""
    branches: list[tuple[list[str], list[ShellToken]]] = []
    patterns: list[str] = []
    body: list[ShellToken] | None = None
    for token in tokens:
        if body is None and token.text == ")":
            body = []
        elif body is None:
            patterns += [] if token.is_operator else [token.text]
        elif token.text == ";;":
            branches.append((patterns, body))
            patterns, body = [], None
        else:
            body.append(token)
    return [*branches, (patterns, body)] if body is not None else branches
