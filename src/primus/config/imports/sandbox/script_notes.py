"""What a reader has to know of how a script was read: what is missing, and what comes from arguments and the shell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from msgspec import Struct, structs

from primus.config.imports.sandbox.run_script import LIMIT_S
from primus.config.imports.sandbox.script_runs import (
    BUDGET_S,
    CLUSTER,
    ScriptRun,
    ScriptRunner,
    list_differences,
)
from primus.config.imports.sandbox.trace import (
    INSIDE,
    TOKEN,
    list_comparisons,
    list_missing,
    list_tests,
    list_trace,
)

UNSET = "not set by the script or in this shell"
"""Begin of the text about such a variable."""
_OWN = ("HOME", "USER", "LOGNAME")
"""Variables of the shell that a script may use without a note."""
_PLAIN_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\}")
_ARGUMENT = re.compile(r"\$\{?#?([1-9@*])|\$#")
_ARITHMETIC = re.compile(r"\$?\(\(")
_ENVIRONMENTS = re.compile(r"activate|conda\.sh|\.?bash(rc|_profile)|\.?profile|setvars\.sh|set_env\.sh|bash")
"""Files that set up programs, not a training."""
MOST_SHOWN = 8
MOST_COMPARED = 16
"""Values of arguments that are tried."""


class Note(Struct, frozen=True):
    """Something about the script that a reader of the result has to know."""

    subject: str
    text: str


def list_run_notes(runner: ScriptRunner, base: ScriptRun) -> Iterator[Note]:
    """What is missing here, and what the run had to take for given to reach the command."""
    yield from _list_missing_files(base)
    if runner.cwd != runner.folder:
        yield Note("the script", f"read as started in {runner.cwd}: what it starts is not in its own folder")
    state = base.state
    if state.has_files and (files := list_tests(base.result)):
        shown = ", ".join(path.removesuffix(INSIDE) for path in files[:MOST_SHOWN])
        yield Note("the script", f"read as if these exist, without which it trains nothing: {shown}")
    if state.variables:
        shown = " ".join(f"{name}={value}" for name, value in state.variables.items())
        yield Note("the script", f"read as a job, without which it trains nothing: {shown}")
    errors = base.result.errors.splitlines()
    if state.is_lenient and errors:
        yield Note("the script", f"ends at an error here, which is passed over: {strip_shell(errors[0])[:200]}")
    if base.result.is_late:
        yield Note("the script", f"did not end within {LIMIT_S:g} s; what it does later is not known")
    if runner.is_cut:
        text = f"takes more than {BUDGET_S:g} s of processor time: what depends on the cluster may not all be found"
        yield Note("the script", text)


def read_arguments(runner: ScriptRunner, base: ScriptRun) -> tuple[list[Note], dict[str, list[str]]]:
    """What depends on arguments of the script if none were given; and what it compares each of them with."""
    notes: list[Note] = []
    candidates: dict[str, list[str]] = {}
    if runner.args or not _ARGUMENT.search(runner.files[runner.path]):
        return notes, candidates
    marks = tuple(f"primus_arg_{number}_" for number in range(1, 10))
    given = runner.run(structs.replace(base.state, args=marks))
    for token, value in list_comparisons(given.result, runner.files):
        if token["kind"] == "arg" and value not in candidates.setdefault(token["name"], []):
            candidates[token["name"]].append(value)
    compared = [(int(number) - 1, value) for number, values in candidates.items() for value in values]
    states = [structs.replace(base.state, args=(*marks[:at], value, *marks[at + 1 :])) for at, value in compared]
    runs = [given, *runner.run_all(states[:MOST_COMPARED])]
    names = dict.fromkeys(
        name for run in runs for name in list_differences(base, run) if not _is_appended(base, run, name)
    )
    if _ARITHMETIC.search(runner.files[runner.path]):  # where a mark counts as 0, as an absent argument does
        counted = runner.run(structs.replace(base.state, args=tuple(str(number) for number in range(2, 11))))
        marked = list_differences(base, given)
        names |= dict.fromkeys(name for name in list_differences(base, counted) if name not in marked)
    if names:
        shown = ", ".join(list(names)[:MOST_SHOWN])
        text = f"none given; {shown} depend on them: config import FILE ARGUMENTS"
        notes.append(Note("arguments of the script", text))
    return notes, candidates


def list_variable_notes(runner: ScriptRunner, base: ScriptRun) -> Iterator[Note]:
    """Variables that the command depends on and the script does not set: unset here, or set in this shell."""
    if base.arguments is None:
        return
    unset = [name for name in _list_unset(runner) if not CLUSTER.fullmatch(name)]
    marks = {name: f"primus_var_{name}_" for name in unset}
    marked = runner.run(structs.replace(base.state, variables=base.state.variables | marks))
    found: dict[str, list[str]] = {}
    for name in list_differences(base, marked):
        for match in TOKEN.finditer(" ".join((marked.arguments or {}).get(name, ()))):
            found.setdefault(match["name"], []).append(name)
    for variable, names in found.items():
        yield Note(f"${variable}", f"{UNSET}: empty at {names[0]}, as in bash")
    yield from _list_compared_variables(runner, base, [name for name in unset if name not in found])
    for variable in [name for name in runner.list_shell_variables() if name not in _OWN]:
        if names := list_differences(base, runner.run(base.state, hidden=variable)):
            listed = ", ".join(names[:MOST_SHOWN])
            yield Note(f"${variable}", f"{runner.environ[variable]} in this shell; it changes {listed}")


def _list_compared_variables(runner: ScriptRunner, base: ScriptRun, unset: list[str]) -> Iterator[Note]:
    """Variables that are compared with numbers and not set; a text does not take a branch there, a number does."""
    compared = [name for name in unset if re.search(rf"\$\{{?{name}\b[^\n]* -(?:eq|ne|lt|le|gt|ge)\b", runner.text)]
    for name in compared[:MOST_COMPARED]:
        numbered = runner.run(structs.replace(base.state, variables=base.state.variables | {name: "1"}))
        if names := list_differences(base, numbered):
            yield Note(f"${name}", f"{UNSET}: {', '.join(names[:MOST_SHOWN])} depend on it")


def _list_unset(runner: ScriptRunner) -> Iterator[str]:
    """Variables that are used without a default and assigned nowhere."""
    text = runner.text
    for name in dict.fromkeys(first or second for first, second in _PLAIN_VARIABLE.findall(text)):
        assigned = rf"\b{name}(?:\+|:)?=|\b(?:for|read|mapfile|readarray|getopts|select|printf)\b[^\n;]*\b{name}\b"
        if name not in runner.environ and not re.search(assigned, text):
            yield name


def _list_missing_files(base: ScriptRun) -> Iterator[Note]:
    """Files that the script reads or starts and that are not here."""
    sources = {os.path.basename(entry["source"]) for entry in list_trace(base.result)}
    for entry in list_trace(base.result):
        words = entry["text"].split()
        if len(words) > 1 and words[0] in ("source", ".") and os.path.basename(words[1].strip("'")) not in sources:
            name = words[1].strip("'")
            is_environment = _ENVIRONMENTS.fullmatch(os.path.basename(name))
            reason = "" if is_environment else "is read by the script and is not here: what it sets is not known"
            yield Note(f"{name} (line {entry['line']})", reason)
    for match in list_missing(base.result):
        if match["line"] is None and os.path.basename(match["shell"]) == "bash":
            yield Note(match["path"], "is started by the script and is not here: what it does is not known")


def _is_appended(base: ScriptRun, other: ScriptRun, name: str) -> bool:
    """Whether only further words stand behind an argument, or behind none: `$@` in a command."""
    words = (other.arguments or {}).get(name)
    rest = tuple(word for word in words or () if not TOKEN.search(word))
    return words is not None and rest == (base.arguments or {}).get(name, ())


def strip_shell(line: str) -> str:
    """A message of bash without the path of the script."""
    return re.sub(r"^\S*?: (?=line \d+: )", "", line)
