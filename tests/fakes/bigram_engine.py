"""A small engine of its own, without a tensor library: a table of bigram logits, trained by gradient descent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fakes.folder_processes import join_processes
from primus.config.schema import Experiment
from primus.runs.attempt import Attempt
from primus.session.engine import Engine, MicroBatches, StepValues
from primus.session.loop import train_with_engine
from primus.session.open_session import open_session
from primus.session.ranks.engine_info import EngineInfo
from primus.session.ranks.processes import OneProcess, Processes
from primus.session.session import Session
from primus.session.settings.settings_in_force import LiveSetting

INFO = EngineInfo(
    backend="bigram",
    library="numpy",
    version=np.__version__,
    device_name="a CPU",
    device_type="cpu",
    num_devices=1,
    data_size=1,
)


class BigramEngine(Engine):
    """An `Engine`; `poison` makes the loss of that step infinite."""

    def __init__(self, vocab_size: int, poison: int | None = None, processes: Processes | None = None) -> None:
        self.processes = processes or OneProcess()
        self.logits = np.zeros((vocab_size, vocab_size))
        self.steps, self.poison, self.is_closed = 0, poison, False
        self.loaded_names: list[str] = []
        self.live: Sequence[LiveSetting] = ()

    @property
    def data_rank(self) -> int:
        return self.processes.rank

    @property
    def model(self) -> Any:
        return self

    @property
    def optimizer(self) -> Any:
        return None

    def load_weights(self, weights: Any) -> None:
        self.loaded_names = [name for name in weights.list_tensors() if weights.read(name) is not None]

    def step(self, batches: MicroBatches, learning_rate: float) -> StepValues:
        own = [self._differentiate(batch) for batch in batches]
        losses, gradients = zip(
            *(pair for pairs in self.processes.all_gather_values(own) for pair in pairs), strict=True
        )
        gradient = np.mean(gradients, axis=0)
        self.logits -= learning_rate * gradient
        self.steps += 1
        loss = np.inf if self.steps == self.poison else float(np.mean(losses))
        return StepValues(loss, float(np.linalg.norm(gradient)))

    def evaluate(self, batches: MicroBatches) -> tuple[float, int]:
        tokens = sum(batch[:, 1:].size for batch in batches)
        return sum(self._differentiate(batch)[0] * batch[:, 1:].size for batch in batches), tokens

    def watch_step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def read_settings(self) -> list[LiveSetting]:
        return [LiveSetting(key="parameters", value=self.logits.size), *self.live]

    def save(self, folder: Path) -> None:
        if self.processes.is_first:
            np.save(folder / "logits.npy", self.logits)

    def load(self, folder: Path) -> None:
        self.logits = np.load(folder / "logits.npy")

    def read_memory(self) -> int:
        return int(self.logits.nbytes)

    def close(self) -> None:
        self.is_closed = True

    def _differentiate(self, batch: NDArray[np.int64]) -> tuple[float, NDArray[np.float64]]:
        """Mean loss, and its gradient."""
        inputs, targets = batch[:, :-1].ravel(), batch[:, 1:].ravel()
        rows = self.logits[inputs]
        shares = np.exp(rows - rows.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        loss = float(-np.log(shares[np.arange(len(targets)), targets]).mean())
        shares[np.arange(len(targets)), targets] -= 1
        gradient = np.zeros_like(self.logits)
        np.add.at(gradient, inputs, shares / len(targets))
        return loss, gradient


def train_bigrams(
    experiment: Experiment,
    attempt: Attempt,
    poison: int | None = None,
    *,
    compiles: bool = False,
    live: Sequence[LiveSetting] = (),
) -> tuple[Session, BigramEngine]:
    session = open_session(experiment, attempt, OneProcess(), replace(INFO, compiles=compiles), os.environ)
    engine = BigramEngine(experiment.trainer.model.vocab_size, poison)
    engine.live = live
    train_with_engine(session, engine)
    return session, engine


def train_bigrams_on_hosts(experiment: Experiment, attempt: Attempt) -> None:
    """Train in all processes of a run together; a step takes 20 ms at least."""
    processes = join_processes(attempt)
    info = replace(INFO, num_devices=processes.world, data_size=processes.world)
    session = open_session(experiment, attempt, processes, info, os.environ)
    train_with_engine(session, PausingEngine(experiment.trainer.model.vocab_size, processes=processes))


class PausingEngine(BigramEngine):
    """Leaves the machine to what is tested."""

    def step(self, batches: MicroBatches, learning_rate: float) -> StepValues:
        time.sleep(0.02)
        return super().step(batches, learning_rate)
