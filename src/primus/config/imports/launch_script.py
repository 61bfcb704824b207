"""Read what a bash script or a command line trains as an experiment of the framework that it starts.

bash itself expands the script in a sandbox. Where none can be had, our own reader of bash serves, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus import registry
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.launch_line import FURTHER, LaunchLine, find_launches, list_command_names
from primus.config.imports.sandbox.probe_script import ScriptProbe, probe_script
from primus.config.imports.sandbox.run_script import RunRecord
from primus.config.imports.sandbox.script_facts import Doubt
from primus.config.imports.sandbox.script_notes import UNSET, Note
from primus.config.imports.sandbox.script_runs import list_checkout_folders
from primus.config.imports.sandbox.trace import find_last_words, list_assigned_words
from primus.config.imports.static_script import find_unknown_parts, format_unknown, read_static_script
from primus.config.schema import OWNERS
from primus.errors import UsageError
from primus.framework import IMPORTS, TRANSLATIONS
from primus.redaction import is_secret_name, redact_value
from primus.redaction.harmless import is_harmless_variable

_SIZE = re.compile(r"\d{1,6}")
"""A value that is not a secret, whatever its argument is called: ``--num-key-value-heads 4``."""
_COLUMN = re.compile(r"--[\w-]*(input|label|text|json|data|metadata|tool|prompt|answer|image|messages?)[-_]keys?")
"""An argument that names a column of the data: ``--input-key prompt``."""
_TRAINER = re.compile(r"(?:\S*/)?(?:\w*_)?(?:pre)?train\w*\.py")
"""A program that trains, by its name."""
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


def read_launch_script(
    text: str, origin: str, name: str, path: Path, args: tuple[str, ...], environ: Mapping[str, str]
) -> ForeignConfig:
    """The experiment that a script starts.

    Args:
        text: The script, or one command line.
        origin: Name of the file in messages.
        name: Name of the experiment.
        path: The file.
        args: Arguments of the script.
        environ: Variables of the environment that the script may use.

    Raises:
        UsageError: The script is not bash, or no command that trains is found in it.
    """
    known = {key: value for key, value in environ.items() if is_harmless_variable(key, value)}
    probe = probe_script(text, path, args, known, _choose_arguments)
    if probe.unavailable:
        probe = _read_without_bash(text, origin, known, probe.unavailable)
    words = [record.words for record in probe.commands]
    found = find_launches(words)
    if not found.launches and found.refused is None:
        found = find_launches([list_assigned_words(probe.trace)])
    if not found.launches:
        if found.refused:
            raise UsageError(f"{origin}: {found.refused.problem}", found.refused.hint)
        raise UsageError(
            f"{origin}: no command with arguments of {list_command_names()} was found ({_describe_commands(words)})",
            _suggest_way(probe, args),
        )
    launches = found.launches
    target = _read_launch(launches[0], probe, origin, name, list_checkout_folders(path))
    target.hint = _suggest_arguments(probe, args)
    for variable in dict.fromkeys(_VARIABLE.findall(text)):
        if variable in environ and variable not in known and not is_secret_name(variable):
            reason = (
                f"not shown to the script: it may be a secret. To use it: config import '{variable}=VALUE bash FILE'"
            )
            target.add_other(f"${variable} of this shell", None, reason)
    _report_others(launches, probe.commands, target)
    return target


def _choose_arguments(records: list[RunRecord]) -> Mapping[str, tuple[str, ...]] | None:
    launches = find_launches([record.words for record in records]).launches
    return launches[0].arguments if launches else None


def _read_launch(
    launch: LaunchLine, probe: ScriptProbe, origin: str, name: str, folders: tuple[Path, ...]
) -> ForeignConfig:
    arguments = dict(launch.arguments)
    plug_in = registry.load_plug_in(IMPORTS, launch.framework)
    kind = plug_in.COMMANDS or launch.framework
    target = ForeignConfig(
        origin=f"{kind} arguments of {origin}", name=name, framework=launch.framework, folders=folders
    )
    for note in probe.notes:
        target.add_other(note.subject, None, note.text)
    for doubt in probe.doubts:
        _settle_doubt(doubt, arguments, target)
    for flag, values in list(arguments.items()):
        unknown = [part for value in values for part in find_unknown_parts(value)]
        shown = " ".join(map(format_unknown, values))
        if unknown:
            del arguments[flag]
            reason = f"only a run of the script can tell {', '.join(unknown)}; set it here"
            target.add_other(flag, shown, reason)
        elif is_secret_name(flag) and not _is_setting(flag, launch.framework) and not all(map(_SIZE.fullmatch, values)):
            del arguments[flag]
            target.add_other(flag, redact_value(flag, shown), "a secret; pass it by --env")
    further = arguments.pop(FURTHER, ())
    if further:
        target.add_other(" ".join(further)[:80], None, "words that belong to no argument")
    plug_in.read_arguments(arguments, target)
    return target


def _settle_doubt(doubt: Doubt, arguments: dict[str, tuple[str, ...]], target: ForeignConfig) -> None:
    """Keep or drop an argument whose value depends on facts of the cluster, and say so."""
    facts = " and ".join(dict.fromkeys(doubt.facts))
    others = ", ".join(dict.fromkeys(_format_words(values) for values in doubt.values[1:4]))
    if doubt.is_kept:
        reason = f"depends on {facts}{f' (also seen: {others})' if others else ''}; this is what holds without it"
        target.add_other(doubt.name, _format_words(doubt.values[0]), reason)
        return
    arguments.pop(doubt.name, None)
    seen = ", ".join(dict.fromkeys(_format_words(values) for values in doubt.values[:4] if values is not None))
    reason = f"only a run of the script can tell {facts} (seen in trials: {seen}); set it here"
    target.add_other(doubt.name, None, reason)


def _format_words(values: Sequence[str] | None) -> str:
    return "absent" if values is None else " ".join(values)[:60] or "given"


def _is_setting(flag: str, framework: str) -> bool:
    """Whether a flag that sounds secret is a setting, or a column: ``--tiktoken-pattern``, ``--input-key``."""
    name = flag.removeprefix("--").replace("-", "_")
    if _COLUMN.fullmatch(flag):
        return True
    if name in OWNERS or framework not in registry.list_plug_ins(TRANSLATIONS.name):
        return name in OWNERS
    return name in registry.load_plug_in(TRANSLATIONS, framework).create_translator().list_known_keys()


def _report_others(launches: list[LaunchLine], commands: list[RunRecord], target: ForeignConfig) -> None:
    """Say which command was read, if the script starts several with other arguments."""
    first = launches[0]
    if first.index >= len(commands):
        return
    differing = [launch for launch in launches[1:] if launch.arguments != first.arguments]
    if not differing:
        return
    names = dict.fromkeys(
        name
        for launch in differing
        for name in [*first.arguments, *launch.arguments]
        if first.arguments.get(name) != launch.arguments.get(name)
    )
    listed = ", ".join(list(names)[:8])
    reason = f"one of {len(launches)} commands that train; only it is read, the others differ in {listed}"
    target.add_other(f"line {commands[first.index].line}", None, reason)


def _describe_commands(commands: Sequence[Sequence[str]]) -> str:
    names = list(dict.fromkeys(words[0] for words in commands if words))[:5]
    return f"its commands: {', '.join(map(format_unknown, names))}" if names else "it has no command"


def _suggest_arguments(probe: ScriptProbe, args: tuple[str, ...]) -> str:
    """Which arguments or variables the script takes; empty if they were given, or it has none."""
    if args or not probe.candidates:
        return _suggest_variables(probe)
    taken = "; ".join(
        f"${number} is compared with {', '.join(values[:8])}" if values else f"${number}"
        for number, values in sorted(probe.candidates.items())
    )
    return f"the script takes arguments, and none were given ({taken}): config import FILE ARGUMENTS"


def _suggest_variables(probe: ScriptProbe) -> str:
    """Which variables the script reads and does not set; empty if there are none."""
    unset = [note.subject for note in probe.notes if note.text.startswith(UNSET)]
    if not unset:
        return ""
    assigned = f"{unset[0].removeprefix('$')}=VALUE"
    return f"the script does not set {', '.join(unset[:8])}: config import '{assigned} ... bash FILE'"


def _suggest_way(probe: ScriptProbe, args: tuple[str, ...]) -> str:
    """What to give instead; a script that reads others has its arguments in one of them."""
    missing = [note for note in probe.notes if note.text]
    if hint := _suggest_arguments(probe, args):
        return hint
    if last := find_last_words(probe.trace):
        return f"the script ends with: {last[:200]}; give what it needs: config import 'NAME=VALUE bash FILE ARGUMENTS'"
    if missing:
        return f"{missing[0].subject} {missing[0].text}"
    programs = [word for record in probe.commands for word in record.words if _TRAINER.fullmatch(word)]
    if programs:
        return f"the arguments of its program {programs[0]} are those of neither: give a script of pretrain_gpt.py"
    if probe.errors:
        return f"bash says: {probe.errors[-1][:200]}"
    return "give the script that starts the training, or a file with its command line"


def _read_without_bash(text: str, origin: str, environ: Mapping[str, str], reason: str) -> ScriptProbe:
    """The commands of a script by our own reader of bash, which reads only its static part."""
    try:
        script = read_static_script(text, environ)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: cannot be read as a bash script: {error}") from None
    unread = "branches, loops, arguments and other files are not read"
    notes = [
        Note("the script", f"read without bash, because there is no sandbox ({reason}): {unread}"),
        *(
            Note(f"line {block.line} {' '.join(block.flags)}", f"not read: in '{block.keyword}'")
            for block in script.skipped
            if block.flags
        ),
    ]
    commands = [RunRecord(command.line, "", command.words) for command in script.commands]
    if not find_launches([command.words for command in commands]).launches:
        # variables that hold arguments, as one command: for a script whose command is not seen
        held = [value for value in script.values.values() if value and value[0].startswith("--")]
        words = [word for value in held for text in value for word in (text.split() if len(value) == 1 else [text])]
        commands.append(RunRecord(0, "", words))
    return ScriptProbe(commands=commands, notes=notes)
