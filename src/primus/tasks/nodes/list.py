"""List the nodes that jobs avoid, and those with a first failure."""

from __future__ import annotations

from msgspec import Struct

from primus.report import table
from primus.runs import unfit_nodes
from primus.runs.unfit_nodes import NodeRecord, UnfitNodes
from primus.task import TaskContext
from primus.tasks.nodes._list_folder import choose_list


class Options(Struct, frozen=True, kw_only=True):
    """Options of `nodes list`."""

    all: bool = False
    """Show every record, the expired ones too, with its evidence."""
    unfit_nodes: str | None = None
    """Folder of the list (default: PRIMUS_UNFIT_NODES, else that of the user)."""


def run(options: Options, context: TaskContext) -> None:
    """Print one line a node, or with --all one block a record."""
    listed = unfit_nodes.read_unfit_nodes(choose_list(context.environ, options.unfit_nodes))
    text = _format_records(listed.records) if options.all else _format_nodes(listed)
    context.result(listed, "\n".join([text, *listed.notes]))


def _format_nodes(listed: UnfitNodes) -> str:
    if not listed.nodes:
        return f"no unfit nodes in {listed.folder}" if listed.folder else "there is no list of unfit nodes"
    header = ["node", "state", "since", "until", "found by", "reason"]
    rows = [
        [
            each.node,
            "unfit" if each.is_unfit else "one failure",
            unfit_nodes.format_day(each.since),
            unfit_nodes.format_day(each.expires),
            each.records[-1].source,
            each.reason,
        ]
        for each in listed.nodes
    ]
    return table.format_table(header, rows)


def _format_records(records: tuple[NodeRecord, ...]) -> str:
    return "\n\n".join(map(_format_record, records)) or "no records"


def _format_record(record: NodeRecord) -> str:
    attempt = "" if record.attempt is None else f", attempt {record.attempt}"
    rows = {
        "node": f"{record.node}: {record.kind}",
        "reason": record.reason,
        "time": f"{table.format_time(record.time)}, counts until {table.format_time(record.expires)}",
        "found by": f"{record.source}, written by {record.user} on {record.host}",
        "run": f"{record.run}{attempt}" if record.run else "",
        "evidence": record.line,
    }
    return "\n".join(f"{name + ':':<10}{value}" for name, value in rows.items() if value)
