"""The set-up of a run: data, model, optimizer, the checkpoint that it starts from, and callbacks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import partial

import torch

import primus
from primus.backends.native import compilation, model
from primus.backends.native.bad_steps import BadStepDetector
from primus.backends.native.checkpoint import CheckpointSaver, CheckpointSettings
from primus.backends.native.compilation import CompileDecision
from primus.backends.native.data import build_document_handling, open_data
from primus.backends.native.distributed import Processes, device_name, seed_everything
from primus.backends.native.documents import DocumentHandling
from primus.backends.native.loggers import check_packages, open_loggers
from primus.backends.native.optimizer import build_optimizer
from primus.backends.native.progress import ProgressBar
from primus.backends.native.report import TrainingReporter
from primus.backends.native.resume import CheckpointSearch, ResumePoint, check_same_data, own_folder, restore_state
from primus.backends.native.rewind import Rewind, read_rewinds, set_aside, set_aside_undone
from primus.backends.native.samples import TextSampler
from primus.backends.native.step import Trainable, prepare_model
from primus.backends.native.step_timer import Rates, StepTimer
from primus.backends.native.timing import ComputeTimer
from primus.backends.native.training import Training
from primus.callback import CONVENTION, CallbackChoice, CallbackList, choose_callbacks
from primus.checkpoint.shape import build_shape
from primus.config.schema import Experiment, Trainer
from primus.data.training.dataset import Datasets
from primus.data.training.loader import num_micro_batches
from primus.machine.profile import find_peak_tflops
from primus.model import count_parameters, flops_per_token
from primus.runs.attempt import Attempt
from primus.runs.store import Run

PROGRESS_VARIABLE = "PRIMUS_PROGRESS"
"""Path of the terminal that shows a bar; the launcher sets it."""


def set_up_training(
    experiment: Experiment, attempt: Attempt, processes: Processes, environ: Mapping[str, str]
) -> Training:
    """Make a run ready for its next step.

    Raises:
        UsageError: The configuration does not fit the data, the processes or the checkpoint.
        UnfitError: The data differs from that of the resumed or replayed run, or a package is missing.
        PrimusError: The checkpoint cannot be read.
    """
    trainer = experiment.trainer
    check_packages(trainer.logging)
    choices = choose_callbacks(trainer.training.callbacks)
    # Before anything draws a number; the restored generators replace these.
    seed_everything(trainer.training.seed, trainer.training.deterministic)
    global_batch_size = _global_batch_size(trainer, processes.world)
    attempt.beat("data")
    data = open_data(trainer, attempt, global_batch_size)
    search = CheckpointSearch(
        attempt.run, trainer.checkpoint, build_shape(trainer.model), processes, say=attempt.say, event=attempt.event
    )
    # Before the search: it must not find checkpoints that a killed attempt has left to be renamed.
    rewinds = _read_run_rewinds(search)
    start = _find_start(search, attempt, data)
    # After the search: a resumed run is compiled if the checkpoint's was, since rounding differs.
    decision = _decide_compile(trainer, processes, global_batch_size, start, environ)
    trainable, optimizer = _build_model_and_optimizer(trainer, processes, decision.compiled, data, start)
    bad_steps = BadStepDetector(trainer.training, processes.device)
    if start is not None:
        bad_steps.restart_after(start.step, start.recent_losses)
    callbacks = CallbackList()
    training = Training(
        experiment=experiment,
        attempt=attempt,
        processes=processes,
        data=data,
        trainable=trainable,
        optimizer=optimizer,
        callbacks=callbacks,
        reporter=_build_reporter(experiment, attempt, processes, start, environ),
        saver=_build_saver(experiment, attempt, processes, data, decision, callbacks),
        search=search,
        bad_steps=bad_steps,
        step_timer=_build_step_timer(trainer, processes, global_batch_size),
        compute_timer=ComputeTimer(processes.device, trainable.model),
        rewinds=rewinds,
        compiled=decision.compiled,
        global_batch_size=global_batch_size,
        step=start.step if start else 0,
        consumed_samples=start.consumed_samples if start else 0,
    )
    # The loaded checkpoint need not be saved again.
    training.saver.last_step = training.step
    _report_setup(training, decision, start)
    _add_callbacks(training, choices, start)
    return training


def _add_callbacks(training: Training, choices: Sequence[CallbackChoice], start: ResumePoint | None) -> None:
    """Add the callbacks in the order in which every moment calls them.

    A step is reported before a plug-in sees it, and judged last: bad steps raise, and must be reported by then.
    """
    callbacks = training.callbacks
    callbacks.add(training.step_timer)
    callbacks.add(TextSampler(training))
    callbacks.add(training.reporter)
    for choice in choices:
        callbacks.build(choice, training)
    callbacks.add(training.bad_steps)
    # Before the checkpoint's state is restored: a rewind to the initial weights needs the state of the beginning.
    training.initial_callback_state = callbacks.collect_state()
    if start is not None:
        callbacks.restore_state(start.callback_state)


def _global_batch_size(trainer: Trainer, world: int) -> int:
    """Sequences in a step; raises UsageError where they do not divide among the processes."""
    training = trainer.training
    size = training.global_batch_size or training.micro_batch_size * world
    num_micro_batches(size, training.micro_batch_size, world)
    return size


def _read_run_rewinds(search: CheckpointSearch) -> list[Rewind]:
    """The run's rewinds so far; finishes the renaming of bad checkpoints that a killed attempt may have left undone."""
    run, processes = search.run, search.processes
    # Read by one process: others on a shared file system may see an older version of the file.
    rewinds: list[Rewind] = processes.broadcast_from_first(read_rewinds(run) if processes.is_first else None)
    if rewinds:
        set_aside(processes, lambda: set_aside_undone(search.folder, run, rewinds), search.say, search.event)
    return rewinds


