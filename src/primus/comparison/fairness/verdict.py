"""The proof of fairness of a pair of results: what differs between them, and whether a ratio of their speeds is fair.

A fact that a side does not state is `not shown`, never `same`. A pair is fair if nothing is unfair and every required
fact is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from primus.comparison.fairness.check import ComparisonClass, FairnessCheck, Judgement
from primus.comparison.fairness.environment_checks import check_environment
from primus.comparison.fairness.evidence import FairnessEvidence
from primus.comparison.fairness.fact_checks import FACT_CHECKS, check_learning_rates, check_losses
from primus.comparison.fairness.loss_curves import LossSpread
from primus.comparison.fairness.setting_checks import compare_settings

FairnessStatus = Literal["fair", "not shown", "unfair"]
WORST_FIRST: tuple[Judgement, ...] = ("unfair", "not shown", "tuned", "equivalent", "irrelevant", "same")


class PairVerdict(Struct, frozen=True, kw_only=True):
    """Whether two cells are fair to compare."""

    a: str
    b: str
    comparison_class: ComparisonClass
    status: FairnessStatus
    checks: list[FairnessCheck]
    """Checks of facts, and of all settings that differ or are not shown."""
    same_settings: int
    """Settings that are equal on both sides."""

    def list_reasons(self) -> list[str]:
        """Why the pair is not fair; empty if it is."""
        if self.status == "fair":
            return []
        found = [check for check in self.checks if check.judgement == self.status and check.is_required]
        return [f"{check.rule}: {check.reason}" for check in found]


def judge_pair(
    a: FairnessEvidence, b: FairnessEvidence, comparison_class: ComparisonClass, spread: LossSpread | None = None
) -> PairVerdict:
    """Compare what two results state.

    Args:
        a: The one side.
        b: The other side.
        comparison_class: `identical` allows no other setting; `tuned` lets each side choose how it computes.
        spread: Differences between trainings that differ only in their seed.
    """
    rates = check_learning_rates(a, b)
    settings = list(compare_settings(a, b, comparison_class, has_equal_rates=rates.judgement == "same"))
    return _build_verdict(
        [
            *(check for check in settings if check.judgement != "same"),
            *check_environment(a, b, comparison_class),
            *(check(a, b) for check in FACT_CHECKS),
            check_losses(a, b, spread),
            rates,
        ],
        (a.name, b.name),
        comparison_class,
        sum(check.judgement == "same" for check in settings),
    )


def merge_verdicts(verdicts: Sequence[PairVerdict]) -> PairVerdict:
    """The verdict of two cells from those of their runs: of each rule the worst judgement."""
    worst: dict[str, FairnessCheck] = {}
    for check in (check for verdict in verdicts for check in verdict.checks):
        known = worst.get(check.rule)
        if known is None or WORST_FIRST.index(check.judgement) < WORST_FIRST.index(known.judgement):
            worst[check.rule] = check
    first = verdicts[0]
    same = min(verdict.same_settings for verdict in verdicts)
    return _build_verdict(list(worst.values()), (first.a, first.b), first.comparison_class, same)


def _build_verdict(
    checks: list[FairnessCheck], names: tuple[str, str], comparison_class: ComparisonClass, same_settings: int
) -> PairVerdict:
    status: FairnessStatus = "fair"
    if any(check.judgement == "unfair" for check in checks):
        status = "unfair"
    elif any(check.judgement == "not shown" and check.is_required for check in checks):
        status = "not shown"
    return PairVerdict(
        a=names[0],
        b=names[1],
        comparison_class=comparison_class,
        status=status,
        checks=sorted(checks, key=lambda check: WORST_FIRST.index(check.judgement)),
        same_settings=same_settings,
    )
