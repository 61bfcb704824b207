"""Watches the ranks of one attempt on this node, and hears what the other nodes say of theirs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, structs

from primus.errors import PrimusError
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.signals import StopSignals
from primus.launch.supervision import hang_detector, stacks
from primus.launch.supervision import heartbeats as ranks
from primus.launch.supervision.attempt_result import AttemptDecision, NodeResult
from primus.launch.supervision.hang_detector import RankStatus
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.launch.supervision.straggler_detection import ComputeTimeSample, StragglerMonitor
from primus.machine.cluster import ClusterLayout
from primus.runs.attempt import process_state, stacks_file
from primus.runs.files import write_json
from primus.runs.store import RankFailure

GRACE_S = 60.0
"""Time that workers have for a last checkpoint after the first signal."""
FAILED_PEERS_S = 2.5
"""Time that the other ranks have to end after one has failed."""
PROCESSES_INTERVAL_S = 0.25
BEATS_INTERVAL_S = 1.0
INSPECTION_LIMIT_S = 20.0
"""Time that the other nodes have to look at their ranks before a hang is ended."""

RecordEvent = Callable[..., None]
"""Appends an event: its kind, then its fields."""


class NodeAttempt(Struct, frozen=True, kw_only=True):
    """Where an attempt runs on this node."""

    folder: Path
    layout: ClusterLayout
    ranks: tuple[int, ...]
    """Those of this node, where they are known beforehand."""
    environ: Mapping[str, str]
    """Variables of the workers."""
    hang_timeout_s: float


class AttemptMonitor:
    """One attempt on this node, from its start to the end of its processes, and on node 0 of all nodes.

    Args:
        place: Where it runs.
        channel: The other nodes.
        signals: What asks us to stop.
        record: For events.
        say: For people.
    """

    def __init__(
        self,
        place: NodeAttempt,
        channel: ControlChannel,
        signals: StopSignals,
        record: RecordEvent,
        say: Callable[[str], None],
    ) -> None:
        self.dead: dict[int, float] = {}
        """Ranks that were found dead, and when they were last seen alive."""
        self.ended: dict[int, NodeResult] = {}
        """How it ended on other nodes."""
        self.hang: RankFailure | None = None
        self.failed_at: float | None = None
        """When something was first known to be wrong, here or on another node."""
        self._decisions: list[AttemptDecision] = []
        self._place, self._channel, self._signals, self._record, self._say = place, channel, signals, record, say
        self._is_head = place.layout.node_rank == 0
        self._told_at: float | None = None
        self._urgent_at: float | None = None
        self._told: set[int] = set()
        self._has_passed_on = False
        self._beats: Mapping[int, RankHeartbeat] = {}
        self._alive: dict[int, float] = {}
        """When each rank was last seen to live."""
        self._over: set[int] = set()
        """Ranks whose process has ended."""
        self._processes_at = self._beats_at = time.monotonic()
        self._hangs = hang_detector.HangDetector(place.hang_timeout_s, place.ranks, time.monotonic())
        self._pace = StragglerMonitor(channel, time.monotonic(), is_head=self._is_head, record=record, say=say)
        self._seen: dict[int, tuple[RankStatus, ...]] = {}
        self._looking_until: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether the processes of this node are to be ended now."""
        self.receive_messages()
        if now - self._processes_at > PROCESSES_INTERVAL_S:
            self._processes_at = now
            self._find_dead_ranks(now)
        if now - self._beats_at > BEATS_INTERVAL_S:
            self._beats_at = now
            self._check_heartbeats(now)
        self._judge_hang(now)
        return self._is_stopped(now) or (self.failed_at is not None and now - self.failed_at > FAILED_PEERS_S)

    @property
    def heartbeats(self) -> Mapping[int, RankHeartbeat]:
        """The ranks of this node, read again."""
        return ranks.read_own_heartbeats(self._place.folder, self._place.ranks)

    def report_result(self, own: NodeResult) -> None:
        """Another node than 0: tell node 0 how the attempt ended here."""
        self._channel.send_message(ControlMessage(kind="ended", body=own))

    def take_decision(self) -> AttemptDecision | None:
        """Another node: the next thing that node 0 has decided, once; None as long as there is none."""
        return self._decisions.pop(0) if self._decisions else None

    def report_own_failure(self) -> None:
        """Node 0: its own processes have failed."""
        self._report_failure("")

    def wait_for_others(self, timeout_s: float) -> None:
        """Hear the other nodes once the processes of this one have ended."""
        self._hangs.end_all_ranks()
        self.receive_messages(timeout_s)
        self._judge_hang(time.monotonic())

    def receive_messages(self, timeout_s: float = 0.0) -> None:
        """Take in what other nodes say, waiting for it at most `timeout_s`, and pass on what we hear."""
        for rank, message in self._channel.receive_messages(timeout_s):
            self._handle_message(rank, message)
        number = self._signals.first_signal
        if number is not None and not self._has_passed_on:
            self._has_passed_on = True
            self._channel.send_message(ControlMessage(kind="signal", number=number))

    def _handle_message(self, rank: int, message: ControlMessage) -> None:
        match message:
            case ControlMessage(kind="signal"):
                if self._signals.first_signal is None:
                    self._signals.note_signal(message.number)
            case ControlMessage(kind="failed" | "lost"):
                self._report_failure(message.text)
            case ControlMessage(kind="ended"):
                result = message.read_body(NodeResult)
                if result is not None:
                    self.ended[rank] = result
                    if result.returncode:
                        self._report_failure("")
            case ControlMessage(kind="end"):
                self.failed_at = self.failed_at or time.monotonic()
            case ControlMessage(kind="decision"):
                decision = message.read_body(AttemptDecision)
                if decision is not None:
                    self._decisions.append(decision)
            case _:
                self._collect_inspections(rank, message)

    def _collect_inspections(self, rank: int, message: ControlMessage) -> None:
        """Take in what another node says of how its ranks get on."""
        match message:
            case ControlMessage(kind="hang", number=step):
                if self._looking_until is None and not self._hangs.is_blocking(time.monotonic(), step):
                    self._begin_inspection()
            case ControlMessage(kind="look"):
                self._channel.send_message(ControlMessage(kind="seen", body=self._inspect_ranks()))
            case ControlMessage(kind="seen"):
                self._seen[rank] = message.read_body(tuple[RankStatus, ...]) or ()
            case ControlMessage(kind="times"):
                self._pace.take_samples(message.read_body(tuple[ComputeTimeSample, ...]) or ())

    def _report_failure(self, why: str) -> None:
        """Something is wrong: all nodes know at once, and their ranks get a moment to say what they see."""
        if self.failed_at is not None:
            return
        self.failed_at = time.monotonic()
        self._channel.send_message(ControlMessage(kind="end" if self._is_head else "failed", text=why))

    def _is_stopped(self, now: float) -> bool:
        """Pass a request to stop on to the ranks; whether their time is up."""
        if self._signals.first_signal is None:
            return False
        self._told_at = self._told_at or now
        if self._told_at == now:
            self._beats = self.heartbeats
        fresh = {rank: beat for rank, beat in self._beats.items() if rank not in self._told}
        ranks.signal_ranks(fresh, self._signals.first_signal)
        self._told |= set(fresh)
        if self._signals.is_urgent:
            self._urgent_at = self._urgent_at or now
        is_late = self._urgent_at is not None and now - self._urgent_at > GRACE_S
        nobody_began = not self._told
        return nobody_began or self._signals.insists or is_late

    def _find_dead_ranks(self, now: float) -> None:
        ended = {rank for rank, beat in self._beats.items() if rank not in self._over and not process_state(beat.pid)}
        self._alive |= dict.fromkeys(set(self._beats) - ended, time.time())
        newest = self.heartbeats if ended else {}
        for rank in ended:
            self._over.add(rank)
            self._hangs.end_rank(rank)
            if rank in newest and newest[rank].phase != "exit":
                self.dead[rank] = self._alive.get(rank, time.time())
        if self.failed_at is None and (self.dead or ranks.read_failures(self._place.folder, self._beats)):
            self._report_failure("")

    def _check_heartbeats(self, now: float) -> None:
        self._beats = self.heartbeats
        alive = {rank: beat for rank, beat in self._beats.items() if rank not in self._over}
        self._hangs.observe_heartbeats(now, alive)
        self._pace.observe_heartbeats(now, alive)
        if self.failed_at is None and self._signals.first_signal is None and self._hangs.is_hanging(now):
            if not self._is_head:
                standings = self._hangs.rank_statuses(now, socket.gethostname())
                self._channel.send_message(ControlMessage(kind="hang", number=min(each.step for each in standings)))
            elif self._looking_until is None:
                self._begin_inspection()

    def _begin_inspection(self) -> None:
        """Node 0: have all nodes look at their ranks, and look at our own, before anything is ended."""
        self._say("no rank gets on: looking at their stacks before they are ended")
        self._looking_until = time.monotonic() + INSPECTION_LIMIT_S
        self._channel.send_message(ControlMessage(kind="look"))
        self._seen[self._place.layout.node_rank] = self._inspect_ranks()

    def _inspect_ranks(self) -> tuple[RankStatus, ...]:
        standings = self._hangs.rank_statuses(time.monotonic(), socket.gethostname())
        return stacks.inspect_ranks(standings, self._place.folder, self._place.layout.node_rank, self._place.environ)

    def _judge_hang(self, now: float) -> None:
        """Node 0: name the rank that hangs once all nodes have looked, and have everything ended."""
        if self._looking_until is None or self.hang is not None:
            return
        if self._channel.ranks - set(self._seen) and now < self._looking_until:
            return
        found = [each for standings in self._seen.values() for each in standings]
        self.hang = _describe_hang(found, self._place)
        verdict = _format_hang_event(self.hang, found)
        with contextlib.suppress(PrimusError):  # a full disk: the event and the outcome say it too
            write_json(self._place.folder / "hang.json", verdict)
        self._record("hang", **verdict)
        self._report_failure(self.hang.problem)


