"""An experiment, resolved and found possible, as the files of a run folder and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from primus import model_checks, registry
from primus.config import checks
from primus.config.load import Resolved, load_experiment
from primus.config.schema import GROUPS, Experiment
from primus.config.source import dump
from primus.runs.files import to_json
from primus.runs.store import Run
from primus.secret import MASK, masked

CONFIG_FILE = "config/primus_config.yaml"
MODEL_FILE = "config/model_config.yaml"
ORIGINS_FILE = "config/origins.json"


def resolve(file: Path, overrides: Sequence[str], environ: Mapping[str, str], stage: str | None = None) -> Resolved:
    """The experiment of `file` with the command line's `overrides`, checked as far as one machine's word allows.

    Raises:
        UsageError: The configuration is wrong, contradicts itself, or its backend cannot train it.
    """
    resolved = load_experiment(file, overrides, environ=environ, stage=stage)
    check(resolved)
    return resolved


def check(resolved: Resolved) -> None:
    """Raises UsageError where the configuration contradicts itself, or its backend cannot train it."""
    trainer = resolved.experiment.trainer
    backend = registry.load("backends", trainer.framework)
    model_checks.check(trainer.model, resolved.origins)
    model_checks.check_parallel(trainer.model, trainer.parallel, trainer.training.seq_length, resolved.origins)
    checks.check_lengths(resolved)
    checks.check_data(resolved)
    checks.accumulation_steps(resolved, _fewest_processes(resolved))
    backend.check(resolved.experiment)


def _fewest_processes(resolved: Resolved) -> int:
    """Processes of one replica of the model: a batch that does not divide there divides nowhere."""
    parallel = resolved.experiment.trainer.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def files_of(resolved: Resolved) -> dict[str, str]:
    """The experiment as the files of a run folder, from which `of_run` gives it back; secrets are masked."""
    experiment = resolved.experiment
    trainer = experiment.trainer
    settings: dict[str, Any] = {}
    for group in GROUPS:
        if group != "model":
            settings |= msgspec.to_builtins(getattr(trainer, group))
    if trainer.backend_args:
        settings["backend_args"] = trainer.backend_args
    top: dict[str, Any] = {
        key: getattr(experiment, key) for key in ("work_group", "user_name", "exp_name", "workspace")
    }
    top["env"] = {name: masked(name, value) for name, value in experiment.env.items()}
    module = {"framework": trainer.framework, "model": Path(MODEL_FILE).name, "overrides": settings}
    whole = {**top, "modules": {experiment.stage: module}}
    return {
        CONFIG_FILE: dump(whole),
        MODEL_FILE: dump(msgspec.to_builtins(trainer.model)),
        ORIGINS_FILE: to_json(resolved.origins) + "\n",
    }


def of_run(run: Run) -> Resolved:
    """The experiment that a run folder holds; its secret variables are left to today's environment."""
    resolved = load_experiment(run.directory / CONFIG_FILE, environ=None)
    env = {name: value for name, value in resolved.experiment.env.items() if MASK not in value}
    return Resolved(structs.replace(resolved.experiment, env=env), resolved.origins)


def experiment_of(run: Run) -> Experiment:
    """The experiment that a run trains."""
    return of_run(run).experiment
