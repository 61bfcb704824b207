"""Read the arguments of Megatron-LM's `pretrain_gpt.py` from a bash script or a command line as an experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.megatron_flags import MegatronFlags, list_arguments
from primus.config.imports.shell_script import ShellCommand, ShellScript, interpret_script
from primus.config.imports.shell_variables import find_unknown_parts, format_unknown
from primus.config.schema import OWNERS
from primus.errors import UsageError
from primus.redaction import is_secret_name, redact_value

_PROGRAM = re.compile(r"(.*/)?(pretrain|train|finetune|main)\w*\.py")
_OTHER_PROGRAM = re.compile(r"(.*/)?pretrain_(bert|t5|ict|retro|vision\w*|vlm|mimo)\.py")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_TELLING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--seq-length", "--train-iters", "--lr"}
"""Arguments by which a command of Megatron-LM is recognized."""
FEWEST_TELLING = 2
LAUNCHERS = re.compile(r"(--?)(nproc|nnodes|node[_-]rank|master|rdzv|standalone|local[_-]addr|tee|log[_-]dir|role)")
"""Options of torchrun that may stand among the arguments of a script without a program's name."""


def is_megatron_script(text: str) -> bool:
    """Whether `text` has arguments of Megatron-LM."""
    return sum(1 for flag in _TELLING if re.search(rf"(?<![\w-]){flag}(?![\w-])", text)) >= FEWEST_TELLING


def read_megatron_script(text: str, origin: str, name: str, environ: Mapping[str, str]) -> ForeignConfig:
    """The experiment that a script starts.

    Args:
        text: The script, or one command line.
        origin: Name of the file in messages.
        name: Name of the experiment.
        environ: Variables of the environment that the script may use.

    Raises:
        UsageError: The script is not bash, or no command with arguments of Megatron-LM is found in it.
    """
    known = {key: value for key, value in environ.items() if not is_secret_name(key)}
    try:
        script = interpret_script(text, known)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: cannot be read as a bash script: {error}") from None
    other = next((word for command in script.commands for word in command.words if _OTHER_PROGRAM.fullmatch(word)), "")
    if other:
        raise UsageError(
            f"{origin}: {other.rpartition('/')[2]} does not train a decoder", "primus trains language models"
        )
    words = _find_arguments(script)
    if not words:
        raise UsageError(
            f"{origin}: no command with arguments of Megatron-LM was found ({_describe_commands(script)})",
            _suggest_file(script),
        )
    target = ForeignConfig(origin=f"Megatron-LM arguments of {origin}", name=name, framework="megatron")
    flags = _group_flags(words, target)
    _report_skipped(script, target)
    MegatronFlags(flags, target).translate()
    return target


def _find_arguments(script: ShellScript) -> list[str]:
    """Words behind the program of the command with the most arguments; else those of all variables that hold some."""
    candidates = [_cut_program(command) for command in script.commands]
    best = max(candidates, key=_count_telling, default=[])
    if _count_telling(best) >= FEWEST_TELLING:
        return best
    listed = [word for command in script.commands if command.words[0].startswith("--") for word in command.words]
    if _count_telling(listed) >= FEWEST_TELLING:  # a file with one argument on each line
        return listed
    values = [*script.variables.arrays.values(), *(text.split() for text in script.variables.texts.values())]
    words = [word for value in values if value and value[0].startswith("--") for word in value]
    return words if _count_telling(words) >= FEWEST_TELLING else []


def _cut_program(command: ShellCommand) -> list[str]:
    """Words behind the Python program that a launcher starts."""
    for index, word in enumerate(command.words):
        if _PROGRAM.fullmatch(word):
            return command.words[index + 1 :]
    first = next((index for index, word in enumerate(command.words) if word in _TELLING), None)
    return [] if first is None else command.words


def _count_telling(words: list[str]) -> int:
    return sum(word.partition("=")[0] in _TELLING for word in words)


def _describe_commands(script: ShellScript) -> str:
    names = list(dict.fromkeys(command.words[0] for command in script.commands))[:5]
    return f"its commands: {', '.join(map(format_unknown, names))}" if names else "it has no command"


def _suggest_file(script: ShellScript) -> str:
    """What to give instead; a script that reads others has its arguments in one of them."""
    read = [
        command.words[1] for command in script.commands if command.words[0] in (".", "source") and command.words[1:]
    ]
    if read:
        return f"it reads {format_unknown(read[0])}: give the script that has the arguments"
    return "give the script that calls pretrain_gpt.py, or a file with its command line"


def _group_flags(words: list[str], target: ForeignConfig) -> dict[str, list[str]]:
    """Values of each flag; flags whose values only a run can tell are reported instead."""
    flags: dict[str, list[str]] = {}
    last = ""
    for word in words:
        # an array's entry such as "--fp8-format hybrid" may hold the flag and its value
        for part in word.split() if word.startswith("--") and " " in word else [word]:
            flag, is_assigned, value = part.partition("=")
            if _FLAG.fullmatch(flag) and not LAUNCHERS.match(flag):
                last = flag[2:]
                flags[last] = [_strip_quotes(value)] if is_assigned else []
            elif part.startswith("--") and last:
                last = ""
            elif last:
                flags[last].append(_strip_quotes(part))
            elif find_unknown_parts(part):
                target.add_other(format_unknown(part), None, "further arguments that only a run of the script can tell")
    for flag, values in list(flags.items()):
        unknown = [part for value in values for part in find_unknown_parts(value)]
        if unknown:
            del flags[flag]
            shown = " ".join(map(format_unknown, values))
            target.add_other(f"--{flag}", shown, f"only a run of the script can tell {', '.join(unknown)}; set it here")
        elif is_secret_name(flag) and not _is_setting(flag):
            target.add_other(f"--{flag}", redact_value(flag, " ".join(flags.pop(flag))), "a secret; pass it by --env")
    return flags


def _is_setting(flag: str) -> bool:
    """Whether a flag that sounds secret is a known setting: ``--tiktoken-pattern``."""
    name = flag.replace("-", "_")
    return name in OWNERS or name in list_arguments()


def _strip_quotes(text: str) -> str:
    """`text` without quotes that a script wrote inside other quotes: ``"--split '99,1,0'"``."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _report_skipped(script: ShellScript, target: ForeignConfig) -> None:
    for part in script.skipped:
        flags = [word.strip("'\"").split()[0] for word in part.words if word.strip("'\"").startswith("--")]
        if flags:
            target.add_other(f"line {part.line}", " ".join(flags), f"not read: it {part.reason}")
