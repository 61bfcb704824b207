"""Turns: runs that take a few steps each while the others wait, so that whatever else a machine does meets all of them.

A run has a folder with two named pipes. Before a step for which it has no turn, its first process writes an empty line
to `ready` and waits for a line in `turns`: the number of the turn, and of its steps. A process that is started again
asks again, so that a turn ends when its run is ready for the next one or has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

VARIABLE = "PRIMUS_STEP_TURNS"
"""Variable of a run with the folder of its pipes."""
EVENT = "turn"
"""Kind of the event of a turn: its `number`, and its `first_step`."""
READY, TURNS = "ready", "turns"
POLL_S = 1.0
"""Longest time until a run that waits for its turn sees a signal."""
LONGEST_LINE = 256
"""Of a pipe; there is one line at a time, and a pipe keeps up to 4096 bytes whole (pipe(7))."""


class Turn(NamedTuple):
    """Steps that a run takes while the others wait."""

    number: int
    steps: int


class TurnWaiter:
    """The side of a run: its first process waits before each turn. A comparison that has ended lets it run freely.

    Args:
        folder: With the pipes.
        is_stopping: Whether a signal asks the run to stop.
    """

    def __init__(self, folder: Path, is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._steps_left = 0
        self._pipes: tuple[int, int] | None = None
        try:
            turns = os.open(folder / TURNS, os.O_RDONLY | os.O_NONBLOCK)
            _drain(turns)
            # Fails where nobody reads: the comparison has ended.
            self._pipes = turns, os.open(folder / READY, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            self._pipes = None

    def wait(self) -> Turn | None:
        """Wait until the next step may be taken; the turn if it is the first step of one."""
        if self._pipes is None:
            return None
        turn = None
        if not self._steps_left:
            turn = self._wait_for_turn(*self._pipes)
            if turn is None:
                # Ended or stopping: no later step waits either, so that a checkpoint is saved at once.
                self._pipes = None
                return None
            self._steps_left = turn.steps
        self._steps_left -= 1
        return turn

    def _wait_for_turn(self, turns: int, ready: int) -> Turn | None:
        try:
            os.write(ready, b"\n")
        except OSError:
            return None
        # A handler only notes its signal, and Python then continues the call that it interrupted (PEP 475): without a
        # limit, a run that is told to stop would wait for a turn that nobody gives.
        while not self._is_stopping():
            if select.select([turns], [], [], POLL_S)[0]:
                # Empty if the comparison has ended.
                line = os.read(turns, LONGEST_LINE).split()
                return Turn(*map(int, line)) if line else None
        return None


def _drain(pipe: int) -> None:
    """Forget a turn that was given to a process of this run that died before it read it."""
    with contextlib.suppress(BlockingIOError):
        while os.read(pipe, LONGEST_LINE):
            pass


class TurnGiver:
    """The side of the comparison.

    Args:
        folder: For the pipes; it exists.
    """

    def __init__(self, folder: Path) -> None:
        for name in (READY, TURNS):
            os.mkfifo(folder / name)
        # For both directions: opening waits for nobody, and a run that is started again finds them open.
        self._ready, self._turns = (os.open(folder / name, os.O_RDWR) for name in (READY, TURNS))

    def wait_until_ready(self, has_ended: Callable[[], bool], deadline: float) -> bool:
        """Wait until the run is ready for a turn; False if it has ended, or not become ready in time."""
        while not has_ended() and time.monotonic() < deadline:
            if select.select([self._ready], [], [], POLL_S)[0]:
                os.read(self._ready, LONGEST_LINE)
                return True
        return False

    def give(self, turn: Turn) -> None:
        """Let the run take the steps of a turn; it must be ready."""
        os.write(self._turns, b"%d %d\n" % turn)

    def close(self) -> None:
        """Let the run continue without turns."""
        os.close(self._ready)
        os.close(self._turns)


def give_turns(runs: Sequence[tuple[TurnGiver, Callable[[], bool]]], steps: int, deadline: float) -> None:
    """Give turns of `steps` steps until all runs have ended; each round begins with the next run.

    A drift of the machine then meets all alike. In a reversed order the first and the last of several runs would have
    two turns in a row, with warm caches: 5 to 7 % faster than the others. The first round begins when all are ready,
    since a start is not a step.

    Args:
        runs: With whether each has ended.
        steps: Of a turn.
        deadline: Monotonic time after which no turn is given.
    """
    waiting = [(giver, has_ended) for giver, has_ended in runs if giver.wait_until_ready(has_ended, deadline)]
    number = 0
    while waiting:
        number += 1
        first = (number - 1) % len(waiting)
        for giver, has_ended in waiting[first:] + waiting[:first]:
            giver.give(Turn(number, steps))
            # Ready again: the steps of the turn are over, and nothing of this run computes during the next one.
            if not giver.wait_until_ready(has_ended, deadline):
                waiting.remove((giver, has_ended))
