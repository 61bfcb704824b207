"""Reads the micro batches of each step for one rank, ahead with threads; resumes from the consumed samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from primus.data.training.packing import Dataset
from primus.errors import UsageError

MicroBatches = list[NDArray[np.int64]]
"""Micro batches [B, S + 1] of one optimizer step."""


def num_micro_batches(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Micro batches that each of `world_size` data-parallel ranks runs in one step.

    Raises:
        UsageError: The global batch does not divide.
    """
    together = micro_batch_size * world_size
    if global_batch_size % together:
        lower = global_batch_size // together * together
        valid = " or ".join(str(size) for size in (lower, lower + together) if size)
        raise UsageError(
            f"global_batch_size {global_batch_size} does not divide into micro batches of {micro_batch_size}"
            f" on {world_size} data-parallel ranks",
            f"use a multiple of {together}: {valid}",
        )
    return global_batch_size // together


def list_samples_of_step(step: int, global_batch_size: int) -> range:
    """Numbers of the samples of a step; steps are counted from 1, as in the log of a run.

    A run that skipped data after a loss spike is ahead of this range by the number of skipped samples.
    """
    return range((step - 1) * global_batch_size, step * global_batch_size)


@dataclass(frozen=True)
class BatchShape:
    """The micro batches of one rank in the global batch of a step.

    Raises:
        UsageError: The global batch does not divide.
    """

    global_batch_size: int
    """Samples in a step of all ranks together."""
    micro_batch_size: int
    rank: int = 0
    """Data-parallel rank of this process."""
    world_size: int = 1
    """Number of data-parallel ranks."""

    def __post_init__(self) -> None:
        num_micro_batches(self.global_batch_size, self.micro_batch_size, self.world_size)

    def list_starts(self, first: int) -> range:
        """First sample of each micro batch of a step whose first sample is `first`."""
        # Ranks take micro batches in turn, so that the order of samples in a step does not depend on the number of
        # ranks.
        size = self.micro_batch_size
        return range(first + self.rank * size, first + self.global_batch_size, size * self.world_size)


class Batches:
    """An endless iterator over steps; step g covers the samples from ``consumed_samples + g * global_batch_size``.

    The samples of a step depend on nothing else, so that a run may resume with another number of ranks. Micro batch m
    of rank r has the B samples of the step from ``(m * world_size + r) * B``.

    Only ``consumed_samples`` is state. A checkpoint saves it, and a new iterator with the same value returns the next
    step. One thread at a time may call ``next``.

    Args:
        dataset: Samples by number.
        shape: Of the steps; its `micro_batch_size` is B.
        consumed_samples: Samples that earlier steps of the run took.
        num_workers: Threads that read ahead; with 0, ``next`` reads.
    """

    def __init__(self, dataset: Dataset, shape: BatchShape, consumed_samples: int = 0, num_workers: int = 1) -> None:
        self.dataset, self.shape = dataset, shape
        self.consumed_samples = consumed_samples
        # Two positions: `consumed_samples` is what the caller took, which a checkpoint saves. `_requested` is what the
        # threads were asked for; it is ahead and is never saved, so that a resumed run reads those steps again.
        self._requested = consumed_samples
        # One step more than threads: every thread stays busy while the caller holds a finished step.
        self._depth = num_workers + 1
        self._ahead: deque[Future[MicroBatches]] = deque()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="batches") if num_workers else None

    def __iter__(self) -> Iterator[MicroBatches]:
        return self

    def __next__(self) -> MicroBatches:
        if self._threads is None:
            step = self._read_step(self.consumed_samples)
        else:
            while len(self._ahead) < self._depth:
                self._ahead.append(self._threads.submit(self._read_step, self._requested))
                self._requested += self.shape.global_batch_size
            # Steps are returned in the order of submission. An error in a thread is raised here, at its step.
            step = self._ahead.popleft().result()
        self.consumed_samples += self.shape.global_batch_size
        return step

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads. The iterator cannot be used afterwards."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def _read_step(self, first: int) -> MicroBatches:
        size = self.shape.micro_batch_size
        starts = self.shape.list_starts(first)
        return [np.stack([self.dataset[sample] for sample in range(start, start + size)]) for start in starts]
