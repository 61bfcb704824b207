"""The contract between the training loop of the session and an engine that takes one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader
    from primus.session.settings_in_force import LiveSetting

MicroBatches = Sequence[NDArray[np.int64]]
"""Micro batches [B, S + 1] of one data-parallel rank: S inputs, and as targets the tokens after them."""


class StepValues(NamedTuple):
    """The numbers of one optimizer step; the same in every process."""

    loss: float
    """Mean over the valid tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    skipped: bool = False
    """A value was not finite, and the weights were not changed."""
    compute_time_s: float | None = None
    """Forward and backward passes of this process without waiting for others; None if it was not measured."""
    learning_rate: float | None = None
    """That was applied, if it is not the one that the step was asked to apply (`schedule: engine`)."""


class Engine(Protocol):
    """An engine that takes one step at a time. Every process makes the same calls in the same order."""

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of this process: which micro batches it gets."""
        ...

    @property
    def model(self) -> Any:
        """The model, for callbacks."""
        ...

    @property
    def optimizer(self) -> Any:
        """The optimizer, for callbacks."""
        ...

    def load_weights(self, weights: WeightReader, /) -> None:
        """Load weights under their names on the Hugging Face Hub, before the first step."""
        ...

    def step(self, batches: MicroBatches, learning_rate: float, /) -> StepValues:
        """Take one optimizer step with `learning_rate`; returns when its numbers are known."""
        ...

    def evaluate(self, batches: MicroBatches, /) -> tuple[float, int]:
        """Sum of the losses, and number, of the valid tokens of all processes; changes nothing."""
        ...

    def save(self, folder: Path, /) -> None:
        """Write weights, optimizer and random generators into `folder`, which is empty; returns when this process's
        files are on disk.

        Files of a process are named ``__RANK_...``, as torch.distributed.checkpoint does; all others are the first
        process's.
        """
        ...

    def load(self, folder: Path, /) -> None:
        """Restore what `save` wrote, also by another number of processes where the engine can."""
        ...

    def watch_step(self) -> AbstractContextManager[object]:
        """What observes the first step from its beginning to its end."""
        ...

    def read_settings(self) -> Sequence[LiveSetting]:
        """The settings that model, optimizer and process groups have, right after the first step."""
        ...

    def read_memory(self) -> int:
        """Peak memory of this process in bytes: allocated on its device, or resident if the host trains."""
        ...

    def close(self) -> None:
        """Release devices and process groups; also called after an error."""
        ...
