"""The training of one run: its steps, evaluations and checkpoints, and what comes last."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from primus.backends.native.bad_steps import BadSteps
from primus.backends.native.distributed import join_processes
from primus.backends.native.evaluate import EvaluationResult, evaluate_dataset, to_batch
from primus.backends.native.optimizer import compute_learning_rate
from primus.backends.native.recovery import recover_from_bad_steps
from primus.backends.native.report import LaunchedStep
from primus.backends.native.resume import collect_current_state
from primus.backends.native.rewind import find_next_sample
from primus.backends.native.samples import generate_sample, write_sample
from primus.backends.native.setup import Training, set_up_training
from primus.backends.native.step import train_step
from primus.backends.native.step_line import format_evaluation_line
from primus.config.schedule import evaluation_interval
from primus.config.schema import Experiment
from primus.data.training.loader import Batches
from primus.data.training.packing import Dataset
from primus.errors import PrimusError, UsageError
from primus.runs.attempt import Attempt

ABANDON_S = 10.0
"""Time that a checkpoint on its way to the disk has when training fails; the peers of a failed rank wait as long."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal, from its newest checkpoint on.

    Raises:
        PrimusError: The training cannot begin or go on, and why.
    """
    timeout = timedelta(minutes=experiment.trainer.parallel.distributed_timeout_minutes)
    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    device = experiment.trainer.training.device
    with _explain_errors(), join_processes(*place, timeout, os.environ, device) as processes:
        training = set_up_training(experiment, attempt, processes, os.environ)
        try:
            _run_training(training)
        except BaseException:
            with suppress(PrimusError):
                training.saver.finish_writing(ABANDON_S)
            raise
        finally:
            training.reporter.close()


def _run_training(training: Training) -> None:
    train_iters = training.experiment.trainer.training.train_iters
    if training.step > train_iters:
        raise UsageError(
            f"checkpoint is at step {training.step}, past train_iters {train_iters}: nothing to train",
            f"set train_iters above {training.step}, or begin at step 0 with its weights: load: and finetune: true",
        )
    if training.step == train_iters:
        training.reporter.print_line(f"checkpoint is at step {training.step} of {train_iters}: nothing left to train")
        return
    first = training.step
    is_over = False
    while not is_over:
        try:
            is_over = _train_steps(training, first)
        except BadSteps as bad:
            recover_from_bad_steps(training, bad)


def _train_steps(training: Training, first: int) -> bool:
    """Train until the run is over, or until data begins that a rewind passes over: then False.

    Raises:
        BadSteps: The run cannot go on from its last steps.
    """
    train_iters = training.experiment.trainer.training.train_iters
    training.consumed_samples = find_next_sample(training.consumed_samples, training.rewinds)
    with _open_batches(training) as batches:
        training.reporter.restart_clock()
        while training.step < train_iters:
            if training.processes.all_reduce_any(training.attempt.stop_signal is not None):
                _save_and_interrupt(training, first)
                return True
            _take_step(training, batches)
            _handle_step(training)
            if find_next_sample(training.consumed_samples, training.rewinds) != training.consumed_samples:
                return False
    _finish_training(training, first)
    return True


def _open_batches(training: Training) -> Batches:
    """The micro batches of this process from the next step on."""
    config = training.experiment.trainer
    return Batches(
        training.data.train,
        global_batch_size=training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        rank=training.processes.rank,
        world_size=training.processes.world,
        consumed_samples=training.consumed_samples,
        num_workers=config.data.num_workers,
    )


def _take_step(training: Training, batches: Batches) -> None:
    trainer = training.experiment.trainer
    before = time.perf_counter()
    micro_batches = [
        to_batch(tokens, _find_masked_token(training), training.processes.device) for tokens in next(batches)
    ]
    data_time_s = time.perf_counter() - before
    rate = compute_learning_rate(training.step + 1, trainer.optimizer, trainer.training.train_iters)
    if training.reporter.last is None:
        training.attempt.beat("compile" if training.compiled else "train", training.step)
    result = train_step(
        training.trainable,
        training.optimizer,
        micro_batches,
        learning_rate=rate,
        clip_grad=trainer.optimizer.clip_grad,
        window=training.watch.window,
        timer=training.timer,
    )
    training.step += 1
    training.consumed_samples += training.global_batch_size
    compute_time = training.timer.take_time()
    training.reporter.add_step(
        LaunchedStep(training.step, result, rate, training.consumed_samples, data_time_s, compute_time)
    )


def _find_masked_token(training: Training) -> int | None:
    """Token after which nothing is to be predicted."""
    return training.data.eod_id if training.experiment.trainer.data.eod_mask_loss else None


def _handle_step(training: Training) -> None:
    """Evaluate and save where it is time."""
    trainer = training.experiment.trainer
    training.saver.poll()
    if _is_due(training, evaluation_interval(trainer.training)):
        _evaluate_validation(training)
    if _is_due(training, trainer.checkpoint.save_interval):
        _begin_save(training)


def _is_due(training: Training, interval: int | None) -> bool:
    """Whether a multiple of `interval` is reached; the last step has its own ending."""
    is_last = training.step == training.experiment.trainer.training.train_iters
    return interval is not None and training.step % interval == 0 and not is_last


def _evaluate_validation(training: Training) -> None:
    valid = training.data.valid
    assert valid is not None, "set_up has checked it"
    training.reporter.flush()
    training.attempt.beat("eval", training.step)
    before = time.perf_counter()
    found = _compute_loss_on(training, valid)
    reporter = training.reporter
    reporter.print_line(format_evaluation_line(training.step, found.loss, found.perplexity, time.time()))
    reporter.append_event(
        "eval",
        step=training.step,
        loss=found.loss,
        perplexity=found.perplexity,
        tokens=found.tokens,
        time_s=round(time.perf_counter() - before, 3),
    )
    reporter.log_scalars(training.step, {"lm loss validation": found.loss, "lm loss validation ppl": found.perplexity})
    training.attempt.beat("train", training.step)
    reporter.restart_clock()


def _evaluate_test(training: Training, test: Dataset) -> None:
    """The loss on the test data, once, after the last step."""
    training.reporter.flush()
    training.attempt.beat("eval", training.step)
    found = _compute_loss_on(training, test)
    training.reporter.print_line(
        f"test loss after the last step: {found.loss:.4f}, perplexity {found.perplexity:.4g}, {found.tokens:,} tokens"
    )
    training.reporter.append_event(
        "test", step=training.step, loss=found.loss, perplexity=found.perplexity, tokens=found.tokens
    )


def _compute_loss_on(training: Training, dataset: Dataset) -> EvaluationResult:
    return evaluate_dataset(
        training.trainable,
        dataset,
        training.experiment.trainer.training,
        training.global_batch_size,
        training.processes,
        _find_masked_token(training),
    )


def _begin_save(training: Training) -> None:
    """Begin to save the state after this step."""
    training.reporter.flush()
    training.attempt.beat("checkpoint", training.step)
    state = collect_current_state(training.trainable.model, training.optimizer, training.processes)
    training.saver.save(state, training.step, training.consumed_samples, training.watch.losses)
    training.attempt.beat("train", training.step)
    training.reporter.restart_clock()


def _save_last(training: Training, first: int) -> None:
    """Save unless this step was saved, or loaded, already."""
    if training.step not in (first, training.saver.last_step):
        _begin_save(training)


def _save_and_interrupt(training: Training, first: int) -> None:
    """Save, and leave the rest to the next attempt."""
    training.reporter.flush()
    signal = training.attempt.stop_signal or "a signal to another rank"
    training.reporter.print_line(f"{signal}: stopping after step {training.step}")
    _save_last(training, first)
    training.saver.finish_writing()
    training.reporter.append_event("interrupted", signal=signal, step=training.step)


def _finish_training(training: Training, first: int) -> None:
    """The last evaluation, checkpoint and sample, and a summary."""
    trainer = training.experiment.trainer
    training.reporter.flush()
    if evaluation_interval(trainer.training):
        _evaluate_validation(training)
    if training.data.test is not None and trainer.training.eval_iters:
        _evaluate_test(training, training.data.test)
    if not trainer.checkpoint.disable_last_saving:
        _save_last(training, first)
    if trainer.logging.sample_tokens:
        _report_sample(training)
    training.saver.finish_writing()
    _report_summary(training)


def _report_sample(training: Training) -> None:
    trainer = training.experiment.trainer
    text = generate_sample(training.trainable.model, training.data, trainer.logging, trainer.training.seed)
    if text is None:
        return
    training.reporter.print_line(f"sample of {trainer.logging.sample_tokens} tokens:\n{text}")
    if training.processes.is_first:
        write_sample(training.attempt.run.directory / "report" / "sample.txt", text)


def _report_summary(training: Training) -> None:
    reporter, last = training.reporter, training.reporter.last
    assert last is not None, "at least one step was taken"
    steps = reporter.num_steps
    tokens = steps * last.tokens
    reporter.print_line(
        f"{steps:,} steps, {tokens:,} tokens in {_format_duration(reporter.trained_s)}:"
        f" {tokens / reporter.trained_s:,.0f} tokens/s, final loss {last.loss:.4f}"
    )
    reporter.append_event(
        "training_ended",
        step=training.step,
        steps=steps,
        tokens=tokens,
        time_s=round(reporter.trained_s, 3),
        tokens_per_s=tokens / reporter.trained_s,
        loss=last.loss,
    )


def _format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Turn what torch says when memory runs out, or when it cannot compile, into what to do about it."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(error) from error
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the CPU allocator's words, c10/core/impl/alloc_cpu.cpp
            raise _out_of_memory(error) from error
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = str(error).strip().splitlines()[0]
            raise PrimusError(f"torch.compile failed: {reason}", "set compile: false to train without it") from error
        raise


def _out_of_memory(error: BaseException) -> PrimusError:
    reason = (str(error) or "MemoryError").splitlines()[0]
    return PrimusError(
        f"out of memory: {reason}",
        "lower micro_batch_size (gradients then accumulate to the same global_batch_size) or seq_length,"
        " set recompute_activations: true, or share the model among more processes",
    )
