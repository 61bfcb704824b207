"""The check of a training's layout before it is submitted or started: a step of each kind of rank on fake tensors."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import structs

from primus.config.load import Resolved
from primus.errors import UsageError, did_you_mean
from primus.machine.cluster import LayoutFlags, find_layout
from primus.plan import LaunchJob
from primus.task import TaskContext

Check = Literal["layout", "off"]
VARIABLE = "PRIMUS_CHECK"
USUAL_DEVICES = 8
"""Devices of a node where nothing tells their number."""


def require_layout(
    job: LaunchJob,
    resolved: Resolved,
    assume: str | None,
    nnodes: int | None,
    context: TaskContext,
) -> LaunchJob:
    """`job`, which starts only if its layout runs, and fits the memory of its devices where they are known.

    Args:
        job: A new run.
        resolved: Its experiment.
        assume: Machine of each node: MODEL or MODEL:GPUS; None for this one, which must not be a login node.
        nnodes: Nodes; None for those that the runtimes ask for.
        context: Of the command.

    Raises:
        UsageError: The machine does not exist, or the processes cannot be laid out.
    """
    # For runs that are checked only: profiles, and processes of ranks.
    from primus.prediction import layout_cache, layout_machine, layout_run
    from primus.prediction.fake_ranks import ALL_KINDS, check_world_size, choose_ranks

    asked = context.find_size()
    if context.runs_elsewhere:
        nodes = nnodes or asked.nodes
        if nodes is None:
            skipped = "check layout: skipped, since the options do not tell the number of nodes; --check-nnodes N does"
            return structs.replace(job, notes=(*job.notes, skipped))
        machine = layout_machine.LayoutMachine(
            name="unknown device", nnodes=nodes, devices_per_node=USUAL_DEVICES, device_bytes=None
        )
    else:
        # Addresses of the rendezvous change no size.
        flags = LayoutFlags(nnodes=nnodes or asked.nodes, node_rank=0, master_addr="localhost")
        nodes = find_layout(context.environ, lambda: 1, flags).nnodes
    if assume is not None or not context.runs_elsewhere:
        machine = layout_machine.describe_machine(assume, context.facts, nodes)
    machine = structs.replace(machine, devices_per_node=asked.devices_per_node or machine.devices_per_node)
    world = machine.world_size
    check_world_size(resolved, world)
    ranks = choose_ranks(ALL_KINDS, resolved.experiment.trainer, world)
    memory = "memory is compared with the device" if machine.device_bytes else "--check-assume MODEL compares memory"
    note = (
        f"check layout: ranks {', '.join(map(str, ranks))} of {world} ({nodes} nodes x {machine.devices_per_node} x"
        f" {machine.name}) execute a step on fake tensors before anything starts; {memory}"
    )
    check_start = job.check_start

    def check() -> None:
        check_start()
        if context.dry_run:
            return
        context.say(note)
        try:
            found = layout_cache.check_layout(resolved, machine, context.environ)
        except layout_run.LayoutUnknown as error:
            found = f"skipped: {error.problem}"
        context.say(f"check layout: {found}")

    return structs.replace(job, check_start=check, notes=(*job.notes, note))


def parse_check(text: str | None) -> Check:
    """The check that an option or a variable asks for.

    Raises:
        UsageError: There is none of that name.
    """
    for check in get_args(Check):
        if (text or "off") == check:
            return check  # type: ignore[no-any-return]
    raise UsageError(f"${VARIABLE}: '{text}' is not a check", did_you_mean(str(text), get_args(Check)))