def _describe_hang(standings: list[RankStatus], place: NodeAttempt) -> RankFailure:
    if not standings:
        host = socket.gethostname()
        return RankFailure(rank=0, host=host, time=time.time(), problem="all ranks hang", log="logs/launch.log")
    found = hang_detector.find_culprit(standings)
    number = place.folder.name.removeprefix("attempt_")
    said = "it has never begun" if found.phase == "start" else f"in phase {found.phase} after step {found.step}"
    stopped = "; its process is stopped" if found.state == "T" else ""
    stack = stacks_file(place.folder, found.rank)
    return RankFailure(
        rank=found.rank,
        host=found.host,
        time=time.time() - found.idle_s,
        problem=f"rank {found.rank} hangs: no progress for {found.idle_s:.0f} s, {said}{stopped}",
        hint=f"its stacks and those of the other ranks are in logs/attempt_{number}/{stack.name}",
        log=f"logs/attempt_{number}/rank_{found.rank}.log",
    )


def _format_hang_event(hang: RankFailure, found: list[RankStatus]) -> dict[str, object]:
    """What is kept of a hang: the rank that is to blame, and how all of them stand."""
    blamed = next((each for each in found if each.rank == hang.rank), None)
    where = {} if blamed is None else {"phase": blamed.phase, "step": blamed.step, "seconds": round(blamed.idle_s, 1)}
    standings = [structs.asdict(each) for each in sorted(found, key=lambda each: each.rank)]
    return {"rank": hang.rank, "host": hang.host, **where, "problem": hang.problem, "standings": standings}
