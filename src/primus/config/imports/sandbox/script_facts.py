"""Find the facts about its cluster that the arguments of a script depend on, by changing them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct, structs

from primus.config.imports.sandbox.script_runs import (
    CLUSTER,
    RunState,
    ScriptRun,
    ScriptRunner,
    list_differences,
    make_value,
)
from primus.config.imports.sandbox.trace import INSIDE, TOKEN, list_comparisons, list_tests

MOST_FACTS = 24
"""Facts that are changed one by one."""
NUMBERS = ("1", "8", "512")
"""What variables and commands are in runs in which all have one value: of a GPU, of a node, of a large cluster."""


class Doubt(Struct):
    """An argument that is not the same in all runs."""

    name: str
    values: list[tuple[str, ...] | None]
    """What it was, the first run's value first; None where it was absent."""
    facts: list[str]
    """What it depends on, as a person says it."""
    is_kept: bool
    """Whether the first run's value holds as long as nothing is set or there: else it is a guess."""


class Fact(Struct, frozen=True):
    """Something that only the cluster, or who starts the script, knows."""

    kind: str
    """`command`, `variable`, `file` or `argument`."""
    name: str

    def describe(self) -> str:
        """The fact as a person says it."""
        forms = {"command": "$({})", "variable": "${}", "file": "whether {} exists", "argument": "its argument ${}"}
        return forms[self.kind].format(self.name.removesuffix(INSIDE))


def make_token_state(runner: ScriptRunner) -> RunState:
    """A run in which each fact is a text that names it."""
    variables = {name: f"primus_var_{name}_" for name in runner.list_cluster_variables()}
    return RunState(answer="token", variables=variables)


def list_groups(runner: ScriptRunner) -> list[RunState]:
    """Runs in which many facts are different at once."""
    names = runner.list_cluster_variables()
    small, *others = [{name: make_value(name, number) for name in names} for number in NUMBERS]
    large = {name: make_value(name, str(64 + index)) for index, name in enumerate(names)}
    return [
        RunState(variables=small),
        RunState(variables=large, answer="large"),
        RunState(variables=small, answer="lines", has_files=True),
        RunState(answer="none"),
        RunState(has_files=True),
        *(RunState(variables=each, answer=number) for each, number in zip(others, NUMBERS[1:], strict=True)),
    ]


def find_doubts(runner: ScriptRunner, base: ScriptRun, token: ScriptRun, groups: list[ScriptRun]) -> list[Doubt]:
    """Arguments that depend on facts of the cluster, and on which.

    Args:
        runner: The script.
        base: The run whose arguments are taken.
        token: The run in which facts are texts that name them.
        groups: The runs in which many facts are different.
    """
    if base.arguments is None:
        return []
    facts: dict[str, dict[Fact, None]] = {}
    values: dict[str, list[tuple[str, ...] | None]] = {}
    for name in list_differences(base, token):
        value = " ".join((token.arguments or {}).get(name, ()))
        facts.setdefault(name, {}).update(dict.fromkeys(_read_token(runner, each) for each in TOKEN.finditer(value)))
    trials = list(_list_trials(runner, base, [token, *groups]))[: 4 * MOST_FACTS]
    runs: list[tuple[Fact | None, ScriptRun]] = [
        *zip((fact for fact, _ in trials), runner.run_all(state for _, state in trials), strict=True),
        *((None, run) for run in groups),
    ]
    if any(not facts.get(name) for _, run in runs for name in list_differences(base, run)):
        changes = list(_list_changes(runner, base, groups))
        runs += zip((fact for fact, _ in changes), runner.run_all(state for _, state in changes), strict=True)
    for fact, run in runs:
        for name in list_differences(base, run):
            facts.setdefault(name, {}).update({fact: None} if fact else {})
            values.setdefault(name, []).append((run.arguments or {}).get(name))
    return [
        Doubt(
            name=name,
            values=list(dict.fromkeys([base.arguments.get(name), *values.get(name, [])])),
            facts=[cause.describe() for cause in causes] or ["several facts of the cluster together"],
            is_kept=bool(causes) and all(_has_default(cause, base, runner.text) for cause in causes),
        )
        for name, causes in facts.items()
    ]


def _read_token(runner: ScriptRunner, match: re.Match[str]) -> Fact:
    if match["kind"] != "fact":
        return Fact("variable" if match["kind"] == "var" else "argument", match["name"])
    try:
        beginning = bytes.fromhex(match["name"]).decode(errors="replace")
    except ValueError:
        return Fact("command", match["name"])
    return Fact("command", runner.commands.get(beginning, beginning))


def _list_trials(runner: ScriptRunner, base: ScriptRun, runs: list[ScriptRun]) -> Iterator[tuple[Fact, RunState]]:
    """Each fact with each value that the script compares it with."""
    seen: set[tuple[Fact, str]] = set()
    for run in runs:
        for token, value in list_comparisons(run.result, runner.files):
            fact = _read_token(runner, token)
            if fact.kind != "argument" and (fact, value) not in seen:
                seen.add((fact, value))
                yield fact, _change_fact(base.state, fact, value)


def _list_changes(runner: ScriptRunner, base: ScriptRun, groups: list[ScriptRun]) -> Iterator[tuple[Fact, RunState]]:
    """Each fact with other values, one at a time."""
    variables = [Fact("variable", name) for name in runner.list_cluster_variables()]
    commands = [Fact("command", name) for name in _list_commands(groups)]
    files = [Fact("file", path) for path in dict.fromkeys(path for run in groups for path in list_tests(run.result))]
    for fact in [*variables, *commands, *files][:MOST_FACTS]:
        others = {"variable": ("1", "64"), "command": ("large", "lines", "none"), "file": ("",)}[fact.kind]
        for value in others:
            made = make_value(fact.name, value) if fact.kind == "variable" else value
            yield fact, _change_fact(base.state, fact, made)


def _change_fact(state: RunState, fact: Fact, value: str) -> RunState:
    if fact.kind == "variable":
        return structs.replace(state, variables=state.variables | {fact.name: value})
    if fact.kind == "command":
        return structs.replace(state, answers=state.answers | {fact.name: value})
    return structs.replace(state, present=(*state.present, fact.name))


def _list_commands(runs: list[ScriptRun]) -> list[str]:
    """Commands from outside whose output or status may matter; not those that train."""
    found: dict[str, None] = {}
    for run in runs:
        for record in run.result.records:
            if not any(word.endswith(".py") for word in record.words):
                found[" ".join(record.words)] = None
    return [each for each in found if not TOKEN.search(each)]


def _has_default(fact: Fact, base: ScriptRun, text: str) -> bool:
    """Whether it is certain what holds without the fact: it is not set, or not there."""
    if fact.kind == "file":
        return True
    if fact.kind != "variable" or fact.name in base.state.variables:
        return False
    if not CLUSTER.fullmatch(fact.name):  # of this shell, where it is not set
        return True
    return re.search(rf"\$\{{{fact.name}:?[-=]|-[zn] \"?\$\{{?{fact.name}\b", text) is not None
