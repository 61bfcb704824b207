"""Softmax of rows: GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, MeasuredCall, Mode, parse_sizes

ROWS = 4096


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark softmax`."""

    columns: str = "1024:16384:x4"
    """Length of the rows: a number, a list, or a range."""


def check_options(options: Options) -> None:
    """Refuse lengths that are not positive."""
    parse_sizes(options.columns, "--columns")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each length."""
    for columns in parse_sizes(options.columns, "--columns"):
        yield from context.measure({"rows": ROWS, "columns": columns}, partial(make_call, columns, context))


def make_call(columns: int, context: BenchmarkContext, mode: Mode) -> MeasuredCall:
    """The call for one length; `count_sets` says how many inputs the cache does not hold."""
    import torch

    inputs = [
        torch.randn(ROWS, columns, device=context.device)
        for _ in range(context.count_sets(2 * 4 * ROWS * columns, mode))
    ]
    outputs = [torch.empty_like(each) for each in inputs]
    calls = 0

    def call() -> None:
        nonlocal calls
        calls = (calls + 1) % len(inputs)
        torch.softmax(inputs[calls], dim=1, out=outputs[calls])

    moved_bytes = inputs[0].nbytes + outputs[0].nbytes
    return MeasuredCall(call=call, moved_bytes=moved_bytes, value="bytes", convention="one read, one write; fp32")
