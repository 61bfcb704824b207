"""Run on a grid, for tests."""

from __future__ import annotations

import shlex
from typing import Annotated

from msgspec import Meta, Struct

from primus.plan import LaunchPlan, PlanContext

LEVEL = "cluster"


class Options(Struct, frozen=True, kw_only=True):
    """Run on a grid."""

    nodes: Annotated[int, Meta(ge=1, extra={"short": ("-N",)})] = 1
    """Nodes of the grid."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan`, on each node of the grid."""
    script = f"#!/bin/sh\n# nodes {options.nodes}\n{shlex.join(context.there)}\n"
    file = f"{context.directory}/job.sh"
    return LaunchPlan(argv=("gsub", file), env=plan.env, files={file: script}, notes=("waits in a queue",), inner=plan)
