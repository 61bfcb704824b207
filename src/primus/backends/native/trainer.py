"""The training of one run, to be read from top to bottom: set up, train, step, evaluate, save, finish.

Everything that is not needed to train a model is a callback (`primus.callback`): reports and loggers (`report`), times
of steps (`step_timer`), detection of bad steps (`bad_steps`), the text sample (`samples`), and those that the
experiment names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

from primus.backends.native.adapters import collect_adapter_files
from primus.backends.native.checkpoint import collect_current_state, count_bytes, prepare_files
from primus.backends.native.evaluate import evaluate_dataset, to_batch
from primus.backends.native.recovery import recover_from_bad_steps
from primus.backends.native.rewind import find_next_sample
from primus.backends.native.setup import set_up_training
from primus.backends.native.step import train_step
from primus.backends.native.step_timer import LaunchedStep
from primus.backends.native.training import Training
from primus.callback import StepReport
from primus.config.schema import Experiment
from primus.data.training.loader import Batches
from primus.data.training.packing import Dataset
from primus.errors import PrimusError, UsageError
from primus.interpreter import restore_garbage_collection
from primus.runs.attempt import Attempt
from primus.session.bad_steps import BadSteps
from primus.session.engine_errors import explain_torch_errors
from primus.session.session import FINISH, INTERRUPT
from primus.session.torch_processes import join_run

ABANDON_S = 10.0
"""Time that a checkpoint in writing has to complete after a failure; the peers of a failed rank wait as long."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal, from its newest checkpoint on.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    with explain_torch_errors(), join_run(attempt, experiment.trainer) as processes:
        # Inside of the process group: the set-up already communicates, for example to agree on the checkpoint.
        training = set_up_training(experiment, attempt, processes, os.environ)
        try:
            train_to_end(training)
        except BaseException:
            # The error is raised again below: a checkpoint that fails as well must not hide it.
            with suppress(PrimusError):
                training.saver.finish_writing(ABANDON_S)
            raise
        finally:
            # Also after an error; callbacks must not communicate here, because other processes may have ended.
            training.callbacks.call("close")


def train_to_end(training: Training) -> None:
    """Train until the run is over, rewinding after bad steps."""
    train_iters = training.experiment.trainer.training.train_iters
    if training.step > train_iters:
        raise UsageError(
            f"checkpoint is at step {training.step}, past train_iters {train_iters}: nothing to train",
            f"set train_iters above {training.step}, or begin at step 0 with its weights: load: and finetune: true",
        )
    if training.step == train_iters:
        training.print_line(f"checkpoint is at step {training.step} of {train_iters}: nothing left to train")
        return
    restore_garbage_collection()
    training.callbacks.call("before_train")
    is_over = False
    while not is_over:
        try:
            # Raises BadSteps in every process at the same step, because all of them judge the same reduced values.
            is_over = train_steps(training)
        except BadSteps as bad:
            recover_from_bad_steps(training, bad)


def train_steps(training: Training) -> bool:
    """Take steps until the run is over; False at data that a rewind skips, where the batches are opened again.

    Raises:
        BadSteps: The run cannot continue from its last steps.
    """
    train_iters = training.experiment.trainer.training.train_iters
    training.consumed_samples = find_next_sample(training.consumed_samples, training.rewinds)
    with training.open_batches(training.processes.rank) as batches:
        while training.step < train_iters:
            wanted = training.choose_action()
            if wanted == INTERRUPT:
                interrupt(training)
                return True
            if wanted == FINISH:
                training.report_early_stop()
                break
            step(training, batches)
            # Reports a finished checkpoint early, and never waits, so that a slow disk does not slow down the steps.
            training.saver.poll()
            if training.is_evaluation_due():
                evaluate_validation(training)
            if training.is_save_due():
                save(training)
            if find_next_sample(training.consumed_samples, training.rewinds) != training.consumed_samples:
                return False
    finish(training)
    return True


