"""Compose a plan from a request: the runtimes of the chain wrap it, innermost first."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from primus import registry
from primus.launch.command import NODE_END, GlobalOptions, parse_segment_options
from primus.plan import LaunchPlan, LaunchRequest, PlanContext, RequestSegment, Variable
from primus.runtime import RUNTIMES


def compose_plan(request: LaunchRequest, plan: LaunchPlan, context: PlanContext) -> LaunchPlan:
    """Wrap `plan` in the request's runtimes, innermost first.

    Raises:
        UsageError: An option of a runtime is wrong.
    """
    return _compose_runtimes(request, len(request.runtimes), plan, context, ())


def compose_outer_plan(
    request: LaunchRequest, context: PlanContext, env: Mapping[str, Variable], given: GlobalOptions
) -> LaunchPlan:
    """Compose the plan of the runtimes outside of the node level; inside them `primus-cli` runs the rest of the chain.

    Args:
        env: Variables that are passed by name to the rest of the chain.
        given: Global options, which also apply there.

    Raises:
        UsageError: An option of a runtime is wrong.
    """
    num_outer = sum(registry.load_plug_in(RUNTIMES, segment.name).LEVEL != "node" for segment in request.runtimes)
    passed_on = tuple(f"--{name.replace('_', '-')}" for name in ("debug", "json", "no_config") if getattr(given, name))
    innermost = LaunchPlan(argv=_make_remote_command(request, num_outer, passed_on), env=dict(env))
    return _compose_runtimes(request, num_outer, innermost, context, passed_on)


def _compose_runtimes(
    request: LaunchRequest, count: int, plan: LaunchPlan, context: PlanContext, passed_on: tuple[str, ...]
) -> LaunchPlan:
    """`plan` wrapped by the first `count` runtimes."""
    for number, segment in reversed(list(enumerate(request.runtimes[:count]))):
        there = _make_remote_command(request, number + 1, passed_on)
        level = structs.replace(context, is_here=number == 0, there=there)
        plan = registry.load_plug_in(RUNTIMES, segment.name).wrap(plan, parse_segment_options(segment), level)
    return plan


def _make_remote_command(request: LaunchRequest, first: int, passed_on: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs the chain from runtime number `first` on."""
    runtimes = request.runtimes[first:] or (RequestSegment(NODE_END),)
    words = [word for segment in runtimes for word in (segment.name, *segment.words, "--")]
    if registry.load_plug_in(RUNTIMES, runtimes[-1].name).LEVEL != "node":
        words += [NODE_END, "--"]
    return (find_entry_point(), *passed_on, *words, *request.task.split(), *request.words)


def find_entry_point() -> str:
    """Path of the `primus-cli` that other nodes and containers start: the checkout's, else the installed one."""
    checkout = registry.PACKAGE.parents[1] / "primus-cli"
    installed = Path(sys.prefix) / "bin" / "primus-cli"
    return str(checkout if checkout.is_file() else installed if installed.is_file() else "primus-cli")
