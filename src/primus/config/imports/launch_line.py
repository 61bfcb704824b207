"""Recognize the command that trains among the commands of a script: that of Megatron-LM, or of MaxText."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

_PROGRAM = re.compile(r"(.*/)?(pretrain|train|finetune|main)\w*\.py")
_OTHER_PROGRAM = re.compile(r"(.*/)?(pretrain_(bert|t5|ict|retro|vision\w*|vlm|mimo|samba)|posttrain_\w+)\.py")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_TELLING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--seq-length", "--train-iters", "--lr"}
"""Arguments by which a command of Megatron-LM is recognized."""
FEWEST_TELLING = 2
ROLLOUT_FLAGS = frozenset(
    "num-rollout rollout-batch-size rollout-function-path n-samples-per-prompt rm-type advantage-estimator".split()
)
"""Arguments that slime (THUDM/slime) and its forks add to those of Megatron-LM for post-training."""
LAUNCHERS = re.compile(r"(--?)(nproc|nnodes|node[_-]rank|master|rdzv|standalone|local[_-]addr|tee|log[_-]dir|role)")
"""Options of torchrun that may stand among the arguments of a script without a program's name."""
_MAXTEXT_PROGRAM = re.compile(r"(?i).*maxtext.*[./]\w*train\w*(\.py)?|(.*/)?train\.py")
"""A program that trains; those that decode, convert or check take the same settings."""
_TITAN_OPTION = re.compile(r"--(job\.config[-_]file|module|config)(?:=(.*))?")
_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
BASE_CONFIG = "base_config"
FURTHER = ""
"""Name under which words that belong to no argument are kept."""


class LaunchLine(Struct, frozen=True):
    """A command that trains."""

    framework: str
    """`megatron` or `maxtext`."""
    arguments: dict[str, tuple[str, ...]]
    """Values by argument; MaxText's settings file is `base_config`."""
    index: int
    """Which of the commands it is."""


def is_launch_text(text: str) -> bool:
    """Whether `text` has arguments of Megatron-LM, or starts MaxText."""
    found = sum(1 for flag in _TELLING if re.search(rf"(?<![\w-]){flag}(?![\w-])", text))
    return found >= FEWEST_TELLING or re.search(r"(?i)\bmaxtext\S*[/.]\S*train\S*\s+\S+\.ya?ml\s", text) is not None


def find_launches(commands: Sequence[Sequence[str]]) -> list[LaunchLine]:
    """Commands that train, the one with the most arguments first; of equal ones, the first that was called."""
    found = [launch for index, words in enumerate(commands) for launch in _read_command(words, index)]
    if not found:  # a file with one argument on each line
        listed = [word for words in commands if words and words[0].startswith("--") for word in words]
        found = [*_read_command(listed, 0)]
    return sorted(found, key=lambda launch: -_count_telling(f"--{name}" for name in launch.arguments))


def find_other_program(commands: Iterable[Sequence[str]]) -> str:
    """A program of Megatron-LM or a fork that pre-trains no decoder; empty if none is called."""
    found = (word for words in commands for word in words if _OTHER_PROGRAM.fullmatch(word))
    return next(found, "").rpartition("/")[2]


def find_titan_source(commands: Iterable[Sequence[str]]) -> str:
    """What a command that starts torchtitan reads, as arguments of `config import`; empty if none does."""
    for words in commands:
        named = {
            match[1]: match[2] or following
            for word, following in zip(words, [*words[1:], ""], strict=True)
            if (match := _TITAN_OPTION.fullmatch(word))
        }
        if file := named.get("job.config_file") or named.get("job.config-file"):
            return file
        if "torchtitan.train" in words and {"module", "config"} <= named.keys():
            return f"torchtitan/models/{named['module']}/config_registry.py --function {named['config']}"
    return ""


def _read_command(words: Sequence[str], index: int) -> Iterator[LaunchLine]:
    file = next((at for at, word in enumerate(words) if word.endswith((".yml", ".yaml"))), None)
    if file is not None and any(_MAXTEXT_PROGRAM.fullmatch(word) for word in words[:file]):
        settings = [word for word in words[file + 1 :] if _SETTING.fullmatch(word)]
        if settings or any("maxtext" in word.lower() for word in words[:file]):
            values = {name: (value,) for name, _, value in (word.partition("=") for word in settings)}
            yield LaunchLine("maxtext", {BASE_CONFIG: (words[file],), **values}, index)
            return
    arguments = _cut_program(words)
    if _count_telling(arguments) >= FEWEST_TELLING:
        yield LaunchLine("megatron", _group_arguments(arguments), index)


def _cut_program(words: Sequence[str]) -> Sequence[str]:
    """Words behind the Python program that a launcher starts; all of a command without a known program."""
    program = next((index for index, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    return words if program is None else words[program + 1 :]


def _count_telling(words: Iterable[str]) -> int:
    return sum(word.partition("=")[0] in _TELLING for word in words)


def _group_arguments(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Values of each argument."""
    arguments: dict[str, tuple[str, ...]] = {}
    last: str | None = None
    for word in words:
        # an array's entry such as "--fp8-format hybrid" may hold the argument and its value
        for part in word.split() if word.startswith("--") and " " in word else [word]:
            flag, is_assigned, value = part.partition("=")
            if _FLAG.fullmatch(flag) and not LAUNCHERS.match(flag):
                last = flag[2:]
                arguments[last] = (_strip_quotes(value),) if is_assigned else ()
            elif part.startswith("--"):
                last = None
            elif last:
                arguments[last] += (_strip_quotes(part),)
            else:
                arguments[FURTHER] = (*arguments.get(FURTHER, ()), part)
    return arguments


def _strip_quotes(text: str) -> str:
    """`text` without quotes that a script wrote inside other quotes: ``"--split '99,1,0'"``."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
