"""Every setting in which two results differ, classified by `rules.yaml`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from primus.comparison.fairness.check import ComparisonClass, FairnessCheck, judge_by_kind, make_check
from primus.comparison.fairness.evidence import FairnessEvidence
from primus.comparison.fairness.rules import read_fairness_rules

SCHEDULE_KEYS = (
    *("lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters", "lr_warmup_init", "lr_decay_style", "min_lr"),
    *("schedule", "schedule_shift"),
)
"""Settings that only choose the learning rates: equal rates at every step make them equivalent."""
SETTING = "setting "
"""Prefix of the name of a setting in the rule of its check."""
ABSENT = "not stated"
OFF: tuple[Any, ...] = (None, False, 0, "", "none")
"""Values of a setting that does nothing."""
MOST_NAMES = 8


def compare_settings(
    a: FairnessEvidence, b: FairnessEvidence, comparison_class: ComparisonClass, *, has_equal_rates: bool
) -> Iterator[FairnessCheck]:
    """A check of each setting that a side states, or must state.

    Args:
        a: The one side.
        b: The other side.
        comparison_class: `identical` allows no other setting; `tuned` lets each side choose how it computes.
        has_equal_rates: Whether the learning rates of all common steps are equal.
    """
    rules = read_fairness_rules()
    one_sided = []
    for key in dict.fromkeys([*rules.list_required_keys(), *a.settings, *b.settings]):
        rule, name = rules.find_rule(key), f"{SETTING}{key}"
        values = a.settings.get(key, ABSENT), b.settings.get(key, ABSENT)
        if ABSENT in values:
            is_on = rule is not None and rule.required_if_on and not any(value in OFF for value in values)
            if rule is not None and (rule.kind == "same" or (is_on and comparison_class == "identical")):
                yield make_check(name, "not shown", rule.reason, values, is_required=rule.required or is_on)
            elif key in a.chosen | b.chosen and comparison_class == "identical":
                reason = "one side asks its engine for it, and the other does not state it"
                yield make_check(name, "not shown", reason, values)
            elif rule is None or rule.kind == "tuned":
                one_sided.append(key)
        elif _is_equal_value(*values):
            yield _check_equal_setting(key, a, b)
        elif has_equal_rates and key in SCHEDULE_KEYS:
            yield make_check(name, "equivalent", "the learning rates of all common steps are equal", values)
        else:
            yield _judge_difference(key, a, b, comparison_class)
    if one_sided:
        reason = f"stated by one side only: {_join_names(one_sided)}"
        yield make_check("other settings", "not shown", reason, is_required=False)


def _check_equal_setting(key: str, a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """The same value: `equivalent` if a side states it under another name or in other words."""
    value = a.settings[key]
    if _is_equal_value(*(side.stated.get(key, ABSENT) for side in (a, b))):
        return make_check(f"{SETTING}{key}", "same", "equal", (value, value))
    words = [f"{key} = {side.stated[key]}" if key in side.stated else "by another name" for side in (a, b)]
    return make_check(f"{SETTING}{key}", "equivalent", f"both come to {key} = {value}", words)


def _judge_difference(
    key: str, a: FairnessEvidence, b: FairnessEvidence, comparison_class: ComparisonClass
) -> FairnessCheck:
    rule, name, values = read_fairness_rules().find_rule(key), f"{SETTING}{key}", (a.settings[key], b.settings[key])
    if rule is None:
        return make_check(name, "not shown", "no rule says what this setting changes", values)
    inherent = [side.framework for side in (a, b) if side.framework in rule.inherent_to]
    if inherent:
        return make_check(name, "irrelevant", f"{' and '.join(inherent)} has no other value", values)
    if rule.differs_by_engine and a.framework != b.framework and key not in a.chosen | b.chosen:
        return make_check(name, "irrelevant", "each engine has its own, and was not asked for another", values)
    return judge_by_kind(name, rule.kind, rule.reason, values, comparison_class)


def _is_equal_value(a: Any, b: Any) -> bool:
    """Whether two values of a setting are the same; numbers may differ by rounding of their text."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
