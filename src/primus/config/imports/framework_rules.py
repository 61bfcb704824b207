"""Read settings of a framework as an experiment, by the rules for the same settings in experiment files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from primus.config.convert import find_origin
from primus.config.imports.foreign_config import NUMBER, ForeignConfig, check_types
from primus.config.source import ConfigValue, Leaf, Tree, strip_origins
from primus.config.translation.foreign_settings import DEFAULT_ORIGIN, ForeignSettings, LayerContext
from primus.config.translation.known_keys import KnownKey
from primus.errors import find_nearest


class SettingRules(Protocol):
    """The part of a translator that does not depend on presets."""

    names: Mapping[str, str]
    """Key of the schema by the setting with the same meaning."""
    numbers: Collection[str]
    """Further settings whose values are numbers."""

    def rename(self, settings: Tree) -> Tree: ...

    def apply_rules(self, work: ForeignSettings) -> None:
        """Translate the settings that other keys of the schema, or several, replace."""
        ...

    def settle_rest(self, work: ForeignSettings, context: LayerContext) -> None:
        """Take settings without a key of the schema out of the tree, and give the engine what it takes."""
        ...


def import_settings(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    rules: SettingRules,
    target: ForeignConfig,
    known: Mapping[str, KnownKey],
) -> dict[str, ConfigValue]:
    """Set the keys of `target`, and list each setting without one.

    Args:
        values: Settings of the file by their names.
        defaults: What the framework does without a setting, by its name.
        rules: How an experiment file with such settings is read.
        target: Result; gets all but what is kept for the engine.
        known: All settings of the framework.

    Returns:
        Settings that the engine takes by the framework's names.

    Raises:
        UsageError: A number or a switch has another type; names it.
    """
    check_types(values, {**dict.fromkeys(rules.numbers, NUMBER), **rules.names}, target.origin)
    named: dict[str, ConfigValue] = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in known or name in rules.names:
            named[name] = value
        else:
            close = find_nearest(name, [*rules.names, *known])
            target.add_other(name, value, f"unknown setting{f'; did you mean {close}?' if close else ''}")
    absent = f"{target.framework}{DEFAULT_ORIGIN}"
    renamed = rules.rename({**make_tree(defaults, absent), **make_tree(named, target.origin)})
    work = ForeignSettings(renamed, list_value=target.add_other)
    rules.apply_rules(work)
    rules.settle_rest(work, LayerContext(stage="pre_trainer", written=frozenset(work.tree)))
    target.unchanged += work.unchanged
    for key, value in strip_origins(work.tree).items():
        target.set_key(key, value)
        origin = find_origin(work.tree[key])
        if origin == "default" or DEFAULT_ORIGIN in origin:
            target.defaults[key] = value
    return strip_origins(work.backend_args)


def make_tree(values: Mapping[str, Any], origin: str) -> Tree:
    """`values` as settings of a file."""
    return {
        key: make_tree(value, origin)
        if isinstance(value, dict)
        else Leaf(value, origin, "" if value is None else str(value))
        for key, value in values.items()
    }
