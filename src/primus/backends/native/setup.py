"""The set-up of a run: session, model, optimizer, and callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial

import torch

from primus.backends.native import adapters, compilation, model
from primus.backends.native.checkpoint import restore_state
from primus.backends.native.compilation import CompileDecision
from primus.backends.native.optimizer import build_optimizer
from primus.backends.native.rewind import Rewind, read_rewinds, set_aside, set_aside_undone
from primus.backends.native.samples import TextSampler
from primus.backends.native.settings_in_force import read_settings
from primus.backends.native.spikes import LossWindow
from primus.backends.native.step import Trainable, prepare_model
from primus.backends.native.step_timer import StepTimer
from primus.backends.native.training import Training
from primus.callback import CONVENTION
from primus.checkpoint.formats.adapter import has_adapter
from primus.config.schema import Experiment, Trainer
from primus.data.training.masks import DocumentHandling, build_document_handling
from primus.model import flops_per_token
from primus.runs.attempt import Attempt
from primus.session.adapter_settings import AdapterSettings
from primus.session.adapter_settings import read_settings as read_adapter_settings
from primus.session.bad_steps import BadStepDetector
from primus.session.compute_timer import ComputeTimer
from primus.session.open_session import open_session
from primus.session.resume import CheckpointSearch, ResumePoint
from primus.session.session import Session
from primus.session.setup_report import report_setup
from primus.session.torch_processes import TorchProcesses, describe_torch_engine, seed_everything
from primus.session.torch_settings import StepWatch
from primus.session.weights import open_base_weights, open_loaded_weights

FLOAT64_VARIABLE = "PRIMUS_NATIVE_FLOAT64"
"""Variable that makes native train one process in float64 if it is 1: the reference by which engines are judged."""


def set_up_training(
    experiment: Experiment, attempt: Attempt, processes: TorchProcesses, environ: Mapping[str, str]
) -> Training:
    """Make a run ready for its next step.

    Raises:
        UsageError: The configuration does not fit the data, the processes or the checkpoint.
        UnfitError: The data differs from that of the resumed or replayed run, or a package is missing.
        PrimusError: The checkpoint cannot be read.
    """
    trainer = experiment.trainer
    # Before anything draws a number; the restored generators replace these.
    seed_everything(trainer.training.seed, trainer.training.deterministic)
    rewinds: list[Rewind] = []
    session = open_session(
        experiment,
        attempt,
        processes,
        describe_torch_engine(processes, "native", "torch", str(torch.__version__), processes.world),
        environ,
        # Before the search: it must not find checkpoints that a killed attempt has left to be renamed.
        prepare_search=lambda search: rewinds.extend(_read_run_rewinds(search, processes)),
    )
    start = session.start
    # After the search: a resumed run is compiled if the checkpoint's was, since rounding differs.
    decision = _decide_compile(trainer, processes, session.global_batch_size, start, environ)
    dtype = torch.float64 if environ.get(FLOAT64_VARIABLE) == "1" else torch.float32
    trainable, optimizer = _build_model_and_optimizer(session, processes, decision.compiled, dtype)
    window = _build_loss_window(trainer, processes)
    bad_steps = BadStepDetector(trainer.training, window)
    if start is not None:
        bad_steps.restart_after(start.step, start.recent_losses)
    training = Training(
        **{each.name: getattr(session, each.name) for each in fields(session) if each.init} | {"bad_steps": bad_steps},
        trainable=trainable,
        optimizer=optimizer,
        loss_window=window,
        step_timer=StepTimer(session.rates, processes.device),
        compute_timer=ComputeTimer(processes.device, trainable.model),
        rewinds=rewinds,
        compiled=decision.compiled,
    )
    report_setup(training, compiled=decision.compiled, compile_reason=decision.reason)
    _add_callbacks(training, decision.reason)
    return training


def _build_loss_window(trainer: Trainer, processes: TorchProcesses) -> LossWindow | None:
    config = trainer.training
    if config.loss_spike_policy == "none":
        return None
    return LossWindow(config.loss_spike_window, config.loss_spike_factor, processes.device)


def _add_callbacks(training: Training, compile_reason: str) -> None:
    """Add the callbacks in the order in which every moment calls them.

    A step is reported before a plug-in sees it, and judged last: bad steps raise, and must be reported by then.
    """
    callbacks = training.callbacks
    training.add_profiler()
    callbacks.add(training.step_timer)
    callbacks.add(TextSampler(training))
    watch = StepWatch(training.model, is_compiled=training.compiled)
    training.add_reporters(watch, partial(read_settings, training, watch, compile_reason))
    for choice in training.choices:
        callbacks.build(choice, training)
    callbacks.add(training.bad_steps)
    # Before the checkpoint's state is restored: a rewind to the initial weights needs the state of the beginning.
    training.initial_callback_state = callbacks.collect_state()
    if training.start is not None:
        callbacks.restore_state(training.start.callback_state)


def _read_run_rewinds(search: CheckpointSearch, processes: TorchProcesses) -> list[Rewind]:
    """The run's rewinds so far; finishes the renaming of bad checkpoints that a killed attempt may have left undone."""
    run = search.run
    # Read by one process: others on a shared file system may see an older version of the file.
    rewinds: list[Rewind] = processes.broadcast_from_first(read_rewinds(run) if processes.is_first else None)
    if rewinds:
        set_aside(processes, lambda: set_aside_undone(search.folder, run, rewinds), search.say, search.event)
    return rewinds


