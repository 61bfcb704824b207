"""Signals that ask this process to stop.

SIGUSR1 is a warning: a scheduler sends it some time before a time limit or a preemption, and then enforces the limit
itself. SIGTERM, SIGINT and SIGHUP are urgent. Schedulers and launchers often signal every process of a job, so one
request arrives here several times within moments; a later repetition comes from the user.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

INSISTS_AFTER_S = 1.0
"""A signal that is repeated after this time is a second request by the user; before, it is the same request that
arrived on another path."""
TOGETHER_S = 0.1
"""Signals within this time are one request: handlers interrupt each other, so their order means nothing."""


class StopSignals:
    """Records the signals that ask this process to stop, while it is open.

    Handlers run in the main thread between two bytecodes, and only set attributes; the main thread reads them.
    """

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.is_urgent = False
        """Whether there was more than a warning, so that this process enforces a time limit."""
        self.insists = False
        """Whether an urgent signal was repeated: processes are killed at once."""
        self._noted: dict[int, float] = {}
        """Time of the first of each signal, to this process or to another node."""
        self._received: dict[int, float] = {}
        """Time of the first of each signal to this process."""

    def __enter__(self) -> StopSignals:
        is_main = threading.current_thread() is threading.main_thread()
        # Only the main thread may set handlers (Python's signal module); in other threads this class records nothing by
        # itself.
        handled = [number for number in self.HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # by nohup
        self._before = {number: signal.signal(number, self._on_signal) for number in handled} if is_main else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def first_signal(self) -> int | None:
        """The first signal; SIGUSR1 if it came together with others, so that the job counts as preempted."""
        if not self._noted:
            return None
        # By time; but a warning that came within the same moments explains the other signals.
        number = min(self._noted, key=self._noted.__getitem__)
        warned_at = self._noted.get(signal.SIGUSR1, math.inf)
        return signal.SIGUSR1 if warned_at - self._noted[number] < TOGETHER_S else number

    @property
    def first_at(self) -> float | None:
        """When the first signal arrived (monotonic clock)."""
        return min(self._noted.values(), default=None)

    def note_signal(self, number: int) -> None:
        """Record a signal to this process or to the launcher of another node."""
        # The first time counts: a repeated signal must not change which one was first.
        self._noted.setdefault(number, time.monotonic())
        self.is_urgent |= number != signal.SIGUSR1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A repeated SIGUSR1 is only another warning: schedulers send one for each limit.
        now = time.monotonic()
        if number != signal.SIGUSR1 and now - self._received.setdefault(number, now) > INSISTS_AFTER_S:
            # Compared with signals to this process only: another node's copy of the same request must not count as a
            # second one.
            self.insists = True
        self.note_signal(number)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised like the KeyboardInterrupt of Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def find_exit_code(error: KeyboardInterrupt) -> int:
    """Exit code after an interruption: 128 + the signal, as shells report it."""
    return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """While open, SIGTERM and SIGHUP raise `Terminated`, so that `finally` blocks report or undo what was started."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    # Signals that are ignored stay so, as `nohup` sets SIGHUP.
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = {each: signal.signal(each, stop) for each in numbers if signal.getsignal(each) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
