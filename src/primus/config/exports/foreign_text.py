"""What a writer makes of an experiment: a file of another framework, and each setting that it cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct, field

from primus.config.convert import DEFAULT
from primus.config.load import Resolved
from primus.config.schema import DEFAULTS, OWNERS, ModelSpec


class LostSetting(Struct, frozen=True):
    """A setting that the other framework does not have."""

    key: str
    value: Any
    reason: str
    """What the other framework does instead."""


class ForeignText(Struct):
    """A file of another framework."""

    text: str
    lost: list[LostSetting] = field(default_factory=list)


def list_lost(resolved: Resolved, reasons: Mapping[str, str], written: Collection[str] = ()) -> list[LostSetting]:
    """Settings with an effect that the file does not hold: those that differ from their defaults.

    Args:
        resolved: The experiment.
        reasons: Why the framework's files do not hold a key, as `engine_keys.list_lost_keys` says.
        written: Keys that the file holds all the same, and keys of `backend_args`.
    """
    trainer = resolved.experiment.trainer
    lost = []
    for key, reason in reasons.items():
        value = getattr(getattr(trainer, OWNERS[key]), key)
        was_set = resolved.origins.get(key, DEFAULT) != DEFAULT
        if key not in written and was_set and value not in (DEFAULTS.get(key), None, False):
            lost.append(LostSetting(key, value, reason))
    lost += [
        LostSetting(f"backend_args.{key}", value, "a setting of another backend")
        for key, value in trainer.backend_args.items()
        if f"backend_args.{key}" not in written
    ]
    return lost


def find_head_width(model: ModelSpec) -> int:
    """Width of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def comment_lost(lost: list[LostSetting]) -> list[str]:
    """A comment line for each setting that is lost."""
    if not lost:
        return []
    lines = [f"#   {each.key}: {each.value}: {each.reason}" for each in lost]
    return ["#", "# Settings that this file cannot hold:", *(line.replace("\n", " ") for line in lines)]


def is_number(word: str | float) -> bool:
    """Whether a part of a blend is a weight, not a prefix."""
    try:
        float(word)
    except ValueError:
        return False
    return True
