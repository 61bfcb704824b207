"""Which ranks hang and which are slow, from heartbeats alone: nothing here reads a clock, a file or a process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from statistics import median

from msgspec import Struct

from primus.launch.supervision.heartbeats import RankHeartbeat

SLOWER = {"init": 3.0, "data": 3.0, "compile": 6.0, "eval": 3.0, "checkpoint": 3.0, "exit": 3.0}
"""Patience with a phase, in hang time-outs: no heartbeat comes while a checkpoint is written or a model compiled."""
NUM_PATIENT_STEPS = 5
"""A step may take this many times the median of the last ones, however long they take."""
NUM_INTERVALS = 20


class RankStatus(Struct, frozen=True, kw_only=True):
    """Where a rank stands when a hang is looked at."""

    rank: int
    host: str
    local_rank: int = 0
    pid: int = 0
    phase: str
    """Of its heartbeat; `start` where it has never sent one."""
    step: int = 0
    idle_s: float
    """Time since it got on."""
    state: str = ""
    """Of its process, as the kernel says it."""
    waits: bool | None = None
    """Whether its stack is in a communication with others; None where no stack could be read."""
    frame: str = ""
    """Where its main thread is."""


class HangDetector:
    """Remembers when each rank of a node last got on, by the watcher's own clock.

    Args:
        timeout_s: Time without progress that a training step may take; 0 for no limit.
        ranks: Ranks that are to come.
        now: The clock at the start of the attempt.
    """

    def __init__(self, timeout_s: float, ranks: Iterable[int], now: float) -> None:
        self._timeout_s = timeout_s
        self._progress: dict[int, tuple[float, RankHeartbeat | None]] = dict.fromkeys(ranks, (now, None))
        self._intervals: deque[float] = deque(maxlen=NUM_INTERVALS)

    def observe_heartbeats(self, now: float, beats: Mapping[int, RankHeartbeat]) -> None:
        """Note what the heartbeats say now; ranks that have ended are left out of `beats`."""
        for rank, beat in beats.items():
            since, before = self._progress.get(rank, (now, None))
            if before is None or _progress_key(before) != _progress_key(beat):
                if before is not None and before.phase == beat.phase == "train" and beat.step > before.step:
                    self._intervals.append((now - since) / (beat.step - before.step))
                self._progress[rank] = (now, beat)

    def end_rank(self, rank: int) -> None:
        """The rank has ended, and is waited for no more."""
        self._progress.pop(rank, None)

    def end_all_ranks(self) -> None:
        """All ranks of this node have ended."""
        self._progress.clear()

    def rank_statuses(self, now: float, host: str) -> tuple[RankStatus, ...]:
        """Where each rank stands, the one that has not got on for the longest time first."""
        found = [_make_rank_status(rank, now - since, beat, host) for rank, (since, beat) in self._progress.items()]
        return tuple(sorted(found, key=lambda each: -each.idle_s))

    def is_hanging(self, now: float) -> bool:
        """Whether a rank is over its limit, and waits for none that is within its own."""
        late = self._find_late_ranks(now)
        return any(
            is_late and all(late[other] for other in late if self._current_step(other) <= self._current_step(rank))
            for rank, is_late in late.items()
        )

    def is_blocking(self, now: float, step: int) -> bool:
        """Whether a rank of another node that does not get on after `step` may be waiting for one of these, which is
        not over its limit."""
        return any(
            not is_late and self._current_step(rank) <= step for rank, is_late in self._find_late_ranks(now).items()
        )

    def _find_late_ranks(self, now: float) -> dict[int, bool]:
        if not self._timeout_s:
            return {}
        return {rank: now - since > self._limit_s(beat) for rank, (since, beat) in self._progress.items()}

    def _current_step(self, rank: int) -> int:
        beat = self._progress[rank][1]
        return beat.step if beat else 0

    def _limit_s(self, beat: RankHeartbeat | None) -> float:
        phase = beat.phase if beat else "init"
        if phase in SLOWER:
            return self._timeout_s * SLOWER[phase]
        return max(self._timeout_s, NUM_PATIENT_STEPS * median(self._intervals) if self._intervals else 0.0)


def _progress_key(beat: RankHeartbeat) -> tuple[str, int, float]:
    return beat.phase, beat.step, beat.progress_time


def _make_rank_status(rank: int, idle_s: float, beat: RankHeartbeat | None, host: str) -> RankStatus:
    if beat is None:
        return RankStatus(rank=rank, host=host, phase="start", idle_s=idle_s)
    return RankStatus(
        rank=rank,
        host=host,
        local_rank=beat.local_rank,
        pid=beat.pid,
        phase=beat.phase,
        step=beat.step,
        idle_s=idle_s,
    )


def find_culprit(standings: Iterable[RankStatus]) -> RankStatus:
    """The rank that the others wait for, as far as can be told.

    That is one that is stopped or has never come, else one that does not communicate while others do, or is elsewhere
    than most, else the one that is behind.
    """
    ranks = list(standings)
    for suspects in (
        [each for each in ranks if each.state == "T"],
        [each for each in ranks if each.phase == "start"],
        [each for each in ranks if each.waits is False],
        _find_outliers(ranks),
    ):
        if 0 < len(suspects) < len(ranks):
            return _find_last_rank(suspects)
    return _find_last_rank(ranks)


def _find_outliers(ranks: list[RankStatus]) -> list[RankStatus]:
    """Ranks that are elsewhere than most, where most are at one place."""
    frames = Counter(each.frame for each in ranks if each.frame)
    ((frame, number),) = frames.most_common(1) or [("", 0)]
    return [each for each in ranks if each.frame != frame] if number > len(ranks) / 2 else []


def _find_last_rank(ranks: list[RankStatus]) -> RankStatus:
    return min(ranks, key=lambda each: (each.step, -each.idle_s, each.rank))
