"""Where a node stands, as its variables say."""

from __future__ import annotations

from collections.abc import Mapping

from primus.machine.placement.rank_order import Place

PLACE_VARIABLE = "PRIMUS_NODE_PLACE"
"""Switches above a node, outermost first, separated by dots; for a site that knows them where jobs start."""


def read_own_place(environ: Mapping[str, str]) -> Place:
    """The switches above this node, by its variables; empty where they do not say.

    ``SLURM_TOPOLOGY_ADDR`` names them and the node where Slurm has a topology plug-in (srun(1)).
    """
    given = environ.get(PLACE_VARIABLE, "")
    if given:
        return tuple(given.split("."))
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # The name of a node may have dots, and stands last.
    return tuple(environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")[: len(kinds) - 1]) if kinds[-1] == "node" else ()
