"""Tuned matrix products in a run: which table is used, and the line that says how many products it applies to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from primus.callback import Callback, StepReport
from primus.errors import PrimusError
from primus.runs.files import write_text
from primus.runs.tuned_files import PRODUCTS_VARIABLE, TABLE_FILE, explain_mismatch
from primus.tuning.product_table import (
    COMPARISON_VARIABLE,
    DEFAULT,
    RECORD_VARIABLE,
    ProductTable,
    StepComparison,
    is_tuned_step,
    read_product_table,
)
from primus.tuning.products import sort_products, write_product_list

if TYPE_CHECKING:
    from primus.measure.product_override import ProductOverride
    from primus.measure.product_recorder import ProductRecorder
    from primus.session.session import Session

RECORDED_STEP = 2
"""The first step may also contain initializations."""


def add_tuned_products(session: Session, environ: Mapping[str, str], *, compiled: bool) -> None:
    """Add the callbacks that use or record matrix products, where the environment asks for them."""
    if session.engine.device_type != "cpu" or "torch" not in {session.engine.library, *session.engine.versions}:
        return
    record = environ.get(RECORD_VARIABLE)
    if record and session.processes.is_first:
        session.callbacks.add(ProductRecording(session, Path(record)))
    path = _find_table(session, environ.get(PRODUCTS_VARIABLE))
    if path is None:
        return
    try:
        table, reason = _load_table(session, path, compiled=compiled)
    except PrimusError as error:  # a run does not fail because it could be faster
        table, reason = None, error.problem
    if table is None:
        session.print_line(f"tuned matrix products: not used: {reason}")
        session.append_event("tuned_products", table=str(path), applied=0, reason=reason)
        return
    session.callbacks.add(TunedProducts(session, table, compares=bool(environ.get(COMPARISON_VARIABLE))))


def _find_table(session: Session, given: str | None) -> Path | None:
    """The table of this run, else the given one if the run begins; None without one."""
    own = session.attempt.run.directory / TABLE_FILE
    if own.is_file():
        return own
    # A run that began without a table continues without one: another form of a product rounds differently.
    is_resumed = session.attempt.number > 0 or session.step > 0
    return Path(given) if given and not is_resumed else None


def _load_table(session: Session, path: Path, *, compiled: bool) -> tuple[ProductTable | None, str]:
    """The table, or why it is not used."""
    from primus.measure.product_forms import FORMS
    from primus.measure.product_tuning import describe_cpu_library

    table = read_product_table(path)
    unknown = next((each.form for each in table.products if each.form not in FORMS), None)
    if unknown:
        return None, f"{path}: this version has no form '{unknown}'"
    if compiled:
        return None, "the model is compiled, and Inductor chooses the kernels (see tune inductor)"
    reason = explain_mismatch(table.valid_for, describe_cpu_library(session.engine.device_name))
    if reason:
        return None, f"{reason}; run tune gemm again"
    if session.trainer.training.deterministic:
        return None, "deterministic: true"
    if not any(each.is_kept for each in table.products):
        newest = max(table.comparisons, key=lambda each: each.created, default=None)
        return None, f"no gain in real steps ({newest})" if newest else "no form is faster than the default"
    own = session.attempt.run.directory / TABLE_FILE
    if session.processes.is_first and path != own:
        write_text(own, path.read_text(encoding="utf-8"))
    return table, ""


class TunedProducts(Callback):
    """Uses a table from the first step on; in a comparison only in the steps of `is_tuned_step`."""

    def __init__(self, session: Session, table: ProductTable, *, compares: bool) -> None:
        from primus.measure.product_override import ProductOverride

        self._session, self._compares = session, compares
        self._override: ProductOverride = ProductOverride(each for each in table.products if each.is_kept)
        self._comparison = _find_comparison(table, session.experiment.exp_name)
        self._is_reported = False

    def before_step(self) -> None:
        # Both calls are free if nothing changes, so that a run that does not compare needs no other path.
        if not self._compares or is_tuned_step(self._session.step + 1):
            self._override.install()
        else:
            self._override.remove()

    def after_report(self, report: StepReport) -> None:
        # Not in `before_train`: the shapes of the products are known after the first step.
        if self._is_reported or not self._override.seen:
            return
        self._is_reported = True
        applied, num_products = sum(self._override.seen.values()), len(self._override.seen)
        gain = ""
        if self._comparison is not None:
            day = time.strftime("%Y-%m-%d", time.localtime(self._comparison.created))
            gain = f"; steps were {1 / self._comparison.ratio - 1:.1%} faster on {day}"
        self._session.print_line(f"tuned matrix products: {applied} of {num_products} shapes use a tuned form{gain}")
        self._session.append_event("tuned_products", applied=applied, shapes=num_products)

    def close(self) -> None:
        self._override.remove()


class ProductRecording(Callback):
    """Writes the matrix products of one step to a file."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session, self._path = session, path
        self._recorder: ProductRecorder | None = None
        self._mode = ExitStack()

    def before_step(self) -> None:
        if self._session.step + 1 == RECORDED_STEP:
            from primus.measure.product_recorder import ProductRecorder

            self._recorder = ProductRecorder()
            self._mode.enter_context(self._recorder)

    def after_step(self) -> None:
        if self._recorder is not None:
            self._mode.close()
            write_product_list(self._path, sort_products(self._recorder.counts, f"step {RECORDED_STEP} of a run"))
            self._recorder = None


def _find_comparison(table: ProductTable, experiment: str) -> StepComparison | None:
    """The comparison of this experiment, else the newest."""
    found = sorted(table.comparisons, key=lambda each: (each.experiment == experiment, each.created))
    return found[-1] if found and any(each.form != DEFAULT for each in table.products) else None
