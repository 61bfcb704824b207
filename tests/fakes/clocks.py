"""A device whose time a test decides."""

from __future__ import annotations

import math

from primus.measure.timing import Effort

BRIEF = Effort(warm_up_calls=1, warm_up_s=0.01, longest_warm_up_s=0.02, calls=10, measure_s=0.02, fewest_calls=3)


class DeviceClock:
    """A device whose calls take a known time, and whose clock has a resolution."""

    def __init__(self, call_s: float, resolution_s: float) -> None:
        self.now_s = 0.0
        self.call_s = call_s
        self.resolution_s = resolution_s
        self.waits = 0
        self.queued: list[float] = []
        self.most_queued = 0
        self.was_idle = False

    def call(self) -> None:
        self.now_s += self.call_s

    def record_mark(self) -> object:
        self.queued.append(self.now_s)
        self.most_queued = max(self.most_queued, len(self.queued))
        return self.now_s

    def wait(self, mark: object) -> None:
        self.queued = self.queued[self.queued.index(mark) + 1 :]  # type: ignore[arg-type]
        self.was_idle = self.was_idle or not self.queued

    def compute_seconds(self, begin: object, end: object) -> float:
        assert isinstance(begin, float) and isinstance(end, float)
        return math.floor((end - begin) / self.resolution_s + 1e-9) * self.resolution_s

    def synchronize(self) -> None:
        self.waits += 1
        self.queued = []