def _find_start(search: CheckpointSearch, attempt: Attempt, data: Datasets) -> ResumePoint | None:
    """The checkpoint to start from, printed and recorded."""
    start = search.find_start()
    if start is None:
        if attempt.number > 0:
            attempt.say("no usable checkpoint of this run: training starts from scratch")
        return None
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
    return start


def _format_start(start: ResumePoint, run: Run) -> str:
    """A checkpoint's folder, relative to the run folder if it is inside."""
    folder = start.folder.resolve()
    root = run.directory.resolve()
    return str(folder.relative_to(root)) if folder.is_relative_to(root) else str(start.folder)


def _decide_compile(
    trainer: Trainer,
    processes: Processes,
    global_batch_size: int,
    start: ResumePoint | None,
    environ: Mapping[str, str],
) -> CompileDecision:
    training = trainer.training
    tokens = training.train_iters * global_batch_size * training.seq_length
    return compilation.decide_compilation(
        training.compile,
        before=start.manifest.compiled if start and not start.weights_only else None,
        flops_per_device=tokens * flops_per_token(trainer.model, training.seq_length, CONVENTION) / processes.world,
        device_type=processes.device.type,
        threads=torch.get_num_threads(),
        environ=environ,
    )


def _build_model_and_optimizer(
    trainer: Trainer, processes: Processes, compiled: bool, data: Datasets, start: ResumePoint | None
) -> tuple[Trainable, torch.optim.AdamW]:
    """The model and its optimizer, with their initial state or that of the checkpoint."""
    documents = build_document_handling(trainer.data, data.eod_id)
    trainable = _build_trainable(trainer, processes, compiled, documents)
    optimizer = build_optimizer(trainable.model, trainer.optimizer)
    if start is not None:
        restore_state(start, trainable.model, optimizer, processes)
    return trainable, optimizer


