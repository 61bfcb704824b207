"""Finds the fastest form of a matrix product on a CPU: forms measured in turn, checked, and judged against noise."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from statistics import median

import psutil
import torch

from primus.measure.gemm import SEED, Operands, wrong_elements
from primus.measure.product_forms import Form, list_forms
from primus.statistics import bootstrap_interval
from primus.tuning.product_table import DEFAULT, FormTiming, TunedProduct
from primus.tuning.products import MatrixProduct

NUM_SETS = 3
"""Sets of operands in turn: a step does not find them in the innermost cache either."""
WARM_UP_ROUNDS = 2
"""Rounds that are dropped: the first calls allocate workspaces and create oneDNN's primitives."""
FEWEST_ROUNDS, MOST_ROUNDS = 12, 200
"""A product that takes seconds still gets ten ratios for its interval; more than 200 hardly narrow it."""
LEVEL = 0.99
"""Of the interval that a winner must keep below 1: several forms are compared with the default at once."""
MEMORY_SHARE = 0.5
"""Of the available memory that operands may take."""


def describe_cpu_library(device_name: str) -> dict[str, str]:
    """What tuned forms depend on, by name: the device, PyTorch with its instruction set, and the threads."""
    return {
        "device": device_name,
        "torch": str(torch.__version__),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def tune_product(product: MatrixProduct, measure_s: float) -> TunedProduct:
    """Measure the forms of a product in turn for about `measure_s` seconds.

    The fastest form wins if the interval of its ratio to the default contains gains only.
    """
    problem = _find_obstacle(product)
    if problem:
        return TunedProduct(product=product, problem=problem)
    try:
        sets = create_operand_sets(product)
        forms, problems = _check_forms(product, sets)
    except (RuntimeError, TypeError) as error:
        return TunedProduct(product=product, problem=_take_first_line(error))
    # Without the default there is nothing to compare with.
    if DEFAULT not in forms:
        return TunedProduct(product=product, problem=problems[DEFAULT])
    samples = _measure_in_turn(forms, sets, measure_s)
    timings = [_judge_form(name, samples[name], samples[DEFAULT]) for name in forms]
    timings += [FormTiming(form=name, problem=problem) for name, problem in problems.items()]
    faster = [timing for timing in timings if timing.form != DEFAULT and timing.high and timing.high < 1.0]
    best = min(faster, key=lambda timing: timing.ratio or math.inf, default=None)
    return TunedProduct(product=product, form=best.form if best else DEFAULT, timings=timings)


def create_operand_sets(product: MatrixProduct) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sets of normal random operands in the order in memory that the product has.

    Raises:
        RuntimeError: The CPU has no such type.
    """
    kind = getattr(torch, product.dtype)
    generator = torch.Generator().manual_seed(SEED)

    def create_matrix(rows: int, columns: int, order: str) -> torch.Tensor:
        stored = (columns, rows) if order == "T" else (rows, columns)
        batch = (product.batch,) if "bmm" in product.operator else ()
        made = torch.randn((*batch, *stored), generator=generator).to(kind)
        return made.transpose(-2, -1) if order == "T" else made

    return [
        (create_matrix(product.m, product.k, product.order_a), create_matrix(product.k, product.n, product.order_b))
        for _ in range(NUM_SETS)
    ]


def _find_obstacle(product: MatrixProduct) -> str:
    """Why a product is not measured; empty if it can be."""
    if product.operator == "scaled_mm":
        return "scaled products have one form on a CPU"
    if "S" in product.order_a + product.order_b:
        return "an operand is contiguous in neither dimension"
    if not hasattr(torch, product.dtype):
        return f"this version of PyTorch has no type {product.dtype}"
    elements = product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
    # In fp32, in which operands are made and checked, and as copies that a form makes.
    need, have = 4 * (NUM_SETS + 1) * elements, MEMORY_SHARE * psutil.virtual_memory().available
    if need > have:
        return f"its operands need {need / 2**30:.1f} GiB, and {have / 2**30:.1f} GiB may be used"
    return ""


def _check_forms(
    product: MatrixProduct, sets: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[dict[str, Form], dict[str, str]]:
    """The forms whose result agrees with the product in fp64, and what is wrong with the others."""
    usable: dict[str, Form] = {}
    problems: dict[str, str] = {}
    # Before any timing: a form that computes something else may well be the fastest.
    a, b = sets[0]
    for name, form in list_forms(product, torch.get_num_threads()).items():
        try:
            result = form(a, b)
        except RuntimeError as error:
            problems[name] = _take_first_line(error)
            continue
        wrong = sum(wrong_elements(checked) for checked in _list_matrices(a, b, result))
        if wrong:
            problems[name] = f"{wrong} elements differ from the product in fp64"
        else:
            usable[name] = form
    return usable, problems


def _list_matrices(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Iterator[Operands]:
    """The products of a batch, the first and the last."""
    if a.dim() == 2:
        yield Operands(a, b, out)
        return
    for index in {0, len(a) - 1}:
        yield Operands(a[index], b[index], out[index])


def _measure_in_turn(
    forms: Mapping[str, Form], sets: list[tuple[torch.Tensor, torch.Tensor]], measure_s: float
) -> dict[str, list[float]]:
    """Seconds of each form by round; all forms of a round see the same machine."""
    samples: dict[str, list[float]] = {name: [] for name in forms}
    names = list(forms)
    started, number = time.perf_counter(), 0
    while number < MOST_ROUNDS and (number < FEWEST_ROUNDS or time.perf_counter() - started < measure_s):
        a, b = sets[number % len(sets)]
        # Each round begins with another form: no form always follows the same one, which leaves its data in the cache.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            forms[name](a, b)
            samples[name].append(time.perf_counter() - begin)
        number += 1
    return {name: times[WARM_UP_ROUNDS:] for name, times in samples.items()}


def _judge_form(name: str, times: list[float], base: list[float]) -> FormTiming:
    # Ratios within a round: a change of the clock or of the load hits both times, and cancels.
    ratios = [own / other for own, other in zip(times, base, strict=True)]
    interval = bootstrap_interval(ratios, median, level=LEVEL)
    return FormTiming(
        form=name, median_us=median(times) * 1e6, ratio=interval.estimate, low=interval.low, high=interval.high
    )


def _take_first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
