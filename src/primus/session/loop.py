"""The training loop for engines that take one step at a time, to be read from top to bottom."""

from __future__ import annotations

import math
import time

from primus.data.training.packing import Dataset
from primus.errors import FinalError, UsageError
from primus.interpreter import restore_garbage_collection
from primus.session.bad_steps import SUGGESTION
from primus.session.engine import Engine, StepValues
from primus.session.session import FINISH, INTERRUPT, Session
from primus.session.setup_report import report_setup
from primus.session.weights import open_start_weights


class EngineRun:
    """A session and its engine; a `primus.callback.TrainingView` for callbacks."""

    def __init__(self, session: Session, engine: Engine) -> None:
        self.session, self.engine = session, engine
        self.experiment, self.attempt = session.experiment, session.attempt
        self.request_stop = session.request_stop
        self.print_line, self.append_event = session.print_line, session.append_event
        self.log_scalars = session.log_scalars

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


def train_with_engine(session: Session, engine: Engine) -> None:
    """Train until the last step or a signal, from the start of the session on; closes both.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    run = EngineRun(session, engine)
    try:
        load_start(run)
        add_callbacks(run)
        # The launch asks for torch.compile by `compile: true`; JAX compiles whatever the key says.
        report_setup(session, compiled=session.engine.compiles and session.trainer.training.compile is True)
        if is_complete(session):
            return
        restore_garbage_collection()
        session.callbacks.call("before_train")
        train_steps(run)
    finally:
        # Also after an error; neither communicates, because other processes may have ended.
        session.callbacks.call("close")
        engine.close()


def load_start(run: EngineRun) -> None:
    """Load the checkpoint that the run starts from, or its initial weights."""
    session, engine = run.session, run.engine
    start = session.start
    if start is not None and not start.weights_only:
        engine.load(start.folder)
        session.bad_steps.restart_after(start.step, start.recent_losses)
        return
    weights = open_start_weights(session)
    if weights is not None:
        engine.load_weights(weights)


def add_callbacks(run: EngineRun) -> None:
    """Add the callbacks in the order in which every moment calls them, and restore their state.

    A step is reported before a plug-in sees it, and judged last: bad steps raise, and must be reported by then.
    """
    session = run.session
    session.add_profiler()
    session.add_reporters(run.engine.watch_step(), run.engine.read_settings)
    for choice in session.choices:
        session.callbacks.build(choice, run)
    session.callbacks.add(session.bad_steps)
    if session.start is not None:
        session.callbacks.restore_state(session.start.callback_state)


def is_complete(session: Session) -> bool:
    """Whether nothing is left to train.

    Raises:
        UsageError: The checkpoint is past the last step.
    """
    if session.step > session.train_iters:
        raise UsageError(
            f"checkpoint is at step {session.step}, past train_iters {session.train_iters}: nothing to train",
            f"set train_iters above {session.step}, or begin at step 0 with its weights: load: and finetune: true",
        )
    if session.step == session.train_iters:
        session.print_line(f"checkpoint is at step {session.step} of {session.train_iters}: nothing left to train")
    return session.step == session.train_iters


def train_steps(run: EngineRun) -> None:
    """Take the steps that are left, with the evaluations and checkpoints that are due between them."""
    session = run.session
    first_step = session.step
    with session.open_batches(run.engine.data_rank) as batches:
        while session.step < session.train_iters:
            action = session.choose_action()
            if action == INTERRUPT:
                interrupt(run)
                return
            if action == FINISH:
                session.report_early_stop()
                break
            session.callbacks.call("before_step")
            # The phase `compile` has a longer hang timeout; it ends with the first report.
            is_compiling = session.engine.compiles and session.step == first_step
            session.attempt.beat("compile" if is_compiling else "train", session.step)
            # Before the batch: the time of a step includes the wait for its data, which is reported as a part of it.
            started, cpu_started = time.perf_counter(), time.process_time()
            micro_batches = next(batches)
            data_time_s = time.perf_counter() - started
            # Of the step that is about to be taken; `session.step` counts those that were.
            learning_rate = session.learning_rate(session.step + 1)
            values = run.engine.step(micro_batches, learning_rate)
            session.advance(
                learning_rate if values.learning_rate is None else values.learning_rate,
                loss=values.loss,
                grad_norm=values.grad_norm,
                skipped=values.skipped,
                compute_time_s=values.compute_time_s,
                step_time_s=time.perf_counter() - started,
                cpu_time_s=time.process_time() - cpu_started,
                data_time_s=data_time_s,
                memory_bytes=run.engine.read_memory(),
            )
            # After the report, so that the events contain the step that ended the run.
            if not values.skipped:
                check_finite(session, values)
            if session.is_evaluation_due():
                evaluate_validation(run)
            if session.is_save_due():
                save(run)
    finish(run)


def check_finite(session: Session, values: StepValues) -> None:
    """End the run after a step that was not finite and has changed the weights.

    Raises:
        FinalError: It was.
    """
    if not (math.isfinite(values.loss) and math.isfinite(values.grad_norm)):
        raise FinalError(
            f"step {session.step}: the loss or the gradient is not finite (loss {values.loss}, grad norm"
            f" {values.grad_norm}); {session.engine.library} has changed the weights",
            SUGGESTION,
        )


def evaluate_validation(run: EngineRun) -> None:
    """Evaluate on the validation data."""
    dataset = run.session.data.valid
    assert dataset is not None, "open_data has checked it"
    evaluate(run, dataset, "validation")


def evaluate(run: EngineRun, dataset: Dataset, name: str) -> None:
    """Compute the loss over the first `eval_iters` global batches of `dataset`; callbacks report it."""
    session = run.session
    session.callbacks.call("before_evaluation")
    session.attempt.beat("eval", session.step)
    started = time.perf_counter()
    with session.open_batches(run.engine.data_rank, dataset) as batches:
        read = [batch for _ in range(session.trainer.training.eval_iters) for batch in next(batches)]
    loss_sum, tokens = run.engine.evaluate(read)
    session.report_evaluation(name, loss_sum / tokens, tokens, time.perf_counter() - started)


def save(run: EngineRun) -> None:
    """Save the state after this step."""
    run.session.save(lambda: run.engine.save)


def interrupt(run: EngineRun) -> None:
    """Save, and leave the remaining steps to the next attempt."""
    run.session.announce_interrupt()
    # The time until SIGKILL is short: a step that is saved already is not written again.
    if not run.session.is_saved():
        save(run)
    run.session.saver.check_last()
    run.session.report_interrupt()


def finish(run: EngineRun) -> None:
    """The last evaluation and checkpoint; callbacks write the summary."""
    session = run.session
    # Evaluations come before the checkpoint, whose manifest then contains what callbacks know of them.
    if session.should_evaluate_at_end():
        evaluate_validation(run)
    if session.data.test is not None and session.trainer.training.eval_iters:
        evaluate(run, session.data.test, "test")
    if session.should_save_at_end():
        save(run)
    session.callbacks.call("after_train")
    session.saver.check_last()
