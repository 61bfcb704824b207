"""How quick the ranks of a job compute beside each other: node 0 hears all of them, and says who falls behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.supervision import hang_detector
from primus.launch.supervision.hang_detector import ComputeTimeSample, StragglerFinding
from primus.launch.supervision.heartbeats import RankHeartbeat

WINDOW_S = 10.0
"""Time over which the ranks' steps are compared."""


class StragglerMonitor:
    """The steps of one attempt.

    Args:
        bond: The other nodes.
        is_head: Whether this is node 0.
        now: The clock at the start of the attempt.
        record: For events.
        say: For people.
    """

    def __init__(
        self,
        bond: ControlChannel,
        now: float,
        *,
        is_head: bool,
        record: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self._bond, self._is_head, self._record, self._say = bond, is_head, record, say
        self._window, self._stragglers = hang_detector.ComputeTimeWindow(), hang_detector.StragglerDetector()
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
            self._bond.send_message(ControlMessage(kind="times", samples=samples))

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
