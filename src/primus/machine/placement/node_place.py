"""Where a node stands, as its variables and its GPUs say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from primus.machine.facts import Device
from primus.machine.placement.rank_order import Place

LEAST_ORDERED = 3
"""Nodes of a job from which their order matters: of two, node 0 remains the first."""
TOPOLOGY_VARIABLE = "PRIMUS_TOPOLOGY_FILE"
"""File of the switches above each node, unless an option names another one."""
PLACE_VARIABLE = "PRIMUS_NODE_PLACE"
"""Switches above a node, outermost first, separated by dots; for a site that knows them where jobs start."""


def read_place_variables(environ: Mapping[str, str]) -> Place:
    """The switches above this node, by its variables; empty where they do not say.

    ``SLURM_TOPOLOGY_ADDR`` names them and the node where Slurm has a topology plug-in (srun(1)).
    """
    given = environ.get(PLACE_VARIABLE, "")
    if given:
        return tuple(given.split("."))
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # The name of a node may have dots, and stands last.
    return tuple(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[: len(kinds) - 1]) if kinds[-1] == "node" else ()


def find_fabric(devices: Iterable[Device]) -> Place:
    """The NVLink domain of a node's GPUs as its innermost level; empty without one domain for all of them."""
    fabrics = {device.fabric for device in devices}
    fabric = fabrics.pop() if len(fabrics) == 1 else None
    return (f"nvlink-{fabric}",) if fabric else ()
