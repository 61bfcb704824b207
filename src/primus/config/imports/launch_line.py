"""Find the commands of a script that train: each framework knows its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus import registry
from primus.errors import UsageError
from primus.framework import IMPORTS

FURTHER = ""
"""Name under which words that belong to no argument are kept."""


class LaunchLine(Struct, frozen=True):
    """A command that trains."""

    framework: str
    """Framework whose command it is."""
    arguments: Mapping[str, tuple[str, ...]]
    """Values by argument, as the command writes it."""
    index: int
    """Which of the commands it is."""


class FoundLaunches(Struct, frozen=True):
    """What the commands of a script train."""

    launches: list[LaunchLine] = []
    """Those that are imported, the one with the most arguments first; of equal ones, the first that was called."""
    refused: UsageError | None = None
    """Why the first command that a framework knows and does not import is refused."""


def find_launches(commands: Sequence[Sequence[str]]) -> FoundLaunches:
    """Commands that train, by what the frameworks say of each."""
    found = _ask_frameworks(commands)
    if not found.launches:  # a file with one argument on each line
        listed = [word for words in commands if words and words[0].startswith("--") for word in words]
        found = FoundLaunches(_ask_frameworks([listed]).launches, found.refused)
    return found


def list_command_names() -> str:
    """The frameworks whose commands are imported, for messages."""
    plug_ins = (registry.load_plug_in(IMPORTS, name) for name in registry.list_plug_ins(IMPORTS.name))
    return " or ".join(each.COMMANDS for each in plug_ins if each.COMMANDS)


def _ask_frameworks(commands: Sequence[Sequence[str]]) -> FoundLaunches:
    launches: list[LaunchLine] = []
    refused = None
    for index, words in enumerate(commands):
        try:
            launches += [
                launch for name in registry.list_plug_ins(IMPORTS.name) if (launch := _ask(name, words, index))
            ]
        except UsageError as error:
            refused = refused or error
    return FoundLaunches(sorted(launches, key=lambda launch: -len(launch.arguments)), refused)


def _ask(framework: str, words: Sequence[str], index: int) -> LaunchLine | None:
    arguments = registry.load_plug_in(IMPORTS, framework).find_arguments(words)
    return None if arguments is None else LaunchLine(framework, arguments, index)
