"""Detect misplaced arguments of a task: misspelled options, options of a runtime, files without their option."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from msgspec import Struct

from primus import registry
from primus.config import flags
from primus.config.experiment_file import TOP_KEYS
from primus.config.overrides import is_known
from primus.config.schema import OWNERS
from primus.errors import PrimusError, UsageError, find_nearest
from primus.framework import FRAMEWORKS
from primus.launch.option_owner import find_option_owner
from primus.runtime import LaunchRequest
from primus.task import Task

FILES = (".yaml", ".yml", ".toml", ".json")
"""Extensions of files that may be meant as an experiment."""


class _StrayArgument(Struct, frozen=True):
    """An unknown argument of the task, with its values."""

    word: str
    value: tuple[str, ...] = ()


def check(extra: Sequence[str], task: Task, request: LaunchRequest) -> None:
    """Accept the words of a task that are not its options as overrides.

    Args:
        extra: Words that are not options of the task.
        task: The task.
        request: The whole command, whose runtimes have their own options.

    Raises:
        UsageError: A word is not an override, and its intended place is known.
    """
    if "--" in extra:
        raise UsageError(f"task '{request.task}': unexpected word '--'", "options follow the name of the task directly")
    own = [name for flag in flags.list_flags(task.Options) for name in flag.names if name.startswith("--")]
    for stray in _find_strays(extra):
        if not stray.word.startswith("-"):
            _check_file(stray.word, own, request)
            continue
        name = stray.word.partition("=")[0]
        if is_known(name.lstrip("-").removeprefix("no-").removeprefix("no_")) or _is_of_a_backend(name):
            continue
        _check_runtimes(stray, name, request)
        close = find_nearest(name.removeprefix("--"), [*(each.removeprefix("--") for each in own), *OWNERS, *TOP_KEYS])
        if close and close not in OWNERS and close not in TOP_KEYS:
            raise UsageError(f"task '{request.task}': unknown option {name}", f"did you mean '--{close}'?")


def _find_strays(extra: Sequence[str]) -> Iterator[_StrayArgument]:
    """Options with their values, and positional words."""
    words = list(extra)
    while words:
        word = words.pop(0)
        takes_value = word.startswith("-") and "=" not in word
        if takes_value and words and not words[0].startswith("--") and "=" not in words[0]:
            yield _StrayArgument(word, (words.pop(0),))
        elif word.startswith("-") or "=" not in word:
            yield _StrayArgument(word)


def _is_of_a_backend(name: str) -> bool:
    """Whether a framework has a key `name`; one that cannot be loaded is skipped, and reported when it is used."""
    key = name.removeprefix("--").replace("-", "_").partition(".")[0]
    for backend in registry.list_plug_ins("frameworks"):
        with contextlib.suppress(PrimusError):
            if key in registry.load_plug_in(FRAMEWORKS, backend).KEYS:
                return True
    return False


def _check_file(word: str, own: Sequence[str], request: LaunchRequest) -> None:
    if "--config" in own and PurePath(word).suffix.lower() in FILES:
        raise UsageError(
            f"task '{request.task}': unexpected word {word!r}", f"pass an experiment file as --config {word}"
        )


def _check_runtimes(stray: _StrayArgument, name: str, request: LaunchRequest) -> None:
    """Reject an option of a runtime; the runtimes of this command are tried first."""
    owner = find_option_owner(name, reversed([segment.name for segment in request.runtimes]))
    if owner is None:
        return
    runtime, spelling = owner
    typed = shlex.join([spelling, *_list_values(stray)])
    raise UsageError(
        f"task '{request.task}': {name} is an option of the runtime '{runtime}'",
        f"put it before the --: primus-cli {runtime} {typed} -- {request.task} ...",
    )


def _list_values(stray: _StrayArgument) -> tuple[str, ...]:
    _, equals, value = stray.word.partition("=")
    return (value,) if equals else stray.value
