"""The training loop of all engines, to be read from top to bottom: load, train, step, evaluate, save, finish.

Everything that is not needed to train a model is a callback (`primus.callback`): reports and loggers (`report`), times
of steps (`step_timer`), detection of bad steps (`bad_steps`), settings in force, and those that the experiment names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress

from primus.callback import EvaluationReport, StepReport
from primus.config.schedule import compute_learning_rate, find_evaluation_interval
from primus.data.training.loader import Batches
from primus.data.training.packing import Dataset
from primus.errors import FinalError, PrimusError, UsageError
from primus.interpreter import restore_garbage_collection
from primus.runs import step_turns
from primus.session.bad_steps import SUGGESTION, BadSteps
from primus.session.batches.batch_record import is_recorded, open_batches
from primus.session.checkpoints.rewind import find_next_sample
from primus.session.checkpoints.saver import TrainingPosition
from primus.session.engine import Engine
from primus.session.profile.profiler import build_profiler
from primus.session.recovery import recover_from_bad_steps
from primus.session.session import Session
from primus.session.settings_recorder import SettingsRecorder
from primus.session.setup_report import report_setup
from primus.session.step_timer import TakenStep
from primus.session.timing.collection_record import CollectionRecorder
from primus.session.training_run import TrainingRun

CONTINUE, FINISH, INTERRUPT, GIVE_UP = 0, 1, 2, 3
"""Request of a process before a step; the largest of all processes decides, so that they stop after the same step."""
ABANDON_S = 10.0
"""Time that a checkpoint in writing has to complete after a failure; the peers of a failed rank wait as long."""
DATA_SPAN = "data"
"""Name of the span in a profile in which a process waits for its batch."""
LARGEST_EXPONENT = 20.0
"""Perplexity is e to the loss, at most to this; Megatron-LM `evaluate_and_print_results`."""


def train_with_engine(session: Session, engine: Engine) -> None:
    """Train until the last step or a signal, from the start of the session on; closes both.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    run = TrainingRun(session, engine)
    try:
        run.continue_from(session.start)
        add_callbacks(run)
        report_setup(run)
        train_to_end(run)
    except BaseException:
        # The error is raised again below: a checkpoint that fails as well must not hide it.
        with suppress(PrimusError):
            run.saver.finish_writing(ABANDON_S)
        raise
    finally:
        # Also after an error; neither communicates, because other processes may have ended.
        run.callbacks.call("close")
        engine.close()


def add_callbacks(run: TrainingRun) -> None:
    """Add the callbacks in the order in which every moment calls them, and restore their state.

    A step is reported before a plug-in sees it, and judged last: bad steps raise, and must be reported by then.
    """
    session, engine, callbacks = run.session, run.engine, run.callbacks
    profiler = build_profiler(run)
    # The profiler is the first: it sees what others do in a step.
    for callback in ([profiler] if profiler else []) + [run.timer, *engine.build_callbacks(session), session.reporter]:
        callbacks.add(callback)
    callbacks.add(SettingsRecorder(session, engine.watch_step(), engine.read_settings))
    if is_recorded(session.environ):
        callbacks.add(CollectionRecorder(run.append_event))
    for choice in session.choices:
        callbacks.build(choice, run)
    callbacks.add(run.bad_steps)
    # Before the checkpoint's state is restored: a rewind to the initial weights needs the state of the beginning.
    run.initial_callback_state = callbacks.collect_state()
    if session.start is not None:
        callbacks.restore_state(session.start.callback_state)


def train_to_end(run: TrainingRun) -> None:
    """Train until the run is over, rewinding after bad steps.

    Raises:
        UsageError: The checkpoint is past the last step.
    """
    train_iters = run.trainer.training.train_iters
    if run.step > train_iters:
        raise UsageError(
            f"checkpoint is at step {run.step}, past train_iters {train_iters}: nothing to train",
            f"set train_iters above {run.step}, or begin at step 0 with its weights: load: and finetune: true",
        )
    if run.step == train_iters:
        run.print_line(f"checkpoint is at step {run.step} of {train_iters}: nothing left to train")
        return
    restore_garbage_collection()
    run.callbacks.call("before_train")
    is_over = False
    while not is_over:
        try:
            # Raises BadSteps in every process at the same step, because all of them judge the same reduced values.
            is_over = train_steps(run)
        except BadSteps as bad:
            recover_from_bad_steps(run, bad)


