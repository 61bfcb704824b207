"""Clear nodes: what was recorded of them until now does not count any more."""

from __future__ import annotations

from msgspec import Struct

from primus.config.flags import PositionalList
from primus.errors import UsageError, did_you_mean
from primus.runs import unfit_nodes
from primus.task import TaskContext
from primus.tasks.nodes._list_folder import choose_list


class Options(Struct, frozen=True, kw_only=True):
    """Options of `nodes remove`."""

    nodes: PositionalList = []
    """Names of the nodes."""
    reason: str = "repaired"
    """Why they are fit, for the history."""
    unfit_nodes: str | None = None
    """Folder of the list (default: PRIMUS_UNFIT_NODES, else that of the user)."""


def run(options: Options, context: TaskContext) -> None:
    """Write one record a node, after which jobs use it again.

    Raises:
        UsageError: A node is not in the list.
        PrimusError: The list cannot be written.
    """
    environ = choose_list(context.environ, options.unfit_nodes)
    if not options.nodes:
        raise UsageError("nodes remove needs nodes", "nodes list shows them")
    listed = [each.node for each in unfit_nodes.read_unfit_nodes(environ).nodes]
    for name in options.nodes:  # all names before the first record
        if not any(unfit_nodes.is_same_node(name, each) for each in listed):
            hint = did_you_mean(name, listed) if listed else "the list is empty"
            raise UsageError(f"'{name}' is not in the list of unfit nodes", hint)
    records = [unfit_nodes.clear_node(environ, name, options.reason) for name in options.nodes]
    context.result(records, "\n".join(f"{name} is not in the list any more" for name in options.nodes))
