"""The nodes of a run: which host has which node rank, and where it stands on the network."""

from __future__ import annotations

from msgspec import Struct

from primus.errors import PrimusError
from primus.runs.files import read_json
from primus.runs.store import Run

NODES_FILE = "nodes.json"


class RunNode(Struct, frozen=True, kw_only=True):
    """A node of a run."""

    host: str
    scheduler_rank: int
    """Its rank in the order of the scheduler, or as `--node-rank` gave it."""
    place: tuple[str, ...] = ()
    """Switches above it, outermost first; empty where nothing says."""


class NodesRecord(Struct, frozen=True, kw_only=True):
    """The nodes.json of a run, of its newest start."""

    nodes: tuple[RunNode, ...]
    """By node rank."""
    summary: str = ""
    """What the order of ranks gives."""


def read_nodes_record(run: Run) -> NodesRecord | None:
    """The nodes of a run; None without a record that can be read, such as that of a run on one node."""
    try:
        return read_json(run.directory / NODES_FILE, NodesRecord)
    except (OSError, PrimusError):
        return None
