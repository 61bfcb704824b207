"""The contract of callbacks: actions of a plug-in inside the training loop, alike on every engine.

An experiment names them, with options where they have some::

    overrides:
      callbacks: [garbage_collector, {early_stopping: {patience: 3}}]
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from primus.contract import PlugInKind, optional_value
from primus.errors import PrimusError, did_you_mean, format_error_place
from primus.models.counts import Convention
from primus.plug_in_choice import NoOptions, PlugInChoice

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

CONVENTION: Convention = "causal"
"""How FLOPs are counted, see `primus.models.counts.flops_per_token`."""


class StepReport(Struct, frozen=True, kw_only=True):
    """The numbers of one optimizer step; its fields are those of the `step` event."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Tokens of the global batch."""
    consumed_samples: int
    """Since the beginning of the run."""
    global_batch_size: int
    step_time_s: float
    """From the end of the step before, without evaluation and checkpoints."""
    data_time_s: float
    """Part of it that was spent waiting for the batch."""
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    flops_convention: str = CONVENTION
    mfu: float | None
    """Share of the device's dense peak; None if the peak is not known."""
    memory_gib: float
    """Peak of this process: allocated on the device, or resident on the host if the host trains."""
    skipped: bool
    """The loss or the gradient was not finite, or the loss was a spike, and nothing was changed."""
    spike: bool = False
    """The loss was a spike."""
    overflow: bool = False
    """The gradient was too large for float16 at the loss scale, which falls."""
    compute_time_s: float | None = None
    """Forward and backward passes of this process, without waiting for others; None if it was not measured."""
    cpu_time_s: float | None = None
    """CPU time of all threads of this process in the step."""


class EvaluationReport(Struct, frozen=True, kw_only=True):
    """The result of one evaluation."""

    data: str
    """``validation``, or ``test`` once after the last step."""
    step: int
    """Steps taken before it."""
    loss: float
    """Mean over all tokens."""
    perplexity: float
    tokens: int
    time_s: float


class ProfileReport(Struct, frozen=True, kw_only=True):
    """A profile that was written; its fields are those of the `profile` event."""

    first_step: int
    """Counted from 1."""
    last_step: int
    """Included."""
    ranks: list[int]
    """Processes that recorded."""
    files: list[str]
    """Relative to the run folder."""
    time_s: float
    """Time that training waited for the files; it is part of no step."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    folder: Path
    total_bytes: int
    seconds: float
    """From the beginning of the save until it was complete."""
    wait_s: float = 0.0
    """Of this, the time that training waited; with `async_save` the rest is written while steps are taken."""


class TrainingView(Protocol):
    """What a callback can see and do; the same object during the whole attempt."""

    @property
    def experiment(self) -> Experiment: ...

    @property
    def attempt(self) -> Attempt:
        """The run folder is `attempt.run.directory`; `attempt.rank` is 0 in the first process."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def consumed_samples(self) -> int:
        """Samples taken from the data, including those that a rewind skipped."""
        ...

    @property
    def model(self) -> Any:
        """The `torch.nn.Module`; sharded by FSDP2 if there are several processes."""
        ...

    @property
    def optimizer(self) -> Any:
        """The `torch.optim.AdamW`."""
        ...

    def request_stop(self, reason: str) -> None:
        """End the training after this step as if it were the last: evaluate, save, and exit with code 0.

        One process is enough; all processes stop after the same step.
        """

    def print_line(self, text: str) -> None:
        """Print a line to the log of this rank, and on rank 0 to the terminal."""

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append an event to `events.jsonl`, on rank 0."""

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send numbers to TensorBoard, Weights & Biases and MLflow, on rank 0."""


class Callback:
    """Actions inside the training loop. Subclass it and override the moments that you need; the others cost nothing.

    Every process calls every moment in the same order, unless a moment says otherwise, so collectives are allowed.
    """

    def before_train(self) -> None:
        """Called once, after the checkpoint is loaded and before the first step."""

    def before_step(self) -> None:
        """Called before the batch of the next step is read."""

    def after_step(self) -> None:
        """Called when a step was launched; a GPU may still be computing it.

        Gradients are already cleared. Reading a tensor here makes the host wait for the GPU.
        """

    def after_report(self, report: StepReport) -> None:
        """Called when the numbers of a step are known.

        On a CPU this is right after `after_step`; on a GPU it is after the next step's `after_step`, so that the host
        never waits, and at the latest before an evaluation, a save or the end.
        """

    def before_evaluation(self) -> None:
        """Called before the loss on the validation or test data is computed."""

    def after_evaluation(self, report: EvaluationReport) -> None:
        """Called with the result of an evaluation."""

    def before_save(self) -> None:
        """Called before the state of a checkpoint is collected; `state_dict` follows."""

    def after_save(self, saved: SavedCheckpoint) -> None:
        """Called on rank 0 only, when a checkpoint is complete on disk; with `async_save` that is some steps later."""

    def after_profile(self, report: ProfileReport) -> None:
        """Called when the profile of `profile:` is written by all processes."""

    def after_pause(self) -> None:
        """Called on rank 0 only, before a step, when the run has waited for others that it takes turns with."""

    def after_rewind(self, step: int) -> None:
        """Called when a rewind has loaded the state after `step`; the steps that follow are repeated."""

    def after_train(self) -> None:
        """Called once, after the last evaluation and checkpoint; not when a signal interrupted the run."""

    def close(self) -> None:
        """Called at the end in any case, also after an error; release what you hold. Processes may be in any state."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as values that JSON can hold; rank 0's counts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, in every process.

        Called before `before_train` when a run resumes, and before `after_rewind`. A rewind to the initial weights
        passes the state as it was when training began. It is not called when the checkpoint has no state of this
        callback, or with `finetune: true`.
        """


