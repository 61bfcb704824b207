"""Forms of a matrix product on a CPU: ways to compute it that give the same values at another speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from primus.tuning.product_table import DEFAULT
from primus.tuning.products import MatrixProduct

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the product of two matrices, or of two batches of them."""


def multiply_by_default(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's own choice: MKL in fp32 on x86, oneDNN in bf16. Calls the variant with `out`, which has the kernel of
    the plain one and is not replaced where that is."""
    if a.dim() == 3:
        return torch.bmm(a, b, out=a.new_empty((a.shape[0], a.shape[1], b.shape[2])))
    return torch.mm(a, b, out=a.new_empty((a.shape[0], b.shape[1])))


def multiply_by_onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """oneDNN by the operator that Inductor uses for linear layers, which reads a matrix in any order."""
    operator: Any = torch.ops.mkldnn._linear_pointwise
    product: torch.Tensor = operator(a, b.t(), None, "none", [], "")
    return product


def multiply_packed_by_onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """oneDNN on the order that it is fastest with: both operands with their inner dimension contiguous."""
    return multiply_by_onednn(a.contiguous(), b.t().contiguous().t())


def multiply_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's choice on copies by rows."""
    return multiply_by_default(a.contiguous(), b.contiguous())


def multiply_on_one_thread(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's choice on one thread: small products lose more by the threads' synchronization than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return multiply_by_default(a, b)
    finally:
        torch.set_num_threads(threads)


FORMS: dict[str, Form] = {
    DEFAULT: multiply_by_default,
    "onednn": multiply_by_onednn,
    "onednn-packed": multiply_packed_by_onednn,
    "rows": multiply_rows,
    "one-thread": multiply_on_one_thread,
}


def list_forms(product: MatrixProduct, threads: int) -> dict[str, Form]:
    """The forms that can differ from each other for a product, the default first."""
    names = [DEFAULT]
    if product.batch == 1 and "bmm" not in product.operator and torch.backends.mkldnn.is_available():
        names.append("onednn")
        if (product.order_a, product.order_b) != ("N", "T"):
            names.append("onednn-packed")
    if (product.order_a, product.order_b) != ("N", "N"):
        names.append("rows")
    if threads > 1:
        names.append("one-thread")
    return {name: FORMS[name] for name in names}
