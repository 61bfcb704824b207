"""Tune the matrix products of an experiment for AMD GPUs, and use them in later runs if real steps are faster."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus.errors import UsageError
from primus.runs import tuned_files
from primus.task import TaskContext
from primus.tuning.gemm import gpu_search, traced_products
from primus.tuning.gemm.gpu_tuner import GpuTuner
from primus.tuning.gemm.hipblaslt import PROGRAM
from primus.tuning.gemm.hipblaslt_tuner import HipblasltTuner
from primus.tuning.gemm.options import GemmOptions
from primus.tuning.gemm.tunableop_tuner import TunableOpTuner, is_record

Options = GemmOptions
OVERRIDES = True


def run(options: GemmOptions, context: TaskContext) -> None:
    """Collect, tune, compare and keep.

    Raises:
        UnfitError: A program, a package or an AMD GPU is missing.
        UsageError: The options or the experiment are invalid, or another process tunes into the same file.
        PrimusError: A log has no products, or no product can be tuned.
    """
    if options.config is None and not options.shapes:
        raise UsageError("tune gemm needs --config FILE, or --shapes LOG ...", "for example --config experiment.yaml")
    if options.config is None and context.overrides:
        raise UsageError(f"{context.overrides[0]} changes an experiment, and none is given", "add --config FILE")
    if options.config is not None:
        traced_products.check_accelerators(options, context)
    gpu_search.tune_on_gpus(_choose_tuner(options, context), options, context)


def plan_notes(options: GemmOptions, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    tuner = _choose_tuner(options, context)
    name = "" if options.config is None else traced_products.resolve_experiment(options, context).experiment.exp_name
    notes = [f"tunes the products of {', '.join(options.shapes) or name} by {tuner.name} into {tuner.output}"]
    if name:
        notes.append(f"later runs use {tuned_files.find_store(context.environ)}/{tuner.kind}-*.json if it is faster")
    return notes


def _choose_tuner(options: GemmOptions, context: TaskContext) -> GpuTuner[Any]:
    tool = options.tool
    if tool == "auto":
        # A path that the user names is not replaced by another tool.
        is_missing = options.bench == PROGRAM and shutil.which(PROGRAM, path=context.environ.get("PATH")) is None
        is_recorded = bool(options.shapes) and all(is_record(Path(shape)) for shape in options.shapes)
        tool = "tunableop" if is_missing or is_recorded else "hipblaslt"
        if is_missing and not is_recorded:
            context.say(f"{PROGRAM} is not installed: TunableOp of PyTorch tunes instead (--with tunableop)")
    return TunableOpTuner(options, context) if tool == "tunableop" else HipblasltTuner(options, context)
