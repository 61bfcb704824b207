"""Jobs of training runs: new, resumed and replayed ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from primus import experiment, patch, registry
from primus.checkpoint import folders
from primus.config import checks
from primus.config.load import Resolved, load_experiment
from primus.config.schema import Experiment
from primus.config.source import format_yaml_value
from primus.errors import PrimusError, UnfitError, UsageError, find_owner
from primus.framework import FRAMEWORKS
from primus.machine.facts import DeviceKind
from primus.machine.placement.rank_groups import RankGroups
from primus.messages import Say
from primus.models import training_memory
from primus.plan import LaunchJob, Variable
from primus.runs import lock
from primus.runs.differences import compare_mappings
from primus.runs.files import read_json
from primus.runs.store import Run, find_run, is_damaged_run, list_runs
from primus.runs.summary import flatten_run_settings, flatten_settings
from primus.task import TaskContext

COMPARED = (experiment.CONFIG_FILE, experiment.MODEL_FILE)
"""Files that identify a run's configuration."""
SMALL_MODEL = 1 << 23
"""Layers x width^2 x experts below which no machine lacks the memory; a layer has about 12 width^2 parameters."""
WORKSPACE = Path("output")
"""Where the names of runs are looked up: the workspace of an experiment that does not set one."""
BEFORE_HOOKS = "config/before_hooks/"
"""Folder of a run whose configuration was changed by hooks: these files before the change."""


def prepare_new_run(file: str, stage: str, context: TaskContext) -> LaunchJob:
    """A new run of an experiment file; or its newest unfinished run, with `auto_continue_train`."""
    resolved = experiment.resolve_experiment(
        Path(file), context.overrides, context.environ, stage, is_elsewhere=context.runs_elsewhere
    )
    trainer = resolved.experiment.trainer
    if trainer.data.sft_data_path:
        from primus.data.instruction.row_check import check_rows  # for fine-tuning only

        row_notes = check_rows(trainer.data, trainer.backend_args)
        resolved = structs.replace(resolved, notes=(*resolved.notes, *row_notes))
    files = experiment.ExperimentFiles(resolved)
    continues = resolved.experiment.trainer.checkpoint.auto_continue_train
    others = _list_earlier_runs(resolved) if continues else []
    same = [run for run in others if _is_same(run, files)]
    unfinished = same[0] if same and _is_unfinished(same[0]) else None
    notes = resolved.notes
    if unfinished is not None and not lock.may_execute(unfinished.directory):
        notes = (*notes, _describe_foreign_run(unfinished))
        unfinished = None
    if others and unfinished is None and (left := _find_run_left_behind(others, files)):
        notes = (*notes, _describe_run_left_behind(left, files))
    for note in () if context.dry_run else notes:  # a dry run prints them with the plan
        print(f"note: {note}", file=sys.stderr)

    def resolve(extra: tuple[str, ...]) -> Resolved:
        return experiment.resolve_experiment(Path(file), (*extra, *context.overrides), context.environ, stage)

    job = _build_training_job(resolved, files, resume=unfinished)

    spec = resolved.experiment.trainer.model
    is_small = spec.num_layers * spec.hidden_size**2 * (spec.num_experts or 1) < SMALL_MODEL
    job = structs.replace(
        job,
        check=job.check if is_small else partial(_check_memory, job.check, resolved, context),
        check_start=partial(_check_ended, same, context),
        check_new=partial(_check_only_run, same, resolved, files),
        notes=(*notes, *job.notes),
    )
    return _allow_hook_changes(job, resolved, resolve, keeps=unfinished)


def prepare_resumed_run(name: str, context: TaskContext) -> LaunchJob:
    """The run that `name` means, resumed."""
    if context.overrides:
        raise UsageError(
            f"--run resumes a run unchanged and does not accept {context.overrides[0]}",
            f"to continue from its checkpoint in a new run, also in another layout: --config FILE --load {name}",
        )
    run = find_run(name, WORKSPACE)
    resolved = experiment.load_run_experiment(run, context.environ)
    job = _build_training_job(resolved, {}, resume=run)
    if not context.runs_elsewhere:
        job = structs.replace(job, check_files=partial(experiment.check_files, resolved))
    origin = run.read_metadata().replay_of
    if origin and (Path(origin) / "metadata.json").is_file():
        job = structs.replace(job, env=job.env | _read_run_variables(Run(Path(origin)), context))
    return _allow_hook_changes(job, resolved, partial(_resolve_run_experiment, run), keeps=run)


