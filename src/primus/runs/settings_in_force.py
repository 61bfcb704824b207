"""Settings in force, as a run has recorded them after the first step of an attempt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from primus.runs.events import Event

EVENT = "settings_in_force"
SettingState = Literal["as asked", "explained", "not in force", "not asked"]


class SettingInForce(Struct, frozen=True, kw_only=True):
    """A setting of the event `settings_in_force`."""

    key: str
    asked: Any = None
    """Value in the experiment; null also where nothing can ask for it."""
    in_force: Any
    """Value that the engine has."""
    state: SettingState
    """`explained`: it differs for `reason`; `not asked`: no setting of the experiment names it."""
    reason: str = ""


def read_settings_in_force(recorded: Iterable[Event]) -> list[SettingInForce]:
    """The settings of the last attempt that took a step; none of a run of an earlier version."""
    found = [event for event in recorded if event["kind"] == EVENT]
    try:
        return msgspec.convert(found[-1].get("settings"), list[SettingInForce]) if found else []
    except msgspec.ValidationError:  # of another version
        return []
