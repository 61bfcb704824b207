"""Terminates a process whose test hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from primus.errors import EXIT_TIMED_OUT, PrimusError


class Watchdog:
    """Time limit for code that may hang without raising: in a driver, in a collective.

    Args:
        limit_s: Time limit of each part.
        on_expiry: Called with the message before the process exits with EXIT_TIMED_OUT.
    """

    def __init__(self, limit_s: float, on_expiry: Callable[[PrimusError], None]) -> None:
        self._limit_s = limit_s
        self._on_expiry = on_expiry

    @contextmanager
    def limit_time(self, what: str, num_parts: int = 1) -> Iterator[None]:
        """Limit the time of the body, which does `what` in a number of parts."""
        # The bodies follow one another in the main thread: each has a separate timer and starts with its full limit.
        limit_s = self._limit_s * num_parts
        timer = threading.Timer(limit_s, self._end_process, [what, limit_s])
        timer.daemon = True  # a timer that is still pending must not keep the process alive
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_process(self, what: str, limit_s: float) -> None:
        # Runs in the timer's thread while the main thread is blocked in the hung call: on_expiry must not wait for
        # it.
        try:
            self._on_expiry(
                PrimusError(
                    f"{what} timed out after {limit_s:g} s",
                    "a device or the network hangs, or a rank did not start: see the other ranks' logs",
                )
            )
        finally:
            # Not sys.exit: it would end only the timer's thread, and exit handlers may wait for the hung call.
            os._exit(EXIT_TIMED_OUT)
