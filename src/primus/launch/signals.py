"""Signals that ask this process to stop, noted while it works."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

INSISTS_AFTER_S = 1.0
"""A signal that comes again later than this is a person who insists; sooner it is a scheduler that signals everybody,
and a launcher that passes it on."""


class Signals:
    """Notes the signals that ask us to stop, while it is open."""

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self.is_urgent = False
        """Whether there was more than a warning: SIGUSR1 leaves the time to whoever sends it."""
        self.insists = False
        """Whether somebody wants the end at once."""
        self._heard: dict[int, float] = {}

    def __enter__(self) -> Signals:
        is_main = threading.current_thread() is threading.main_thread()
        heard = [number for number in self.HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup wants
        self._before = {number: signal.signal(number, self._on_signal) for number in heard} if is_main else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note(self, number: int) -> None:
        """A signal, to this process or to the launcher of another node."""
        self.first = self.first or number
        self.count += 1
        self.is_urgent |= number != signal.SIGUSR1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != signal.SIGUSR1 and now - self._heard.setdefault(number, now) > INSISTS_AFTER_S:
            self.insists = True
        self.note(number)
