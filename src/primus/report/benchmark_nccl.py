"""The result of `benchmark collectives` as the table that nccl-tests and rccl-tests print."""

from __future__ import annotations

from collections.abc import Iterator

from primus.benchmark import BenchmarkResult, BenchmarkRow

TYPES = {"fp32": "float", "fp16": "half", "bf16": "bfloat16"}
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
SUMS = ("all_reduce", "reduce_scatter")
ROOTED = ("broadcast",)
BY_SHARE = ("all_gather", "reduce_scatter", "all_to_all")
"""Operations whose count is that of one rank (NVIDIA/nccl-tests, GetCollByteCount of each)."""
HEADER = (
    "#       size         count      type   redop    root     time   algbw   busbw  #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"
)


def format_nccl_table(result: BenchmarkResult) -> str:
    """A table for each operation and group; a failed case is a comment."""
    return "\n".join(_list_lines(result)) + "\n"


def _list_lines(result: BenchmarkResult) -> Iterator[str]:
    last = None
    for row in result.rows:
        title = f"# {row.case['op']}, {row.case['ranks']} ranks from rank {row.case['first_rank']}"
        if title != last:
            yield f"{title}\n#\n{HEADER}"
        last = title
        yield _format_line(row)


def _format_line(row: BenchmarkRow) -> str:
    size, operation, dtype = row.case["size_bytes"], str(row.case["op"]), str(row.case["dtype"])
    if row.timing is None:
        return f"# {size} B: {row.problem}"
    assert isinstance(size, int) and isinstance(row.case["ranks"], int)
    count = size // ITEM_BYTES[dtype] // (row.case["ranks"] if operation in BY_SHARE else 1)
    reduction, root = "sum" if operation in SUMS else "none", 0 if operation in ROOTED else -1
    return (
        f"{size:>12} {count:>13} {TYPES[dtype]:>9} {reduction:>7} {root:>7} {row.timing.median_s * 1e6:>8.2f} "
        f"{row.figures['algbw_gb_per_s']:>7.2f} {row.figures['busbw_gb_per_s']:>7.2f} {row.wrong:>7}"
    )
