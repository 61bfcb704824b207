"""Processes that read parts of token files, and that are ended in silence when their parent is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from primus.interpreter import exclude_working_folder_of_children


@contextmanager
def process_pool(workers: int) -> Iterator[Executor]:
    """An executor of fresh processes; what waits for them is called off by an exception in the ``with`` block.

    Args:
        workers: Number of processes.
    """
    exclude_working_folder_of_children()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the processes inherit, and keep
        try:
            for _ in range(workers):
                pool.submit(os.getpid)  # each starts a process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
