"""Finds ranks that hang, from heartbeats alone: nothing here reads a clock, a file or a process.

A rank is late when it has made no progress for longer than its phase allows. A late rank hangs only if every rank that
it may wait for, those with the same or a lower step, is late as well: collectives make ranks wait for the slowest.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from statistics import median

from msgspec import Struct

from primus.launch.supervision.heartbeats import RankHeartbeat

PHASE_FACTORS = dict.fromkeys(("init", "data", "rollout", "eval", "checkpoint", "profile", "exit"), 3.0) | {
    "compile": 6.0
}
"""Limits of phases in hang time-outs; other phases have 1. No progress is reported while a checkpoint is written."""
STEP_FACTOR = 5
"""A step may take this many times the median of the last ones, even if that is longer than the time-out."""
NUM_INTERVALS = 20
"""Steps over which the median is taken."""


class RankStatus(Struct, frozen=True, kw_only=True):
    """State of a rank when a hang is inspected."""

    rank: int
    host: str
    local_rank: int = 0
    pid: int = 0
    phase: str
    """Phase of its heartbeat; `start` if it never sent one."""
    step: int = 0
    idle_s: float
    """Time since its last progress."""
    state: str = ""
    """State of its process (proc(5)); `T` is stopped."""
    waits: bool | None = None
    """Whether its stack is in a collective; None if no stack could be read."""
    frame: str = ""
    """Innermost frame of its main thread."""


class HangDetector:
    """Remembers when each rank of a node last made progress, by the clock of the launcher.

    Args:
        timeout_s: Time without progress that a training step may take; 0 for no limit.
        ranks: Ranks that are expected.
        now: The clock at the start of the attempt.
    """

    def __init__(self, timeout_s: float, ranks: Iterable[int], now: float) -> None:
        self._timeout_s = timeout_s
        self._progress: dict[int, tuple[float, RankHeartbeat | None]] = dict.fromkeys(ranks, (now, None))
        """By rank: when its heartbeat last changed, and the heartbeat."""
        self._intervals: deque[float] = deque(maxlen=NUM_INTERVALS)

    def observe_heartbeats(self, now: float, heartbeats: Mapping[int, RankHeartbeat]) -> None:
        """Record the current heartbeats, without those of ranks that have ended."""
        for rank, new in heartbeats.items():
            # A heartbeat is rewritten every second; only a changed phase, step or progress time is progress.
            since, old = self._progress.get(rank, (now, None))
            if old is None or _build_progress_key(old) != _build_progress_key(new):
                # Steps between two looks share their time; phases such as an evaluation do not count as steps.
                if old is not None and old.phase == new.phase == "train" and new.step > old.step:
                    self._intervals.append((now - since) / (new.step - old.step))
                self._progress[rank] = (now, new)

    def end_rank(self, rank: int) -> None:
        """The process of the rank has ended: it cannot hang."""
        self._progress.pop(rank, None)

    def end_all_ranks(self) -> None:
        """The processes of all ranks of this node have ended."""
        self._progress.clear()

    def make_rank_statuses(self, now: float, host: str) -> tuple[RankStatus, ...]:
        """The status of each rank, the one that has been idle for the longest time first."""
        found = [_make_rank_status(rank, now - since, beat, host) for rank, (since, beat) in self._progress.items()]
        return tuple(sorted(found, key=lambda each: -each.idle_s))

    def is_hanging(self, now: float) -> bool:
        """Whether a rank is late, and does not wait for one that is not."""
        # A late rank with the lowest step, or with only late ranks at or below its step, waits for no other rank.
        late = self._find_late_ranks(now)
        return any(
            is_late
            and all(late[other] for other in late if self._read_current_step(other) <= self._read_current_step(rank))
            for rank, is_late in late.items()
        )

    def is_blocking(self, now: float, step: int) -> bool:
        """Whether a rank of another node that is late after `step` may wait for one of these, which is not late."""
        return any(
            not is_late and self._read_current_step(rank) <= step
            for rank, is_late in self._find_late_ranks(now).items()
        )

    def _find_late_ranks(self, now: float) -> dict[int, bool]:
        if not self._timeout_s:
            return {}
        return {rank: now - since > self._limit_s(beat) for rank, (since, beat) in self._progress.items()}

    def _read_current_step(self, rank: int) -> int:
        heartbeat = self._progress[rank][1]
        return heartbeat.step if heartbeat else 0

    def _limit_s(self, heartbeat: RankHeartbeat | None) -> float:
        phase = heartbeat.phase if heartbeat else "init"
        if phase in PHASE_FACTORS:
            return self._timeout_s * PHASE_FACTORS[phase]
        return max(self._timeout_s, STEP_FACTOR * median(self._intervals) if self._intervals else 0.0)


def _build_progress_key(heartbeat: RankHeartbeat) -> tuple[str, int, float]:
    return heartbeat.phase, heartbeat.step, heartbeat.progress_time


def _make_rank_status(rank: int, idle_s: float, heartbeat: RankHeartbeat | None, host: str) -> RankStatus:
    if heartbeat is None:
        return RankStatus(rank=rank, host=host, phase="start", idle_s=idle_s)
    return RankStatus(
        rank=rank,
        host=host,
        local_rank=heartbeat.local_rank,
        pid=heartbeat.pid,
        phase=heartbeat.phase,
        step=heartbeat.step,
        idle_s=idle_s,
    )


def find_culprit(statuses: Iterable[RankStatus]) -> RankStatus:
    """The rank that the others wait for, as far as it can be found.

    In this order: a stopped rank; a rank that never started; the ranks outside collectives while others are inside; the
    ranks in another frame than most; the rank with the lowest step. A rule that fits all ranks says nothing.
    """
    ranks = list(statuses)
    for suspects in (
        [each for each in ranks if each.state == "T"],
        [each for each in ranks if each.phase == "start"],
        [each for each in ranks if each.waits is False],
        _find_outliers(ranks),
    ):
        if 0 < len(suspects) < len(ranks):  # with none or all ranks the rule distinguishes nothing
            return _find_last_rank(suspects)
    return _find_last_rank(ranks)


def _find_outliers(ranks: list[RankStatus]) -> list[RankStatus]:
    """Ranks in another frame than the majority, if there is one."""
    frames = Counter(each.frame for each in ranks if each.frame)
    ((frame, number),) = frames.most_common(1) or [("", 0)]
    return [each for each in ranks if each.frame != frame] if number > len(ranks) / 2 else []


def _find_last_rank(ranks: list[RankStatus]) -> RankStatus:
    return min(ranks, key=lambda each: (each.step, -each.idle_s, each.rank))
