from __future__ import annotations

import signal
import time
from concurrent.futures import Future

import pytest

from primus.data.process_pool import process_pool


def blocked_signals() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def interrupted(waiting: list[Future[None]]) -> None:
    before = blocked_signals()
    with process_pool(1) as pool:
        assert signal.SIGINT in pool.submit(blocked_signals).result()
        assert blocked_signals() == before
        waiting += [pool.submit(time.sleep, 0.1) for _ in range(20)]
        raise KeyboardInterrupt


def test_processes_do_not_hear_the_interrupt_of_a_terminal_and_their_work_is_called_off() -> None:
    """Otherwise each of them would print a traceback."""
    waiting: list[Future[None]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(waiting)
    assert waiting[-1].cancelled()
