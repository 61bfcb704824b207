"""The contract between the training loop of the session and an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from primus.callback import Callback
from primus.session.bad_steps import ReplaceableLosses
from primus.session.checkpoints.saver import TakeState
from primus.session.session import Session
from primus.session.start_weights import open_start_weights

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader
    from primus.session.checkpoints.resume import ResumePoint
    from primus.session.settings.settings_in_force import LiveSetting

MicroBatches = Sequence[NDArray[np.int64]]
"""Micro batches [B, S + 1] of one data-parallel rank: S inputs, and as targets the tokens after them. Of instruction
data [B, 3, S + 1], see `primus.data.instruction.dataset`."""


class StepValues(NamedTuple):
    """The numbers of one optimizer step; the same in every process."""

    loss: float
    """Mean over the valid tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    skipped: bool = False
    """A value was not finite, or the loss was a spike, and the weights were not changed."""
    compute_time_s: float | None = None
    """Forward and backward passes of this process without waiting for others; None if it was not measured."""
    learning_rate: float | None = None
    """That was applied, if it is not the one that the step was asked to apply (`schedule: engine`)."""
    spike: bool = False
    """The loss was a spike."""
    overflow: bool = False
    """The gradient was too large for float16 at the loss scale, which falls."""


class RunningStep(Protocol):
    """A step that was launched, and may still be running on the device."""

    def read(self) -> StepValues:
        """The numbers of the step; waits for the device."""
        ...


class StateToSave(NamedTuple):
    """The state of an engine that a checkpoint shall contain."""

    take: TakeState
    """See `CheckpointSaver.save`."""
    num_bytes: int = 0
    """Size of the files of all processes together; 0 if it is not known."""
    in_thread: bool = False
    """Whether `take` copies the state, so that it is written while training continues."""


class Engine(ABC):
    """An engine that takes one step at a time. Every process makes the same calls in the same order.

    A method with a body need not be implemented.
    """

    @property
    @abstractmethod
    def data_rank(self) -> int:
        """Data-parallel rank of this process: which micro batches it gets."""

    @property
    @abstractmethod
    def model(self) -> Any:
        """The model, for callbacks."""

    @property
    @abstractmethod
    def optimizer(self) -> Any:
        """The optimizer, for callbacks."""

    @property
    def loss_window(self) -> ReplaceableLosses | None:
        """The losses by which the engine finds spikes; None if it finds none."""
        return None

    def load_start(self, session: Session, start: ResumePoint | None) -> None:
        """Load the checkpoint or the weights that training starts from; after a rewind once more.

        Args:
            session: The run.
            start: A checkpoint; None for the weights of `load:` or initial ones.
        """
        if start is not None and not start.weights_only:
            self.load(start.folder)
            return
        weights = open_start_weights(session)
        if weights is not None:
            self.load_weights(weights)

    @abstractmethod
    def load_weights(self, weights: WeightReader, /) -> None:
        """Load weights under their names on the Hugging Face Hub, before the first step."""

    @abstractmethod
    def step(self, batches: MicroBatches, learning_rate: float, /) -> StepValues | RunningStep:
        """Take one optimizer step with `learning_rate`; its numbers are read after the next one is launched if they are
        not known yet."""

    @abstractmethod
    def evaluate(self, batches: MicroBatches, /) -> tuple[float, int]:
        """Sum of the losses, and number, of the valid tokens of all processes; changes nothing."""

    @abstractmethod
    def save(self, folder: Path, /) -> None:
        """Write weights, optimizer and random generators into `folder`, which is empty; returns when this process's
        files are on disk.

        Files of a process are named ``__RANK_...``, as torch.distributed.checkpoint does; all others are the first
        process's.
        """

    def collect_state(self) -> StateToSave:
        """What `save` writes, for a checkpoint of this step."""
        return StateToSave(lambda: self.save)

    @abstractmethod
    def load(self, folder: Path, /) -> None:
        """Restore what `save` wrote, also by another number of processes where the engine can."""

    @abstractmethod
    def watch_step(self) -> AbstractContextManager[object]:
        """What observes the first step from its beginning to its end."""

    @abstractmethod
    def read_settings(self) -> Sequence[LiveSetting]:
        """The settings that model, optimizer and process groups have, right after the first step."""

    @abstractmethod
    def read_memory(self) -> int:
        """Peak memory of this process in bytes: allocated on its device, or resident if the host trains."""

    def build_callbacks(self, session: Session) -> Sequence[Callback]:
        """Callbacks that only this engine has."""
        return ()

    def close(self) -> None:  # noqa: B027  (most engines have nothing to release)
        """Release devices and process groups; also called after an error."""
