"""Records the matrix products of a step, on every device and on fake tensors: nothing depends on a library's log."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primus.tuning.gemm.products import MatrixProduct, Operator, Order

aten: Any = torch.ops.aten
OPERATIONS: dict[Any, tuple[Operator, int]] = {
    aten.mm: ("mm", 0),
    aten.addmm: ("addmm", 1),
    aten.addmm_: ("addmm", 1),
    aten.bmm: ("bmm", 0),
    aten.baddbmm: ("baddbmm", 1),
    aten.baddbmm_: ("baddbmm", 1),
    aten._scaled_mm: ("scaled_mm", 0),
}
"""Operator, and place of its first matrix among the arguments. `linear`, `matmul` and `einsum` end in these."""


class ProductRecorder(TorchDispatchMode):
    """Counts the matrix products inside of a `with`.

    On fake tensors, values that Python reads are 1: a branch on a value takes the common case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[MatrixProduct] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = OPERATIONS.get(func.overloadpacket)
        if found is not None:
            operator, first = found
            product = describe_product(operator, args[first], args[first + 1], (kwargs or {}).get("out_dtype"))
            if product is not None:
                self.counts[product] += 1
        elif func is aten._local_scalar_dense.default and _is_without_data(args[0]):
            kind = args[0].dtype  # a tensor made here would be fake as well
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return func(*args, **(kwargs or {}))


def describe_product(
    operator: Operator, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None
) -> MatrixProduct | None:
    """The product of two operands; None if it is empty."""
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if not min(batch, m, n, k):
        return None
    same = out_dtype is None or out_dtype == a.dtype
    return MatrixProduct(
        operator=operator,
        m=m,
        n=n,
        k=k,
        batch=batch,
        order_a=find_order(a),
        order_b=find_order(b),
        dtype=format_dtype(a.dtype),
        out_dtype="" if same or out_dtype is None else format_dtype(out_dtype),
    )


def find_order(matrix: torch.Tensor) -> Order:
    """How the last two dimensions lie in memory."""
    rows, columns = matrix.stride()[-2:]
    if columns == 1 and rows >= matrix.shape[-1]:
        return "N"
    return "T" if rows == 1 and columns >= matrix.shape[-2] else "S"


def format_dtype(kind: torch.dtype) -> str:
    """``float32``."""
    return str(kind).removeprefix("torch.")


def _is_without_data(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta
