"""Monitors the ranks of one attempt on this node, and on node 0 also those of other nodes by their reports.

The monitor runs in the main thread of the launcher, which calls `is_over` every 50 ms while the processes of the
attempt run, and `wait_for_others` afterwards. An attempt is, on each node, in one of these states:

    running      nothing is wrong
    stopping     a signal asked the job to stop: the ranks save, for at most `GRACE_S` after an urgent signal
    inspecting   (node 0) a rank hangs: all nodes write what their ranks do, for at most `INSPECTION_LIMIT_S`
    failed       `failed_at` is set: the other ranks get `FAILED_PEERS_S`, then the launcher kills them

Messages of the control channel in an attempt; "all" includes every node that is not lost:

    kind       from -> to       text, number or body
    signal     any  -> all      number of the first signal that asked the job to stop
    failed     k    -> 0        a rank of node k failed
    hang       k    -> 0        ranks of node k hang after the step `number`
    look, end  0    -> k        inspect the ranks; kill them soon, for the reason in `text`
    seen       k    -> 0        RankStatus of its ranks, after "look"
    times      k    -> 0        ComputeTimeSample of its ranks, every window of straggler detection
    ended      k    -> 0        NodeResult, once all processes of the attempt have ended there
    decision   0    -> k        AttemptDecision
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, structs

from primus.errors import PrimusError
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.signals import StopSignals
from primus.launch.supervision import hang_detector, heartbeats
from primus.launch.supervision.attempt_result import AttemptDecision, NodeResult
from primus.launch.supervision.hang_detector import RankStatus
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.launch.supervision.straggler_detection import ComputeTimeSample, StragglerMonitor
from primus.machine.cluster import ClusterLayout, find_node_name
from primus.runs.attempt import process_state, stacks_file
from primus.runs.files import write_json
from primus.runs.store import RankFailure

GRACE_S = 60.0
"""Time that ranks have for a last checkpoint after an urgent signal. Schedulers kill 30 s (KillWait of Slurm,
terminationGracePeriodSeconds of Kubernetes) or more after their signal; more than a minute only delays the user."""
FAILED_PEERS_S = 2.5
"""Time that the other ranks have to report their own errors after one has failed: a collective that loses a peer fails
within milliseconds, or blocks until its own time-out, which is not worth waiting for."""
PROCESSES_INTERVAL_S = 0.25
"""Time between two looks at the rank processes: one `stat` in /proc for each."""
HEARTBEATS_INTERVAL_S = 1.0
"""Ranks write a heartbeat once a second (primus.runs.attempt); the run folder may be on a shared file system."""
INSPECTION_LIMIT_S = 20.0
"""Time that other nodes have to inspect their ranks: the limits of py-spy and of the device tools, and some more."""

RecordEvent = Callable[..., None]
"""Appends an event: its kind, then its fields."""


class NodeAttempt(Struct, frozen=True, kw_only=True):
    """An attempt on this node."""

    folder: Path
    layout: ClusterLayout
    ranks: tuple[int, ...]
    """Those of this node; empty if the rendezvous numbers them."""
    environ: Mapping[str, str]
    """Variables of the ranks."""
    hang_timeout_s: float


class AttemptMonitor:
    """One attempt on this node, from its start to the end of its processes, and on node 0 of all nodes.

    Args:
        attempt: The attempt to monitor.
        channel: The other nodes.
        signals: Signals that ask the job to stop.
        record: For events.
        say: Prints a line.
    """

    def __init__(
        self,
        attempt: NodeAttempt,
        channel: ControlChannel,
        signals: StopSignals,
        record: RecordEvent,
        say: Callable[[str], None],
    ) -> None:
        self.dead: dict[int, float] = {}
        """Ranks whose process ended without an exit heartbeat, and when they were last seen alive."""
        self.node_results: dict[int, NodeResult] = {}
        """Results of other nodes."""
        self.hang: RankFailure | None = None
        self.failed_at: float | None = None
        """When a failure was first known, here or on another node."""
        self._attempt, self._channel, self._signals = attempt, channel, signals
        self._record, self._say = record, say
        self._is_head = attempt.layout.node_rank == 0
        self._decisions: list[AttemptDecision] = []
        self._stopping_at: float | None = None
        self._urgent_at: float | None = None
        self._signaled_ranks: set[int] = set()
        self._has_forwarded_signal = False
        self._heartbeats: Mapping[int, RankHeartbeat] = {}
        self._alive_at: dict[int, float] = {}
        """When each rank was last seen alive, by the clock that ranks use in their errors."""
        self._ended_ranks: set[int] = set()
        self._began = time.time()
        now = time.monotonic()
        self._processes_at = self._heartbeats_at = now
        self._hangs = hang_detector.HangDetector(attempt.hang_timeout_s, attempt.ranks, now)
        self._stragglers = StragglerMonitor(channel, now, is_head=self._is_head, record=record, say=say)
        self._inspections: dict[int, tuple[RankStatus, ...]] = {}
        self._inspection_deadline: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether the launcher must kill the processes of this node now."""
        # Messages first: a failure elsewhere decides what the rest of this look means.
        self.receive_messages()
        if now - self._processes_at > PROCESSES_INTERVAL_S:
            self._processes_at = now
            self._find_dead_ranks()
        if now - self._heartbeats_at > HEARTBEATS_INTERVAL_S:
            self._heartbeats_at = now
            self._check_heartbeats(now)
        self._conclude_inspection(now)
        return self._is_stopped(now) or (self.failed_at is not None and now - self.failed_at > FAILED_PEERS_S)

    def read_heartbeats(self) -> Mapping[int, RankHeartbeat]:
        """Heartbeats of the ranks of this node."""
        return heartbeats.read_own_heartbeats(self._attempt.folder, self._attempt.ranks)

    def report_result(self, own: NodeResult) -> None:
        """Other nodes than 0: send the result of this node to node 0."""
        self._channel.send_message(ControlMessage(kind="ended", body=own))

    def take_decision(self) -> AttemptDecision | None:
        """Another node: the next decision of node 0, once; None as long as there is none."""
        return self._decisions.pop(0) if self._decisions else None

    def wait_for_others(self, timeout_s: float) -> None:
        """Receive messages once the processes of this node have ended."""
        # Ranks that ended here are no reason to wait for; node 0 still judges the hangs of other nodes.
        self._hangs.end_all_ranks()
        self.receive_messages(timeout_s)
        self._conclude_inspection(time.monotonic())

    def receive_messages(self, timeout_s: float = 0.0) -> None:
        """Handle messages of other nodes, waiting for one at most `timeout_s`, and forward a signal that came here."""
        for rank, message in self._channel.receive_messages(timeout_s):
            self._handle_message(rank, message)
        number = self._signals.first_signal
        if number is not None and not self._has_forwarded_signal:
            # Once: the other nodes forward it too, and a signal that repeats means "kill at once".
            self._has_forwarded_signal = True
            self._channel.send_message(ControlMessage(kind="signal", number=number))

    def _handle_message(self, rank: int, message: ControlMessage) -> None:
        match message.kind:
            case "signal":
                if self._signals.first_signal is None:
                    self._signals.note_signal(message.number)
            case "failed" | "lost":
                self.report_failure(message.text)
            case "ended":
                self._handle_node_result(rank, message.read_body(NodeResult))
            case "end":
                # Without `report_failure`, which would send the message back to node 0.
                self.failed_at = self.failed_at or time.monotonic()
            case "decision":
                decision = message.read_body(AttemptDecision)
                self._decisions += [decision] if decision else []
            case "hang":
                # A rank that waits for a rank of this node, which is within its limit, does not hang.
                if self._inspection_deadline is None and not self._hangs.is_blocking(time.monotonic(), message.number):
                    self._start_inspection()
            case "look":
                self._channel.send_message(ControlMessage(kind="seen", body=self._inspect_ranks()))
            case "seen":
                self._inspections[rank] = message.read_body(tuple[RankStatus, ...]) or ()
            case "times":
                self._stragglers.take_samples(message.read_body(tuple[ComputeTimeSample, ...]) or ())

    def _handle_node_result(self, rank: int, result: NodeResult | None) -> None:
        if result is None:
            return
        self.node_results[rank] = result
        if result.returncode:
            self.report_failure()

    def report_failure(self, reason: str = "") -> None:
        """Start the time that the ranks have to report their errors, on all nodes; later calls change nothing."""
        if self.failed_at is not None:
            return
        self.failed_at = time.monotonic()
        self._channel.send_message(ControlMessage(kind="end" if self._is_head else "failed", text=reason))

    def _is_stopped(self, now: float) -> bool:
        """Forward a request to stop to the ranks; whether their time is up."""
        number = self._signals.first_signal
        if number is None:
            return False
        if self._stopping_at is None:
            self._stopping_at = now
            self._heartbeats = self.read_heartbeats()  # up to a second newer than the last look
        # Ranks that start meanwhile get the signal with a later heartbeat, each rank once: a second signal kills it.
        new = {rank: beat for rank, beat in self._heartbeats.items() if rank not in self._signaled_ranks}
        heartbeats.signal_ranks(new, number)
        self._signaled_ranks |= set(new)
        if self._signals.is_urgent:
            self._urgent_at = self._urgent_at or now
        # SIGUSR1 alone sets no limit: its sender enforces one, and a large checkpoint may need all of it.
        is_late = self._urgent_at is not None and now - self._urgent_at > GRACE_S
        has_no_ranks = not self._signaled_ranks  # none has started, so there is nothing to save
        return has_no_ranks or self._signals.insists or is_late

    def _find_dead_ranks(self) -> None:
        ended = {
            rank
            for rank, beat in self._heartbeats.items()
            if rank not in self._ended_ranks and not process_state(beat.pid)
        }
        self._alive_at |= dict.fromkeys(set(self._heartbeats) - ended, time.time())
        # The rank may have ended well after the last look: then its newest heartbeat has the phase `exit`.
        newest = self.read_heartbeats() if ended else {}
        for rank in ended:
            self._ended_ranks.add(rank)
            self._hangs.end_rank(rank)
            if rank in newest and newest[rank].phase != "exit":
                self.dead[rank] = self._alive_at.get(rank, time.time())
        # A rank writes its error before it exits, so this is often known before its process has ended.
        if self.failed_at is None and (self.dead or heartbeats.read_failures(self._attempt.folder, self._heartbeats)):
            self.report_failure()

    def _check_heartbeats(self, now: float) -> None:
        self._heartbeats = self.read_heartbeats()
        alive = {rank: beat for rank, beat in self._heartbeats.items() if rank not in self._ended_ranks}
        self._hangs.observe_heartbeats(now, alive)
        self._stragglers.observe_heartbeats(now, alive)
        # Ranks that save or fail make no progress, and do not hang.
        is_running = self.failed_at is None and self._signals.first_signal is None
        if not is_running or not self._hangs.is_hanging(now):
            return
        if not self._is_head:
            # The lowest step decides which ranks of other nodes these may wait for.
            statuses = self._hangs.make_rank_statuses(now, find_node_name())
            step = min(each.step for each in statuses)
            self._channel.send_message(ControlMessage(kind="hang", number=step))
        elif self._inspection_deadline is None:
            self._start_inspection()

    def _start_inspection(self) -> None:
        """Node 0: have all nodes inspect their ranks, and inspect our own, before any rank is killed."""
        self._say("hang detected: dumping stacks before stopping the ranks")
        self._inspection_deadline = time.monotonic() + INSPECTION_LIMIT_S
        self._channel.send_message(ControlMessage(kind="look"))
        self._inspections[self._attempt.layout.node_rank] = self._inspect_ranks()

    def _inspect_ranks(self) -> tuple[RankStatus, ...]:
        from primus.launch.supervision import stacks  # only if ranks hang

        statuses = self._hangs.make_rank_statuses(time.monotonic(), find_node_name())
        attempt = self._attempt
        place = (attempt.folder, attempt.layout.node_rank)
        return stacks.inspect_ranks(statuses, *place, self._began, attempt.environ)

    def _conclude_inspection(self, now: float) -> None:
        """Node 0: blame a rank once all nodes have reported, or are late, and have all ranks killed."""
        if self._inspection_deadline is None or self.hang is not None:
            return
        if self._channel.ranks - set(self._inspections) and now < self._inspection_deadline:
            return
        # Without the nodes that are late: a hung host is often why, and the others show which rank they wait for.
        statuses = [each for found in self._inspections.values() for each in found]
        self.hang = _describe_hang(statuses, self._attempt)
        event = _format_hang_event(self.hang, statuses)
        with contextlib.suppress(PrimusError):  # a full disk: the event and the outcome have it as well
            write_json(self._attempt.folder / "hang.json", event)
        self._record("hang", **event)
        self.report_failure(self.hang.problem)


