"""Tune the matrix products of an experiment for this device, and use them in later runs if real steps are faster."""

from __future__ import annotations

from collections.abc import Sequence

from primus.errors import UsageError
from primus.task import TaskContext
from primus.tasks.tune import _hipblaslt, _products
from primus.tasks.tune._gemm_options import GemmOptions

Options = GemmOptions
OVERRIDES = True


def run(options: GemmOptions, context: TaskContext) -> None:
    """Collect, tune, check and keep.

    Raises:
        UnfitError: A program, a package or a device is missing.
        UsageError: The options or the experiment are invalid, or this machine is tuning already.
        PrimusError: A log has no products, or no product can be tuned.
    """
    if options.config is None and not options.shapes:
        raise UsageError("tune gemm needs --config FILE, or --shapes LOG ...", "for example --config experiment.yaml")
    if options.config is None and context.overrides:
        raise UsageError(f"{context.overrides[0]} changes an experiment, and none is given", "add --config FILE")
    if options.config is None or _products.uses_accelerators(options, context):
        _hipblaslt.tune_logged_products(options, context)
        return
    _products.tune_experiment(options, context)


def plan_notes(options: GemmOptions, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    if options.config is None:
        return [f"tunes the products of {', '.join(options.shapes)} into {options.output}"]
    return _products.list_plan_notes(options, context)
