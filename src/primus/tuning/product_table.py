"""Tables of tuned matrix products: the fastest form of each, and whether real steps were faster with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, field, structs

from primus.errors import PrimusError
from primus.runs.files import read_json, write_json
from primus.runs.tuned_files import TunedFile
from primus.tuning.products import MatrixProduct

FORMAT = 1
DEFAULT = "default"
"""The form that PyTorch chooses itself."""
TUNED_STEPS = (False, True, True, False)
"""Whether the steps of a comparison use tuned forms, in turn: a drift of the machine's speed cancels out in each
group."""
COMPARISON_VARIABLE = "PRIMUS_TUNED_GEMM_COMPARE"
"""Set for a run whose steps compare; see `is_tuned_step`."""
RECORD_VARIABLE = "PRIMUS_RECORD_GEMM"
"""File for the matrix products of one step of a run."""


class FormTiming(Struct, frozen=True, kw_only=True):
    """The measured time of one form of a product."""

    form: str
    median_us: float | None = None
    ratio: float | None = None
    """Median ratio of its time to that of the default form, measured in turn."""
    low: float | None = None
    high: float | None = None
    """99 % interval of the ratio."""
    problem: str = ""
    """Why it cannot be used: not supported, or wrong elements."""


class TunedProduct(Struct, frozen=True, kw_only=True):
    """The forms of a product, and which one is the fastest beyond the noise."""

    product: MatrixProduct
    form: str = DEFAULT
    timings: list[FormTiming] = []
    problem: str = ""
    """Why it was not tuned."""
    is_kept: bool = False
    """Whether real steps were faster with it."""

    @property
    def ratio(self) -> float:
        """Time of the chosen form relative to that of the default."""
        return next((timing.ratio for timing in self.timings if timing.form == self.form and timing.ratio), 1.0)


class StepComparison(Struct, frozen=True, kw_only=True):
    """Real steps with tuned products and without, in turn."""

    experiment: str
    created: float
    num_steps: int
    ratio: float
    """Median ratio of the times with and without."""
    low: float
    high: float
    """95 % interval of the ratio."""

    @property
    def is_faster(self) -> bool:
        """Whether the interval contains gains only."""
        return self.high < 1.0

    def __str__(self) -> str:
        return f"step time x {self.ratio:.3f}, 95 % interval {self.low:.3f} to {self.high:.3f}"


class ProductTable(TunedFile, frozen=True, kw_only=True):
    """A file of tuned products for one device, library and number of threads."""

    format: int = FORMAT
    products: list[TunedProduct] = field(default_factory=list)
    comparisons: list[StepComparison] = field(default_factory=list)
    """The newest of each experiment."""


def read_product_table(path: Path) -> ProductTable:
    """Read a table.

    Raises:
        PrimusError: It is missing or damaged, of another format, or names a product twice.
    """
    table = read_json(path, ProductTable)
    if table.format != FORMAT:
        raise PrimusError(f"{path}: format {table.format}, this version reads {FORMAT}", "run tune gemm again")
    keys = [each.product.key for each in table.products]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice:
        raise PrimusError(f"{path}: damaged: {twice} is there twice", "run tune gemm again")
    return table


def write_product_table(path: Path, table: ProductTable) -> None:
    """Replace `path` in one step."""
    write_json(path, table)


def merge_tables(old: ProductTable | None, new: ProductTable) -> ProductTable:
    """`new`, and the products and comparisons of `old` that it does not have."""
    if old is None or old.valid_for != new.valid_for:
        return new
    keys = {each.product.key for each in new.products}
    names = {each.experiment for each in new.comparisons}
    return structs.replace(
        new,
        products=[*new.products, *(each for each in old.products if each.product.key not in keys)],
        comparisons=[*(each for each in old.comparisons if each.experiment not in names), *new.comparisons],
    )


def keep_products(products: Sequence[TunedProduct], comparison: StepComparison | None) -> list[TunedProduct]:
    """`products`, kept for later runs if the comparison contains gains only."""
    is_kept = comparison is not None and comparison.is_faster
    return [structs.replace(each, is_kept=is_kept and each.form != DEFAULT) for each in products]


def is_tuned_step(step: int) -> bool:
    """Whether step `step`, counted from 1, of a comparison uses tuned forms."""
    return TUNED_STEPS[(step - 1) % len(TUNED_STEPS)]
