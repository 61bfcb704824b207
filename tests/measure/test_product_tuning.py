"""Forms of a product agree with fp64, and replace the kernels of PyTorch where they win."""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec import structs

from primus.measure import product_tuning
from primus.measure.product_override import ProductOverride
from primus.measure.product_recorder import ProductRecorder
from primus.measure.product_tuning import create_operand_sets, tune_product
from primus.tuning.product_table import TunedProduct
from primus.tuning.products import MatrixProduct

ORDERS = list(itertools.product("NT", "NT"))


def make_product(**fields: object) -> MatrixProduct:
    return structs.replace(MatrixProduct(operator="mm", m=24, n=40, k=16), **fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_form_of_every_order_is_measured_and_right(dtype: str) -> None:
    for order_a, order_b in ORDERS:
        product = make_product(order_a=order_a, order_b=order_b, dtype=dtype)
        tuned = tune_product(product, 0.001)
        assert not tuned.problem
        names = {timing.form for timing in tuned.timings}
        assert {"default", "onednn"} <= names
        measured = [timing for timing in tuned.timings if not timing.problem]
        assert all(timing.median_us and timing.low and timing.high for timing in measured)
        assert dtype == "float64" or len(measured) == len(tuned.timings)


def test_operands_lie_in_memory_as_recorded() -> None:
    for order_a, order_b in ORDERS:
        product = make_product(order_a=order_a, order_b=order_b)
        with ProductRecorder() as recorder:
            a, b = create_operand_sets(product)[0]
            torch.mm(a, b)
        assert list(recorder.counts) == [product]


def test_a_form_with_wrong_elements_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = {"default": torch.mm, "onednn": lambda a, b: torch.zeros(a.shape[0], b.shape[1])}
    monkeypatch.setattr(product_tuning, "list_forms", lambda product, threads: forms)
    tuned = tune_product(make_product(m=256, n=256, k=256), 0.01)
    assert tuned.form == "default"
    assert "elements differ from the product in fp64" in tuned.timings[1].problem


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"m": 10**9}, "its operands need"),
        ({"dtype": "float7"}, "has no type float7"),
        ({"order_a": "S"}, "contiguous in neither dimension"),
        ({"operator": "scaled_mm"}, "one form on a CPU"),
    ],
)
def test_a_product_that_cannot_be_measured_has_a_reason(fields: dict[str, object], problem: str) -> None:
    tuned = tune_product(make_product(**fields), 0.01)
    assert problem in tuned.problem and tuned.form == "default"


def test_tuned_forms_replace_the_kernels_of_a_training_step_until_they_are_removed() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(24, 16), torch.randn(40, 16, requires_grad=True)
    total = torch.randn(24, 40)

    def compute() -> list[torch.Tensor]:
        w.grad = None
        (torch.nn.functional.linear(x, w).square().sum() + torch.addmm(total, x, w.t()).sum()).backward()
        assert w.grad is not None
        with torch.no_grad():
            added = total.clone().addmm_(x, w.t())
            scaled = torch.addmm(total, x, w.t(), beta=0.5, alpha=2.0)
        return [w.grad.clone(), added, scaled, torch.bmm(x[None], w.t()[None])]

    expected = compute()
    with ProductRecorder() as recorder:
        compute()
    products = [product for product in recorder.counts if "bmm" not in product.operator]
    override = ProductOverride(TunedProduct(product=product, form="onednn", is_kept=True) for product in products)
    override.install()
    try:
        for found, wanted in zip(compute(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
        assert set(override.seen) == set(products) and all(override.seen.values())
    finally:
        override.remove()
    override.seen.clear()
    compute()
    assert not override.seen
