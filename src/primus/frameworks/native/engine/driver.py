"""Native behind the contract of `primus.session.engine`: a model that PyTorch's own distributed parts train."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from primus.callback import Callback
from primus.checkpoint.formats.adapter import has_adapter
from primus.checkpoint.manifest import read_manifest
from primus.checkpoint.weights import WeightReader
from primus.config.schema import Trainer, TrainingConfig
from primus.data.instruction.policy_settings import POLICY_FORMULAS, PolicySettings
from primus.data.instruction.preference_settings import FORMULAS, PreferenceSettings
from primus.data.training.masks import build_document_handling
from primus.frameworks.native.engine.adapters import add_adapters, collect_adapter_files, initialize_adapters
from primus.frameworks.native.engine.batch import to_batch
from primus.frameworks.native.engine.checkpoint import collect_current_state, count_bytes, prepare_files, restore_state
from primus.frameworks.native.engine.kernel_trial import KernelTrial
from primus.frameworks.native.engine.kernels import ATTENTION, KernelChoice, choose_kernels, enable_attention
from primus.frameworks.native.engine.layout import Layout, build_layout
from primus.frameworks.native.engine.loss_scale import LossScale
from primus.frameworks.native.engine.model import (
    Transformer,
    build_model,
    fill_frequencies,
    initialize_weights,
    load_weights,
)
from primus.frameworks.native.engine.moe import apply_router_settings
from primus.frameworks.native.engine.optimizer import build_optimizer, fill_state
from primus.frameworks.native.engine.pipeline import choose_layers
from primus.frameworks.native.engine.post_training.preference_report import PreferenceReporter
from primus.frameworks.native.engine.post_training.preferences import PreferenceLoss, count_pairs
from primus.frameworks.native.engine.post_training.reference_scores import load_reference
from primus.frameworks.native.engine.samples import TextSampler
from primus.frameworks.native.engine.settings_in_force import read_settings
from primus.frameworks.native.engine.spikes import LossWindow
from primus.frameworks.native.engine.step import (
    OVERFLOW,
    SPIKE,
    StepResult,
    evaluate_batches,
    prepare_model,
    train_step,
)
from primus.frameworks.native.engine.step_monitor import StepMonitor
from primus.frameworks.native.kernel_settings import KernelSettings
from primus.frameworks.native.layout_settings import LayoutSettings
from primus.frameworks.native.router_settings import RouterSettings
from primus.frameworks.native.support import read_own_settings
from primus.frameworks.native.training_settings import TrainingSettings
from primus.session.checkpoints.resume import ResumePoint
from primus.session.engine import Engine, MicroBatches, RunningStep, StateToSave, StepValues
from primus.session.ranks.torch_processes import TorchProcesses, read_peak_memory, seed_everything
from primus.session.session import Session
from primus.session.settings.adapter_settings import AdapterSettings
from primus.session.settings.adapter_settings import read_settings as read_adapter_settings
from primus.session.settings.settings_in_force import LiveSetting
from primus.session.settings.torch_settings import StepWatch
from primus.session.start_weights import open_base_weights, open_loaded_weights
from primus.session.timing.compute_timer import ComputeTime, ComputeTimer

if TYPE_CHECKING:
    from primus.frameworks.native.engine.reinforcement.rollouts import RolloutCollector


class LaunchedStep(NamedTuple):
    """A step that was launched, and may still be running on the device."""

    result: StepResult
    compute_time: ComputeTime | None

    def read(self) -> StepValues:
        loss, grad_norm, skipped, _ = self.result.values.tolist()  # waits for the step, once
        seconds = self.compute_time.seconds() if self.compute_time else None
        return StepValues(
            loss, grad_norm, skipped != 0.0, seconds, spike=skipped == SPIKE, overflow=skipped == OVERFLOW
        )


class NativeEngine(Engine):
    """Trains the model of a run; its weights are filled by `load_start`.

    Args:
        session: The run.
        processes: That train together.
        dtype: Of the parameters.
    """

    def __init__(self, session: Session, processes: TorchProcesses, dtype: torch.dtype = torch.float32) -> None:
        self._trainer, self._processes = session.trainer, processes
        self._masked_token, self._compile_reason = session.masked_token, session.compile_reason
        layout = read_own_settings(session.trainer, LayoutSettings)
        self._layout = build_layout(session.trainer.parallel, processes.device, processes.world, layout)
        built = build_unsharded(session.trainer, self._layout, dtype, session.data.eod_id)
        kernels = read_own_settings(session.trainer, KernelSettings)
        report_choices(session, choose_kernels(built, session.trainer, kernels, processes.device))
        trainable = prepare_model(built, device=processes.device, compile=session.compiled)
        self._timer = ComputeTimer(processes.device, trainable.model)
        window = _build_loss_window(session.trainer.training, processes.device)
        settings = read_own_settings(session.trainer, TrainingSettings)
        scale = LossScale(settings, processes.device) if settings.fp16 else None
        self.trainable = replace(trainable, window=window, timer=self._timer, loss_scale=scale)
        self._objective: PreferenceLoss | None = None
        preferences = read_own_settings(session.trainer, PreferenceSettings)
        self._rollouts: RolloutCollector | None = None
        if preferences.loss in POLICY_FORMULAS:
            from primus.frameworks.native.engine.reinforcement.policy_loss import PolicyLoss  # for `train rl` only
            from primus.frameworks.native.engine.reinforcement.rollouts import RolloutCollector

            policy = read_own_settings(session.trainer, PolicySettings)
            loss = self.model.objective = PolicyLoss(preferences.loss, policy, processes.device)
            self._rollouts = RolloutCollector(session, self.model, loss, policy, processes)
            self.trainable = replace(self.trainable, count=loss.count_units)
        elif preferences.loss != "sft":
            self._objective = self.model.objective = PreferenceLoss(preferences, processes.device)
            self.trainable = replace(self.trainable, count=count_pairs)
        self._optimizer = build_optimizer(self.model, session.trainer.optimizer, settings)
        self._watch = StepWatch(self.model, is_compiled=session.compiled)
        self._results: deque[StepResult] | None = None

    @property
    def data_rank(self) -> int:
        return self._layout.data.rank

    @property
    def model(self) -> Transformer:
        return self.trainable.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def loss_window(self) -> LossWindow | None:
        return self.trainable.window

    def load_start(self, session: Session, start: ResumePoint | None) -> None:
        """Load a checkpoint of native; else fill the weights: those of `load:` in another format, or initial ones.

        With adapters, the weights under them are loaded first, also where a run resumes: checkpoints lack them.
        """
        transformer, seed = self.model, self._trainer.training.seed
        self._load_reference(session)
        if self._rollouts is not None:
            self._rollouts.continue_from(start.step if start else 0)
        # First of all that draws a number; a checkpoint of as many processes restores the generators.
        seed_everything(seed, self._trainer.training.deterministic)
        if start is None or start.weights_only:
            self._optimizer.state.clear()
            fill_state(self._optimizer)
        if transformer.adapters is not None:
            load_weights(transformer, open_base_weights(self._trainer))
            initialize_adapters(transformer, seed)
            if start is not None and not start.weights_only:
                self._restore(start)
            return
        if start is not None and start.manifest.backend == "native" and not has_adapter(start.folder):
            fill_frequencies(transformer)
            self._restore(start)
            return
        # After sharding: each process fills its own part, from values that depend on the seed and the names only.
        weights = open_loaded_weights(session)
        if weights is None:
            initialize_weights(transformer, seed)
        else:
            self.load_weights(weights)

    def load_weights(self, weights: WeightReader) -> None:
        load_weights(self.model, weights)

    def step(self, batches: MicroBatches, learning_rate: float) -> StepValues | RunningStep:
        """One optimizer step; on a GPU it is running when this returns."""
        device = self._processes.device
        if self._rollouts is not None:
            read = self._rollouts.collect(batches)
        else:
            read = [to_batch(tokens, self._masked_token, device) for tokens in batches]
        result = train_step(
            self.trainable,
            self._optimizer,
            read,
            learning_rate=learning_rate,
            clip_grad=self._trainer.optimizer.clip_grad,
        )
        if self._results is not None:
            self._results.append(result)
        launched = LaunchedStep(result, self._timer.take_time())
        return launched.read() if device.type == "cpu" else launched

    def evaluate(self, batches: MicroBatches) -> tuple[float, int]:
        """Sum and number of the losses, without compiling: without gradients the model would be compiled again."""
        read = [to_batch(tokens, self._masked_token, self._processes.device) for tokens in batches]
        return evaluate_batches(replace(self.trainable, loss=self.model), read)

    def save(self, folder: Path) -> None:
        self.collect_state().take()(folder)

    def collect_state(self) -> StateToSave:
        """The tensors of this step; with `async_save` a copy of them is written while training continues."""
        config = self._trainer.checkpoint
        state = collect_current_state(self.model, self._optimizer, self._processes, self._loss_scale_state)
        adapter = None
        if self.model.adapters is not None and config.load:
            # Gathered by all processes, before one of them writes it.
            adapter = collect_adapter_files(self.model, config.load)
        return StateToSave(
            lambda: prepare_files(state, config.async_save, self._processes, adapter),
            num_bytes=count_bytes(state),
            in_thread=config.async_save,
        )

    def load(self, folder: Path) -> None:
        found = read_manifest(folder)
        assert found is not None, "the search takes complete checkpoints only"
        self._restore(ResumePoint(folder, found))

    def watch_step(self) -> StepWatch:
        return self._watch

    def read_settings(self) -> list[LiveSetting]:
        settings = read_own_settings(self._trainer, TrainingSettings)
        granularity = settings.recompute_granularity
        reasons = {
            "compile": self._compile_reason,
            "recompute_activations": granularity and f"recompute_granularity: {granularity}",
            "recompute_granularity": "recompute_activations: true" if granularity is None else "",
            "bf16": "fp16: true" if settings.fp16 else "",
            "seq_length": "the longest rollout" if self._rollouts else "",
        }
        return read_settings(self.trainable, self._optimizer, self._watch, {k: v for k, v in reasons.items() if v})

    def read_memory(self) -> int:
        return read_peak_memory(self._processes.device)

    def close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()
        # It was restricted for the whole process.
        enable_attention(list(ATTENTION))

    def build_callbacks(self, session: Session) -> Sequence[Callback]:
        device, trial = self._processes.device, read_own_settings(self._trainer, KernelSettings).kernel_trial
        is_tried = trial == "always" or (trial == "auto" and device.type == "cuda")
        trials = [KernelTrial(session, self.model, device)] if is_tried else []
        reporters: list[Callback] = (
            [PreferenceReporter(session, self.model, self._objective)] if self._objective else []
        )
        if self._trainer.model.num_experts or self._trainer.model.mtp_num_layers:
            self._results = deque()
            reporters.append(StepMonitor(session, self.model, self._results))
        if self._rollouts is not None:
            from primus.frameworks.native.engine.reinforcement.rollout_report import RolloutReporter

            return [*trials, *reporters, RolloutReporter(session, self._rollouts)]
        return [*trials, *reporters, TextSampler(session, self.model)]

    def _load_reference(self, session: Session) -> None:
        """Give a loss its reference: the weights that the run starts from, also where it resumes."""

        def load_weights_of_start() -> None:
            load_weights(self.model, open_base_weights(self._trainer))
            initialize_adapters(self.model, self._trainer.training.seed)

        rollouts, objective = self._rollouts, self._objective
        if rollouts is not None and rollouts.loss.kl_beta > 0 and rollouts.reference is None:
            from primus.frameworks.native.engine.reinforcement.reference_policy import ReferencePolicy

            dtype = next(self.model.parameters()).dtype
            built = build_unsharded(self._trainer, self._layout, dtype, session.data.eod_id).requires_grad_(False)
            other = prepare_model(built, device=self._processes.device).model
            load_weights(other, open_base_weights(self._trainer))
            initialize_adapters(other, self._trainer.training.seed)
            rollouts.reference = ReferencePolicy(other, rollouts.loss.temperature)
        if objective is None or objective.reference_E is not None or not FORMULAS[objective.kind].needs_reference:
            return
        load_reference(objective, self.model, session.data, self._trainer, self._processes, load_weights_of_start)

    @property
    def _loss_scale_state(self) -> torch.Tensor | None:
        return self.trainable.loss_scale.state if self.trainable.loss_scale else None

    def _restore(self, start: ResumePoint) -> None:
        restore_state(start, self.model, self._optimizer, self._processes, self._loss_scale_state)


def build_unsharded(trainer: Trainer, layout: Layout, dtype: torch.dtype, eod_id: int | None) -> Transformer:
    """The part of the model that a process has, on the meta device, as the experiment computes it.

    Args:
        trainer: The experiment.
        layout: The processes.
        dtype: Of the parameters, unless the experiment has them in bf16.
        eod_id: The end-of-document token of the data, if it is known.
    """
    training = trainer.training
    groups = read_own_settings(trainer, LayoutSettings).num_virtual_stages_per_pipeline_rank
    stage = choose_layers(trainer.model.num_layers, layout.pipeline, groups)
    settings = read_own_settings(trainer, TrainingSettings)
    if settings.main_params_dtype == "bf16" and dtype is torch.float32:
        dtype = torch.bfloat16
    built = build_model(trainer.model, "meta", training.seed, dtype, layout, stage)
    built.configure(training, settings)
    apply_router_settings(built, read_own_settings(trainer, RouterSettings))
    built.documents = build_document_handling(trainer.data, eod_id)
    adapters = read_adapter_settings(trainer.backend_args, AdapterSettings)
    if adapters.peft != "none":
        add_adapters(built, adapters)
    return built


def report_choices(session: Session, chosen: Sequence[KernelChoice]) -> None:
    """Print and record the kernels that an experiment asks for, and what is used."""
    for each in chosen:
        session.reporter.print_line(each.format())
    if chosen and session.processes.is_first:
        session.attempt.event("kernels", choices=[each._asdict() for each in chosen])


def _build_loss_window(config: TrainingConfig, device: torch.device) -> LossWindow | None:
    if config.loss_spike_policy == "none":
        return None
    return LossWindow(config.loss_spike_window, config.loss_spike_factor, device)
