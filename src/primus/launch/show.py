"""Format a plan as text: every level, with the origin of each variable and without secrets."""

from __future__ import annotations

import shlex

from primus.launch.plan import Action, LaunchPlan, RestartPolicy
from primus.redaction import redact_args


def format_plan(plan: LaunchPlan) -> str:
    """Format the plan as indented text, one block per level."""
    blocks = []
    level: LaunchPlan | None = plan
    depth = 0
    while level is not None:
        blocks.append("\n".join("    " * depth + line for line in _format_level(level)))
        level, depth = level.inner, depth + 1
    return "\n\n".join(blocks)


def _format_level(plan: LaunchPlan) -> list[str]:
    lines = ["command:", f"  {shlex.join(redact_args(plan.argv))}"]
    if plan.layout:
        shape = plan.layout
        lines += ["layout:"]
        lines += [
            f"  {name}: {getattr(shape, name)}{_format_source(shape.sources.get(name))}"
            for name in _list_layout_names(plan)
        ]
    if plan.policy:
        lines += ["supervision:", *(f"  {line}" for line in _format_policy(plan.policy))]
    if plan.env:
        lines += ["environment, over the inherited:"]
        lines += [f"  {name}={v.format_value(name)}{_format_source(v.source)}" for name, v in sorted(plan.env.items())]
    if plan.actions:
        lines += ["hooks and patches, in this order:", *(f"  {_format_action(action)}" for action in plan.actions)]
    if plan.inherited:
        lines += ["passed on by name:", f"  {' '.join(plan.inherited)}"]
    if plan.mounts:
        lines += ["mounts:"] + [
            f"  {m.source} -> {m.target}{' (read-only)' if m.is_read_only else ''}" for m in plan.mounts
        ]
    for path, content in plan.files.items():
        lines += [f"file {path}:"] + [f"  | {line}" for line in content.splitlines()]
    return lines + [f"note: {note}" for note in plan.notes]


def _format_policy(policy: RestartPolicy) -> list[str]:
    restarts = f"{policy.max_restarts}" + (f", the first after {policy.backoff_s:g} s" if policy.max_restarts else "")
    hang = f"after {policy.hang_timeout_s:g} s without progress" if policy.hang_timeout_s else "never"
    return [f"restarts: {restarts}", f"hang: {hang}"]


def _list_layout_names(plan: LaunchPlan) -> list[str]:
    assert plan.layout
    several = ["nnodes", "node_rank", "master_addr", "master_port"] if plan.layout.nnodes > 1 else []
    return ["nproc", *several]


def _format_action(action: Action) -> str:
    where = "once" if action.once else "each node"
    alone = ", alone" if action.locked else ""
    return f"{action.stage} {action.kind} {action.file}  # {where}{alone}, at most {action.timeout_s:g} s"


def _format_source(source: str | None) -> str:
    return f"  # {source}" if source else ""
