"""What `train pretrain` and `train posttrain` share: options, the job, and the work of one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from primus import experiment, registry
from primus.config.flags import RunName
from primus.config.schema import Stage
from primus.errors import EXIT_OK, UsageError
from primus.framework import FRAMEWORKS
from primus.plan import LaunchJob
from primus.runs.store import find_run
from primus.task import TaskContext, launch_and_report
from primus.tasks.train import _layout_check, _preflight

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt


class TrainingOptions(Struct, frozen=True, kw_only=True):
    """Options of a training task."""

    config: Annotated[str | None, Meta(extra={"aliases": ("--exp",)})] = None
    """Experiment file."""
    replay: RunName | None = None
    """Run (folder, run id or experiment) to repeat with the same configuration, variables and data."""
    force: bool = False
    """Replay even if differences may change the losses; the run records them."""
    run: RunName | None = None
    """Run (folder, run id or experiment) to resume, or one that was planned on another machine."""
    preflight: _preflight.Depth | None = None
    """Check each node before the run starts; full also measures performance (default: $PRIMUS_PREFLIGHT or off)."""
    check: _layout_check.Check | None = None
    """Before anything is submitted or started, execute a step of each kind of rank on fake tensors: layout (default:
    $PRIMUS_CHECK or off)."""
    check_assume: str | None = None
    """Machine of each node for --check: MODEL or MODEL:GPUS, such as mi300x:8 (default: this one, or 8 unknown devices
    where the job is submitted)."""
    check_nnodes: Annotated[int, Meta(ge=1)] | None = None
    """Nodes for --check (default: those of the runtime's options)."""
    preflight_ignore: tuple[str, ...] = ()
    """Checks to ignore, such as host.memlock; the plan records them."""


class TrainingTask(Struct, frozen=True):
    """A task that trains one module of an experiment."""

    name: str
    stage: Stage
    example: str
    """Experiment file for the hint of an error."""

    def prepare(self, options: TrainingOptions, context: TaskContext) -> LaunchJob | None:
        """The job of a training run; None if hipBLASLt is tuned instead.

        Raises:
            UsageError: The experiment cannot be trained, or the options exclude each other.
        """
        chosen = [name for name in ("config", "replay", "run") if getattr(options, name)]
        if len(chosen) != 1:
            problem = f"{self.name} takes one of --config, --replay and --run"
            if not chosen:
                raise UsageError(f"{problem}; nothing was given", f"{self.name} --config {self.example}")
            raise UsageError(f"{problem}; {' and '.join(f'--{name}' for name in chosen)} were given")
        job = self._choose_job(options, context)
        stage = _find_tuning_stage(options, context)
        if stage is not None:
            from primus.tasks.train import _hipblaslt_stage

            if stage == _hipblaslt_stage.TUNE:
                return None
            job = _hipblaslt_stage.add_stage_variables(job, stage, context.environ)
        asked = options.check or context.environ.get(_layout_check.VARIABLE)
        check = _layout_check.parse_check(asked) if asked else "off"
        if check == "layout" and options.config:
            resolved = experiment.resolve_experiment(
                Path(options.config),
                context.overrides,
                context.environ,
                self.stage,
                is_elsewhere=context.runs_elsewhere,
            )
            job = _layout_check.require_layout(job, resolved, options.check_assume, options.check_nnodes, context)
        elif options.check == "layout" or options.check_assume or options.check_nnodes:
            raise UsageError("--check layout checks a new run: --config FILE --check layout")
        if options.preflight or options.preflight_ignore or context.environ.get(_preflight.VARIABLE):
            job = _preflight.require_preflight(job, options.preflight, options.preflight_ignore, context)
        return job

    def run(self, options: TrainingOptions, context: TaskContext) -> int:
        """Train, with what a stage of $PRIMUS_HIPBLASLT_TUNING_STAGE needs before; stage 2 tunes and does not train."""
        stage = _find_tuning_stage(options, context)
        if stage is not None:
            from primus.tasks.train import _hipblaslt_stage

            name = self._read_experiment_name(options, context)
            if stage == _hipblaslt_stage.TUNE:
                _hipblaslt_stage.tune_products(name, context)
                return EXIT_OK
            _hipblaslt_stage.prepare_files(name, stage, context)
        return launch_and_report(context)

    def _read_experiment_name(self, options: TrainingOptions, context: TaskContext) -> str:
        if options.run:
            from primus.tasks.train._job import WORKSPACE

            found = experiment.load_run_experiment(find_run(options.run, WORKSPACE), context.environ)
        else:
            assert options.config
            file = Path(options.config)
            found = experiment.resolve_experiment(file, context.overrides, context.environ, self.stage)
        return found.experiment.exp_name

    def _choose_job(self, options: TrainingOptions, context: TaskContext) -> LaunchJob:
        from primus.tasks.train import _job  # for the launcher only, not for workers

        if options.replay:
            return _job.prepare_replay(options.replay, context, is_forced=options.force)
        if options.run:
            return _job.prepare_resumed_run(options.run, context)
        assert options.config
        return _job.prepare_new_run(options.config, self.stage, context)


def _find_tuning_stage(options: TrainingOptions, context: TaskContext) -> int | None:
    """The stage of hipBLASLt's tuning that a run is; None for a usual run.

    With `--run` too: that is how the nodes of a job get a run that was planned where the job was submitted.
    """
    if options.replay or not any(name.startswith("PRIMUS_HIPBLASLT_TUNING") for name in context.environ):
        return None
    from primus.tasks.train import _hipblaslt_stage

    return _hipblaslt_stage.find_stage(context.environ)


def train_rank(attempt: Attempt) -> None:
    """Train, as one rank of a run.

    Raises:
        UnfitError: The engine cannot be imported.
    """
    from primus.engines.import_errors import explain_import_errors

    asked = experiment.read_run_experiment(attempt.run, os.environ)
    backend = registry.load_plug_in(FRAMEWORKS, asked.trainer.framework)
    with explain_import_errors(tuple(backend.ENGINES)):
        backend.train(asked, attempt)
