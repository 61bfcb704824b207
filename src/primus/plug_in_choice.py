"""Plug-ins that an experiment names, with their options: `callbacks: [garbage_collector, {early_stopping: {...}}]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from primus import registry
from primus.contract import PlugInKind
from primus.errors import UsageError, did_you_mean

PlugInT = TypeVar("PlugInT")
PlugInEntries = str | Sequence[str | Mapping[str, Mapping[str, Any] | None]] | None
"""The value of a key that names plug-ins; one name may stand without a list."""


class NoOptions(Struct, frozen=True):
    """Options of a plug-in that has none."""


class PlugInChoice(NamedTuple, Generic[PlugInT]):
    """A plug-in that an experiment names."""

    name: str
    plug_in: PlugInT
    options: Struct


def choose_plug_ins(kind: PlugInKind[PlugInT], entries: PlugInEntries) -> list[PlugInChoice[PlugInT]]:
    """The plug-ins of a kind that an experiment names by the key of the same name, in its order.

    Raises:
        UsageError: A name or an option does not exist, a value does not fit, or a name is there twice.
        PrimusError: A file cannot be loaded.
    """
    choices: list[PlugInChoice[PlugInT]] = []
    for entry in [entries] if isinstance(entries, str) else entries or ():
        if isinstance(entry, str):
            name, values = entry, {}
        elif len(entry) == 1:
            ((name, given),) = entry.items()
            values = dict(given or {})
        else:
            raise UsageError(
                f"{kind.name}: an entry has {len(entry)} names: {', '.join(entry) or 'none'}",
                "write one entry for each: [name, {name: {option: value}}]",
            )
        name = name.lower().replace("-", "_")
        if any(choice.name == name for choice in choices):
            raise UsageError(f"{kind.name}: {name} is there twice", "remove one of the entries")
        plug_in: Any = registry.load_plug_in(kind, name)
        choices.append(PlugInChoice(name, plug_in, _convert_options(f"{kind.name}: {name}", plug_in.Options, values)))
    return choices


def _convert_options(where: str, options: type[Struct], values: Mapping[str, Any]) -> Struct:
    for option in values:
        if option not in options.__struct_fields__:
            valid = options.__struct_fields__
            hint = did_you_mean(option, valid) if valid else "it takes no options"
            raise UsageError(f"{where}: unknown option '{option}'", hint)
    try:
        return msgspec.convert(values, options)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error).replace('`', '')}") from None
