"""A run in training: its position, and the parts that the loop calls around the steps of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from primus.callback import CallbackList
from primus.checkpoint.shape import build_shape
from primus.data.training.loader import BatchShape
from primus.runs import step_turns
from primus.session.bad_steps import BadStepDetector
from primus.session.checkpoints.resume import ResumePoint
from primus.session.checkpoints.saver import CheckpointSaver, CheckpointSettings
from primus.session.engine import Engine
from primus.session.session import Session
from primus.session.step_timer import StepTimer, build_rates


class TrainingRun:
    """A session and the engine that trains it; a `primus.callback.TrainingView` for callbacks.

    Every process makes the same calls in the same order.
    """

    def __init__(self, session: Session, engine: Engine) -> None:
        self.session, self.engine = session, engine
        self.experiment, self.trainer = session.experiment, session.trainer
        self.attempt, self.processes = session.attempt, session.processes
        self.print_line, self.append_event = session.reporter.print_line, session.reporter.append_event
        self.log_scalars = session.reporter.log_scalars
        self.callbacks = CallbackList()
        self.batch_shape = BatchShape(
            session.global_batch_size,
            session.trainer.training.micro_batch_size,
            rank=engine.data_rank,
            world_size=session.engine.data_size,
        )
        self.timer = StepTimer(build_rates(session), engine.read_memory)
        self.bad_steps = BadStepDetector(session.trainer.training, engine.loss_window)
        self.saver = _open_saver(session, self.callbacks)
        self.turns = _open_turns(session)
        self.open_span: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Opens a span of the host that the profile shows, while one is recorded."""
        self.step = 0
        """Steps taken."""
        self.consumed_samples = 0
        """Samples that they took."""
        self.rewinds = list(session.rewinds)
        """Of all attempts."""
        self.evaluated_step: int | None = None
        self.stop_reason: str | None = None
        """Why a callback wants the training to end after this step."""
        self.initial_callback_state: Mapping[str, Any] = {}
        """State of the callbacks before the first step, for a rewind to the initial weights."""

    @property
    def model(self) -> object:
        return self.engine.model

    @property
    def optimizer(self) -> object:
        return self.engine.optimizer

    @property
    def is_saved(self) -> bool:
        """Whether there is nothing to save: this step was saved or loaded already, or is the beginning."""
        return self.step == self.saver.last_step

    def continue_from(self, start: ResumePoint | None) -> None:
        """Load the state that training starts from, or goes back to; None for the initial weights.

        Callbacks have their own state.
        """
        self.engine.load_start(self.session, start)
        self.step = start.step if start else 0
        self.consumed_samples = start.consumed_samples if start else 0
        # This step is on disk (or is the beginning), so an interrupt now has nothing to save.
        self.saver.last_step = self.step
        self.evaluated_step = self.stop_reason = None
        self.bad_steps.restart_after(self.step, start.recent_losses if start else [])

    def request_stop(self, reason: str) -> None:
        """End the training after this step as if it were the last."""
        # The first reason counts. Other ranks learn of it in `choose_action`, before the next step.
        self.stop_reason = self.stop_reason or reason


def _open_saver(session: Session, callbacks: CallbackList) -> CheckpointSaver:
    config, reporter = session.trainer.checkpoint, session.reporter
    settings = CheckpointSettings(
        backend=session.engine.backend,
        library_version=session.engine.version,
        folder=session.search.folder,
        remote=session.search.remote,
        run=session.attempt.run.id,
        keep_last_n=config.keep_last_n,
        max_failed=config.max_failed_saves,
        model=build_shape(session.trainer.model),
        data_fingerprint=session.data.fingerprint,
        global_batch_size=session.global_batch_size,
    )
    return CheckpointSaver(
        settings,
        session.processes,
        saved=partial(callbacks.call, "after_save"),
        failed=partial(reporter.report_failed_save, config.max_failed_saves),
        waits=reporter.report_wait_for_save,
    )


def _open_turns(session: Session) -> step_turns.TurnWaiter | None:
    """The turns of a run that alternates with others, on its first process."""
    folder = session.environ.get(step_turns.VARIABLE)
    if not folder or not session.processes.is_first:
        return None
    return step_turns.TurnWaiter(Path(folder), lambda: session.attempt.stop_signal is not None)
