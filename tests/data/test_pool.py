from __future__ import annotations

import signal
import time

import pytest

from primus.data.pool import process_pool


def blocked_signals() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def test_processes_do_not_hear_the_interrupt_of_a_terminal_and_their_work_is_called_off() -> None:
    """Otherwise each of them would print a traceback."""
    before = blocked_signals()
    with pytest.raises(KeyboardInterrupt), process_pool(1) as pool:
        assert signal.SIGINT in pool.submit(blocked_signals).result()
        assert blocked_signals() == before
        waiting = [pool.submit(time.sleep, 0.1) for _ in range(20)][-1]
        raise KeyboardInterrupt
    assert waiting.cancelled()
