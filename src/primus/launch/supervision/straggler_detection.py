"""How quick the ranks of a job compute beside each other: node 0 hears all of them, and says who falls behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Literal

from msgspec import Struct

from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.supervision.heartbeats import RankHeartbeat

WINDOW_S = 10.0
"""Time over which the ranks' steps are compared."""
STRAGGLER_RATIO = 1.15
"""A rank that computes longer than this many times the median of all ranks is slow."""
STRAGGLER_WINDOWS = 3
"""Slow windows in a row that make a straggler; as many fast ones end that."""


class StragglerMonitor:
    """The steps of one attempt.

    Args:
        channel: The other nodes.
        is_head: Whether this is node 0.
        now: The clock at the start of the attempt.
        record: For events.
        say: For people.
    """

    def __init__(
        self,
        channel: ControlChannel,
        now: float,
        *,
        is_head: bool,
        record: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._channel, self._is_head, self._record, self._say = channel, is_head, record, say
        self._window, self._stragglers = ComputeTimeWindow(), StragglerDetector()
        self._window_at = now
        self._samples: dict[int, ComputeTimeSample] = {}

    def observe_heartbeats(self, now: float, beats: Mapping[int, RankHeartbeat]) -> None:
        """Note what the ranks of this node say of their steps; once a window is over they are compared."""
        self._window.observe_heartbeats(beats)
        if now - self._window_at <= WINDOW_S:
            return
        self._window_at = now
        samples = self._window.take_samples()
        if self._is_head:
            self.take_samples(samples)
            self._compare_ranks()
        elif samples:
            self._channel.send_message(ControlMessage(kind="times", body=samples))

    def take_samples(self, samples: Iterable[ComputeTimeSample]) -> None:
        """Node 0: how long ranks have computed in their last window."""
        self._samples |= {sample.rank: sample for sample in samples}

    def _compare_ranks(self) -> None:
        for found in self._stragglers.compare_samples(self._samples.values()):
            self._report_finding(found)
        self._samples = {}

    def _report_finding(self, found: StragglerFinding) -> None:
        where = f"rank {found.rank} (local rank {found.local_rank} on {found.host})"
        self._record(found.kind, rank=found.rank, host=found.host, local_rank=found.local_rank, ratio=found.ratio)
        if found.kind == "straggler":
            self._say(f"straggler: {where} computes {found.ratio:.2f} times as long as the median rank")
        else:
            self._say(f"{where} is as quick as the others again")


class ComputeTimeSample(Struct, frozen=True, kw_only=True):
    """How long a rank computed in one window."""

    rank: int
    host: str
    local_rank: int
    compute_time_s: float


class StragglerFinding(Struct, frozen=True, kw_only=True):
    """A rank that has become a straggler, or is none any more."""

    kind: Literal["straggler", "straggler_over"]
    rank: int
    host: str
    local_rank: int
    ratio: float
    """Its computing time over the median of all ranks."""


class ComputeTimeWindow:
    """Gathers what the ranks of a node say of their steps until a window is over."""

    def __init__(self) -> None:
        self._times: dict[int, dict[int, float]] = {}
        self._beats: dict[int, RankHeartbeat] = {}

    def observe_heartbeats(self, beats: Mapping[int, RankHeartbeat]) -> None:
        for rank, beat in beats.items():
            if beat.phase == "train" and beat.compute_time_s is not None:
                self._times.setdefault(rank, {})[beat.step] = beat.compute_time_s
                self._beats[rank] = beat

    def take_samples(self) -> tuple[ComputeTimeSample, ...]:
        """The ranks' medians; a new window begins."""
        samples = tuple(
            ComputeTimeSample(
                rank=rank,
                host=self._beats[rank].host,
                local_rank=self._beats[rank].local_rank,
                compute_time_s=median(times.values()),
            )
            for rank, times in sorted(self._times.items())
        )
        self._times = {}
        return samples


class StragglerDetector:
    """Compares the ranks of all nodes window by window."""

    def __init__(self) -> None:
        self._slow: Counter[int] = Counter()
        self._quick: Counter[int] = Counter()
        self._known: set[int] = set()

    def compare_samples(self, samples: Iterable[ComputeTimeSample]) -> list[StragglerFinding]:
        """What a window changes."""
        ranks = list(samples)
        if len(ranks) < 2:
            return []
        typical = median(each.compute_time_s for each in ranks)
        if typical <= 0:
            return []
        return [found for each in ranks if (found := self._judge_sample(each, each.compute_time_s / typical))]

    def _judge_sample(self, sample: ComputeTimeSample, ratio: float) -> StragglerFinding | None:
        rank, is_slow = sample.rank, ratio > STRAGGLER_RATIO
        self._slow[rank] = self._slow[rank] + 1 if is_slow else 0
        self._quick[rank] = 0 if is_slow else self._quick[rank] + 1
        kind: Literal["straggler", "straggler_over"]
        if rank not in self._known and self._slow[rank] >= STRAGGLER_WINDOWS:
            self._known.add(rank)
            kind = "straggler"
        elif rank in self._known and self._quick[rank] >= STRAGGLER_WINDOWS:
            self._known.remove(rank)
            kind = "straggler_over"
        else:
            return None
        return StragglerFinding(
            kind=kind, rank=rank, host=sample.host, local_rank=sample.local_rank, ratio=round(ratio, 3)
        )
