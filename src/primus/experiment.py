"""Resolve and check an experiment; write it to a run folder and read it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import structs

from primus import registry
from primus.config import checks
from primus.config.load import Resolved, load_experiment
from primus.config.schema import GROUPS, OWNERS, Experiment, LoggingConfig, Trainer
from primus.config.source import ConfigValue, dump_yaml
from primus.errors import PrimusError, UsageError
from primus.framework import FRAMEWORKS
from primus.machine.cluster import RANK_VARIABLES
from primus.machine.workload import JobWorkload
from primus.models import model_checks
from primus.redaction import MASK, holds_secret, is_secret_name, learn, redact_value
from primus.runs.files import to_json
from primus.runs.store import Run

CONFIG_FILE = "config/primus_config.yaml"
MODEL_FILE = "config/model_config.yaml"
ORIGINS_FILE = "config/origins.json"


SETTINGS_VARIABLE = "PRIMUS_SECRET_SETTINGS"
"""Variable that passes settings with secrets to workers, as JSON by key; the run folder holds only their keys."""
NAMES = ("work_group", "user_name", "exp_name", "workspace")


def resolve_experiment(
    file: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    stage: str | None = None,
    *,
    is_elsewhere: bool = False,
) -> Resolved:
    """The experiment of `file` with the command line's `overrides`, checked as far as is possible before a launch.

    Args:
        file: The experiment file.
        overrides: Words of the command line.
        environ: Variables that the file may name.
        stage: The stage, if the file has several modules.
        is_elsewhere: Whether it is trained where this machine cannot look: each file that is not here becomes a note,
            and `check_files` looks for it on the nodes.

    Raises:
        UsageError: The configuration is wrong, contradicts itself, or its framework cannot train it.
    """
    absent: list[str] | None = [] if is_elsewhere else None
    resolved = resolve_settings(file, overrides, environ, stage, absent=absent)
    _check_stage(resolved.experiment)
    _check_backend(resolved, absent)
    notes = [f"checked on the nodes: {problem} on this machine" for problem in absent or ()]
    return structs.replace(resolved, notes=(*resolved.notes, *notes))


def check_files(resolved: Resolved) -> None:
    """Check the files of an experiment that was planned elsewhere, on the node that reads them.

    Raises:
        UsageError: One does not exist, or does not fit.
    """
    checks.check_data(resolved)
    _check_backend(resolved, None)


def _check_backend(resolved: Resolved, absent: list[str] | None) -> None:
    asked = resolved.experiment
    load = asked.trainer.checkpoint.load
    if absent is not None and load and not load.startswith("hf:") and not Path(load).expanduser().exists():
        absent.append(f"{resolved.origins['load']}: load: no folder {load}")
        checkpoint = structs.replace(asked.trainer.checkpoint, load=None)
        asked = structs.replace(asked, trainer=structs.replace(asked.trainer, checkpoint=checkpoint))
    registry.load_plug_in(FRAMEWORKS, asked.trainer.framework).check(asked)


def find_cpu_problem(asked: Experiment) -> UsageError | None:
    """The setting of an accepted experiment that its framework cannot train on a CPU, or None."""
    training = structs.replace(asked.trainer.training, device="cpu")
    framework = registry.load_plug_in(FRAMEWORKS, asked.trainer.framework)
    try:
        framework.check(structs.replace(asked, trainer=structs.replace(asked.trainer, training=training)))
    except UsageError as error:
        return error
    return None


def _check_stage(experiment: Experiment) -> None:
    """Refuse a module of fine-tuning for a framework that only pre-trains."""
    framework, stage = experiment.trainer.framework, experiment.stage
    if stage in registry.load_plug_in(FRAMEWORKS, framework).STAGES:
        return
    others = []
    for name in registry.list_plug_ins("frameworks"):
        with contextlib.suppress(PrimusError):  # a file of the user that cannot be loaded is not what is wrong here
            others += [name] if stage in registry.load_plug_in(FRAMEWORKS, name).STAGES else []
    raise UsageError(
        f"module {stage}: framework {framework} does not train it", f"frameworks that do: {', '.join(others) or 'none'}"
    )


def resolve_settings(
    file: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    stage: str | None = None,
    *,
    absent: list[str] | None = None,
) -> Resolved:
    """As `resolve_experiment`, whether or not its framework can train it.

    Raises:
        UsageError: The configuration is wrong or contradicts itself.
    """
    resolved = load_experiment(file, overrides, environ=environ, stage=stage)
    learn(resolved.experiment.env)
    _check_names(resolved)
    _check_settings(resolved, absent)
    return structs.replace(resolved, notes=(*resolved.notes, *model_checks.check_published_model(resolved)))


def _check_names(resolved: Resolved) -> None:
    """Reject secrets in settings that name folders, and variables that the launcher sets for each rank."""
    for name in RANK_VARIABLES:
        if name in resolved.experiment.env:
            where = resolved.origins[f"env.{name}"]
            raise UsageError(f"{where}: env.{name}: the launcher sets it for each rank", "remove it")
    for key in NAMES:
        if holds_secret(getattr(resolved.experiment, key)):
            raise UsageError(
                f"{resolved.origins[key]}: {key} contains a secret, which folder names would expose",
                "choose another name; pass secrets as variables: env: or --env NAME",
            )


def _check_settings(resolved: Resolved, absent: list[str] | None) -> None:
    """Raises UsageError if the configuration contradicts itself."""
    trainer = resolved.experiment.trainer
    model_checks.check(trainer.model, resolved.origins)
    model_checks.check_parallel(
        trainer.model,
        trainer.parallel,
        trainer.training.seq_length,
        resolved.origins,
        has_own_stages=model_checks.has_own_stages(trainer.backend_args),
    )
    checks.check_lengths(resolved)
    checks.check_data(resolved, absent)
    checks.count_accumulation_steps(resolved)


class ExperimentFiles(Mapping[str, str]):
    """What `format_files` gives, formatted on first use: a dry run shows no file, and formatting them takes 5 ms."""

    def __init__(self, resolved: Resolved) -> None:
        self._resolved = resolved

    @cached_property
    def _texts(self) -> dict[str, str]:
        return format_files(self._resolved)

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def format_files(resolved: Resolved) -> dict[str, str]:
    """The experiment as the files of a run folder, which `load_run_experiment` reads back; secrets are masked."""
    experiment = resolved.experiment
    trainer = experiment.trainer
    settings = {key: redact_setting(key, value) for key, value in _list_settings(experiment).items()}
    top: dict[str, ConfigValue] = {key: getattr(experiment, key) for key in NAMES}
    top["env"] = {name: redact_value(name, value) for name, value in experiment.env.items()}
    module = {"framework": trainer.framework, "model": Path(MODEL_FILE).name, "overrides": settings}
    whole = {**top, "modules": {experiment.stage: module}}
    return {
        CONFIG_FILE: dump_yaml(whole),
        MODEL_FILE: dump_yaml(msgspec.to_builtins(trainer.model)),
        ORIGINS_FILE: to_json(resolved.origins) + "\n",
    }


def build_workload(experiment: Experiment) -> JobWorkload:
    """The workload of an experiment."""
    trainer, parallel = experiment.trainer, experiment.trainer.parallel
    return JobWorkload(
        framework=trainer.framework,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        options=trainer.backend_args,
    )


def list_tracker_packages(config: LoggingConfig) -> tuple[str, ...]:
    """Packages that the workers import for their trackers; TensorBoard is not among them, since runs do without it."""
    given = (("wandb", config.disable_wandb), ("mlflow", config.disable_mlflow))
    return tuple(package for package, is_off in given if not is_off)


def collect_secret_settings(experiment: Experiment) -> dict[str, ConfigValue]:
    """Settings that contain secrets, by key."""
    return {key: value for key, value in _list_settings(experiment).items() if redact_setting(key, value) != value}


def _list_settings(experiment: Experiment) -> dict[str, ConfigValue]:
    """All settings except those of the model, by key."""
    trainer = experiment.trainer
    settings: dict[str, ConfigValue] = {}
    for group in GROUPS:
        if group != "model":
            settings |= msgspec.to_builtins(getattr(trainer, group))
    return settings | ({"backend_args": trainer.backend_args} if trainer.backend_args else {})


def redact_setting(key: str, value: Any) -> Any:
    """`value` without secrets. Keys of the schema are not secret by name; keys of frameworks can be."""
    if isinstance(value, str):
        return redact_value("" if key in OWNERS else key, value)
    if isinstance(value, dict):
        return {name: redact_setting(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [redact_setting(key, item) for item in value]
    return MASK if key not in OWNERS and is_secret_name(key) and type(value) in (int, float) else value


def load_run_experiment(run: Run, environ: Mapping[str, str] = MappingProxyType({})) -> Resolved:
    """The experiment of a run folder.

    Secret variables are omitted, because workers inherit them from the environment; settings that contain secrets are
    read from $PRIMUS_SECRET_SETTINGS.

    Raises:
        UsageError: The environment lacks such a setting.
    """
    resolved = load_experiment(run.directory / CONFIG_FILE, environ=None, is_resolved=True)
    asked = resolved.experiment
    env = {name: value for name, value in asked.env.items() if MASK not in value}
    hidden = [key for key, value in _list_settings(asked).items() if MASK in str(value)]
    trainer = _restore_settings(asked.trainer, hidden, run, environ) if hidden else asked.trainer
    return Resolved(structs.replace(asked, env=env, trainer=trainer), resolved.origins)


def _restore_settings(trainer: Trainer, hidden: Sequence[str], run: Run, environ: Mapping[str, str]) -> Trainer:
    """`trainer` with the settings `hidden` from the environment."""
    try:
        given = msgspec.json.decode(environ.get(SETTINGS_VARIABLE, "{}"), type=dict)
    except msgspec.MsgspecError:
        given = {}
    missing = [key for key in hidden if key not in given]
    if missing:
        raise UsageError(
            f"{run.directory}: {', '.join(missing)} contained a secret, which the run folder does not store",
            f'export {SETTINGS_VARIABLE}=\'{{"{missing[0]}": "..."}}\', and run it again',
        )
    for key in hidden:
        if key == "backend_args":
            trainer = structs.replace(trainer, backend_args=given[key])
        else:
            group = getattr(trainer, OWNERS[key])
            trainer = structs.replace(trainer, **{OWNERS[key]: structs.replace(group, **{key: given[key]})})
    return trainer


def read_run_experiment(run: Run, environ: Mapping[str, str] = MappingProxyType({})) -> Experiment:
    """The experiment that a run trains."""
    return load_run_experiment(run, environ).experiment