def prepare_replay(name: str, context: TaskContext, *, is_forced: bool) -> LaunchJob:
    """A new run with the configuration, the variables and the data of another.

    Raises:
        UnfitError: A difference may change the losses and the replay is not forced, or the data is not here.
    """
    if context.overrides:
        raise UsageError(f"--replay repeats a run unchanged and does not accept {context.overrides[0]}")
    from primus.runs import patch_records

    run = find_run(name, WORKSPACE)
    resolved = experiment.load_run_experiment(run, context.environ)
    numeric = _compare_numeric_settings(run, resolved, context)
    if not context.runs_elsewhere:
        _check_data_is_here(resolved)
    if numeric and not is_forced:
        raise UnfitError(
            f"{len(numeric)} differences may change the losses: {'; '.join(numeric)}", "use --force to replay anyway"
        )
    job = _build_training_job(resolved, experiment.ExperimentFiles(resolved), resume=None)

    def check(world_size: int) -> None:
        job.check(world_size)
        _check_world_size(run, world_size, is_forced)

    repeated = structs.replace(
        job,
        files=job.files if is_forced else {**job.files, **_read_data_file(run)},
        env=job.env | _read_run_variables(run, context),
        check=check,
        patches=() if context.patches else patch_records.list_copies(run),
        replay_of=str(run.directory.resolve()),
        forced=tuple(numeric),
        notes=(f"replay of {run.id}",),
    )
    return _allow_hook_changes(repeated, resolved, partial(_resolve_run_experiment, run), keeps=run)


def _read_run_variables(run: Run, context: TaskContext) -> dict[str, Variable]:
    """The variables that a replayed run had."""
    from primus.runs import replay as replays

    origin = f"replay of {run.id}"
    return {
        name: Variable(value, origin) for name, value in replays.list_replay_variables(run, context.environ).items()
    }


def _compare_numeric_settings(run: Run, resolved: Resolved, context: TaskContext) -> list[str]:
    """The differences from the machine and sources of `run` that may change the losses; prints all differences."""
    from primus.launch.hooks.discovery import list_source_folders
    from primus.runs import replay as replays
    from primus.site_folders import list_package_versions

    framework = resolved.experiment.trainer.framework
    folders, numeric = _find_engine_folders(resolved, context)
    packages = list_package_versions(folders) if folders else None
    chosen = patch.choose_patches(context.environ, lambda: framework, folders=folders)
    applied = [choice.name for choice in chosen if choice.applies]
    found = replays.find_differences(run, packages, numeric) + replays.patch_differences(run, applied, context.patches)
    found += replays.hidden_differences(run, context.environ)
    found += replays.source_differences(run, list_source_folders(context.environ))
    for difference in found:
        context.say(f"replay: {difference}")
    return [str(difference) for difference in found if difference.changes_numbers]


def _check_data_is_here(resolved: Resolved) -> None:
    """Raises UnfitError if this machine lacks data of the replayed run."""
    absent: list[str] = []
    checks.check_data(resolved, absent)
    if absent:
        raise UnfitError(
            f"the data of the run is not on this machine: {'; '.join(absent)}",
            "put it there, or ask for an archive of `runs export --with-data`",
        )


def _find_engine_folders(resolved: Resolved, context: TaskContext) -> tuple[list[str] | None, tuple[str, ...]]:
    """The import path that workers would have now, and the packages of the engine; None for those of primus."""
    from primus.engines.choice import choose_engine
    from primus.engines.installation import list_installation_folders

    trainer = resolved.experiment.trainer
    names = registry.load_plug_in(FRAMEWORKS, trainer.framework).ENGINES
    environ = {**context.environ, **resolved.experiment.env}
    engine = choose_engine(tuple(names), environ, allows_any_version=trainer.training.allow_version)
    if engine is None or engine.installation is None:
        return None, ()
    return list_installation_folders(engine.installation), (engine.requirement.package,)


