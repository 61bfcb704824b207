"""The switches above nodes as a file of the site names them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from primus.config.source import Leaf, Tree, read_yaml
from primus.config.text_file import format_path, read_config_text
from primus.errors import UsageError
from primus.machine.host_list import expand_hosts
from primus.machine.measurements import FILE
from primus.machine.placement.measured_places import read_measured_places
from primus.machine.placement.rank_order import Place

FORMS = (
    "write `spine1: {leaf1: node[01-16]}`, or lines of `node,spine,leaf` in a .csv file, or give Slurm's topology.conf"
)


def read_topology_file(path: Path) -> dict[str, Place]:
    """The switches above each node of a file, outermost first.

    A file holds nested switches with host lists (YAML), a line for each node (``.csv``: node, then its switches from
    the outermost), Slurm's ``topology.conf``, or the bandwidths that a preflight measured (``.json``).

    Raises:
        UsageError: The file cannot be read, or a node stands at two places.
    """
    shown = format_path(path)
    if path.suffix == ".json":
        return _read_measurements(path, shown)
    places: dict[str, Place] = {}
    for where, host, place in _read_entries(path, shown):
        if places.setdefault(host, place) != place:
            other = "/".join(places[host])
            raise UsageError(
                f"{where}: {host} is below {'/'.join(place)}, and also below {other}", "name each node once"
            )
    if not places:
        raise UsageError(f"{shown} names no node", FORMS)
    return places


def _read_measurements(path: Path, shown: str) -> dict[str, Place]:
    try:
        places = read_measured_places(path)
    except (OSError, msgspec.MsgspecError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{shown}: not the results of a preflight: {reason}", f"name RUN/{FILE} of one") from None
    if not places:
        raise UsageError(f"{shown} shows no groups of nodes", "its bandwidths between nodes are alike, or incomplete")
    return places


def _read_entries(path: Path, shown: str) -> Iterator[tuple[str, str, Place]]:
    """Origin, node and switches of each entry."""
    text = read_config_text(path, shown)
    if path.suffix == ".csv":
        for number, row in enumerate(csv.reader(text.splitlines()), 1):
            cells = [cell.strip() for cell in row]
            if cells and cells[0] and not cells[0].startswith("#"):
                yield f"{shown}:{number}", cells[0], tuple(cells[1:])
    elif re.search(r"^\s*(SwitchName|BlockName)=", text, re.MULTILINE | re.IGNORECASE):
        yield from _read_slurm_entries(text, shown)
    else:
        yield from _list_tree_entries(read_yaml(path, None, shown), ())


def _list_tree_entries(tree: Tree, above: Place) -> Iterator[tuple[str, str, Place]]:
    for name, item in tree.items():
        place = (*above, str(name))
        if not isinstance(item, Leaf):
            yield from _list_tree_entries(item, place)
            continue
        lists = item.value if isinstance(item.value, list) else [item.value]
        for each in lists:
            if not isinstance(each, str):
                raise UsageError(f"{item.origin}: {each!r} below {'/'.join(place)} is not a host list", FORMS)
            for host in expand_hosts(each):
                yield item.origin, host, place


def _read_slurm_entries(text: str, shown: str) -> Iterator[tuple[str, str, Place]]:
    """Entries of topology.conf(5): switches name their nodes or switches; blocks name their nodes."""
    parents: dict[str, str] = {}
    leaves: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = re.findall(r"(\w+)=(\S+)", line.partition("#")[0])
        values = {key.lower(): value for key, value in found}
        name = values.get("switchname") or values.get("blockname")
        if name is None:
            continue
        parents |= dict.fromkeys(expand_hosts(values.get("switches", "")), name)
        leaves.append((f"{shown}:{number}", name, values.get("nodes", "")))
    for where, name, nodes in leaves:
        place = [name]
        while (above := parents.get(place[0])) is not None and above not in place:
            place.insert(0, above)
        for host in expand_hosts(nodes):
            yield where, host, tuple(place)
