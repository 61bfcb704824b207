"""Check values of the configuration against each other, and against the number of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from primus import registry
from primus.config.convert import DEFAULT
from primus.config.load import Resolved
from primus.config.schedule import find_decay_end, find_evaluation_interval, find_final_learning_rate, warmup_steps
from primus.config.schema import DataConfig, ParallelConfig
from primus.config.text_file import check_has_end
from primus.config.token_files import (
    WITHOUT_VALIDATION_DATA,
    count_documents,
    parse_split,
    parse_weighted_prefixes,
    parse_weighted_sources,
)
from primus.config.vocabulary import find_data_tokenizer, find_tokenizer_size
from primus.errors import AbsentFileError, UsageError


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
            f"{world_size} processes cannot be laid out as {used}",
            f"start a multiple of {model_parallel} processes (--nproc), or lower these sizes",
        )
    return world_size // model_parallel


def count_accumulation_steps(resolved: Resolved, world_size: int | None = None) -> int:
    """Micro batches that each device sums up for one optimizer step.

    Args:
        resolved: The experiment.
        world_size: Number of processes; None for those of one replica of the model, the fewest that can train it.

    Raises:
        UsageError: global_batch_size is not a multiple of micro_batch_size x data-parallel size.
    """
    training = resolved.experiment.trainer.training
    parallel = resolved.experiment.trainer.parallel
    replicas = 1 if world_size is None else data_parallel_size(parallel, world_size)
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
    """Check that the sequence fits the model, and the learning-rate schedule fits the run.

    Raises:
        UsageError: One does not fit; the message names the line.
    """
    trainer = resolved.experiment.trainer
    limit = trainer.model.max_position_embeddings
    if trainer.training.seq_length > limit:
        raise UsageError(
            f"{resolved.origins['seq_length']}: seq_length {trainer.training.seq_length} is longer than the model's "
            f"max_position_embeddings {limit}",
            "shorten the sequence, or raise max_position_embeddings and scale the rope",
        )
    for key, problem, hint in _schedule_problems(resolved):
        raise UsageError(f"{resolved.origins[key]}: {key} {problem}", hint)


def _schedule_problems(resolved: Resolved) -> Iterator[tuple[str, str, str]]:
    """Key, problem and hint of each contradiction in a learning-rate schedule.

    Megatron-LM asserts the same: both ways to give a warm-up exclude each other (`validate_args`), and the warm-up ends
    before the decay does (`OptimizerParamScheduler`).
    """
    optimizer = resolved.experiment.trainer.optimizer
    length = resolved.experiment.trainer.training.train_iters
    if optimizer.min_lr and optimizer.min_lr_ratio is not None:
        yield "min_lr", "and min_lr_ratio exclude each other", "set one of them to null"
    if optimizer.lr_warmup_iters and optimizer.lr_warmup_fraction is not None:
        yield "lr_warmup_iters", "and lr_warmup_fraction exclude each other", "set one of them to null"
    if find_final_learning_rate(optimizer) > optimizer.lr:
        hint = "lower min_lr, or give min_lr_ratio, which follows lr"
        yield "min_lr", f"{optimizer.min_lr} is above lr {optimizer.lr}", hint
    warmup, end = warmup_steps(optimizer, length), find_decay_end(optimizer, length)
    is_constant = optimizer.lr_decay_style == "constant"
    if warmup > end or (warmup == end and not is_constant):
        key = "lr_warmup_iters" if optimizer.lr_warmup_fraction is None else "lr_warmup_fraction"
        whole = "lr_decay_iters" if optimizer.lr_decay_iters else "train_iters"
        hint = "warm up for fewer steps, or for a share of them (lr_warmup_fraction)"
        if whole == "train_iters":
            hint += "; set lr_decay_iters to the length of the full schedule if this run covers only its start"
        yield key, f"warms up for {warmup} steps, but the decay ends at {whole} {end}", hint
    wsd = optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and wsd is not None and wsd > end - warmup:
        yield "lr_wsd_decay_iters", f"{wsd} is longer than the {end - warmup} steps after warm-up", "shorten it"


@contextlib.contextmanager
def collect_absent(absent: list[str] | None) -> Iterator[None]:
    """Add the problem of a file that is not on this machine to `absent`; without a list, raise it."""
    try:
        yield
    except AbsentFileError as error:
        if absent is None:
            raise
        absent.append(error.problem)


def check_data(resolved: Resolved, absent: list[str] | None = None) -> None:
    """Check that the experiment names one existing source of data, whose token ids fit the model.

    Also checks the blend and the split.

    Args:
        resolved: The experiment.
        absent: Receives the files that this machine does not have, if the experiment is trained elsewhere.

    Raises:
        AbsentFileError: A file does not exist, and there is no list for it.
        UsageError: Another check fails; the message names the line.
    """
    data = resolved.experiment.trainer.data
    given = [name for name in ("dataset", "train_data_path", "sft_data_path", "mock_data") if getattr(data, name)]
    if len(given) != 1:
        problem = f"{' and '.join(given)} exclude each other" if given else "no training data is named"
        raise UsageError(
            problem,
            "set one of dataset, train_data_path (a prefix of .bin/.idx files), sft_data_path (a JSONL file) and"
            " mock_data: true",
        )
    prefixes: list[Path] = []
    for key in ("train_data_path", "valid_data_path", "test_data_path"):
        if given_paths := getattr(data, key):
            with collect_absent(absent):
                found = parse_weighted_prefixes(given_paths, f"{resolved.origins[key]}: {key}")
                prefixes += [prefix for prefix, _ in found]
    if (origin := resolved.origins["split"]) != DEFAULT:
        parse_split(data.split, f"{origin}: split")
    if data.dataset:
        _check_dataset(data, resolved.origins)
    if data.sft_data_path:
        _check_instructions(resolved, absent)
    if not data.mock_data:
        _check_vocabulary(resolved, prefixes)
        with collect_absent(None if absent is None else []):  # the same files again
            _check_validation(resolved)


def _check_dataset(data: DataConfig, origins: dict[str, str]) -> None:
    """Check that a named dataset and its tokenizer exist; names on the Hub are not checked here."""
    assert data.dataset
    if "/" not in data.dataset:
        try:
            registry.find_plug_in_file("sources", data.dataset.partition(":")[0])
        except UsageError as error:
            problem = f"{origins['dataset']}: no dataset '{data.dataset}'"
            raise UsageError(problem, f"{error.hint} (OWNER/NAME is a dataset of the Hugging Face hub)") from None
    if not data.tokenizer_model and data.tokenizer_type != "ByteLevelBPE":
        raise UsageError(
            f"{origins['dataset']}: the dataset {data.dataset} needs a tokenizer",
            "set tokenizer_model to a tokenizer.json, its folder or a hub name, or tokenizer_type to ByteLevelBPE",
        )


def _check_instructions(resolved: Resolved, absent: list[str] | None) -> None:
    """Check that files of instruction data exist, and that a tokenizer and validation data are named."""
    data, origins = resolved.experiment.trainer.data, resolved.origins
    for key in ("sft_data_path", "sft_valid_data_path"):
        for path, _ in parse_weighted_sources(getattr(data, key), f"{origins[key]}: {key}"):
            check_has_end(Path(os.path.expanduser(path)), f"{origins[key]}: {key}: {path}")
            with collect_absent(absent):
                if not path.startswith("hf:") and not Path(os.path.expanduser(path)).is_file():
                    hint = "name a JSONL or parquet file, or hf:OWNER/NAME"
                    raise AbsentFileError(f"{origins[key]}: {key}: no such data: {path}", hint)
    if not data.tokenizer_model:
        raise UsageError(
            f"{origins['sft_data_path']}: sft_data_path needs a tokenizer",
            "set tokenizer_model to the model's folder or hub name",
        )
    if find_evaluation_interval(resolved.experiment.trainer.training) is None or data.sft_valid_data_path:
        return
    if parse_split(data.split)[1] == 0:
        raise UsageError(
            f"{origins['eval_interval']}: eval_interval is set, and split '{data.split}' leaves no validation data",
            "set sft_valid_data_path or another split, or eval_iters: 0 to train without evaluation",
        )


def _check_validation(resolved: Resolved) -> None:
    """Check that an evaluation has data: the split needs two documents in each file of the training data."""
    trainer = resolved.experiment.trainer
    data, interval = trainer.data, find_evaluation_interval(trainer.training)
    if interval is None or data.valid_data_path or not data.train_data_path:
        return
    shares = parse_split(data.split)
    problem = ""
    if data.test_data_path:
        problem = "test_data_path is set, and then training data is not split"
    elif shares[1] == 0:
        problem = f"split '{data.split}' leaves no documents for it"
    for prefix, _ in () if problem else parse_weighted_prefixes(data.train_data_path, "train_data_path"):
        if count_documents(prefix) == 1:
            problem = f"{prefix} has one document"
            break
    if problem:
        raise UsageError(
            f"{resolved.origins['eval_interval']}: eval_interval is {interval}, but validation data is missing:"
            f" {problem}",
            WITHOUT_VALIDATION_DATA,
        )


def _check_vocabulary(resolved: Resolved, prefixes: list[Path]) -> None:
    """Check that the embedding has a row for each token of tokenizers that can be sized without loading them."""
    trainer = resolved.experiment.trainer
    known = [found for found in map(find_data_tokenizer, prefixes) if found]
    name = trainer.data.tokenizer_model
    if name:
        size = find_tokenizer_size(name)
        known += [(name, size)] if size else []
    for name, size in known:
        if size > trainer.model.vocab_size:
            raise UsageError(
                f"{resolved.origins['vocab_size']}: the tokenizer {name} has ids up to {size - 1}, but the model's "
                f"vocab_size is {trainer.model.vocab_size}",
                f"set vocab_size to {size} or more, or prepare the data with the model's own tokenizer",
            )