def train_steps(run: TrainingRun) -> bool:
    """Take steps until the run is over; False at data that a rewind skips, where the batches are opened again.

    Raises:
        BadSteps: The run cannot continue from its last steps.
    """
    training = run.trainer.training
    run.consumed_samples = find_next_sample(run.consumed_samples, run.rewinds)
    with open_batches(run) as batches:
        while run.step < training.train_iters:
            action = choose_action(run)
            if action == INTERRUPT:
                interrupt(run)
                return True
            if action == FINISH:
                reason = run.stop_reason or "requested by another rank"
                run.print_line(f"training stops after step {run.step}: {reason}")
                run.append_event("early_stop", step=run.step, reason=reason)
                break
            step(run, batches)
            # Reports a finished checkpoint early, and never waits, so that a slow disk does not slow down the steps.
            run.saver.poll()
            if is_due(run, find_evaluation_interval(training)):
                evaluate_validation(run)
            if is_due(run, run.trainer.checkpoint.save_interval):
                save(run)
            if find_next_sample(run.consumed_samples, run.rewinds) != run.consumed_samples:
                return False
    finish(run)
    return True


def choose_action(run: TrainingRun) -> int:
    """CONTINUE, FINISH or INTERRUPT: the same in every process. Called before each step.

    A run that takes turns with others waits here for its turn: other processes wait for the first one.

    Raises:
        PrimusError: Too many checkpoints in a row could not be written.
    """
    turn = run.turns.wait() if run.turns else None
    if turn is not None:
        cpu_s = round(time.process_time(), 6)
        run.append_event(step_turns.EVENT, number=turn.number, first_step=run.step + 1, cpu_s=cpu_s)
        run.callbacks.call("after_pause")
    # A signal precedes a callback's wish: a preempted run must not spend its grace time on an evaluation.
    own = CONTINUE if run.stop_reason is None else FINISH
    if run.attempt.stop_signal is not None:
        own = INTERRUPT
    if run.saver.has_given_up:
        own = GIVE_UP
    # A signal reaches processes at different times, and so does the end of a write in a thread; all must stop after
    # the same step.
    action = run.processes.all_reduce_max(own)
    if action == GIVE_UP:
        run.saver.check_last()
    return action


def step(run: TrainingRun, batches: Batches) -> None:
    """Take one optimizer step.

    Its numbers are reported when the engine knows them: at once, or after the next step is launched, so that the host
    waits for no device.
    """
    run.callbacks.call("before_step")
    # The phase `compile` has a longer hang timeout; it ends with the first report, and each report is a heartbeat.
    if run.timer.num_reports == 0:
        session = run.session
        run.attempt.beat("compile" if session.engine.compiles or session.compiled else "train", run.step)
    started = time.perf_counter()
    with run.open_span(DATA_SPAN):
        micro_batches = next(batches)
    data_time_s = time.perf_counter() - started
    # Of the step that is about to be taken; `run.step` counts those that were.
    learning_rate = compute_learning_rate(run.step + 1, run.trainer.optimizer, run.trainer.training.train_iters)
    outcome = run.engine.step(micro_batches, learning_rate)
    # A skipped step counts as well: its samples are consumed.
    run.step += 1
    run.consumed_samples += run.session.global_batch_size
    run.callbacks.call("after_step")
    taken = TakenStep(run.step, outcome, learning_rate, run.consumed_samples, data_time_s)
    report_steps(run, run.timer.add_step(taken))


def report_steps(run: TrainingRun, reports: Iterable[StepReport]) -> None:
    """Give the numbers of steps to the callbacks.

    Raises:
        BadSteps: The run cannot continue from them.
        FinalError: A step was not finite, and has changed the weights.
    """
    for report in reports:
        run.callbacks.call("after_report", report)
        # After the report, so that the events contain the step that ended the run.
        if not report.skipped and not (math.isfinite(report.loss) and math.isfinite(report.grad_norm)):
            raise FinalError(
                f"step {report.step}: the loss or the gradient is not finite (loss {report.loss}, grad norm"
                f" {report.grad_norm}); {run.session.engine.library} has changed the weights",
                SUGGESTION,
            )


