"""A benchmark whose rank 1 exits after the first case."""

from __future__ import annotations

import os
from collections.abc import Iterator

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, MeasuredCall


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark vanish`."""


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """Two cases, of which rank 1 measures one."""
    for number in range(2):
        if number and context.rank == 1:
            os._exit(7)
        yield from context.measure({"number": number}, lambda mode: MeasuredCall(call=lambda: None, value="time"))
