"""Open the session of a run: its data, the checkpoint that it starts from, and its reports."""

from __future__ import annotations

from collections.abc import Mapping

from primus.callback import CALLBACKS
from primus.checkpoint.shape import build_shape
from primus.config.schema import Experiment, ModelSpec, Trainer, TrainingConfig
from primus.data.training.dataset import Datasets
from primus.data.training.loader import num_micro_batches
from primus.launch.progress_bar import ProgressBar
from primus.plug_in_choice import choose_plug_ins
from primus.runs.attempt import Attempt
from primus.runs.store import Run
from primus.session.batches.run_data import OrderSamples, open_data
from primus.session.checkpoints.resume import CheckpointSearch, ResumePoint, check_same_data
from primus.session.checkpoints.rewind import Rewind, read_rewinds, set_aside, set_aside_undone
from primus.session.ranks.engine_info import EngineInfo
from primus.session.ranks.processes import Processes
from primus.session.reports.loggers import check_packages, open_loggers
from primus.session.reports.reporter import TrainingReporter
from primus.session.session import Session

PROGRESS_VARIABLE = "PRIMUS_PROGRESS"
"""Path of the terminal that shows a bar; the launcher sets it."""


def open_session(
    experiment: Experiment,
    attempt: Attempt,
    processes: Processes,
    engine: EngineInfo,
    environ: Mapping[str, str],
    order_samples: OrderSamples | None = None,
) -> Session:
    """Open the data of a run, find the checkpoint that it starts from, and prepare its reports.

    Args:
        experiment: That the run trains.
        attempt: Of this process.
        processes: That train together.
        engine: That trains.
        environ: Variables of this process.
        order_samples: The engine's own order of the samples (`dataloader: engine`).

    Raises:
        UsageError: The configuration does not fit the data, the processes or the checkpoint.
        UnfitError: The data differs from that of the resumed or replayed run, or a package is missing.
        PrimusError: The checkpoint cannot be read.
    """
    trainer = experiment.trainer
    # First what needs no data: a missing package is reported before minutes of preparing.
    check_packages(trainer.logging)
    choices = choose_plug_ins(CALLBACKS, trainer.training.callbacks)
    # A separate phase, with a longer hang time-out: the order of a large corpus may be built, or awaited.
    attempt.beat("data")
    search = _build_search(trainer, attempt, processes, engine.backend)
    # Before the search: it must not find checkpoints that a killed attempt has left to be renamed.
    rewinds = _read_run_rewinds(search)
    start = search.find_start()
    global_batch_size = _find_global_batch_size(trainer.training, engine.data_size, start, attempt)
    data = open_data(trainer, attempt, global_batch_size, order_samples)
    _report_start(start, search, attempt, data, trainer.model)
    return Session(
        experiment=experiment,
        attempt=attempt,
        environ=environ,
        processes=processes,
        engine=engine,
        data=data,
        global_batch_size=global_batch_size,
        choices=choices,
        reporter=_build_reporter(experiment, attempt, processes, start, environ),
        search=search,
        start=start,
        rewinds=rewinds,
        compiled=engine.compiles and trainer.training.compile is True,  # JAX compiles whatever the key says
    )


def _find_global_batch_size(
    training: TrainingConfig, data_size: int, start: ResumePoint | None, attempt: Attempt
) -> int:
    """Sequences in one optimizer step: as configured, else as the run had it, else one micro batch for each replica of
    the model.

    Raises:
        UsageError: The micro batches of all replicas do not divide it.
    """
    # With another number of processes, a resumed run would otherwise continue with other batches.
    is_own = start is not None and not start.weights_only and start.manifest.run == attempt.run.id
    before = start.manifest.global_batch_size if start is not None and is_own else None
    global_batch_size = training.global_batch_size or before or training.micro_batch_size * data_size
    num_micro_batches(global_batch_size, training.micro_batch_size, data_size)
    return global_batch_size


def _build_search(trainer: Trainer, attempt: Attempt, processes: Processes, backend: str) -> CheckpointSearch:
    return CheckpointSearch(
        attempt.run,
        trainer.checkpoint,
        build_shape(trainer.model),
        processes,
        say=attempt.say,
        event=attempt.event,
        backend=backend,
    )


def _read_run_rewinds(search: CheckpointSearch) -> list[Rewind]:
    """The run's rewinds so far; finishes the renaming of bad checkpoints that a killed attempt may have left undone."""
    run, processes = search.run, search.processes
    # Read by one process: others on a shared file system may see an older version of the file.
    rewinds: list[Rewind] = processes.broadcast_from_first(read_rewinds(run) if processes.is_first else None)
    if rewinds:
        set_aside(processes, lambda: set_aside_undone(search.folder, run, rewinds), search.say, search.event)
    return rewinds


def _report_start(
    start: ResumePoint | None, search: CheckpointSearch, attempt: Attempt, data: Datasets, model: ModelSpec
) -> None:
    """Check that the data is that of the checkpoint to start from, which is printed and recorded."""
    if start is None and search.config.load is not None:
        from primus.checkpoint.formats.saved_shape import list_other_settings

        attempt.say(f"starting from the weights of {search.config.load}")
        for difference in list_other_settings(search.config.load, model):
            attempt.say(f"note: {difference}; the weights were trained with the setting of the checkpoint")
        return
    if start is None:
        if attempt.number > 0:
            attempt.say("no usable checkpoint of this run: training starts from scratch")
        return
    check_same_data(start, attempt.run, data.fingerprint, search.config.allow_other_data)
    what = "the weights of" if start.weights_only else "step"
    name = start.folder.name if start.weights_only else str(start.step)
    attempt.say(f"resuming from {what} {name} ({_format_start(start, attempt.run)})")
    if start.manifest.world_size != search.processes.world and not start.weights_only:
        attempt.say(
            f"saved by {start.manifest.world_size} processes, resumed by {search.processes.world}:"
            " the losses agree within rounding, not bit by bit"
        )
    attempt.event(
        "checkpoint_loaded",
        step=start.manifest.step,
        path=_format_start(start, attempt.run),
        weights_only=start.weights_only,
        world_size=start.manifest.world_size,
    )


def _format_start(start: ResumePoint, run: Run) -> str:
    """A checkpoint's folder, relative to the run folder if it is inside."""
    folder = start.folder.resolve()
    root = run.directory.resolve()
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else str(start.folder)


def _build_reporter(
    experiment: Experiment,
    attempt: Attempt,
    processes: Processes,
    start: ResumePoint | None,
    environ: Mapping[str, str],
) -> TrainingReporter:
    trainer = experiment.trainer
    train_iters, first_step = trainer.training.train_iters, start.step if start else 0
    loggers, note = open_loggers(experiment, attempt.run, first_step) if processes.is_first else ([], "")
    if note:
        attempt.say(note)
    terminal = environ.get(PROGRESS_VARIABLE) if processes.is_first else None
    return TrainingReporter(
        attempt,
        train_iters=train_iters,
        log_interval=trainer.logging.log_interval,
        log_format=trainer.logging.log_format,
        loggers=loggers,
        bar=_build_bar(terminal, train_iters, first_step),
    )


def _build_bar(terminal: str | None, train_iters: int, done: int) -> ProgressBar | None:
    if not terminal:
        return None
    try:
        return ProgressBar(terminal, train_iters, done)
    except OSError:  # the terminal was closed in the meantime
        return None