def is_due(run: TrainingRun, interval: int | None) -> bool:
    """Whether to do now what is done every `interval` steps; `finish` decides for the last step."""
    return interval is not None and run.step % interval == 0 and run.step != run.trainer.training.train_iters


def evaluate_validation(run: TrainingRun) -> None:
    """Evaluate on the validation data."""
    dataset = run.session.data.valid
    assert dataset is not None, "open_data has checked it"
    evaluate(run, dataset, "validation")
    run.evaluated_step = run.step


def evaluate(run: TrainingRun, dataset: Dataset, name: str) -> None:
    """Compute the loss over the first `eval_iters` global batches of `dataset`; callbacks report it."""
    report_steps(run, run.timer.take_pending())
    run.callbacks.call("before_evaluation")
    # The phase has a longer hang timeout, and begins before the first batch is read.
    run.attempt.beat("eval", run.step)
    started = time.perf_counter()
    with Batches(dataset, run.batch_shape, num_workers=0) as batches:
        read = [batch for _ in range(run.trainer.training.eval_iters) for batch in next(batches)]
    loss_sum, tokens = run.engine.evaluate(read)
    loss = loss_sum / max(tokens, 1)
    report = EvaluationReport(
        data=name,
        step=run.step,
        loss=loss,
        perplexity=math.exp(min(LARGEST_EXPONENT, loss)),
        tokens=tokens,
        time_s=round(time.perf_counter() - started, 3),
    )
    run.callbacks.call("after_evaluation", report)
    run.attempt.beat("train", run.step)


def save(run: TrainingRun) -> None:
    """Save the state after this step; with `async_save` some engines write it while training continues."""
    # Bad steps among the pending ones must raise before their state is saved.
    report_steps(run, run.timer.take_pending())
    state = run.engine.collect_state()
    # Callbacks may change their state in `before_save`, so it is collected afterwards.
    run.callbacks.call("before_save")
    # The phase has a longer hang timeout, which ends with the heartbeat of the phase `train`.
    run.attempt.beat("checkpoint", run.step)
    position = TrainingPosition(
        run.step, run.consumed_samples, run.bad_steps.losses, run.callbacks.collect_state(), run.session.compiled
    )
    run.saver.save(state.take, position, state.num_bytes, state.in_thread)
    run.attempt.beat("train", run.step)


def interrupt(run: TrainingRun) -> None:
    """Save, and leave the remaining steps to the next attempt."""
    report_steps(run, run.timer.take_pending())
    signal = run.attempt.stop_signal or "a signal to another rank"
    run.print_line(f"{signal}: stopping after step {run.step}")
    # The time until SIGKILL is short: a step that is saved already is not written again.
    if not run.is_saved:
        save(run)
    run.saver.check_last()
    # The event implies a complete checkpoint.
    run.append_event("interrupted", signal=signal, step=run.step)


def finish(run: TrainingRun) -> None:
    """The last evaluation and checkpoint; callbacks write the summary."""
    report_steps(run, run.timer.take_pending())
    training = run.trainer.training
    # Evaluations come before the checkpoint, whose manifest then contains what callbacks know of them.
    if find_evaluation_interval(training) is not None and run.evaluated_step != run.step:
        evaluate_validation(run)
    if run.session.data.test is not None and training.eval_iters:
        evaluate(run, run.session.data.test, "test")
    if not run.is_saved and run.trainer.checkpoint.disable_last_saving:
        last = run.saver.last_step
        newest = f"the newest checkpoint is of step {last}" if last else "no checkpoint"
        run.print_line(f"step {run.step} is not saved, by disable_last_saving: true; {newest}")
    elif not run.is_saved:
        save(run)
    run.saver.finish_writing()
    run.callbacks.call("after_train")
    run.saver.check_last()