def _decide_compile(
    trainer: Trainer,
    processes: TorchProcesses,
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
    session: Session, processes: TorchProcesses, compiled: bool, dtype: torch.dtype
) -> tuple[Trainable, torch.optim.AdamW]:
    """The model and its optimizer, with their initial state or that of the checkpoint."""
    trainer = session.trainer
    documents = build_document_handling(trainer.data, session.data.eod_id)
    trainable = _build_trainable(trainer, processes, compiled, documents, dtype)
    optimizer = build_optimizer(trainable.model, trainer.optimizer)
    load_start(session, session.start, trainable.model, optimizer, processes)
    return trainable, optimizer


def load_start(
    session: Session,
    start: ResumePoint | None,
    transformer: model.Transformer,
    optimizer: torch.optim.Optimizer,
    processes: TorchProcesses,
) -> None:
    """Load a checkpoint of native; else fill the weights: those of `load:` in another format, or initial ones.

    With adapters, the weights under them are loaded first, also where a run resumes: checkpoints lack them.
    """
    if transformer.adapters is not None:
        model.load_weights(transformer, open_base_weights(session.trainer))
        adapters.initialize_adapters(transformer, session.trainer.training.seed)
        if start is not None and not start.weights_only:
            restore_state(start, transformer, optimizer, processes)
        return
    if start is not None and start.manifest.backend == "native" and not has_adapter(start.folder):
        model.fill_frequencies(transformer)
        restore_state(start, transformer, optimizer, processes)
        return
    # After sharding: each process fills its own part, from values that depend on the seed and the names only.
    weights = open_loaded_weights(session)
    if weights is None:
        model.initialize_weights(transformer, session.trainer.training.seed)
    else:
        model.load_weights(transformer, weights)


def _build_trainable(
    trainer: Trainer,
    processes: TorchProcesses,
    compiled: bool,
    documents: DocumentHandling | None,
    dtype: torch.dtype,
) -> Trainable:
    """The model, sharded if there are several processes; its weights are not filled yet."""
    training = trainer.training
    built = model.build_model(trainer.model, "meta", training.seed, dtype)
    built.documents = documents
    settings = read_adapter_settings(trainer.backend_args, AdapterSettings)
    if settings.peft != "none":
        adapters.add_adapters(built, settings)
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
    return trainable
