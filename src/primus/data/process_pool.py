"""Process pool for reading token files; its processes ignore Ctrl-C, which the parent handles."""

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
    """Executor of spawned processes. An exception in the ``with`` block cancels the pending tasks.

    Args:
        workers: Number of processes.
    """
    # Spawned processes import this package again. The working folder must not be on their path: a file there could
    # shadow a module.
    exclude_working_folder_of_children()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        # Children inherit the signal mask, so SIGINT stays blocked in them. Ctrl-C, which the terminal sends to the
        # whole process group, then prints one message of the parent and no traceback of each child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                pool.submit(os.getpid)  # the executor starts a process for each of the first tasks
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
