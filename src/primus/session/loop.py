"""The training loop of all engines, to be read from top to bottom: load, train, step, evaluate, save, finish.

Everything that is not needed to train a model is a callback (`primus.callback`): reports and loggers (`report`), times
of steps (`step_timer`), detection of bad steps (`bad_steps`), settings in force, and those that the experiment names.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress

from primus.callback import StepReport
from primus.data.training.loader import Batches
from primus.data.training.packing import Dataset
from primus.errors import FinalError, PrimusError, UsageError
from primus.interpreter import restore_garbage_collection
from primus.session.bad_steps import SUGGESTION, BadSteps
from primus.session.batches.batch_record import RECORD_VARIABLE
from primus.session.checkpoints.rewind import find_next_sample
from primus.session.engine import Engine
from primus.session.engine_run import EngineRun
from primus.session.recovery import recover_from_bad_steps
from primus.session.session import FINISH, INTERRUPT, Session
from primus.session.settings_recorder import SettingsRecorder
from primus.session.setup_report import report_setup
from primus.session.step_timer import TakenStep
from primus.session.timing.collection_record import CollectionRecorder

ABANDON_S = 10.0
"""Time that a checkpoint in writing has to complete after a failure; the peers of a failed rank wait as long."""


def train_with_engine(session: Session, engine: Engine) -> None:
    """Train until the last step or a signal, from the start of the session on; closes both.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    run = EngineRun(session, engine)
    try:
        engine.load_start(session, session.start)
        add_callbacks(run)
        report_setup(session)
        train_to_end(run)
    except BaseException:
        # The error is raised again below: a checkpoint that fails as well must not hide it.
        with suppress(PrimusError):
            session.saver.finish_writing(ABANDON_S)
        raise
    finally:
        # Also after an error; neither communicates, because other processes may have ended.
        session.callbacks.call("close")
        engine.close()


def add_callbacks(run: EngineRun) -> None:
    """Add the callbacks in the order in which every moment calls them, and restore their state.

    A step is reported before a plug-in sees it, and judged last: bad steps raise, and must be reported by then.
    """
    session, callbacks = run.session, run.session.callbacks
    session.add_profiler()
    callbacks.add(run.timer)
    for callback in run.engine.build_callbacks(session):
        callbacks.add(callback)
    callbacks.add(session.reporter)
    callbacks.add(SettingsRecorder(session, run.engine.watch_step(), run.engine.read_settings))
    if os.environ.get(RECORD_VARIABLE) == "1":
        callbacks.add(CollectionRecorder(session.append_event))
    for choice in session.choices:
        callbacks.build(choice, run)
    callbacks.add(session.bad_steps)
    # Before the checkpoint's state is restored: a rewind to the initial weights needs the state of the beginning.
    run.initial_callback_state = callbacks.collect_state()
    start = session.start
    if start is not None:
        session.bad_steps.restart_after(start.step, start.recent_losses)
        callbacks.restore_state(start.callback_state)


def train_to_end(run: EngineRun) -> None:
    """Train until the run is over, rewinding after bad steps.

    Raises:
        UsageError: The checkpoint is past the last step.
    """
    session = run.session
    if session.step > session.train_iters:
        raise UsageError(
            f"checkpoint is at step {session.step}, past train_iters {session.train_iters}: nothing to train",
            f"set train_iters above {session.step}, or begin at step 0 with its weights: load: and finetune: true",
        )
    if session.step == session.train_iters:
        session.print_line(f"checkpoint is at step {session.step} of {session.train_iters}: nothing left to train")
        return
    restore_garbage_collection()
    session.callbacks.call("before_train")
    is_over = False
    while not is_over:
        try:
            # Raises BadSteps in every process at the same step, because all of them judge the same reduced values.
            is_over = train_steps(run)
        except BadSteps as bad:
            recover_from_bad_steps(run, bad)


