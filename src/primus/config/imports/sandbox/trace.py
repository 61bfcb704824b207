"""What bash says that a script did: commands as they were executed, conditions, and paths that are not here."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial

from primus.config.imports.sandbox.run_script import RunResult

_MISSING = re.compile(
    r"^(?P<shell>.+?): (?:line (?P<line>\d+): )?(?P<folder>cd: |pushd: )?(?:[\w.]+: )?(?P<path>[^:]+?)"
    r"(?:: .* bad interpreter)?: (?:No such file or directory|Not a directory)$"
)
_TRACE = re.compile("^\\++\x01(?P<source>[^\x01]*)\x01(?P<line>\\d*)\x01(?P<cwd>[^\x01]*)\x01 (?P<text>.*)$")
_FILE_TEST = re.compile(r"(?<!\S)-(?P<kind>[defrswxLhN]) (?P<path>'[^']*'|[^\s;]+)")
_COMPARISON = re.compile(
    r"(?P<left>\S+) (?P<operator>=|==|!=|=~|-eq|-ne|-lt|-le|-gt|-ge|<|>) (?P<right>'[^']*'|\S+)",
)
_ARITHMETIC = re.compile(r"(?P<left>\w+) *(?P<operator>[=!<>]=|<|>) *(?P<right>\w+)")
_ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly|declare)(?: -\w+)? '?)?([A-Za-z_]\w*)=(.*)")
_CHANGE = re.compile(r"(\w+) *(?:\+\+|--|[-+*/]?=(?!=))")
_ORDERS = ("-lt", "-le", "-gt", "-ge", "<", ">", "<=", ">=")
TOKEN = re.compile(r"primus_(?P<kind>fact|var|arg)_(?P<name>\w+?)_(?![A-Za-z0-9])")
"""A text that names a fact: the output of a command, a variable or an argument."""
TOKEN_LENGTH = 40
"""Letters of a command in its token; that of the recorder."""
INSIDE = "/.here"
"""A file in a folder that is to exist."""
LONGEST_LINE = 16 << 10
"""Characters of a traced command; longer ones hold data, not conditions."""
LONGEST_CONDITION = 1000
MOST_TESTS = 32


def list_trace(result: RunResult) -> Iterator[re.Match[str]]:
    """Commands of the script as bash executed them, without those of the recorder."""
    for line in result.trace.split("\n"):
        match = _TRACE.match(line) if len(line) <= LONGEST_LINE else None
        if match and not match["source"].startswith("/.primus/") and match["text"] != "set -x":
            yield match


def list_missing(result: RunResult) -> Iterator[re.Match[str]]:
    """Messages of bash about paths that are not in the sandbox."""
    lines = (line for line in result.errors.splitlines() if len(line) <= LONGEST_CONDITION)
    return filter(None, map(_MISSING.match, lines))


def list_tests(result: RunResult) -> list[str]:
    """Paths whose existence the script asks for."""
    found: dict[str, None] = {}
    for entry in list_trace(result):
        for match in _FILE_TEST.finditer(_get_condition(entry)):
            path = os.path.normpath(os.path.join(entry["cwd"], match["path"].strip("'")))
            found[path + INSIDE if match["kind"] == "d" else path] = None
    return list(found)[:MOST_TESTS]


def list_comparisons(result: RunResult, files: Mapping[str, str]) -> Iterator[tuple[re.Match[str], str]]:
    """Facts, and what they are compared with, in a run in which facts are tokens; of a threshold, its neighbours too.

    Args:
        result: What bash did.
        files: Text of the scripts by path: bash does not trace the patterns of `case`.
    """
    assigned: dict[str, str] = {}
    for entry in list_trace(result):
        text = entry["text"]
        if match := _ASSIGNMENT.match(text):
            assigned[match[1]] = match[2].strip("'")
        if text.startswith("case "):
            subject = _resolve_subject(text[5:].removesuffix(" in"), assigned)
            patterns = _list_patterns(files.get(entry["source"], ""), int(entry["line"] or 0))
            yield from ((token, each) for token in TOKEN.finditer(subject) for each in patterns)
        condition = _get_condition(entry)
        if condition.startswith("(("):  # traced with the names of its variables
            assigned |= dict.fromkeys(_CHANGE.findall(condition), "")
            condition = re.sub(r"[A-Za-z_]\w*", partial(_resolve_name, assigned=assigned), condition)
        for match in (_ARITHMETIC if condition.startswith("((") else _COMPARISON).finditer(condition):
            yield from _read_comparison(match)


def _read_comparison(match: re.Match[str]) -> Iterator[tuple[re.Match[str], str]]:
    sides = match["left"], match["right"]
    for side, other in (sides, sides[::-1]):
        value = re.sub(r"\\(.)", r"\1", other).strip("'\"^$*.")
        if not value or TOKEN.search(other):
            continue
        is_threshold = match["operator"] in _ORDERS and value.isdecimal()
        values = [str(int(value) + step) for step in (-1, 0, 1)] if is_threshold else [value]
        yield from ((token, each) for token in TOKEN.finditer(side) for each in values)


def _get_condition(entry: re.Match[str]) -> str:
    """The text of a traced condition; empty for other commands."""
    text = entry["text"]
    return text if text.startswith(("[", "'['", "test ", "((")) and len(text) <= LONGEST_CONDITION else ""


def _resolve_name(match: re.Match[str], assigned: Mapping[str, str]) -> str:
    """What a name in arithmetic stands for: a fact, if its value is one or the script does not set it."""
    value = assigned.get(match[0], match[0] if TOKEN.fullmatch(match[0]) else f"primus_var_{match[0]}_")
    return value if TOKEN.fullmatch(value) else match[0]


def _resolve_subject(text: str, assigned: Mapping[str, str]) -> str:
    """The word of a `case`, which bash does not trace expanded, with tokens in the place of facts."""
    text = re.sub(r"\$\(([^()]*)\)|`([^`]*)`", lambda m: _make_token((m[1] or m[2]).rpartition("|")[2].strip()), text)
    text = re.sub(r"\$\{?([A-Za-z_]\w*)[^}]*\}?", lambda m: assigned.get(m[1], f"primus_var_{m[1]}_"), text)
    return re.sub(r"\$\{?([1-9])[^}]*\}?", lambda m: f"primus_arg_{m[1]}_", text)


def _make_token(command: str) -> str:
    return f"primus_fact_{command[:TOKEN_LENGTH].encode().hex()}_"


def _list_patterns(text: str, line: int) -> list[str]:
    """Patterns of the `case` at a line of a script."""
    body = "\n".join(text.split("\n")[line - 1 :]).partition(" in")[2].partition("esac")[0]
    found = re.findall(r"(?:^|;;|\n)\s*\(?([^()\n;]+)\)", body)
    return [part.strip(" '\"*") for each in found for part in each.split("|") if part.strip(" '\"*")]


def list_assigned_words(trace: list[str]) -> list[str]:
    """Words of the variables of a traced script that hold arguments of a command."""
    words: list[str] = []
    for text in trace:
        match = re.match(r"(?:(?:export|declare|local|readonly)(?: -\w+)? )?'?[A-Za-z_]\w*\+?=", text)
        try:
            parts = shlex.split(text[match.end() :].strip("()'")) if match else []
        except ValueError:
            continue
        found = [word for part in parts for word in part.split()]
        words += found if found and found[0].startswith("--") else []
    return words


def find_last_words(trace: list[str]) -> str:
    """What a script prints before it ends itself with an error; empty if it does not."""
    end = next((at for at, text in enumerate(trace) if re.fullmatch(r"exit [1-9]\d*", text)), 0)
    said = next((text for text in reversed(trace[:end]) if text.startswith(("echo ", "printf "))), "")
    try:
        return " ".join(word for word in shlex.split(said)[1:] if not re.fullmatch(r"-[neE]+", word))
    except ValueError:
        return said
