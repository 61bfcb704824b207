"""Jobs of training runs: a fresh one, one that goes on, one that repeats another."""

from __future__ import annotations

from pathlib import Path

from primus import experiment
from primus.config import checks
from primus.config.load import Resolved
from primus.errors import PrimusError, UnfitError, UsageError
from primus.launch.plan import Job, Variable
from primus.runs.files import read_json
from primus.runs.store import Run, runs_of
from primus.task import TaskContext


def fresh(file: str, stage: str, context: TaskContext) -> Job:
    """A new run of an experiment file; the newest unfinished one of the same configuration where it may continue."""
    resolved = experiment.resolve(Path(file), context.overrides, context.environ, stage)
    files = experiment.files_of(resolved)
    unfinished = _unfinished(resolved, files) if resolved.experiment.trainer.checkpoint.auto_continue_train else None
    return _job(resolved, files, resume=unfinished)


def continued(directory: str, context: TaskContext) -> Job:
    """The run in `directory`, once more."""
    if context.overrides:
        raise UsageError(
            f"--run continues a run as it is; it takes no {context.overrides[0]}", "start a new run with --config"
        )
    run = _existing(directory)
    return _job(experiment.of_run(run), {}, resume=run)


def replay(directory: str, context: TaskContext, *, is_forced: bool) -> Job:
    """A new run with the configuration, the variables and the data of another.

    Raises:
        UnfitError: Something that may change numbers differs, and the replay is not forced.
    """
    if context.overrides:
        raise UsageError(f"--replay repeats a run as it was; it takes no {context.overrides[0]}")
    from primus.runs import replay as replays  # its look at the machine is not for every launch

    run = _existing(directory)
    resolved = experiment.of_run(run)
    found = replays.differences(run)
    for difference in found:
        context.say(f"replay: {difference}")
    numeric = [str(difference) for difference in found if difference.changes_numbers]
    if numeric and not is_forced:
        raise UnfitError(
            f"{len(numeric)} differences may change the losses: {'; '.join(numeric)}", "--force replays all the same"
        )
    job = _job(resolved, experiment.files_of(resolved), resume=None)
    origin = f"replay of {run.id}"
    env = {name: Variable(value, origin) for name, value in replays.variables(run, context.environ).items()}

    def check(world_size: int) -> None:
        job.check(world_size)
        _check_world_size(run, world_size, is_forced)

    files = job.files if is_forced else {**job.files, **_data_file(run)}
    return Job(
        name=job.name,
        workspace=job.workspace,
        files=files,
        env=job.env | env,
        check=check,
        replay_of=str(run.directory.resolve()),
        forced=tuple(numeric),
        notes=(origin,),
    )


def _job(resolved: Resolved, files: dict[str, str], resume: Run | None) -> Job:
    asked = resolved.experiment

    def check(world_size: int) -> None:
        checks.accumulation_steps(resolved, world_size)

    return Job(
        name=asked.exp_name,
        workspace=asked.workspace,
        files=files,
        env={name: Variable(value, resolved.origins[f"env.{name}"]) for name, value in asked.env.items()},
        check=check,
        resume=str(resume.directory) if resume else None,
        notes=(f"continues {resume.directory.name} from its newest checkpoint",) if resume else (),
    )


def _existing(directory: str) -> Run:
    run = Run(Path(directory).resolve())
    if not (run.directory / "metadata.json").is_file():
        raise UsageError(f"{directory} is not a run folder: it holds no metadata.json", "'runs list' shows the runs")
    return run


def _unfinished(resolved: Resolved, files: dict[str, str]) -> Run | None:
    """The newest run of the same configuration, where it ended early and left a checkpoint."""
    asked = resolved.experiment
    for run in reversed(runs_of(Path(asked.workspace) / asked.exp_name)):
        if not _is_same(run, files):
            continue
        ended_early = run.metadata().outcome.state != "done" and not run.is_active()
        return run if ended_early and _has_checkpoint(run, asked.trainer.checkpoint.save) else None
    return None


def _is_same(run: Run, files: dict[str, str]) -> bool:
    """Whether a run can be read and has the configuration of `files`; where its values came from does not matter."""
    try:
        run.metadata()
    except PrimusError:
        return False
    for name in (experiment.CONFIG_FILE, experiment.MODEL_FILE):
        path = run.directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != files[name]:
            return False
    return True


def _has_checkpoint(run: Run, save: str | None) -> bool:
    folder = Path(save) if save else run.checkpoints
    return any(folder.glob("step_*/manifest.json"))


def _check_world_size(run: Run, world_size: int, is_forced: bool) -> None:
    plan = read_json(run.directory / "plan.json", dict)
    shape = plan.get("layout") or {"nproc": 1, "nnodes": 1}
    then = shape["nproc"] * shape["nnodes"]
    if then != world_size and not is_forced:
        raise UnfitError(
            f"the run had {then} processes, this replay has {world_size}: the losses would differ",
            f"start {then} with --nproc and --nnodes, or give --force",
        )


def _data_file(run: Run) -> dict[str, str]:
    """The fingerprints of the run's data, which the workers of the replay compare with what they open."""
    path = run.directory / "config" / "data_config.yaml"
    return {"config/replayed_data_config.yaml": path.read_text(encoding="utf-8")} if path.is_file() else {}