def _allow_hook_changes(
    job: LaunchJob,
    resolved: Resolved,
    resolve: Callable[[tuple[str, ...]], Resolved],
    *,
    keeps: Run | None,
    extra: tuple[str, ...] = (),
) -> LaunchJob:
    """`job`, whose experiment hooks can change; settings from the command line take precedence over those of hooks.

    Args:
        job: The job.
        resolved: Its experiment.
        resolve: Resolves the experiment with further overrides.
        keeps: The resumed or replayed run, whose configuration must not change.
        extra: Overrides that it has already.
    """

    def amend(words: tuple[str, ...]) -> LaunchJob:
        wanted = (*extra, *words)
        found = _mark_hook_origins(resolve(wanted), resolved)
        files = experiment.ExperimentFiles(found)
        notes = (
            f"hook setting {word} is overridden by the command line" for word in words if _is_typed(word, resolved)
        )
        changed = structs.replace(job, notes=(*job.notes, *notes))
        if keeps is None:
            fresh = _build_training_job(found, {**files, **_name_files_before_hooks(job.files)}, resume=None)
            changed = structs.replace(
                changed,
                files=fresh.files,
                env=fresh.env,
                workload=fresh.workload,
                check=fresh.check,
                list_rank_groups=fresh.list_rank_groups,
                device=fresh.device,
                engines=fresh.engines,
                allows_any_version=fresh.allows_any_version,
            )
        elif not _has_files(keeps, {name: files[name] for name in COMPARED}):
            raise UsageError(
                f"{' '.join(words)} changes the configuration of an existing run",
                "start a new run, or remove the setting from the hook",
            )
        return _allow_hook_changes(changed, resolved, resolve, keeps=keeps, extra=wanted)

    return structs.replace(job, amend=amend)


def _name_files_before_hooks(files: Mapping[str, str]) -> dict[str, str]:
    """The configuration before hooks changed it, which identifies an unfinished run."""
    kept = {name: text for name, text in files.items() if name.startswith(BEFORE_HOOKS)}
    return kept or {BEFORE_HOOKS + Path(name).name: files[name] for name in COMPARED}


def _mark_hook_origins(found: Resolved, asked: Resolved) -> Resolved:
    """`found` with the origins of settings that hooks changed."""
    origins = {
        key: f"hook: {origin}" if origin.startswith("--") and asked.origins.get(key) != origin else origin
        for key, origin in found.origins.items()
    }
    return structs.replace(found, origins=origins)


def _is_typed(word: str, resolved: Resolved) -> bool:
    """Whether the command line also has the setting of `word`, ``--name=value``."""
    name = word.removeprefix("--").partition("=")[0]
    key = name if name.startswith("env.") else name.rpartition(".")[2].replace("-", "_")
    return resolved.origins.get(key, "").startswith("--")


def _resolve_run_experiment(run: Run, extra: tuple[str, ...]) -> Resolved:
    return load_experiment(run.directory / experiment.CONFIG_FILE, extra, environ=None, is_resolved=True)


def _build_training_job(resolved: Resolved, files: Mapping[str, str], resume: Run | None) -> LaunchJob:
    asked = resolved.experiment
    variables = {name: Variable(value, resolved.origins[f"env.{name}"]) for name, value in asked.env.items()}

    def check(world_size: int) -> None:
        checks.count_accumulation_steps(resolved, world_size)

    def list_groups(world_size: int) -> Sequence[RankGroups]:
        from primus.models.communication import list_rank_groups  # for jobs of several nodes only

        return list_rank_groups(asked.trainer, world_size)

    return LaunchJob(
        name=asked.exp_name,
        workspace=asked.workspace,
        files=files,
        env={**_find_secret_settings(asked), **variables},
        check=check,
        list_rank_groups=list_groups,
        find_cpu_problem=partial(experiment.find_cpu_problem, asked),
        device=_find_required_device(asked),
        framework=asked.trainer.framework,
        engines=tuple(registry.load_plug_in(FRAMEWORKS, asked.trainer.framework).ENGINES),
        packages=experiment.list_tracker_packages(asked.trainer.logging),
        observe=partial(_observe_run, asked) if asked.trainer.logging.observers else None,
        log_format=asked.trainer.logging.log_format,
        allows_any_version=asked.trainer.training.allow_version,
        workload=experiment.build_workload(asked),
        elsewhere=(),
        resume=str(resume.directory) if resume else None,
        notes=(f"resumes {resume.directory.name} from its newest checkpoint",) if resume else (),
    )


