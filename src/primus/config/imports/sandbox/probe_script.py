"""Find what a script does in any case, and what depends on facts that only its cluster knows.

The script runs several times in the sandbox. In the first run no argument is given, a variable of a job is not set, a
file that is not here does not exist, and each command from outside prints 1. In the other runs these facts are
different: commands print other numbers, several lines or nothing and fail, variables of a job have values, tested
files exist. In one run each fact is a text that names it, so that the facts in a value, and what they are compared
with, are seen; each such comparison is tried, too. Arguments that are equal in all runs are certain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field, structs

from primus.config.imports.sandbox.run_script import RunRecord
from primus.config.imports.sandbox.script_facts import Doubt, find_doubts, list_groups, make_token_state
from primus.config.imports.sandbox.script_notes import (
    Note,
    list_run_notes,
    list_variable_notes,
    read_arguments,
    strip_shell,
)
from primus.config.imports.sandbox.script_runs import Arguments, RunState, ScriptRun, ScriptRunner
from primus.config.imports.sandbox.trace import list_trace

_PLACEHOLDER = re.compile(r"(?<=[=\"'\w.] |.[=\"'])<[A-Za-z][^<>\n|&;()$]*>")
_FILE = re.compile(r"[\w./+-]+\.(py|ya?ml)")
"""A program, or a file of settings, in a command."""
_STRICT = re.compile(r"\bset\b(?: [-+]?\w+)*? (?:-\w*[eu]|-o (?:errexit|nounset))|^#!.* -\w*[eu]", re.MULTILINE)


class ScriptProbe(Struct):
    """What the runs of a script showed."""

    unavailable: str = ""
    """Why there is no sandbox; all else is empty then."""
    arguments: Arguments | None = None
    """Those of the first run that reached the command; None if none did."""
    commands: list[RunRecord] = field(default_factory=list)
    """Commands of that run."""
    doubts: list[Doubt] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    candidates: dict[str, list[str]] = field(default_factory=dict)
    """What the script compares each of its arguments with."""
    errors: list[str] = field(default_factory=list)
    """What bash said in that run."""
    trace: list[str] = field(default_factory=list)
    """Commands of that run as bash executed them."""


def probe_script(
    text: str,
    path: Path,
    args: tuple[str, ...],
    environ: Mapping[str, str],
    choose: Callable[[list[RunRecord]], Arguments | None],
) -> ScriptProbe:
    """Run a script in the sandbox until it is known what its command depends on; see `ScriptRunner`."""
    runner = ScriptRunner(text, path, args, environ, choose)
    first = runner.run(RunState())
    if first.result.unavailable:
        return ScriptProbe(unavailable=first.result.unavailable)
    placeholders = _name_placeholders(runner, first.result.errors)
    if placeholders:
        first = runner.run(RunState())
    if first.arguments is None or _is_elsewhere(runner, first):
        _choose_folder(runner)
    base, token, groups = _run_groups(runner)
    if base.arguments is None and _STRICT.search(runner.text):
        base, token, groups = _run_groups(runner, is_lenient=True)
        if _is_elsewhere(runner, base):
            runner.cwd = str(runner.roots[-1])
            base, token, groups = _run_groups(runner, is_lenient=True)
    doubts = find_doubts(runner, base, token, groups)
    argument_notes, candidates = read_arguments(runner, base)
    variable_notes = list(list_variable_notes(runner, base))
    return ScriptProbe(
        arguments=base.arguments,
        commands=base.result.records,
        errors=[strip_shell(line) for line in base.result.errors.splitlines()],
        trace=[entry["text"] for entry in list_trace(base.result)],
        doubts=doubts,
        candidates=candidates,
        notes=[
            *(Note(each, "is a placeholder; write its value into the script") for each in placeholders),
            *list_run_notes(runner, base),
            *argument_notes,
            *variable_notes,
        ],
    )


def _is_elsewhere(runner: ScriptRunner, run: ScriptRun) -> bool:
    """Whether what a script starts is not where it was started, but would be in the folder of its checkout."""
    words = (word for record in run.result.records if record.cwd == runner.cwd for word in record.words)
    paths = [os.path.relpath(os.path.join(runner.cwd, word), runner.cwd) for word in words if _FILE.fullmatch(word)]
    return not any((runner.roots[0] / path).is_file() for path in paths) and any(
        (runner.roots[-1] / path).is_file() for path in paths
    )


def _choose_folder(runner: ScriptRunner) -> None:
    """Start the script in its checkout, if it trains there."""
    folder, runner.cwd = runner.cwd, str(runner.roots[-1])
    if runner.cwd == folder or runner.run(RunState()).arguments is None:
        runner.cwd = folder


def _run_groups(runner: ScriptRunner, is_lenient: bool = False) -> tuple[ScriptRun, ScriptRun, list[ScriptRun]]:
    """The first run that reaches the command, the run in which facts are texts, and the runs with other facts."""
    states = [RunState(), *list_groups(runner), make_token_state(runner)]
    *groups, token = runner.run_all(structs.replace(state, is_lenient=is_lenient) for state in states)
    return next((run for run in groups if run.arguments), groups[0]), token, groups


def _name_placeholders(runner: ScriptRunner, errors: str) -> list[str]:
    """Values such as `<path to data>`, which bash takes for redirections, become words: PATH_TO_DATA."""
    text = runner.files[runner.path]
    found = list(dict.fromkeys(_PLACEHOLDER.findall(text)))
    if (
        not any(f"{value[1:-1].split()[0]}: No such file" in errors for value in found)
        and ": syntax error" not in errors
    ):
        return []
    runner.files[runner.path] = _PLACEHOLDER.sub(lambda match: re.sub(r"\W+", "_", match[0][1:-1]).upper(), text)
    return found
