"""Finds stragglers: ranks that compute longer than the other ranks of the job.

Ranks report the computing time of their last step in their heartbeats, without the time that they wait for others: in
synchronous training all ranks take equally long for a step. Each node takes the median of its ranks over a window and
sends it to node 0, which compares all ranks. Windows of nodes are not aligned; that does not matter for medians.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Literal

from msgspec import Struct

from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.supervision.heartbeats import RankHeartbeat

WINDOW_S = 10.0
"""Time over which the ranks' steps are compared: several steps of most trainings. Where a step takes longer, a window
lasts until one ends: otherwise one slow step would fill several windows."""
STRAGGLER_RATIO = 1.15
"""A rank that computes longer than this many times the median of all ranks is slow."""
STRAGGLER_WINDOWS = 3
"""Slow windows in a row that make a straggler; as many fast ones end that. One slow window is often a data stall."""


class ComputeTimeSample(Struct, frozen=True, kw_only=True):
    """Computing time of a rank in one window."""

    rank: int
    host: str
    local_rank: int
    compute_time_s: float


class StragglerFinding(Struct, frozen=True, kw_only=True):
    """A rank that became a straggler, or recovered."""

    kind: Literal["straggler", "straggler_over"]
    rank: int
    host: str
    local_rank: int
    ratio: float
    """Its computing time over the median of all ranks."""


class StragglerMonitor:
    """The steps of one attempt, on each node.

    Args:
        channel: The other nodes.
        now: The clock at the start of the attempt.
        is_head: Whether this is node 0.
        record: For events.
        say: Prints a line.
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
        self._window, self._detector = ComputeTimeWindow(), StragglerDetector()
        self._window_at = now
        self._samples: dict[int, ComputeTimeSample] = {}

    def observe_heartbeats(self, now: float, heartbeats: Mapping[int, RankHeartbeat]) -> None:
        """Note the steps of this node's ranks; at the end of a window they are sent to node 0, or compared."""
        self._window.observe_heartbeats(heartbeats)
        # The windows of nodes begin and end at different times: node 0 compares at the end of its window, with the last
        # window of each other node that has arrived by then.
        if now - self._window_at <= WINDOW_S or not self._window.has_steps:
            return
        self._window_at = now
        samples = self._window.take_samples()
        if self._is_head:
            self.take_samples(samples)
            self._compare_ranks()
        else:
            self._channel.send_message(ControlMessage(kind="times", body=samples))

    def take_samples(self, samples: Iterable[ComputeTimeSample]) -> None:
        """Node 0: the last window of some ranks."""
        self._samples |= {sample.rank: sample for sample in samples}

    def _compare_ranks(self) -> None:
        for finding in self._detector.compare_samples(self._samples.values()):
            self._report_finding(finding)
        self._samples = {}  # a node that sends nothing in the next window must not be compared by old values

    def _report_finding(self, found: StragglerFinding) -> None:
        where = f"rank {found.rank} (local rank {found.local_rank} on {found.host})"
        self._record(found.kind, rank=found.rank, host=found.host, local_rank=found.local_rank, ratio=found.ratio)
        if found.kind == "straggler":
            self._say(f"straggler: {where} computes {found.ratio:.2f} times as long as the median rank")
        else:
            self._say(f"straggler recovered: {where} computes as fast as the other ranks again")


class ComputeTimeWindow:
    """Computing times of the ranks of a node until the end of a window."""

    def __init__(self) -> None:
        self._times: dict[int, dict[int, float]] = {}
        """By rank and step: a heartbeat may be read several times in one step."""
        self._heartbeats: dict[int, RankHeartbeat] = {}
        self._ended: dict[int, int] = {}
        """Last step of each rank in earlier windows."""

    @property
    def has_steps(self) -> bool:
        """Whether a step has ended in this window."""
        return bool(self._times)

    def observe_heartbeats(self, heartbeats: Mapping[int, RankHeartbeat]) -> None:
        """Note the last step of each rank."""
        for rank, heartbeat in heartbeats.items():
            is_new = self._ended.get(rank) != heartbeat.step
            if is_new and heartbeat.phase == "train" and heartbeat.compute_time_s is not None:
                self._times.setdefault(rank, {})[heartbeat.step] = heartbeat.compute_time_s
                self._heartbeats[rank] = heartbeat

    def take_samples(self) -> tuple[ComputeTimeSample, ...]:
        """The ranks' medians; starts a new window."""
        samples = tuple(
            ComputeTimeSample(
                rank=rank,
                host=self._heartbeats[rank].host,
                local_rank=self._heartbeats[rank].local_rank,
                compute_time_s=median(times.values()),
            )
            for rank, times in sorted(self._times.items())
        )
        self._ended |= {rank: self._heartbeats[rank].step for rank in self._times}
        self._times = {}
        return samples


class StragglerDetector:
    """Compares the ranks of all nodes window by window; a rank is normal, or a known straggler."""

    def __init__(self) -> None:
        self._slow_windows: Counter[int] = Counter()
        self._fast_windows: Counter[int] = Counter()
        self._stragglers: set[int] = set()

    def compare_samples(self, samples: Iterable[ComputeTimeSample]) -> list[StragglerFinding]:
        """Ranks that change their state with this window."""
        ranks = list(samples)
        if len(ranks) < 2:  # no rank can be slow compared with itself
            return []
        typical = median(each.compute_time_s for each in ranks)
        if typical <= 0:
            return []
        return [found for each in ranks if (found := self._judge_sample(each, each.compute_time_s / typical))]

    def _judge_sample(self, sample: ComputeTimeSample, ratio: float) -> StragglerFinding | None:
        rank, is_slow = sample.rank, ratio > STRAGGLER_RATIO
        # In a row: one window of the other kind starts the count again.
        self._slow_windows[rank] = self._slow_windows[rank] + 1 if is_slow else 0
        self._fast_windows[rank] = 0 if is_slow else self._fast_windows[rank] + 1
        kind: Literal["straggler", "straggler_over"]
        if rank not in self._stragglers and self._slow_windows[rank] >= STRAGGLER_WINDOWS:
            self._stragglers.add(rank)
            kind = "straggler"
        elif rank in self._stragglers and self._fast_windows[rank] >= STRAGGLER_WINDOWS:
            self._stragglers.remove(rank)
            kind = "straggler_over"
        else:
            return None
        return StragglerFinding(
            kind=kind, rank=rank, host=sample.host, local_rank=sample.local_rank, ratio=round(ratio, 3)
        )