class CallbackPlugIn(Protocol):
    """A callback: `callbacks/NAME.py`, named in an experiment.

    The file is imported on the control plane as well, to check names and options: import tensor libraries inside the
    methods.
    """

    def build(self, options: Any, training: TrainingView, /) -> Callback:
        """Build the callback from its options.

        Called once in every process, when the model is ready. `options` is an instance of `Options`.
        """
        ...

    @property
    @optional_value(NoOptions)
    def Options(self) -> type[Struct]:
        """A msgspec Struct whose fields are the options. Default: no options."""
        ...


CALLBACKS = PlugInKind[CallbackPlugIn]("callbacks", CallbackPlugIn)


class CallbackList:
    """The callbacks of a run. A moment calls only those that override it, so an unused moment costs one look-up."""

    def __init__(self) -> None:
        self._plug_ins: dict[str, Callback] = {}
        self._actions: dict[str, list[tuple[str | None, Any]]] = {moment: [] for moment in MOMENTS}

    def add(self, callback: Callback, name: str | None = None) -> None:
        """Append a callback, which is called after those that are there; one of a framework itself has no name."""
        if name is not None:
            self._plug_ins[name] = callback
        for moment in MOMENTS:
            if _overrides(callback, moment):
                self._actions[moment].append((name, getattr(callback, moment)))

    def build(self, choice: PlugInChoice[CallbackPlugIn], training: TrainingView) -> None:
        """Build and append a callback of a plug-in.

        Raises:
            PrimusError: It cannot be built.
        """
        with _explain_failure(choice.name, "build"):
            built = choice.plug_in.build(choice.options, training)
        _check_moments(choice.name, built)
        self.add(built, choice.name)

    def call(self, moment: str, *args: Any) -> None:
        """Call a moment of all callbacks.

        Raises:
            PrimusError: A plug-in raised it, or failed; the message names callback, file and line.
        """
        for name, action in self._actions[moment]:
            if name is None:
                action(*args)
            else:
                with _explain_failure(name, moment):
                    action(*args)

    def collect_state(self) -> dict[str, Any]:
        """The state of all plug-ins that have one, by name: a copy of values that JSON can hold.

        Raises:
            PrimusError: A callback fails, or its state has values that JSON cannot hold.
        """
        states: dict[str, Any] = {}
        for name, callback in self._plug_ins.items():
            if _overrides(callback, "state_dict"):
                with _explain_failure(name, "state_dict"):
                    states[name] = msgspec.json.decode(msgspec.json.encode(callback.state_dict()))
        return states

    def restore_state(self, states: Mapping[str, Any]) -> None:
        """Give each plug-in its state; states of callbacks that the experiment does not name are ignored.

        Raises:
            PrimusError: A callback cannot take its state.
        """
        for name, callback in self._plug_ins.items():
            if name in states:
                with _explain_failure(name, "load_state_dict"):
                    callback.load_state_dict(states[name])


MOMENTS = tuple(
    name
    for name, value in vars(Callback).items()
    if callable(value) and not name.startswith("_") and not name.endswith("state_dict")
)
"""Names of the moments, in the order in which they happen."""
MOMENT_PREFIXES = ("before_", "after_", "on_")
"""How methods begin that look like moments; `on_` is the habit of other trainers."""


def _overrides(callback: Callback, moment: str) -> bool:
    return getattr(type(callback), moment) is not getattr(Callback, moment)


def _check_moments(name: str, callback: Callback) -> None:
    """Refuse methods that would never be called, or cannot be called.

    Raises:
        PrimusError: A method is named like a moment that does not exist, or takes other arguments than the moment.
    """
    kind = type(callback)
    for method in dir(kind):
        if method.startswith(MOMENT_PREFIXES) and method not in MOMENTS:
            raise PrimusError(
                f"callback {name}: {kind.__name__}.{method} is never called", did_you_mean(method, MOMENTS)
            )
    for moment in MOMENTS:
        if _overrides(callback, moment):
            expected = inspect.signature(getattr(Callback, moment))
            given = inspect.signature(getattr(kind, moment))
            try:
                given.bind(*expected.parameters)
            except TypeError as error:
                hint = f"define {moment}{expected}".replace("'", "")
                raise PrimusError(f"callback {name}: {kind.__name__}.{moment}{given}: {error}", hint) from None


class _explain_failure:
    """Turn an unexpected error of a callback into one that names it. The log of the rank gets the traceback."""

    def __init__(self, name: str, moment: str) -> None:
        self._name, self._moment = name, moment

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, PrimusError):
            return
        traceback.print_exception(error, file=sys.stderr)
        raise PrimusError(
            f"callback {self._name}: {self._moment} failed: {format_error_place(error)}:"
            f" {type(error).__name__}: {error}",
            "fix the callback, or remove it from callbacks: in the experiment; the log of the rank has the traceback",
        ) from error