def _check_memory(check: Callable[[int], None], resolved: Resolved, context: TaskContext, world_size: int) -> None:
    """After `check`, refuse what weights, gradients and optimizer state exclude on as many machines as this one.

    Raises:
        UsageError: The devices lack the memory, whatever else the training needs.
    """
    check(world_size)
    need = training_memory.estimate_need(resolved.experiment.trainer)
    if need.total_bytes < training_memory.SMALL_BYTES or context.dry_run or context.runs_elsewhere:
        return
    facts = context.facts()
    devices = sum(max(1, len(device.partitions)) for device in facts.devices)
    # Without accelerators, the processes of a node share its memory.
    nodes = -(-world_size // devices) if devices else 1
    fit = training_memory.compare_with_machine(need, facts, nodes)
    if fit is not None and not fit.fits and (devices or world_size == 1):
        raise UsageError(fit.format_problem(), fit.format_remedy())


def _observe_run(asked: Experiment, run: Run, environ: Mapping[str, str], say: Say) -> AbstractContextManager[None]:
    from primus.launch.run_observers import observe_run  # most runs have no observers
    from primus.observer import OBSERVERS
    from primus.plug_in_choice import choose_plug_ins

    return observe_run(choose_plug_ins(OBSERVERS, asked.trainer.logging.observers), run, environ, say)


def _find_required_device(asked: Experiment) -> DeviceKind | None:
    """The device that the launch checks before it starts; None for frameworks that do not use PyTorch."""
    device = asked.trainer.training.device
    backend = registry.load_plug_in(FRAMEWORKS, asked.trainer.framework)
    return device if device == "cpu" or backend.USES_TORCH else None


def _find_secret_settings(asked: Experiment) -> dict[str, Variable]:
    """Settings with secrets as a variable of the workers, because the run folder must not hold them."""
    settings = experiment.collect_secret_settings(asked)
    if not settings:
        return {}
    text = msgspec.json.encode(settings).decode()
    return {experiment.SETTINGS_VARIABLE: Variable(text, ", ".join(settings), is_secret=True)}


def _list_earlier_runs(resolved: Resolved) -> list[Run]:
    """The runs of the same name that can be read, newest first."""
    asked = resolved.experiment
    return [
        run for run in reversed(list_runs(Path(asked.workspace) / asked.exp_name)) if not is_damaged_run(run.directory)
    ]


def _is_unfinished(run: Run) -> bool:
    """Whether a run ended early and has a checkpoint."""
    return run.read_metadata().outcome.state != "done" and bool(_list_complete_checkpoints(run))


def _list_complete_checkpoints(run: Run) -> list[Path]:
    """Those of a run, oldest first, in its own folder or in that of its `save:`."""
    save = flatten_run_settings(run).get("save")
    return [
        found
        for found in folders.list_checkpoints(Path(str(save)) if save else run.checkpoints)
        if folders.is_complete(found)
    ]


def _find_run_left_behind(others: Sequence[Run], files: Mapping[str, str]) -> Run | None:
    """The newest run of the same model, if it ended early and could go on, but for settings that have changed."""
    model = {experiment.MODEL_FILE: files[experiment.MODEL_FILE]}
    newest = next((run for run in others if _has_files(run, model)), None)
    is_left = newest is not None and not newest.is_active() and not _is_same(newest, files) and _is_unfinished(newest)
    return newest if is_left else None


def _describe_run_left_behind(run: Run, files: Mapping[str, str]) -> str:
    changes = compare_mappings(flatten_run_settings(run), flatten_settings(files[name] for name in COMPARED))
    settings = ", ".join(
        f"{each.what} {format_yaml_value(each.b)} instead of {format_yaml_value(each.a)}" for each in changes
    )
    checkpoint = _list_complete_checkpoints(run)[-1]
    return (
        f"auto_continue_train: {run.directory} ended early and is not resumed, because settings differ: {settings};"
        f" `--load {checkpoint.parent}` begins a new run at its step {folders.parse_step(checkpoint)} with these"
        f" settings, and `--run {run.directory}` instead of `--config` resumes it with its own"
    )


def _describe_foreign_run(run: Run) -> str:
    checkpoint = _list_complete_checkpoints(run)[-1]
    return (
        f"auto_continue_train: {run.directory} ended early and is not resumed, because it belongs to"
        f" {find_owner(run.directory)} and you may not change it; `--load {checkpoint.parent}` begins a new run at"
        f" its step {folders.parse_step(checkpoint)}"
    )


def _check_ended(same: Sequence[Run], context: TaskContext) -> None:
    """Check that no run of the same configuration is active: it must not be resumed, and must not be started twice.

    Raises:
        UsageError: One of the runs is active here, on another host or in a scheduler's job.
    """
    for run in same:
        problem = _find_user(run, context)
        if problem:
            raise UsageError(
                f"auto_continue_train: a run of the same configuration is active: {problem}",
                f"wait for it (runs show {run.id}), stop it, or start another run with"
                " --auto_continue_train false or another --exp_name",
            )


def _check_only_run(same: Sequence[Run], resolved: Resolved, files: Mapping[str, str], run_id: str) -> None:
    """Check that the same command has not started a run since `same` was listed.

    Raises:
        UsageError: It has, and would train beside the run `run_id`.
    """
    if not resolved.experiment.trainer.checkpoint.auto_continue_train:
        return
    known = {run_id, *(run.id for run in same)}
    # One of `same` may have been created but not locked when `_check_ended` looked at it.
    same = [run for run in _list_earlier_runs(resolved) if _is_same(run, files)]
    new = (run for run in same if run.id not in known or lock.is_held_here(run.directory))
    if started := next(new, None):
        raise UsageError(
            f"auto_continue_train: the same command has just started {started.directory}",
            f"wait for it (runs show {started.id}), or start another run with --auto_continue_train false",
        )


def _find_user(run: Run, context: TaskContext) -> str:
    """Description of the process or queued job that executes `run`; empty if there is none. A dry run asks no
    scheduler.
    """
    holder = lock.find_holder(run.directory)
    # On this host flock has decided. The record of another host may be that of a dead process, which takes seconds to
    # find out.
    if holder and holder.host != os.uname().nodename:
        if not context.dry_run:
            context.say(f"{run.directory} was last executed by {holder}: checking whether it is still active")
        holder = holder if context.dry_run or lock.is_renewed(run.directory, holder) else None
    if holder:
        return f"{run.directory} is executed by {holder}"
    if context.dry_run or run.read_metadata().outcome.state not in ("planned", "running"):
        return ""
    try:
        from primus.launch.jobs import run_claims

        if run_claims.is_being_submitted(run):
            return f"another command is starting {run.directory}"
        # Only for a run without an outcome: a query takes time, and schedulers are shared.
        run_claims.check_free(run, context.environ)
    except PrimusError as error:
        return error.problem
    return ""


def _is_same(run: Run, files: Mapping[str, str]) -> bool:
    """Whether a run has the configuration of `files`; the origins of its values do not matter."""
    asked = {name: files[name] for name in COMPARED}
    before_hooks = {BEFORE_HOOKS + Path(name).name: text for name, text in asked.items()}
    return _has_files(run, before_hooks if (run.directory / BEFORE_HOOKS).is_dir() else asked)


def _has_files(run: Run, files: dict[str, str]) -> bool:
    paths = {run.directory / name: text for name, text in files.items()}
    return all(path.is_file() and path.read_text(encoding="utf-8") == text for path, text in paths.items())


def _check_world_size(run: Run, world_size: int, is_forced: bool) -> None:
    plan = read_json(run.directory / "plan.json", dict)
    shape = plan.get("layout") or {"nproc": 1, "nnodes": 1}
    then = shape["nproc"] * shape["nnodes"]
    if then != world_size and not is_forced:
        raise UnfitError(
            f"the run had {then} processes, this replay has {world_size}: the losses would differ",
            f"start {then} processes with --nproc and --nnodes, or use --force",
        )


def _read_data_file(run: Run) -> dict[str, str]:
    """The fingerprints of the run's data, which the workers of the replay compare with theirs."""
    path = run.directory / "config" / "data_config.yaml"
    return {"config/replayed_data_config.yaml": path.read_text(encoding="utf-8")} if path.is_file() else {}
