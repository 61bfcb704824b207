"""Replaces PyTorch's matrix products on the CPU by tuned forms, for any code that runs eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from primus.measure.product_forms import FORMS, Form, multiply_by_default
from primus.measure.product_recorder import describe_product
from primus.tuning.product_table import DEFAULT, TunedProduct
from primus.tuning.products import MatrixProduct, Operator

Key = tuple[Any, ...]


class ProductOverride:
    """Kernels of `aten` for the CPU that look up the form of a product. What is compiled does not call them.

    A look-up takes some microseconds; only operators with a tuned product are replaced.
    """

    def __init__(self, products: Iterable[TunedProduct]) -> None:
        self._forms = {each.product: FORMS[each.form] for each in products if each.form != DEFAULT}
        self._known: dict[Key, Form | None] = {}
        self._library: Any = None
        self.seen: dict[MatrixProduct, bool] = {}
        """Products that were computed since the installation, and whether a tuned form was used."""

    def install(self) -> None:
        """Replace the kernels."""
        if self._library is not None or not self._forms:
            return
        new_library: Any = torch.library.Library
        # Entries of the dispatcher for the key CPU, which is below autograd: the kernels see forward and backward
        # products, in all threads of the process, until `remove` restores the entries.
        self._library = new_library("aten", "IMPL")
        operators = {product.operator for product in self._forms}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the kernels that are replaced, which is intended
            if "mm" in operators:
                self._library.impl("mm", self._multiply, "CPU")
            if "bmm" in operators:
                self._library.impl("bmm", self._multiply_batch, "CPU")
            if "addmm" in operators:
                self._library.impl("addmm", self._add_product, "CPU")
                self._library.impl("addmm_", self._accumulate_product, "CPU")

    def remove(self) -> None:
        """Restore PyTorch's kernels."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _find_form(self, operator: Operator, a: torch.Tensor, b: torch.Tensor) -> Form | None:
        # Shapes and strides repeat in each step: a product is described once, and then found in the dictionary.
        key = (operator, a.shape, b.shape, a.stride(), b.stride(), a.dtype)
        if key not in self._known:
            product = describe_product(operator, a, b)
            form = self._forms.get(product) if product else None
            if product:
                self.seen[product] = form is not None
            self._known[key] = form
        return self._known[key]

    def _multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self._find_form("mm", a, b) or multiply_by_default)(a, b)

    def _multiply_batch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self._find_form("bmm", a, b) or multiply_by_default)(a, b)

    def _add_product(
        self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        form = self._find_form("addmm", a, b)
        if form is None or beta != 1 or alpha != 1:
            # With `out=` another operator is called, `addmm.out`: `addmm` itself would call this kernel again.
            result = a.new_empty((a.shape[0], b.shape[1]))
            return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=result)
        return form(a, b).add_(total)

    def _accumulate_product(
        self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        form = self._find_form("addmm", a, b)
        if form is None or beta != 1 or alpha != 1:
            return torch.addmm(total, a, b, beta=beta, alpha=alpha, out=total)
        return total.add_(form(a, b))
