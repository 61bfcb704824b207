"""Turns: a process takes a number of steps when it is told to, and answers how long they took."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

FOLDER_VARIABLE = "ENGINE_SPEED_TURNS"
"""Variable with the folder of the two pipes."""
REQUESTS, ANSWERS = "requests", "answers"
"""Named pipes: lines with a number of steps, and JSON lines with the seconds and processor time that they took."""


class StepGate:
    """Lets a training loop pass while steps are left of those that were asked for.

    The first step is asked for from the beginning, so that the first answer tells when it ended.

    Args:
        finish_steps: Waits for steps that are computed in the background, before their end is told.
    """

    def __init__(self, finish_steps: Callable[[], None] | None = None) -> None:
        self._finish_steps = finish_steps
        folder = Path(os.environ[FOLDER_VARIABLE])
        self._requests, self._answers = (folder / REQUESTS).open(), (folder / ANSWERS).open("w")
        self._left = 1
        self._started, self._used = time.perf_counter(), time.process_time()

    def wait(self) -> bool:
        """Called before each step: wait until it is asked for; False if no more steps are."""
        if not self._left:
            if self._finish_steps:
                self._finish_steps()
            seconds, used = time.perf_counter() - self._started, time.process_time() - self._used
            answer = {
                "seconds": seconds,
                "cpu_seconds": used,
                "time": time.time(),
                "all_cpu_seconds": time.process_time(),
            }
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
            self._left = int(self._requests.readline() or 0)
            self._started, self._used = time.perf_counter(), time.process_time()
        self._left -= 1
        return self._left >= 0
