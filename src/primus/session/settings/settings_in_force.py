"""Settings in force: what the live objects of an engine have after the first step, beside what the experiment asks for.

What an experiment asks for is in the configuration of the run, which does not show that an engine drops a setting on
its way or replaces it. Each engine has one function that reads its model, optimizer, process groups and compiled step
(`settings_in_force.py` in its folder); here its answer is recorded and compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from primus.callback import StepReport
from primus.config.schema import OWNERS, Trainer
from primus.config.source import ConfigValue, flatten_settings, format_yaml_value
from primus.runs.settings_in_force import SettingInForce, SettingState

SWITCH = "allow_settings_not_in_force"
"""Key of the experiment that lets a run go on."""
APPLIED_NORM = "applied_grad_norm"
"""Norm of the gradient that the optimizer got in the first step."""
MEASURED_TOLERANCE = 0.01
"""Relative, of values that follow from the numbers of a step."""


class LiveSetting(Struct, frozen=True, kw_only=True):
    """A setting as the objects of an engine have it."""

    key: str
    """Key of the schema or of `backend_args`, in whose words `value` is; other facts have a name of their own."""
    value: Any
    reason: str = ""
    """Why the engine may have another value than the one asked for; empty if it may not."""
    tolerance: float = 1e-6
    """Relative, within which a number is the one asked for."""


LiveSettings = Sequence[LiveSetting]


def explain_settings(live: LiveSettings, reasons: Mapping[str, str]) -> list[LiveSetting]:
    """The settings with reasons by key, an empty one for none."""
    return [structs.replace(each, reason=reasons.get(each.key) or each.reason) for each in live]


def collect_request(trainer: Trainer) -> dict[str, ConfigValue]:
    """What an experiment asks for, by the keys of the schema and the paths of `backend_args`."""
    asked = {key: getattr(getattr(trainer, group), key) for key, group in OWNERS.items()}
    if asked["optimizer"] == "adam":  # another name of it
        asked["optimizer"] = "adamw"
    return asked | flatten_settings(trainer.backend_args)


def judge_settings(live: LiveSettings, request: Mapping[str, object]) -> list[SettingInForce]:
    """Each setting that was read, with what was asked for."""
    return [_judge_setting(each, request) for each in live]


def _judge_setting(live: LiveSetting, request: Mapping[str, object]) -> SettingInForce:
    if live.key not in request:
        return SettingInForce(key=live.key, in_force=live.value, state="not asked", reason=live.reason)
    asked = request[live.key]
    if _is_equal(asked, live.value, live.tolerance):
        # Without the rounding of a measurement, which would differ between two engines.
        return SettingInForce(key=live.key, asked=asked, in_force=asked, state="as asked")
    reason = live.reason or ("left to the engine" if asked in (None, "auto") else "")
    state: SettingState = "explained" if reason else "not in force"
    return SettingInForce(key=live.key, asked=asked, in_force=live.value, state=state, reason=reason)


def format_problem(found: Sequence[SettingInForce], library: str, version: str) -> str:
    """A sentence about the settings that were asked for and are not in force; empty if there are none."""
    values = [
        f"{each.key}: asked {format_yaml_value(each.asked)}, in force {format_yaml_value(each.in_force)}"
        for each in found
        if each.state == "not in force"
    ]
    what = "a setting is" if len(values) == 1 else f"{len(values)} settings are"
    return f"{what} not in force in {library} {version}: {'; '.join(values)}" if values else ""


def _is_equal(asked: object, value: object, tolerance: float) -> bool:
    numbers = [each for each in (asked, value) if isinstance(each, int | float) and not isinstance(each, bool)]
    return math.isclose(*numbers, rel_tol=tolerance) if len(numbers) == 2 else bool(asked == value)


def judge_clipping(live: LiveSettings, limit: float, report: StepReport) -> list[LiveSetting]:
    """The limit of the gradient norm, as the first step shows it: by the gradient that the optimizer got."""
    applied = next((float(each.value) for each in live if each.key == APPLIED_NORM and each.value), None)
    norm = report.grad_norm
    if applied is None or report.skipped or not math.isfinite(norm) or (limit and norm <= limit):
        return []
    is_whole = math.isclose(applied, norm, rel_tol=MEASURED_TOLERANCE)
    value = limit if limit and math.isclose(applied, limit, rel_tol=MEASURED_TOLERANCE) else applied
    return [LiveSetting(key="clip_grad", value=0.0 if is_whole and value != limit else value)]
