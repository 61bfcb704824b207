"""Host lists as Slurm writes them: ``a[01-03,7],b``."""

from __future__ import annotations

import re

from primus.errors import UsageError

_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_RANGE = re.compile(r"\[([^\]]*)\]")


def expand_hosts(nodes: str) -> list[str]:
    """Host names in a Slurm host list: ``a[01-03,7],b`` (as `scontrol show hostnames` prints them).

    Raises:
        UsageError: A bracket is not closed, or does not hold numbers.
    """
    if nodes.count("[") != nodes.count("]"):
        raise UsageError(f"{nodes}: a bracket is not closed", "such as node[01-04,7],login")
    return [host for item in _ITEM.findall(nodes) for host in _expand_item(item.strip())]


def _expand_item(item: str) -> list[str]:
    match = _RANGE.search(item)
    if match is None:
        if set(item) & {*"[] \t"}:
            raise UsageError(f"{item}: not the name of a node", "such as node[01-04,7],login")
        return [item] if item else []
    found = []
    for part in match[1].split(","):
        first, _, last = part.strip().partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise UsageError(f"{item}: {part!r} is not a range of numbers", "such as node[01-04,7]")
        for number in range(int(first), int(last or first) + 1):
            found += _expand_item(f"{item[: match.start()]}{number:0{len(first)}}{item[match.end() :]}")
    return found
