"""One fact or setting of a pair of results, and what it means for the fairness of their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from primus.comparison.fairness.evidence import FairnessEvidence
from primus.comparison.fairness.rules import RuleKind

Judgement = Literal["same", "equivalent", "irrelevant", "tuned", "unfair", "not shown"]
ComparisonClass = Literal["identical", "tuned"]


class FairnessCheck(Struct, frozen=True, kw_only=True):
    """One fact of a pair."""

    rule: str
    """Name of the rule: of the fact, or `setting KEY`."""
    judgement: Judgement
    reason: str
    a: str = ""
    b: str = ""
    is_required: bool = True
    """Whether the pair is fair only if the fact is shown."""


def make_check(
    rule: str, judgement: Judgement, reason: str, values: Sequence[Any] = ("", ""), *, is_required: bool = True
) -> FairnessCheck:
    """A check of two values."""
    a, b = map(_format_value, values)
    return FairnessCheck(rule=rule, judgement=judgement, reason=reason, a=a, b=b, is_required=is_required)


def judge_by_kind(
    rule: str, kind: RuleKind, reason: str, values: Sequence[Any], chosen: ComparisonClass
) -> FairnessCheck:
    """What a difference means by the kind of its rule in a class of comparisons."""
    if kind == "irrelevant" or (kind == "tuned" and chosen == "tuned"):
        return make_check(rule, kind, reason, values)
    if kind == "tuned":
        reason = f"{reason}; only the class tuned lets each side choose it"
    return make_check(rule, "unfair", reason, values)


def make_unknown(
    rule: str, problem: str, sides: Sequence[FairnessEvidence], stated: Sequence[Any], *, is_required: bool = True
) -> FairnessCheck:
    """A fact that is not shown; `stated` has what each side states of it."""
    lacking = [
        side.name
        for side, value in zip(sides, stated, strict=True)
        if value is None or value is False or value in ({}, (), "")
    ]
    reason = f"{problem} by {' and '.join(lacking)}" if lacking else problem
    return make_check(rule, "not shown", reason, is_required=is_required)


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
