"""Checks that need more than one value: of the configuration with itself, and with the number of processes."""

from __future__ import annotations

from primus.config.load import Resolved
from primus.config.schema import ParallelConfig
from primus.config.token_files import parse_split, weighted_prefixes
from primus.errors import UsageError


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Replicas of the model among `world_size` processes.

    Raises:
        UsageError: The model-parallel sizes do not divide the number of processes.
    """
    sizes = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
    }
    model_parallel = 1
    for size in sizes.values():
        model_parallel *= size
    if world_size % model_parallel:
        used = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise UsageError(
            f"{world_size} processes cannot be laid out as {used}", f"start a multiple of {model_parallel}"
        )
    return world_size // model_parallel


def accumulation_steps(resolved: Resolved, world_size: int) -> int:
    """Micro batches that each device sums up for one optimizer step.

    Raises:
        UsageError: global_batch_size is not a multiple of micro_batch_size x data-parallel size.
    """
    training = resolved.experiment.trainer.training
    replicas = data_parallel_size(resolved.experiment.trainer.parallel, world_size)
    one_pass = training.micro_batch_size * replicas
    if training.global_batch_size is None:
        return 1
    if training.global_batch_size % one_pass:
        where = resolved.origins.get("global_batch_size", "")
        above = -(-training.global_batch_size // one_pass) * one_pass
        raise UsageError(
            f"{where}: global_batch_size {training.global_batch_size} is not a multiple of micro_batch_size "
            f"{training.micro_batch_size} x {replicas} data-parallel processes",
            f"use a multiple of {one_pass}, such as {above}, or another number of processes",
        )
    return training.global_batch_size // one_pass


def check_lengths(resolved: Resolved) -> None:
    """The schedule and the sequence fit the run and the model.

    Raises:
        UsageError: They do not; the message names the line.
    """
    trainer = resolved.experiment.trainer
    limit = trainer.model.max_position_embeddings
    if trainer.training.seq_length > limit:
        raise UsageError(
            f"{resolved.origins['seq_length']}: seq_length {trainer.training.seq_length} is longer than the model's "
            f"max_position_embeddings {limit}",
            "shorten the sequence, or raise max_position_embeddings and scale its rope",
        )
    optimizer = trainer.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UsageError(f"{resolved.origins['min_lr']}: min_lr {optimizer.min_lr} is above lr {optimizer.lr}")


def check_data(resolved: Resolved) -> None:
    """The experiment names exactly one source of data, its token files exist, and the blend and the split make sense.

    Raises:
        UsageError: Something of this does not hold; the message names the line.
    """
    data = resolved.experiment.trainer.data
    given = [name for name in ("dataset", "train_data_path", "mock_data") if getattr(data, name)]
    if len(given) != 1:
        problem = f"{' and '.join(given)} exclude each other" if given else "no training data is named"
        raise UsageError(
            problem, "set one of dataset, train_data_path (a prefix of .bin/.idx files) and mock_data: true"
        )
    for key in ("train_data_path", "valid_data_path", "test_data_path"):
        if getattr(data, key) is not None:
            weighted_prefixes(getattr(data, key), f"{resolved.origins[key]}: {key}")
    parse_split(data.split, f"{resolved.origins['split']}: split" if "split" in resolved.origins else "split")
