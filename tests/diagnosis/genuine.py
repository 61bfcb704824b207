"""Lines that real programs wrote, with the signature that each one shows.

Those marked `observed` were written by torchrun 2.15 on a CPU or by Slurm 22.05.8; the others are quoted from public
threads and sources. `row` is their number in the survey of failures from which the table of signatures was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Line(NamedTuple):
    signature: str
    row: int
    source: str
    text: str


def _line(text: str) -> Line:
    signature, row, source, line = text.split("\t")
    return Line(signature, int(row or 0), source, line)


LINES = [_line(text) for text in (HERE / "genuine.tsv").read_text().splitlines()[1:]]

HARMLESS = (HERE / "harmless.txt").read_text().splitlines()
"""Advice, and lines of healthy runs."""
