"""A drill on this node, from its options to its result."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from primus.drill import report
from primus.drill.drilled_launch import DrilledJob
from primus.drill.exchange import HeadExchange, NodeDrillReport, make_report
from primus.drill.fault_kinds import (
    KINDS,
    FaultPermissions,
    find_layout_obstacle,
    find_node_obstacle,
    find_target_node,
)
from primus.drill.follow import follow_orders
from primus.drill.lead import DrillHead, DrillSettings
from primus.drill.result import DrillResult
from primus.errors import UsageError
from primus.launch.signals import raise_on_signals
from primus.machine.cluster import ClusterLayout
from primus.runs.files import write_json, write_text
from primus.task import TaskContext

RESULT_FILE, PAGE_FILE = "drill.json", "drill.html"
TASKS = (("train", "pretrain"), ("train", "posttrain"), ("train", "rl"))


def check_command(command: Sequence[str]) -> None:
    """Check the command of a drill.

    Raises:
        UsageError: It is not a training that starts from an experiment file.
    """
    example = "drill --minutes 20 -- train pretrain --config FILE"
    if not command:
        raise UsageError("drill: no training is given", example)
    if tuple(command[:2]) not in TASKS:
        raise UsageError(f"drill: '{' '.join(command[:2])}' is not a training", example)
    flags = [word.partition("=")[0] for word in command]
    if not {"--config", "--exp"} & set(flags):
        raise UsageError("drill: the training needs --config: a drill starts new runs", example)
    taken = next(
        (flag for flag in flags if flag.replace("-", "_") in ("__workspace", "__save", "__save_interval")), None
    )
    if taken:
        raise UsageError(f"drill: {taken} is set by the drill", "use drill --output FOLDER and --steps N instead")


def list_fault_notes(faults: Sequence[str], layout: ClusterLayout | None, allowed: FaultPermissions) -> list[str]:
    """What a drill would do, a line for each fault.

    Args:
        faults: Names of the faults that are asked for.
        layout: Nodes and processes; None if they are not known here.
        allowed: What the user allows.
    """
    lines = []
    for kind in KINDS.values():
        if kind.name not in faults:
            continue
        obstacle = find_layout_obstacle(kind, layout, allowed)
        target = None if layout is None else find_target_node(kind, layout)
        is_here = layout is not None and layout.node_rank == target
        if not obstacle and is_here:
            obstacle = find_node_obstacle(kind, allowed, ())
        place = "node 0" if kind.on_head else "the last node"
        later = (
            "" if is_here or kind.allowed_by is None else f"; whether {kind.allowed_by} may be used is checked there"
        )
        lines.append(f"{kind.name}: skipped: {obstacle}" if obstacle else f"{kind.name}: {kind.act}, on {place}{later}")
    return lines


def run_drill(
    settings: DrillSettings, job: DrilledJob, layout: ClusterLayout, output: str | None, context: TaskContext
) -> DrillResult | None:
    """Run the drill on this node; the result on node 0, None on the others.

    Raises:
        PrimusError: A node did not report, or the undisturbed job does not train.
    """
    # A port of its own: torchelastic listens on that of the job while a launch runs.
    port = (layout.master_port or 0) + 1
    folder = Path(output or _name_folder()).absolute()
    others = (folder if folder.exists() else Path.cwd(),)
    obstacles = {
        str(kind.name): reason
        for kind in KINDS.values()
        if not find_layout_obstacle(kind, layout, job.allowed)
        and (reason := find_node_obstacle(kind, job.allowed, others))
    }
    own = make_report(layout, obstacles)
    with raise_on_signals():  # so that faults are undone, and the launch ends, when the drill is told to stop
        if layout.node_rank > 0:
            follow_orders(job, layout, port, own, settings.minutes)
            return None
        return _lead_drill(settings, job, layout, port, folder, own, context)


def _lead_drill(
    settings: DrillSettings,
    job: DrilledJob,
    layout: ClusterLayout,
    port: int,
    folder: Path,
    own: NodeDrillReport,
    context: TaskContext,
) -> DrillResult:
    folder.mkdir(parents=True, exist_ok=True)
    context.say(f"drill {folder}")
    head = DrillHead(settings, job, layout, HeadExchange(layout, port), folder, context.say)
    result = head.run(own)
    write_json(folder / RESULT_FILE, structs.asdict(result))
    write_text(folder / PAGE_FILE, report.format_page(result))
    return result


def _name_folder() -> Path:
    return Path("output", "drill", f"{time.strftime('%Y%m%d_%H%M%S')}-{secrets.token_hex(2)}")


def find_environ() -> dict[str, str]:
    """The environment of the launches: that of this process, which has the variables of `direct --env`."""
    return dict(os.environ)
