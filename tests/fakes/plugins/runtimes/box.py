"""Run in a box, for tests."""

from __future__ import annotations

from msgspec import Struct

from primus.plan import BindMount, LaunchPlan, PlanContext, Variable

LEVEL = "container"


class Options(Struct, frozen=True, kw_only=True):
    """Run in a box."""

    image: str = "cardboard"
    """What the box is made of."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan`, inside a box."""
    return LaunchPlan(
        argv=("box", "run", options.image, *plan.argv),
        env=plan.env | {"BOX_TOKEN": Variable("canary-of-the-box", "box"), "BOX": Variable(options.image, "--image")},
        inherited=("HF_TOKEN", "NCCL_DEBUG"),
        mounts=(BindMount("/data", "/data"), BindMount("/models", "/m", is_read_only=True)),
        inner=plan,
    )
