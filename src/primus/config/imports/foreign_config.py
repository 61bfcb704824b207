"""What a reader makes of a file of another framework: our settings, and each value that has none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from primus.config.convert import list_union_members
from primus.config.schema import GROUPS, OWNERS, ModelSpec
from primus.config.source import ConfigValue
from primus.errors import UsageError

LONGEST_SHOWN = 80
"""Number of characters of a value that a comment shows."""


class ForeignValue(Struct, frozen=True):
    """A value of the file without a key here."""

    key: str
    """Its name as the file writes it."""
    value: ConfigValue
    """Its value."""
    reason: str
    """Why it is not taken, and what to do about it; empty where it has no effect on training."""


def format_value(other: ForeignValue) -> str:
    """A value by its name, the beginning of a long one."""
    if other.value is None:
        return other.key
    text = str(other.value).replace("\n", " ")
    return f"{other.key} {text if len(text) <= LONGEST_SHOWN else f'{text[:LONGEST_SHOWN]}...'}"


class ForeignConfig(Struct):
    """Settings read from a file of another framework."""

    origin: str
    """Kind and name of the file: ``Megatron-LM arguments of pretrain.sh``."""
    name: str
    """Name of the experiment or model preset that it becomes."""
    framework: str | None = None
    """Backend that trains with these settings; None for a file that describes only a model."""
    stage: str = "pre_trainer"
    """Module of the experiment."""
    model: dict[str, ConfigValue] = field(default_factory=dict)
    """Keys of the model."""
    settings: dict[str, ConfigValue] = field(default_factory=dict)
    """All other keys, those of the framework included."""
    others: list[ForeignValue] = field(default_factory=list)
    """Values without a key here."""
    defaults: dict[str, ConfigValue] = field(default_factory=dict)
    """Keys that the file does not state, with the framework's defaults."""
    unchanged: list[str] = field(default_factory=list)
    """Settings of the file without a key here that are the framework's defaults."""
    folders: tuple[Path, ...] = ()
    """Where files that it names by a relative path may be: its folder, and those above it in its checkout."""
    hint: str = ""
    """What to give where the shape of the model is incomplete."""

    def set_key(self, key: str, value: Any) -> None:
        """Set a key of the schema in its group."""
        (self.model if OWNERS.get(key) == "model" else self.settings)[key] = value

    def add_other(self, key: str, value: Any, reason: str = "") -> None:
        """Record a value without a key here."""
        self.others.append(ForeignValue(key, value, reason))

    @property
    def warnings(self) -> list[ForeignValue]:
        """Values without a key here that affect training."""
        return [other for other in self.others if other.reason]


NUMBER = "train_iters"
"""Key whose type stands for a number, for values without a key of their own."""


def check_types(values: Mapping[str, Any], names: Mapping[str, str], origin: str) -> None:
    """Check that values of numbers and switches have these types, before anything is computed from them.

    Args:
        values: Values by the names of the file.
        names: Key of the schema by name in the file.
        origin: Name of the file in messages.

    Raises:
        UsageError: A value has another type; names it.
    """
    for name, key in names.items():
        value = values.get(name)
        kinds = list_kinds(key)
        if value is None or not kinds or (isinstance(value, bool) and bool in kinds):
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not (is_number and kinds & {int, float}):
            expected = "a number" if kinds & {int, float} else "true or false"
            raise UsageError(f"{origin}: {name}: expected {expected}, found {str(value)[:40]!r}")


@cache
def list_kinds(key: str) -> frozenset[type]:
    """Types of a key if it is a number or a switch; empty for all others."""
    group = GROUPS.get(OWNERS.get(key, ""))
    field = next((each for each in structs.fields(group) if each.name == key), None) if group else None
    kinds = {kind for kind in list_union_members(field.type) if kind is not type(None)} if field else set()
    return frozenset(kinds) if kinds and kinds <= {int, float, bool} else frozenset()


def drop_defaults(model: dict[str, ConfigValue], keep: Iterable[str] = ()) -> dict[str, ConfigValue]:
    """The keys of a model that differ from the schema's defaults, in the order of the schema.

    A width or number of heads that equals its derived default is dropped too, so that equal models are equal files.
    """
    values = dict(model)
    heads = values.get("num_attention_heads")
    if values.get("num_query_groups") == heads:
        values.pop("num_query_groups", None)
    width = values.get("hidden_size")
    if isinstance(width, int) and isinstance(heads, int) and heads and values.get("kv_channels") == width / heads:
        values.pop("kv_channels")
    if values.get("moe_ffn_hidden_size") == values.get("ffn_hidden_size"):
        values.pop("moe_ffn_hidden_size", None)
    fields = msgspec.structs.fields(ModelSpec)
    return {
        each.name: values[each.name]
        for each in fields
        if each.name in values and (each.required or each.name in keep or values[each.name] != each.default)
    }


MOST_REASONS = 3
NAMING = ("model_name", "model.name", "model.flavor")
"""Settings of frameworks that name a model; without a preset of it, its shape is not known."""


def make_model(config: ForeignConfig) -> ModelSpec:
    """The model of a file.

    Raises:
        UsageError: A required key is missing, or a value is not possible; names the file.
    """
    missing = [
        each.name for each in msgspec.structs.fields(ModelSpec) if each.required and each.name not in config.model
    ]
    if missing:
        told = {*NAMING, *(f"--{name.replace('_', '-')}" for name in missing)}
        reasons = [each for each in config.warnings if each.key in told]
        named = "".join(f" ({format_value(each)}: {each.reason})" for each in reasons[:MOST_REASONS])
        raise UsageError(
            f"{config.origin}: the shape of the model is incomplete: {', '.join(missing)} not found{named}",
            config.hint or f"give a preset (--model NAME), or what is missing, such as --{missing[0]} N",
        )
    try:
        return msgspec.convert(drop_defaults(config.model), ModelSpec)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).replace("`", "").replace("Expected", "expected").partition(" - at $.")
        raise UsageError(f"{config.origin}: {place}: {reason} ({config.model.get(place)!r})") from None