def step(training: Training, batches: Batches) -> None:
    """Take one optimizer step.

    On a CPU its numbers are reported at once, on a GPU after the next step is launched: the host waits for no device.
    """
    trainer = training.experiment.trainer
    training.callbacks.call("before_step")
    started = time.perf_counter()
    micro_batches = [to_batch(tokens, training.masked_token, training.processes.device) for tokens in next(batches)]
    data_time_s = time.perf_counter() - started
    # The phase `compile` has a longer hang timeout; it ends with the first report.
    if training.step_timer.num_reports == 0:
        training.attempt.beat("compile" if training.compiled else "train", training.step)
    learning_rate = training.learning_rate(training.step + 1)
    result = train_step(
        training.trainable,
        training.optimizer,
        micro_batches,
        learning_rate=learning_rate,
        clip_grad=trainer.optimizer.clip_grad,
        window=training.loss_window,
        timer=training.compute_timer,
    )
    training.step += 1
    training.consumed_samples += training.global_batch_size
    compute_time = training.compute_timer.take_time()
    training.callbacks.call("after_step")
    launched = LaunchedStep(training.step, result, learning_rate, training.consumed_samples, data_time_s, compute_time)
    _report_steps(training, training.step_timer.add_step(launched))


def evaluate_validation(training: Training) -> None:
    """Evaluate on the validation data."""
    assert training.data.valid is not None, "open_data has checked it"
    evaluate(training, training.data.valid, "validation")


def evaluate(training: Training, dataset: Dataset, name: str) -> None:
    """Compute the loss on `dataset`; callbacks report it."""
    _report_steps(training, training.step_timer.take_pending())
    training.callbacks.call("before_evaluation")
    training.attempt.beat("eval", training.step)
    started = time.perf_counter()
    found = evaluate_dataset(
        training.trainable,
        dataset,
        training.experiment.trainer.training,
        training.global_batch_size,
        training.processes,
        training.masked_token,
    )
    training.report_evaluation(name, found.loss, found.tokens, time.perf_counter() - started)


def save(training: Training) -> None:
    """Begin to save the state after this step; with `async_save` it is written while training continues."""
    # Bad steps among the pending ones must raise before their state is saved.
    _report_steps(training, training.step_timer.take_pending())
    state = collect_current_state(training.trainable.model, training.optimizer, training.processes)
    is_async = training.experiment.trainer.checkpoint.async_save
    load, model = training.experiment.trainer.checkpoint.load, training.trainable.model
    # Gathered by all processes, before one of them writes it.
    adapter = collect_adapter_files(model, load) if model.adapters is not None and load else None
    training.save(
        lambda: prepare_files(state, is_async, training.processes, adapter),
        num_bytes=count_bytes(state),
        in_thread=is_async,
        compiled=training.compiled,
    )


def interrupt(training: Training) -> None:
    """Save, and leave the remaining steps to the next attempt."""
    _report_steps(training, training.step_timer.take_pending())
    training.announce_interrupt()
    if not training.is_saved():
        save(training)
    training.saver.check_last()
    training.report_interrupt()


def finish(training: Training) -> None:
    """The last evaluation and checkpoint; callbacks write the sample and the summary."""
    trainer = training.experiment.trainer
    _report_steps(training, training.step_timer.take_pending())
    if training.should_evaluate_at_end():
        evaluate_validation(training)
    if training.data.test is not None and trainer.training.eval_iters:
        evaluate(training, training.data.test, "test")
    if training.should_save_at_end():
        save(training)
    training.saver.finish_writing()
    training.callbacks.call("after_train")
    training.saver.check_last()


def _report_steps(training: Training, reports: Iterable[StepReport]) -> None:
    """Give the numbers of steps to the callbacks.

    Raises:
        BadSteps: The run cannot continue from them.
    """
    for report in reports:
        training.callbacks.call("after_report", report)