def _build_trainable(
    trainer: Trainer, processes: Processes, compiled: bool, documents: DocumentHandling | None
) -> Trainable:
    """The model with its initial weights, sharded if there are several processes."""
    training = trainer.training
    built = model.build_model(trainer.model, "meta", training.seed)
    built.documents = documents
    trainable = prepare_model(
        built,
        device=processes.device,
        bf16=training.bf16,
        compile=compiled,
        world=processes.world,
        shard=trainer.parallel.use_distributed_optimizer,
        recompute=training.recompute_activations,
        loss_chunk_size=training.loss_chunk_size,
    )
    # After sharding: each process fills its own part, from values that depend on the seed and the names only.
    model.initialise_weights(built, training.seed)
    return trainable


def _build_step_timer(trainer: Trainer, processes: Processes, global_batch_size: int) -> StepTimer:
    training = trainer.training
    rates = Rates(
        global_batch_size=global_batch_size,
        tokens=global_batch_size * training.seq_length,
        world=processes.world,
        flops_per_token=flops_per_token(trainer.model, training.seq_length, CONVENTION),
        peak_tflops=find_peak_tflops(device_name(processes.device), "bf16") if training.bf16 else None,
    )
    return StepTimer(rates, processes.device)


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


def _build_saver(
    experiment: Experiment,
    attempt: Attempt,
    processes: Processes,
    data: Datasets,
    decision: CompileDecision,
    callbacks: CallbackList,
) -> CheckpointSaver:
    config = experiment.trainer.checkpoint
    settings = CheckpointSettings(
        folder=own_folder(config, attempt.run),
        run=attempt.run.id,
        keep_last_n=config.keep_last_n,
        is_async=config.async_save,
        model=build_shape(experiment.trainer.model),
        data_fingerprint=data.fingerprint,
        compiled=decision.compiled,
    )

    return CheckpointSaver(settings, processes, partial(callbacks.call, "after_save"))


def _report_setup(training: Training, decision: CompileDecision, start: ResumePoint | None) -> None:
    """Print and record what is trained, on what, and how."""
    trainer, processes = training.experiment.trainer, training.processes
    config = trainer.training
    num_parameters = count_parameters(trainer.model).total_parameters
    tokens = config.train_iters * training.global_batch_size * config.seq_length
    epochs = config.train_iters * training.global_batch_size / training.data.train.samples_per_epoch
    data = "random" if trainer.data.mock_data else f"{epochs:.2g} epochs"
    name = device_name(processes.device)
    training.print_line(
        f"{num_parameters / 1e6:,.1f} M parameters in {'bf16' if config.bf16 else 'fp32'}"
        f" on {processes.world} x {name}; {config.train_iters:,} steps of {training.global_batch_size} x"
        f" {config.seq_length} tokens, together {tokens:,} ({data})"
    )
    corpora = training.data.train.compute_progress(config.train_iters * training.global_batch_size)
    for part in corpora if len(corpora) > 1 else ():
        training.print_line(f"  {part.prefix}: {part.samples:,} samples, {part.epochs:.2g} epochs")
    training.print_line(f"torch.compile: {'on' if decision.compiled else 'off'} ({decision.reason})")
    training.append_event(
        "run_started",
        attempt=training.attempt.number,
        step=start.step if start else 0,
        device=name,
        device_type=processes.device.type,
        world_size=processes.world,
        threads=torch.get_num_threads(),
        parameters=num_parameters,
        flops_per_token=flops_per_token(trainer.model, config.seq_length, CONVENTION),
        flops_convention=CONVENTION,
        compiled=decision.compiled,
        compile_reason=decision.reason,
        dtype="bfloat16" if config.bf16 else "float32",
        global_batch_size=training.global_batch_size,
        seq_length=config.seq_length,
        train_iters=config.train_iters,
        data_fingerprint=training.data.fingerprint,
        versions={"primus": primus.__version__, "python": platform.python_version(), "torch": str(torch.__version__)},
    )