def _describe_hang(statuses: list[RankStatus], attempt: NodeAttempt) -> RankFailure:
    if not statuses:
        host = find_node_name()
        return RankFailure(rank=0, host=host, time=time.time(), problem="all ranks hang", log="logs/launch.log")
    blamed = hang_detector.find_culprit(statuses)
    number = attempt.folder.name.removeprefix("attempt_")
    where = "it never started" if blamed.phase == "start" else f"in phase {blamed.phase} after step {blamed.step}"
    stopped = "; its process is stopped" if blamed.state == "T" else ""
    stack = stacks_file(attempt.folder, blamed.rank)
    return RankFailure(
        rank=blamed.rank,
        host=blamed.host,
        time=time.time() - blamed.idle_s,  # ahead of errors that other ranks report because of it
        problem=f"rank {blamed.rank} hangs: no progress for {blamed.idle_s:.0f} s, {where}{stopped}",
        hint=f"read logs/attempt_{number}/{stack.name}, its stacks, and the stacks of the other ranks in this folder",
        log=f"logs/attempt_{number}/rank_{blamed.rank}.log",
    )


def _format_hang_event(hang: RankFailure, statuses: list[RankStatus]) -> dict[str, object]:
    """Fields of the event of a hang: the blamed rank, and the status of all ranks."""
    blamed = next((each for each in statuses if each.rank == hang.rank), None)
    where = {} if blamed is None else {"phase": blamed.phase, "step": blamed.step, "seconds": round(blamed.idle_s, 1)}
    standings = [structs.asdict(each) for each in sorted(statuses, key=lambda each: each.rank)]
    return {"rank": hang.rank, "host": hang.host, **where, "problem": hang.problem, "standings": standings}
