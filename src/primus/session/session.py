"""A run in training, as the loop sees it: data, schedule, reports, signals and checkpoints.

Engines meet the rest of the package only here and in `loop`, which drives them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primus.callback import CallbackChoice, CallbackList, EvaluationReport
from primus.config.schedule import compute_learning_rate, find_evaluation_interval
from primus.config.schema import Experiment, Trainer
from primus.data.training.dataset import Datasets
from primus.data.training.loader import Batches
from primus.data.training.packing import Dataset
from primus.runs import step_turns
from primus.runs.attempt import Attempt
from primus.session.bad_steps import BadStepDetector
from primus.session.batches.batch_record import RecordedBatches, open_record
from primus.session.checkpoints.resume import CheckpointSearch, ResumePoint
from primus.session.checkpoints.rewind import Rewind
from primus.session.checkpoints.saver import CheckpointSaver, TakeState, TrainingPosition
from primus.session.profile.profiler import build_profiler
from primus.session.ranks.engine_info import EngineInfo
from primus.session.ranks.processes import Processes
from primus.session.reports.reporter import TrainingReporter
from primus.session.timing.rates import Rates

CONTINUE, FINISH, INTERRUPT, GIVE_UP = 0, 1, 2, 3
"""Request of a process before a step; the largest of all processes decides, so that they stop after the same step."""
LARGEST_EXPONENT = 20.0
"""Perplexity is e to the loss, at most to this; Megatron-LM `evaluate_and_print_results`."""


@dataclass(kw_only=True)
class Session:
    """A run that is open: what frameworks share. Every process makes the same calls in the same order."""

    experiment: Experiment
    attempt: Attempt
    processes: Processes
    engine: EngineInfo
    data: Datasets
    global_batch_size: int
    """Sequences in one optimizer step."""
    callbacks: CallbackList
    choices: Sequence[CallbackChoice]
    """Callbacks that the experiment names."""
    reporter: TrainingReporter
    rates: Rates
    search: CheckpointSearch
    saver: CheckpointSaver
    bad_steps: BadStepDetector
    start: ResumePoint | None
    """Checkpoint that the run starts from; None for initial weights."""
    step: int
    """Steps taken."""
    consumed_samples: int
    """Samples that they took."""
    rewinds: list[Rewind]
    """Of all attempts."""
    compiled: bool
    """Whether torch.compile has changed the steps."""
    compile_reason: str = ""
    """Why; nothing is printed about it if it is empty."""
    turns: step_turns.TurnWaiter | None = None
    """Of the first process of a run that takes turns with others."""
    evaluated_step: int | None = None
    stop_reason: str | None = None
    """Why a callback wants the training to end after this step."""

    @property
    def trainer(self) -> Trainer:
        return self.experiment.trainer

    @property
    def train_iters(self) -> int:
        return self.trainer.training.train_iters

    @property
    def masked_token(self) -> int | None:
        """The token after which nothing is predicted; None if everything is."""
        return self.data.eod_id if self.trainer.data.eod_mask_loss else None

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""
        return compute_learning_rate(step, self.trainer.optimizer, self.train_iters)

    def open_batches(self, data_rank: int, dataset: Dataset | None = None) -> Batches:
        """The micro batches [B, S + 1] of one data-parallel rank: from the next step on, or of `dataset` from its
        beginning."""
        batches = RecordedBatches(
            dataset or self.data.train,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.trainer.training.micro_batch_size,
            rank=data_rank,
            world_size=self.engine.data_size,
            consumed_samples=0 if dataset else self.consumed_samples,
            num_workers=self.trainer.data.num_workers if dataset is None else 0,
        )
        # Only the batches of steps: the record says on what the model was trained.
        if dataset is None:
            batches.record = open_record(self.attempt, os.environ)
        return batches

    def add_profiler(self) -> None:
        """Add the callback that records the profile of `profile:`, first: it sees what others do in a step."""
        profiler = build_profiler(self.trainer, self.step, self.attempt, self.processes, self.callbacks)
        if profiler is not None:
            self.callbacks.add(profiler)

    def choose_action(self) -> int:
        """CONTINUE, FINISH or INTERRUPT: the same in every process. Called before each step.

        A run that takes turns with others waits here for its turn: other processes wait for the first one.

        Raises:
            PrimusError: Too many checkpoints in a row could not be written.
        """
        turn = self.turns.wait() if self.turns else None
        if turn is not None:
            self.append_event(
                step_turns.EVENT, number=turn.number, first_step=self.step + 1, cpu_s=round(time.process_time(), 6)
            )
            self.callbacks.call("after_pause")
        # A signal precedes a callback's wish: a preempted run must not spend its grace time on an evaluation.
        own = CONTINUE if self.stop_reason is None else FINISH
        if self.attempt.stop_signal is not None:
            own = INTERRUPT
        if self.saver.has_given_up:
            own = GIVE_UP
        # A signal reaches processes at different times, and so does the end of a write in a thread; all must stop after
        # the same step.
        action = self.processes.all_reduce_max(own)
        if action == GIVE_UP:
            self.saver.check_last()
        return action

    def is_evaluation_due(self) -> bool:
        """Whether to evaluate now; `should_evaluate_at_end` decides for the last step."""
        return self._is_due(find_evaluation_interval(self.trainer.training))

    def should_evaluate_at_end(self) -> bool:
        """Whether the validation loss after the last step is wanted, and not known yet."""
        return find_evaluation_interval(self.trainer.training) is not None and self.evaluated_step != self.step

    def is_save_due(self) -> bool:
        """Whether to save now; `should_save_at_end` decides for the last step."""
        return self._is_due(self.trainer.checkpoint.save_interval)

    def should_save_at_end(self) -> bool:
        """Whether to save after the last step; says if the run ends without a checkpoint of it."""
        if self.is_saved() or not self.trainer.checkpoint.disable_last_saving:
            return not self.is_saved()
        newest = f"the newest checkpoint is of step {self.saver.last_step}" if self.saver.last_step else "no checkpoint"
        self.print_line(f"step {self.step} is not saved, by disable_last_saving: true; {newest}")
        return False

    def is_saved(self) -> bool:
        """Whether there is nothing to save: this step was saved or loaded already, or is the beginning."""
        return self.step in (0, self.saver.last_step)

    def report_evaluation(self, name: str, loss: float, tokens: int, seconds: float) -> None:
        """Report the mean loss on ``validation`` or ``test`` data."""
        if name == "validation":
            self.evaluated_step = self.step
        report = EvaluationReport(
            data=name,
            step=self.step,
            loss=loss,
            perplexity=math.exp(min(LARGEST_EXPONENT, loss)),
            tokens=tokens,
            time_s=round(seconds, 3),
        )
        self.callbacks.call("after_evaluation", report)
        # Ends the phase `eval`, which has a longer hang time-out and began before the first batch was read.
        self.attempt.beat("train", self.step)

    def save(self, take_state: TakeState, num_bytes: int, in_thread: bool) -> None:
        """Save the state after this step; the arguments are those of `CheckpointSaver.save`."""
        # The phase has a longer hang time-out, which ends with the heartbeat of the phase `train`.
        # Callbacks may change their state in `before_save`, so it is collected afterwards.
        self.callbacks.call("before_save")
        self.attempt.beat("checkpoint", self.step)
        position = TrainingPosition(
            self.step, self.consumed_samples, self.bad_steps.losses, self.callbacks.collect_state(), self.compiled
        )
        self.saver.save(take_state, position, num_bytes, in_thread)
        self.attempt.beat("train", self.step)

    def announce_interrupt(self) -> None:
        """Print that a signal ends the run, before its checkpoint is saved."""
        self.print_line(f"{self._format_signal()}: stopping after step {self.step}")

    def report_interrupt(self) -> None:
        """Record that a signal ended the run, after its checkpoint is complete; the event implies one."""
        self.append_event("interrupted", signal=self._format_signal(), step=self.step)

    def report_early_stop(self) -> None:
        """Record that a callback ends the run."""
        reason = self.stop_reason or "requested by another rank"
        self.print_line(f"training stops after step {self.step}: {reason}")
        self.append_event("early_stop", step=self.step, reason=reason)

    def request_stop(self, reason: str) -> None:
        """End the training after this step as if it were the last."""
        # The first reason counts. Other ranks learn of it in `choose_action`, before the next step.
        self.stop_reason = self.stop_reason or reason

    def print_line(self, text: str) -> None:
        self.reporter.print_line(text)

    def append_event(self, kind: str, **fields: Any) -> None:
        self.reporter.append_event(kind, **fields)

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.reporter.log_scalars(step, scalars)

    def _format_signal(self) -> str:
        return self.attempt.stop_signal or "a signal to another rank"

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.step % interval == 0 and self.step != self.train_iters
