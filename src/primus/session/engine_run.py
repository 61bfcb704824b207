"""A run in the training loop: its session, its engine, and the time of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus.session.engine import Engine
from primus.session.session import Session
from primus.session.step_timer import StepTimer


class EngineRun:
    """A session and its engine; a `primus.callback.TrainingView` for callbacks."""

    def __init__(self, session: Session, engine: Engine) -> None:
        self.session, self.engine = session, engine
        self.experiment, self.attempt = session.experiment, session.attempt
        self.request_stop = session.request_stop
        self.print_line, self.append_event = session.print_line, session.append_event
        self.log_scalars = session.log_scalars
        self.timer = StepTimer(session.rates, engine.read_memory)
        self.initial_callback_state: Mapping[str, Any] = {}
        """State of the callbacks before the first step, for a rewind to the initial weights."""

    @property
    def step(self) -> int:
        return self.session.step

    @property
    def consumed_samples(self) -> int:
        return self.session.consumed_samples

    @property
    def model(self) -> object:
        return self.engine.model

    @property
    def optimizer(self) -> object:
        return self.engine.optimizer
