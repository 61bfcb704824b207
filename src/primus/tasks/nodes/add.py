"""Add nodes to the list of unfit nodes: jobs avoid them from now on."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from primus.config.flags import PositionalList
from primus.errors import UsageError
from primus.runs import unfit_nodes
from primus.runs.unfit_nodes import EXPIRY_DAYS, NodeRecord
from primus.task import TaskContext
from primus.tasks.nodes import _scheduler
from primus.tasks.nodes._list_folder import choose_list


class Options(Struct, frozen=True, kw_only=True):
    """Options of `nodes add`."""

    nodes: PositionalList = []
    """Names of the nodes, as the scheduler shows them."""
    reason: str = ""
    """Why they are unfit, for everybody who reads the list."""
    days: Annotated[float, Meta(ge=0)] = EXPIRY_DAYS
    """Days after which jobs use them again; 0: not before they are removed or checked."""
    drain: bool = False
    """Also drain them in Slurm, for the jobs of all users; prints the command."""
    cordon: bool = False
    """Also cordon them in Kubernetes, for the pods of all users; prints the command."""
    unfit_nodes: str | None = None
    """Folder of the list (default: PRIMUS_UNFIT_NODES, else that of the user)."""


def run(options: Options, context: TaskContext) -> None:
    """Write one record a node.

    Raises:
        UsageError: There is no node or no reason.
        PrimusError: The list cannot be written, or the scheduler refuses.
    """
    if not options.nodes or not options.reason.strip():
        raise UsageError("nodes add needs nodes and a reason", "nodes add n3 --reason 'GPU 5 loses its link'")
    environ = choose_list(context.environ, options.unfit_nodes)
    for name in options.nodes:
        unfit_nodes.check_node_name(name)
    records = [
        unfit_nodes.add_record(
            environ,
            NodeRecord(node=name, kind="unfit", reason=options.reason, time=0),
            days=options.days or None,
        )
        for name in options.nodes
    ]
    if options.drain:
        _scheduler.drain_nodes(options.nodes, options.reason, context)
    if options.cordon:
        _scheduler.cordon_nodes(options.nodes, context)
    lines = [f"{each.node} is unfit until {unfit_nodes.format_day(each.expires)}: {each.reason}" for each in records]
    context.result(records, "\n".join(lines))
