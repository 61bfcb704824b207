"""Recorded machines from their compact descriptions: `<name>.txt` grows into a tree of the kernel's files.

A description has blocks. `[table gpu]` holds a header and rows. `[path | gpu]` is a file for each row of the table,
whose `{gpu.column}` is filled in; `[path | gpu peer | gpu.card == peer.card]` is one for each two different rows for
which that holds. `{next}` in a path counts the entries of its folder. A block without `|` is one file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

Rows = list[SimpleNamespace]
HERE = Path(__file__).parent


def grow(name: str, folder: Path) -> Path:
    """Write the machine `name` under `folder`, which becomes its root."""
    tables: dict[str, Rows] = {}
    counts: Counter[str] = Counter()
    for header, body in _blocks((HERE / f"{name}.txt").read_text()):
        if header.startswith("table "):
            tables[header.removeprefix("table ")] = _rows(body)
            continue
        path, _, rest = (part.strip() for part in header.partition("|"))
        for row in _combinations(tables, rest):
            before = path.partition("{next}")[0].format(**row)
            file = folder / path.format(**row, next=counts[before])
            counts[before] += 1
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body.format(**row))
    return folder


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    parts = re.split(r"^\[(.+)\]\n", text, flags=re.MULTILINE)
    yield from zip(parts[1::2], (part.rstrip("\n") + "\n" for part in parts[2::2]), strict=True)


def _rows(body: str) -> Rows:
    header, *lines = [line.split() for line in body.splitlines() if line.strip()]
    return [SimpleNamespace(**dict(zip(header, line, strict=True))) for line in lines]


def _combinations(tables: dict[str, Rows], rest: str) -> Iterator[dict[str, SimpleNamespace]]:
    """Rows by name; a name that is no table stands for another row of the first one."""
    each, _, condition = (part.strip() for part in rest.partition("|"))
    names = each.split()
    for rows in product(*[tables.get(name, tables[names[0]]) for name in names]):
        chosen = dict(zip(names, rows, strict=True))
        if len(set(map(id, rows))) == len(rows) and _holds(condition, chosen):
            yield chosen


def _holds(condition: str, chosen: dict[str, SimpleNamespace]) -> bool:
    if not condition:
        return True
    one, operator, other = (f"{{{word}}}".format(**chosen) if "." in word else word for word in condition.split())
    return (one == other) == (operator == "==")
