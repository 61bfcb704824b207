"""Variables, packages and machines in which two results differ, classified by the table of speed facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from primus.comparison.fairness.check import ComparisonClass, FairnessCheck, judge_by_kind, make_check, make_unknown
from primus.comparison.fairness.evidence import FairnessEvidence
from primus.redaction import are_comparable
from primus.runs.speed_facts import SpeedPart, SpeedRule, find_speed_rule

USER_SOURCES = ("shell", "--env", "experiment", "hook", "patch", "tuned", "deterministic", "replay of")
"""Beginnings of the sources of variables that somebody chose; the others follow from device, engine and network."""
UNSET = "not set"


def check_environment(
    a: FairnessEvidence, b: FairnessEvidence, comparison_class: ComparisonClass
) -> Iterator[FairnessCheck]:
    """A check of each variable, package and fact about the machine that differs."""
    if not (a.states_environment and b.states_environment):
        problem = "variables, packages and driver are not stated"
        stated = (a.states_environment, b.states_environment)
        yield make_unknown("environment", problem, (a, b), stated, is_required=False)
    for part in get_args(SpeedPart):
        ours, theirs = (side.environment.get(part, {}) for side in (a, b))
        for name in sorted(ours.keys() | theirs.keys()):
            values = ours.get(name, UNSET), theirs.get(name, UNSET)
            if values[0] != values[1] and (UNSET not in values or _is_known_absent(part, a, b)):
                yield _judge_difference(part, name, values, (a, b), comparison_class)


def _is_known_absent(part: SpeedPart, a: FairnessEvidence, b: FairnessEvidence) -> bool:
    """Whether a side that does not state a fact is known not to have it."""
    if part == "variable":
        return a.states_environment and b.states_environment
    # Engines have packages of their own; what is not known of a machine is not known to be absent.
    return part == "package" and a.framework == b.framework and all(side.environment.get(part) for side in (a, b))


def _judge_difference(
    part: SpeedPart,
    name: str,
    values: tuple[str, str],
    sides: tuple[FairnessEvidence, FairnessEvidence],
    comparison_class: ComparisonClass,
) -> FairnessCheck:
    rule, title = find_speed_rule(part, name), f"{part} {name}"
    if rule is None:
        return make_check(title, "not shown", "no rule says what this variable changes", values)
    if not are_comparable(*values):
        return make_check(title, "not shown", "both values are hidden", values, is_required=False)
    excuse = _find_excuse(part, name, rule, sides)
    if excuse:
        return make_check(title, "irrelevant", excuse, values)
    if rule.kind == "minor":
        return make_check(title, "not shown", rule.reason, values, is_required=False)
    return judge_by_kind(title, rule.kind, rule.reason, values, comparison_class)


def _find_excuse(part: SpeedPart, name: str, rule: SpeedRule, sides: tuple[FairnessEvidence, FairnessEvidence]) -> str:
    """Why a difference belongs to the devices or engines that are compared; empty if it does not."""
    a, b = sides
    is_other_engine = a.framework != b.framework
    if part != "variable":
        if a.platform != b.platform:
            return "each platform has software of its own"
        return "what an engine is made of is what is compared" if rule.of_engine and is_other_engine else ""
    is_chosen = any(side.variable_sources.get(name, "").startswith(USER_SOURCES) for side in sides)
    is_stated = any(name in side.variable_sources for side in sides)
    if is_stated and not is_chosen and (is_other_engine or a.device != b.device):
        return "the launch set it for its device, network or engine"
    return ""
