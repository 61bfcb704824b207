"""Run with a lower CPU priority (nice)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs

from primus.plan import LaunchPlan, PlanContext

LEVEL = "container"


class Options(Struct, frozen=True, kw_only=True):
    """Run with a lower CPU priority."""

    level: Annotated[int, Meta(ge=0, le=19)] = 10
    """Added to the niceness of all processes; 19 is the lowest priority."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan` as a command of nice."""
    return structs.replace(plan, argv=("nice", "-n", str(options.level), *plan.argv), inner=plan)
