"""Signals that ask this process to stop, noted while it works."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

INSISTS_AFTER_S = 1.0
"""A signal that comes again later than this is a person who insists; sooner it is a scheduler that signals everybody,
and a launcher that passes it on."""
TOGETHER_S = 0.1
"""Signals within this time are one event. Handlers interrupt each other, so their order says nothing then."""


class StopSignals:
    """Notes the signals that ask us to stop, while it is open."""

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.is_urgent = False
        """Whether there was more than a warning: SIGUSR1 leaves the time to whoever sends it."""
        self.insists = False
        """Whether somebody wants the end at once."""
        self._noted: dict[int, float] = {}
        self._heard: dict[int, float] = {}
        """When each signal first came: at all, and to this very process."""

    def __enter__(self) -> StopSignals:
        is_main = threading.current_thread() is threading.main_thread()
        heard = [number for number in self.HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup wants
        self._before = {number: signal.signal(number, self._on_signal) for number in heard} if is_main else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def first_signal(self) -> int | None:
        """The signal that came first; a warning, where it came together with others."""
        if not self._noted:
            return None
        number = min(self._noted, key=self._noted.__getitem__)
        warned_at = self._noted.get(signal.SIGUSR1, math.inf)
        return signal.SIGUSR1 if warned_at - self._noted[number] < TOGETHER_S else number

    def note_signal(self, number: int) -> None:
        """A signal, to this process or to the launcher of another node."""
        self._noted.setdefault(number, time.monotonic())
        self.is_urgent |= number != signal.SIGUSR1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != signal.SIGUSR1 and now - self._heard.setdefault(number, now) > INSISTS_AFTER_S:
            self.insists = True
        self.note_signal(number)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, where they are to end this process as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def find_exit_code(error: KeyboardInterrupt) -> int:
    """128 + the signal."""
    return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """While open, SIGTERM and SIGHUP raise `Terminated`, so that what was begun is told or undone before the end."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = {each: signal.signal(each, stop) for each in numbers if signal.getsignal(each) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
