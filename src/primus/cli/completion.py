"""Completion of command lines for bash, zsh and fish: the shell asks `primus-cli completion words` at each Tab."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from primus import registry
from primus.config import flags
from primus.config.experiment_file import MODULE_KEYS, TOP_KEYS
from primus.config.schema import GROUPS, OWNERS
from primus.errors import EXIT_OK, PrimusError, UsageError, did_you_mean
from primus.launch.command import GLOBAL_WORDS, HELP_WORDS, is_runtime
from primus.launch.run_remote import WORKSPACE
from primus.runs import store
from primus.runtime import RUNTIMES
from primus.task import TASKS

SCRIPTS = {
    # The tilde of a typed `~/primus-cli` is not expanded in COMP_WORDS. No candidates: names of files.
    "bash": """\
_primus_cli() {
    local IFS=$'\\n' command=${COMP_WORDS[0]/#\\~/$HOME}
    COMPREPLY=($("$command" completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o bashdefault -o default -F _primus_cli primus-cli""",
    "zsh": """\
#compdef primus-cli
_primus_cli() {
    local -a found
    found=(${(f)"$(${~words[1]} completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _primus_cli primus-cli""",
    "fish": """\
function __primus_cli
    set -l before (commandline --tokenize --cut-at-cursor --current-process)
    set -l typed (commandline --current-token --cut-at-cursor)
    set -l command (string replace --regex '^~' $HOME -- $before[1])
    set -l found ($command completion words $before[2..] "$typed" 2>/dev/null)
    and string join \\n -- $found; or __fish_complete_path "$typed"
end
complete --command primus-cli --no-files --arguments '(__primus_cli)'""",
}
"""Scripts that a shell loads, by its name."""


def run(words: Sequence[str]) -> int:
    """`primus-cli completion SHELL` prints the script; `completion words WORD...` what may stand for the last word.

    Raises:
        UsageError: There is no script for the shell.
    """
    if words[:1] == ["words"]:
        print("\n".join(list_candidates(words[1:])))
        return EXIT_OK
    if len(words) != 1 or words[0] not in SCRIPTS:
        given = " ".join(words)
        raise UsageError(f"completion: no script for '{given}'", did_you_mean(given, SCRIPTS))
    print(SCRIPTS[words[0]])
    return EXIT_OK


def list_candidates(words: Sequence[str]) -> list[str]:
    """What the last of `words` may become, sorted; empty where it is a value of the user, such as a file."""
    *before, typed = words or [""]
    with contextlib.suppress(PrimusError):  # the command line is wrong further left: nothing fits
        return sorted({word for word in _list_words(before) if word.startswith(typed)})
    return []


def _list_words(before: Sequence[str]) -> list[str]:
    """All words that may follow `before`."""
    segments: list[list[str]] = [[]]
    for word in before:
        if word == "--":
            segments.append([])
        else:
            segments[-1].append(word)
    is_first = len(segments) == 1
    words = [word for word in segments[-1] if word not in GLOBAL_WORDS]
    runtimes = registry.list_plug_ins("runtimes")
    tasks = registry.list_plug_ins("tasks")
    if not words:
        heads = [name.split()[0] for name in tasks]
        return [*runtimes, *heads, *(_list_global_words() if is_first else ())]
    if is_runtime(words[0]):
        module: Any = registry.load_plug_in(RUNTIMES, words[0])
        commands = [word for word in module.COMMANDS if len(words) == 1]
        return [*commands, *_list_option_words(module.Options, words[1:]), "--"]
    name = next((name for length in (2, 1) if (name := " ".join(words[:length])) in tasks), None)
    if name is None:
        return [task.split()[1] for task in tasks if len(words) == 1 and task.split()[0] == words[0]]
    task = registry.load_plug_in(TASKS, name)
    own = words[len(name.split()) :]
    if task.OVERRIDES and own and (values := _list_key_values(own[-1])) is not None:
        return values
    keys = [f"--{key}" for key in (*TOP_KEYS, *MODULE_KEYS, *OWNERS)] if task.OVERRIDES else []
    found = _list_option_words(task.choose_options(own), own)
    return [*found, *keys] if HELP_WORDS[0] in found else found  # else they are values of an option


KEYS_OF_PLUG_INS = {"framework": "frameworks", "model": "models"}
"""Keys of a module whose values are plug-ins, with their kind. `--config` is an option of the task."""


def _list_key_values(word: str) -> list[str] | None:
    """Values of the key of an experiment that `word` names, as far as they are known; None if it names none."""
    key = word.removeprefix("--").replace("-", "_")
    if not word.startswith("--") or key not in (*KEYS_OF_PLUG_INS, *OWNERS):
        return None
    if key not in OWNERS:
        return registry.list_plug_ins(KEYS_OF_PLUG_INS[key])
    field = next(field for field in msgspec.structs.fields(GROUPS[OWNERS[key]]) if field.name == key)
    schema = msgspec.json.schema(field.type)
    forms = schema.get("anyOf", [schema])
    switch = ["true", "false"] if any(form.get("type") == "boolean" for form in forms) else []
    return [*switch, *(str(value) for form in forms for value in form.get("enum", ()))]


def _list_global_words() -> list[str]:
    return [*(word for word in GLOBAL_WORDS if "_" not in word), *HELP_WORDS, "--config", "--version", "completion"]


def _list_option_words(options: type[Any], words: Sequence[str]) -> list[str]:
    """Values of the option that ends `words`, if it lacks one; else the options, and values without a name."""
    named = {name: flag for flag in flags.list_flags(options) for name in flag.names if not flag.is_positional}
    last = named.get(words[-1]) if words else None
    workspace = words[words.index("--workspace") + 1] if "--workspace" in words[:-1] else WORKSPACE
    if last is not None and not last.is_switch:
        return _list_values(last, workspace)
    positional = [flag for flag in flags.list_flags(options) if flag.is_positional]
    is_value = {index for index, word in enumerate(words, 1) if word in named and not named[word].is_switch}
    num_given = sum(not word.startswith("-") and index not in is_value for index, word in enumerate(words))
    if positional and positional[-1].is_list:
        num_given = min(num_given, len(positional) - 1)
    values = [value for flag in positional[num_given:][:1] for value in _list_values(flag, workspace)]
    return [*values, *(name for name in named if "_" not in name and name.startswith("--")), *HELP_WORDS]


def _list_values(flag: flags.Flag, workspace: str) -> list[str]:
    """Values that are known here: of a fixed set, or the runs of `workspace` and their experiments."""
    if not flag.names_run:
        return flags.list_choices(flag)
    runs = store.list_workspace_runs(Path(workspace).expanduser())
    return [name for run in runs for name in (run.directory.parent.name, run.id)]
