"""Reading of training batches: tokens/s, the first batch and the slowest, by number of reading threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, structs

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_positive, parse_sizes
from primus.errors import UsageError
from primus.statistics import compute_quantile

STEPS_OF_PASS = 16
"""Batches that are timed together: with threads that read ahead, a single one may be free."""


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark dataloader`."""

    data: Annotated[str | None, Meta(extra={"aliases": ("--train-data-path", "--train_data_path")})] = None
    """Prefix of Megatron .bin/.idx files (default: random tokens, which cost no reading)."""
    seqlen: int = 4096
    """Tokens of a sample."""
    mbs: int = 1
    """Samples of a micro batch."""
    micro_batches: int = 8
    """Micro batches of each rank in a step."""
    vocab_size: int = 131072
    """Size of the vocabulary, which the token ids must not reach."""
    workers: str = "0,1,2"
    """Threads that read ahead, separated by commas; 0 reads when a batch is asked for."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive."""
    check_positive(options, ("seqlen", "mbs", "micro_batches", "vocab_size"))
    _list_workers(options)


def _list_workers(options: Options) -> list[int]:
    return [0 if word.strip() == "0" else parse_sizes(word, "--workers")[0] for word in options.workers.split(",")]


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each number of threads."""
    from primus.config.schema import DataConfig
    from primus.data.training.dataset import open_datasets

    data = DataConfig(train_data_path=options.data, mock_data=options.data is None)
    try:
        dataset = open_datasets(data, options.vocab_size, options.seqlen, 1234).train
    except UsageError as error:
        yield BenchmarkRow(case={"data": options.data}, rank=context.rank, problem=error.problem)
        return
    for num_workers in _list_workers(options):
        yield _measure_workers(options, context, dataset, num_workers)


def _measure_workers(options: Options, context: BenchmarkContext, dataset: object, num_workers: int) -> BenchmarkRow:
    from primus.data.training.loader import Batches, BatchShape
    from primus.measure.storage.timed_passes import PassAmount, measure_passes

    size = options.mbs * options.micro_batches * context.world_size
    shape = BatchShape(size, options.mbs, context.rank, context.world_size)
    waits_s: list[float] = []
    # The type of the dataset belongs to a module that needs numpy.
    with Batches(dataset, shape, num_workers=num_workers) as batches:  # type: ignore[arg-type]

        def run_pass() -> float:
            # The clock starts before `next`: the wait for the batch is what training sees.
            before = len(waits_s)
            for _ in range(STEPS_OF_PASS):
                started = time.perf_counter()
                next(batches)
                waits_s.append(time.perf_counter() - started)
            return sum(waits_s[before:])

        row = measure_passes(
            context,
            {
                "data": options.data or "random tokens",
                "seqlen": options.seqlen,
                "mbs": options.mbs,
                "micro_batches": options.micro_batches,
                "workers": num_workers,
            },
            run_pass,
            PassAmount(
                float(STEPS_OF_PASS * options.mbs * options.micro_batches * options.seqlen),
                "tokens/s",
                "tokens of this rank / median time of several next(), while nothing else computes",
            ),
            longest_s=min(options.duration, 0.2) if options.quick else options.duration,
        )
    if row.timing is None:
        return row
    p99_s = compute_quantile(sorted(waits_s[1:]), 0.99)
    return structs.replace(row, figures={"first_batch_us": waits_s[0] * 1e6, "batch_p99_us": p99_s * 1e6})
