"""Matrix products that a training step computes, as values that do not depend on the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, structs

Operator = Literal["mm", "addmm", "bmm", "baddbmm", "scaled_mm"]
Order = Literal["N", "T", "S"]
"""The layout of a matrix in memory: by rows, by columns (the transpose of a matrix by rows), or with other strides."""
OPERATORS: tuple[Operator, ...] = ("mm", "addmm", "bmm", "baddbmm", "scaled_mm")


class MatrixProduct(Struct, frozen=True, kw_only=True, order=True):
    """A product of an m x k and a k x n matrix, as PyTorch computes it."""

    operator: Operator
    m: int
    n: int
    k: int
    batch: int = 1
    """Products of one call."""
    order_a: Order = "N"
    order_b: Order = "N"
    dtype: str = "float32"
    """Type of both operands, as PyTorch names it."""
    out_dtype: str = ""
    """Type of the result; empty for that of the operands."""

    @property
    def key(self) -> str:
        """Names the product in files and tables: ``mm 2048x512x256 NT float32``."""
        batch = f"{self.batch}*" if self.batch > 1 or "bmm" in self.operator else ""
        out = f"->{self.out_dtype}" if self.out_dtype else ""
        sizes = f"{batch}{self.m}x{self.n}x{self.k}"
        return f"{self.operator} {sizes} {self.order_a}{self.order_b} {self.dtype}{out}"

    @property
    def flop(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * self.batch * self.m * self.n * self.k


class ProductCount(Struct, frozen=True, kw_only=True):
    """A product and how often it is computed."""

    product: MatrixProduct
    calls: int


class ProductList(Struct, frozen=True, kw_only=True):
    """The products of a training step or of a log."""

    source: str
    """The source of the products: ``a step on fake tensors``, or the names of logs."""
    products: list[ProductCount]


def sort_products(counts: Mapping[MatrixProduct, int], source: str) -> ProductList:
    """The products with their numbers of calls, those with most work first."""
    found = [ProductCount(product=product, calls=calls) for product, calls in counts.items()]
    found.sort(key=lambda each: (-each.calls * each.product.flop, each.product))
    return ProductList(source=source, products=found)


def multiply_counts(found: ProductList, factor: int) -> ProductList:
    """The products of `factor` micro batches."""
    products = [structs.replace(each, calls=each.calls * factor) for each in found.products]
    return structs.replace(found, products=products)
