"""Matrix products in the logs of libraries: hipBLASLt, TunableOp, oneDNN and MKL.

BLAS counts matrices by columns: its product of an m x n result with transposes (a, b) is PyTorch's product of an n x m
result with the transposes swapped.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from primus.errors import PrimusError
from primus.tuning import tunableop
from primus.tuning.hipblaslt import PROGRAM, parse_log_line
from primus.tuning.products import MatrixProduct, Operator, Order, ProductList, read_product_list, sort_products

HIPBLASLT_TYPES = {"f32_r": "float32", "bf16_r": "bfloat16", "f16_r": "float16", "f64_r": "float64"}
"""ROCm hipBLASLt documentation, hipblaslt-bench."""
TUNABLE_TYPES = {name: dtype for dtype, name in tunableop.TYPES.items()}
ONEDNN_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
MKL_TYPES = {"S": "float32", "D": "float64"}
"""First letter of a BLAS routine."""
TEMPLATE = re.compile(r"onednn_verbose.*,info,template:(.*)|onednn_verbose.*template:(.*)")
ONEDNN_TEMPLATE = (
    "operation,engine,primitive,implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time"
)
"""Fields of a line in oneDNN 3.x; a log states its own (oneDNN developer guide, "Verbose Mode")."""
MKL_LINE = re.compile(r"MKL_VERBOSE ([SD])GEMM(?:_BATCH_STRIDED)?\(([NTC]),([NTC]),(\d+),(\d+),(\d+),")
TUNABLE_LINE = re.compile(r"(Gemm\w*TunableOp)_(\w+?)_([NT])([NT]),[nt]{2}_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?")

Reader = Callable[[str], Iterator[MatrixProduct]]


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
        if text.lstrip().startswith("{"):
            counts.update({each.product: each.calls for each in read_product_list(file).products})
            continue
        found = Counter(parse_log(text))
        if not found:
            raise PrimusError(
                f"{file}: no matrix products of hipBLASLt, TunableOp, oneDNN or MKL",
                "log a few steps with HIPBLASLT_LOG_MASK=32, PYTORCH_TUNABLEOP_RECORD_UNTUNED=1, ONEDNN_VERBOSE=1 or "
                "MKL_VERBOSE=1",
            )
        counts.update(found)
    return sort_products(counts, ", ".join(file.name for file in files))


def parse_log(text: str) -> Iterator[MatrixProduct]:
    """The products of a log, in the order of its lines; a line that was cut off counts as none."""
    template = ONEDNN_TEMPLATE.split(",")
    for line in text.splitlines():
        if PROGRAM in line:
            product = _parse_hipblaslt(line)
        elif line.startswith("onednn_verbose"):
            stated = TEMPLATE.match(line)
            if stated:
                template = (stated[1] or stated[2]).strip().split(",")
            product = None if stated else _parse_onednn(line, template)
        elif line.startswith("MKL_VERBOSE"):
            product = _parse_mkl(line)
        else:
            product = _parse_tunable(line)
        if product is not None and min(product.m, product.n, product.k, product.batch) > 0:
            yield product


def create_product(
    m: int, n: int, k: int, transposes: str, dtype: str | None, batch: int = 1, out_dtype: str = ""
) -> MatrixProduct | None:
    """PyTorch's product from one that is counted by columns; None for a type that it does not have."""
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
    return create_product(m, n, k, transposes, dtype or None, batch, out)


def _parse_mkl(line: str) -> MatrixProduct | None:
    found = MKL_LINE.match(line)
    if found is None:
        return None
    m, n, k = map(int, found.group(4, 5, 6))
    return create_product(m, n, k, found[2] + found[3], MKL_TYPES[found[1]])


def _parse_tunable(line: str) -> MatrixProduct | None:
    found = TUNABLE_LINE.match(line.strip())
    if found is None:
        return None
    m, n, k = map(int, found.group(5, 6, 7))
    return create_product(m, n, k, found[3] + found[4], TUNABLE_TYPES.get(found[2]), int(found[8] or 1))


def _parse_onednn(line: str, template: Sequence[str]) -> MatrixProduct | None:
    """A matmul of oneDNN, which counts by rows: ``src:bf16::blocked:ab::f0 wei:...,512x1024:1024x2048,25.8``."""
    names = [name.strip() for name in template]
    # The mark and the version stand before the fields of the template, in newer versions a time stamp too.
    fields = line.split(",")[-len(names) :]
    values = dict(zip(names, fields, strict=False))
    primitive, problem = values.get("primitive"), values.get("problem_desc", "")
    if primitive not in ("matmul", "inner_product") or ":" not in problem or "exec" not in line.split(",")[:4]:
        return None
    parts = [part.split("x") for part in problem.split(":")[:2]]
    sizes = [list(map(int, part)) for part in parts if all(size.isdecimal() for size in part)]
    tensors = {part.split(":")[0].split("_")[0]: part for part in values.get("memory_descriptors", "").split()}
    if len(sizes) != 2 or not {"src", "wei", "dst"} <= tensors.keys() or min(map(len, sizes)) < 2:
        return None
    dtype, out = (ONEDNN_TYPES.get(tensors[name].split(":")[1], "") for name in ("src", "dst"))
    batch = sizes[0][0] if len(sizes[0]) == 3 else 1
    if not dtype:
        return None
    return MatrixProduct(
        operator="bmm" if batch > 1 else "mm",
        m=sizes[0][-2],
        n=sizes[1][-1],
        k=sizes[0][-1],
        batch=batch,
        order_a=_find_onednn_order(tensors["src"]),
        order_b=_find_onednn_order(tensors["wei"]),
        dtype=dtype,
        out_dtype="" if out == dtype else out,
    )


def _find_onednn_order(descriptor: str) -> Order:
    """The order of a tag such as ``ab`` or ``ba``; the last two letters are the matrix."""
    fields = descriptor.split(":")
    tag = fields[4] if len(fields) > 4 and not fields[4].startswith("f") else fields[3 if len(fields) > 3 else -1]
    tag = next((field for field in fields if re.fullmatch(r"[a-c]{2,3}", field)), tag)
    return "N" if list(tag[-2:]) == sorted(tag[-2:]) else "T"