def train_steps(run: EngineRun) -> bool:
    """Take steps until the run is over; False at data that a rewind skips, where the batches are opened again.

    Raises:
        BadSteps: The run cannot continue from its last steps.
    """
    session = run.session
    session.consumed_samples = find_next_sample(session.consumed_samples, session.rewinds)
    with session.open_batches(run.engine.data_rank) as batches:
        while session.step < session.train_iters:
            action = session.choose_action()
            if action == INTERRUPT:
                interrupt(run)
                return True
            if action == FINISH:
                session.report_early_stop()
                break
            step(run, batches)
            # Reports a finished checkpoint early, and never waits, so that a slow disk does not slow down the steps.
            session.saver.poll()
            if session.is_evaluation_due():
                evaluate_validation(run)
            if session.is_save_due():
                save(run)
            if find_next_sample(session.consumed_samples, session.rewinds) != session.consumed_samples:
                return False
    finish(run)
    return True


def step(run: EngineRun, batches: Batches) -> None:
    """Take one optimizer step.

    Its numbers are reported when the engine knows them: at once, or after the next step is launched, so that the host
    waits for no device.
    """
    session = run.session
    session.callbacks.call("before_step")
    # The phase `compile` has a longer hang timeout; it ends with the first report, and each report is a heartbeat.
    if run.timer.num_reports == 0:
        session.attempt.beat("compile" if session.engine.compiles or session.compiled else "train", session.step)
    started = time.perf_counter()
    micro_batches = next(batches)
    data_time_s = time.perf_counter() - started
    # Of the step that is about to be taken; `session.step` counts those that were.
    learning_rate = session.learning_rate(session.step + 1)
    outcome = run.engine.step(micro_batches, learning_rate)
    # A skipped step counts as well: its samples are consumed.
    session.step += 1
    session.consumed_samples += session.global_batch_size
    session.callbacks.call("after_step")
    taken = TakenStep(session.step, outcome, learning_rate, session.consumed_samples, data_time_s)
    report_steps(run, run.timer.add_step(taken))


def report_steps(run: EngineRun, reports: Iterable[StepReport]) -> None:
    """Give the numbers of steps to the callbacks.

    Raises:
        BadSteps: The run cannot continue from them.
        FinalError: A step was not finite, and has changed the weights.
    """
    for report in reports:
        run.session.callbacks.call("after_report", report)
        # After the report, so that the events contain the step that ended the run.
        if not report.skipped and not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            raise FinalError(
                f"step {report.step}: the loss or the gradient is not finite (loss {report.loss}, grad norm"
                f" {report.grad_norm}); {run.session.engine.library} has changed the weights",
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
    report_steps(run, run.timer.take_pending())
    session.callbacks.call("before_evaluation")
    session.attempt.beat("eval", session.step)
    started = time.perf_counter()
    with session.open_batches(run.engine.data_rank, dataset) as batches:
        read = [batch for _ in range(session.trainer.training.eval_iters) for batch in next(batches)]
    loss_sum, tokens = run.engine.evaluate(read)
    session.report_evaluation(name, loss_sum / max(tokens, 1), tokens, time.perf_counter() - started)


def save(run: EngineRun) -> None:
    """Save the state after this step; with `async_save` some engines write it while training continues."""
    # Bad steps among the pending ones must raise before their state is saved.
    report_steps(run, run.timer.take_pending())
    run.session.save(*run.engine.collect_state())


def interrupt(run: EngineRun) -> None:
    """Save, and leave the remaining steps to the next attempt."""
    session = run.session
    report_steps(run, run.timer.take_pending())
    session.announce_interrupt()
    # The time until SIGKILL is short: a step that is saved already is not written again.
    if not session.is_saved():
        save(run)
    session.saver.check_last()
    session.report_interrupt()


def finish(run: EngineRun) -> None:
    """The last evaluation and checkpoint; callbacks write the summary."""
    session = run.session
    report_steps(run, run.timer.take_pending())
    # Evaluations come before the checkpoint, whose manifest then contains what callbacks know of them.
    if session.should_evaluate_at_end():
        evaluate_validation(run)
    if session.data.test is not None and session.trainer.training.eval_iters:
        evaluate(run, session.data.test, "test")
    if session.should_save_at_end():
        save(run)
    session.saver.finish_writing()
    session.callbacks.call("after_train")
    session.saver.check_last()
