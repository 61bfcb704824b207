"""Matrix products in the logs of hipBLASLt and TunableOp.

BLAS counts matrices by columns: its product of an m x n result with transposes (a, b) is PyTorch's product of an n x m
result with the transposes swapped.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from primus.errors import PrimusError
from primus.tuning.gemm import tunableop
from primus.tuning.gemm.hipblaslt import PROGRAM, parse_log_line
from primus.tuning.gemm.products import MatrixProduct, Operator, Order, ProductList, sort_products

HIPBLASLT_TYPES = {"f32_r": "float32", "bf16_r": "bfloat16", "f16_r": "float16", "f64_r": "float64"}
"""ROCm hipBLASLt documentation, hipblaslt-bench."""
TUNABLE_TYPES = {name: dtype for dtype, name in tunableop.TYPES.items()}
TUNABLE_LINE = re.compile(r"(Gemm\w*TunableOp)_(\w+?)_([NT])([NT]),[nt]{2}_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?")


def read_product_logs(files: Sequence[Path]) -> ProductList:
    """The products of logs, whose kind is found from their lines.

    Raises:
        PrimusError: A file cannot be read, or has no products.
    """
    counts: Counter[MatrixProduct] = Counter()
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise PrimusError(f"{file}: cannot be read: {error.strerror}") from None
        found = Counter(parse_log(text))
        if not found:
            raise PrimusError(
                f"{file}: no matrix products of hipBLASLt or TunableOp",
                "log a few steps with HIPBLASLT_LOG_MASK=32 or PYTORCH_TUNABLEOP_RECORD_UNTUNED=1",
            )
        counts.update(found)
    return sort_products(counts, ", ".join(file.name for file in files))


def parse_log(text: str) -> Iterator[MatrixProduct]:
    """The products of a log, in the order of its lines; a line that was cut off counts as none."""
    for line in text.splitlines():
        product = _parse_hipblaslt(line) if PROGRAM in line else _parse_tunable(line)
        if product is not None and min(product.m, product.n, product.k, product.batch) > 0:
            yield product


def create_product(
    sizes: tuple[int, int, int, int], transposes: str, dtype: str | None, out_dtype: str = ""
) -> MatrixProduct | None:
    """PyTorch's product from one of sizes m, n, k and batch by columns; None for a type that it does not have."""
    m, n, k, batch = sizes
    if dtype is None:
        return None
    orders: dict[str, Order] = {"N": "N", "T": "T", "C": "T"}
    operator: Operator = "bmm" if batch > 1 else "mm"
    return MatrixProduct(
        operator=operator,
        m=n,
        n=m,
        k=k,
        batch=batch,
        order_a=orders[transposes[1]],
        order_b=orders[transposes[0]],
        dtype=dtype,
        out_dtype="" if out_dtype == dtype else out_dtype,
    )


def _parse_hipblaslt(line: str) -> MatrixProduct | None:
    args = parse_log_line(line)
    if args is None:
        return None
    values = dict(itertools.pairwise(args))
    try:
        m, n, k, batch = (int(values.get(name, "1")) for name in ("-m", "-n", "-k", "--batch_count"))
    except ValueError:
        return None
    transposes = values.get("--transA", "N") + values.get("--transB", "N")
    dtype, out = (HIPBLASLT_TYPES.get(values.get(name, ""), "") for name in ("--a_type", "--d_type"))
    return create_product((m, n, k, batch), transposes, dtype or None, out)


def _parse_tunable(line: str) -> MatrixProduct | None:
    found = TUNABLE_LINE.match(line.strip())
    if found is None:
        return None
    sizes = int(found[5]), int(found[6]), int(found[7]), int(found[8] or 1)
    return create_product(sizes, found[3] + found[4], TUNABLE_TYPES.get(found[2]))
