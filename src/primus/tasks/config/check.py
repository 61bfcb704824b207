"""Check an experiment file without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus import experiment, registry
from primus.config.schema import Experiment, Trainer
from primus.errors import UnfitError, UsageError
from primus.framework import FRAMEWORKS
from primus.models import training_memory
from primus.task import TaskContext

OVERRIDES = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `config check`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    stage: str | None = None
    """Module to check, such as post_trainer (default: the only one in the file)."""
    assume: str | None = None
    """Machine that must have the memory: MODEL or MODEL:GPUS, such as mi355x:8 (default: this one, as a note)."""
    nnodes: Annotated[int, Meta(ge=1)] = 1
    """Number of such machines."""


def run(options: Options, context: TaskContext) -> None:
    """Print that the experiment is valid.

    Raises:
        UsageError: It is not, or the assumed machines lack the memory for weights, gradients and optimizer state.
    """
    resolved = experiment.resolve_experiment(Path(options.config), context.overrides, context.environ, options.stage)
    trainer = resolved.experiment.trainer
    notes = list(resolved.notes)
    if trainer.data.sft_data_path:
        from primus.data.instruction.row_check import check_first_masks, check_rows  # for fine-tuning only

        notes += check_rows(trainer.data, trainer.backend_args)
        notes += check_first_masks(trainer)
    notes += _check_memory(trainer, options, context)
    notes += _check_packages(trainer, context)
    if options.assume is None and trainer.training.device == "auto":
        notes += _check_device(resolved.experiment, context)
    text = f"{options.config}: valid ({trainer.framework}, {resolved.experiment.exp_name})"
    value = {"config": options.config, "valid": True, "framework": trainer.framework, "notes": notes}
    context.result(value, "\n".join([text, *(f"  note: {note}" for note in notes)]))


def _check_device(asked: Experiment, context: TaskContext) -> list[str]:
    """A note if a setting needs an accelerator and this machine, which may be a login node, has none."""
    problem = experiment.find_cpu_problem(asked)
    if problem is None or context.facts().devices:
        return []
    return [f"this machine has no AMD or NVIDIA GPU and cannot train it: {problem.problem}"]


def _check_packages(trainer: Trainer, context: TaskContext) -> list[str]:
    """A note if the environment of the workers on this machine lacks the package of a tracker."""
    names = experiment.list_tracker_packages(trainer.logging)
    if not names:
        return []
    from primus.engines.choice import choose_engine
    from primus.launch.worker_packages import check_worker_packages

    try:
        engines = tuple(registry.load_plug_in(FRAMEWORKS, trainer.framework).ENGINES)
        engine = choose_engine(engines, context.environ, allows_any_version=trainer.training.allow_version)
        check_worker_packages(names, engine, context.environ)
    except UnfitError as error:  # another machine may have it
        return [f"{error.problem}; {error.hint}"]
    return []


def _check_memory(trainer: Trainer, options: Options, context: TaskContext) -> list[str]:
    """A note if this machine lacks the memory; an error if the machine that the user names does."""
    need = training_memory.estimate_need(trainer)
    if options.assume is None and need.total_bytes < training_memory.SMALL_BYTES:
        return []
    if options.assume is None:
        facts = context.facts()
    else:
        from primus.machine.assumed_machine import build_assumed_machine  # reads the profiles of devices

        facts = build_assumed_machine(options.assume)
    fit = training_memory.compare_with_machine(need, facts, options.nnodes)
    if fit is None or fit.fits:
        return []
    if options.assume is not None:
        raise UsageError(f"{options.config}: {fit.format_problem()}", fit.format_remedy())
    another = "--assume MODEL:GPUS --nnodes N checks another machine"
    return [f"it does not fit this machine: {fit.format_problem()}; {fit.format_remedy()}; {another}"]
