"""Node 0 of a drill: the undisturbed run first, then one run for each fault, within the time of the drill."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, structs

import primus
from primus.drill import plant
from primus.drill.drilled_launch import STOP_S, DrilledJob, IsOver, find_run, read_run_events, run_launch
from primus.drill.exchange import HeadExchange, LaunchOrder, NodeDrillReport, PlantReport
from primus.drill.fault_kinds import KINDS, FaultKind, find_layout_obstacle, find_slow_time_s, find_target_node
from primus.drill.goodput import estimate_goodput
from primus.drill.result import DrillResult, FaultCase, OutageEstimate, Restarter
from primus.drill.timeline import (
    FaultTimeline,
    ReferenceTimes,
    compare_losses,
    follow_restart,
    measure_reference,
    read_fault_timeline,
)
from primus.errors import PrimusError
from primus.launch.nodes.control_channel import HEARTBEAT_TIMEOUT_S
from primus.launch.supervision.attempt_monitor import INSPECTION_LIMIT_S
from primus.machine.cluster import ClusterLayout
from primus.plan import RestartPolicy
from primus.redaction import redact_args
from primus.runs.events import Event

REFERENCE = "reference"
LEAST_SAVE_INTERVAL = 2
"""Fewest steps between checkpoints: a fault comes between two of them."""
LEAST_REFERENCE_S = 20.0
"""Time that the undisturbed run trains at least: a fault that comes a second later is some fast steps later."""
MOST_REFERENCE_SHARE = 0.3
"""Share of the time of a drill that the undisturbed run may take."""
LEAST_HANG_S = 10.0
"""Shortest hang timeout of a drill: the detector looks once a second, and steps vary."""
LONG_HANG_S = 600.0
"""Hang timeout where the length of steps is not known, or a rank is slowed."""
HANG_FACTOR = 5.0
"""Hang timeout in the longest steps of the undisturbed run."""
RESTART_DELAY_S = 1.0
COLLECT_S = 60.0
"""Time after the end of a launch on node 0 in which the other nodes report."""
MOST_LAUNCHES = 3
"""Launches of a run: the first one, and those in the place of a scheduler."""
MARGIN_S = 20.0
"""Time for reports and for the end of a drill."""
SAFETY = 1.5
"""A fault is planted where this many times its expected duration is left."""


class DrillSettings(Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    minutes: float
    steps: int
    faults: tuple[str, ...]
    at_nodes: tuple[int, ...]
    failure_rate: float
    failure_rate_source: str
    policy: RestartPolicy
    """Restarts and hang timeout of the user's own launches."""

    @property
    def save_interval(self) -> int:
        """Steps between checkpoints of the undisturbed run, and at most those of the other runs."""
        return max(LEAST_SAVE_INTERVAL, self.steps // 3)


class DrillHead:
    """The drill on node 0.

    Args:
        settings: What is asked for.
        job: What every launch starts.
        layout: Nodes and processes.
        exchange: The other nodes.
        folder: Where everything goes.
        say: Prints a line.
    """

    def __init__(
        self,
        settings: DrillSettings,
        job: DrilledJob,
        layout: ClusterLayout,
        exchange: HeadExchange,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._job, self._layout = settings, job, layout
        self._exchange, self._folder, self._say = exchange, folder, say
        self._started = time.time()
        self._deadline = time.monotonic() + 60 * settings.minutes - MARGIN_S
        self._nodes: dict[int, NodeDrillReport] = {}
        self._reference: ReferenceTimes | None = None
        self._steps: dict[int, Event] = {}
        """Of the undisturbed run."""
        self._start_s = 0.0
        self._hang_timeout_s = LEAST_HANG_S
        self._save_interval = settings.save_interval

    def run(self, own: NodeDrillReport) -> DrillResult:
        """Run the drill, and have the other nodes end; `own` is the first report of this node.

        Raises:
            PrimusError: A node did not report, or the job does not train.
        """
        problem, cases = "", []
        try:
            self._nodes = self._exchange.collect_reports(own, self._remaining_s())
            self._run_reference()
            self._save_interval = self._choose_save_interval()
            for kind in KINDS.values():
                if kind.name in self._settings.faults:
                    cases.append(self._run_case(kind))
                    self._say(describe_case(cases[-1]))
        except PrimusError as error:
            if self._reference is None:
                raise
            problem = error.problem
        finally:
            self._exchange.send_order(LaunchOrder(time=time.time()))
        return self._build_result(cases, problem)

    def _remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def _run_reference(self) -> None:
        """Train undisturbed.

        Raises:
            PrimusError: It took too few steps, or wrote no checkpoint.
        """
        self._say(f"{REFERENCE}: training undisturbed")
        place, began = self._folder / REFERENCE, time.time()
        self._launch(REFERENCE, None, self._remaining_s() * MOST_REFERENCE_SHARE, self._is_reference_over)
        found = read_run_events(place)
        times = measure_reference(found)
        if times is None or not times.saved_steps:
            hint = f"the logs are in {place}; use --minutes for a longer drill, and --steps for fewer steps in a run"
            raise PrimusError(f"drill: the undisturbed run {_describe_shortfall(times, found)}", hint)
        self._steps = {each["step"]: each for each in found if each["kind"] == "step"}
        self._reference = times
        self._start_s = min(each["time"] for each in self._steps.values()) - began
        # Ranks that import an engine report no progress: three hang timeouts must be enough for that, even on a
        # machine that is slower the second time.
        self._hang_timeout_s = max(LEAST_HANG_S, HANG_FACTOR * times.longest_step_s, self._start_s)
        self._say(
            f"{REFERENCE}: first step after {self._start_s:.1f} s, {times.step_s:.3g} s a step, a checkpoint stalls"
            f" {times.stall_s:.3g} s"
        )

    def _is_reference_over(self, found: list[Event]) -> bool:
        steps = [each for each in found if each["kind"] == "step"]
        if len(steps) < self._settings.steps or not any(each["kind"] == "checkpoint_saved" for each in found):
            return False
        return bool(steps[-1]["time"] - steps[0]["time"] >= LEAST_REFERENCE_S)

    def _run_case(self, kind: FaultKind) -> FaultCase:
        """Train once with a fault, until the run has recovered or its time is over."""
        target, obstacle = find_target_node(kind, self._layout), self._find_obstacle(kind)
        expected_s = self._estimate_case_s(kind, self._save_interval)
        if not obstacle and expected_s * SAFETY > self._remaining_s():
            left = max(0.0, self._remaining_s())
            obstacle = f"about {expected_s:.0f} s are needed and {left:.0f} s are left: use a higher --minutes"
        if obstacle:
            return FaultCase(fault=kind.name, state="skipped", reason=obstacle)
        self._say(f"{kind.name}: {kind.act}")
        place, planted, ended_at, by_scheduler = self._folder / kind.name, PlantReport(), None, False
        for number in range(MOST_LAUNCHES):
            limit_s = min(self._remaining_s() - STOP_S, expected_s * SAFETY + COLLECT_S)
            if limit_s <= 0:
                break
            is_over = partial(self._is_case_over, kind)
            reports = self._launch(kind.name, kind if number == 0 else None, limit_s, is_over, target)
            if number == 0:
                planted = reports[target].planted or planted
                ended_at = time.time()
            if planted.planted_at is None or read_fault_timeline_of(place, kind, planted, ended_at).is_over:
                break
            by_scheduler = True
        return self._judge_case(kind, target, planted, ended_at, is_restarted_by_scheduler=by_scheduler)

    def _find_obstacle(self, kind: FaultKind) -> str:
        """Why the fault cannot be planted on these nodes; empty if it can."""
        if obstacle := find_layout_obstacle(kind, self._layout, self._job.allowed):
            return obstacle
        # Ranks of all nodes write the checkpoints that fill a disk.
        target = find_target_node(kind, self._layout)
        nodes = self._nodes.values() if kind.name == "fill-disk" else (self._nodes[target],)
        return next((each.obstacles[kind.name] for each in nodes if kind.name in each.obstacles), "")

    def _choose_save_interval(self) -> int:
        wanted = [kind for name, kind in KINDS.items() if name in self._settings.faults]
        kinds = [kind for kind in wanted if not self._find_obstacle(kind)]

        def estimate(interval: int) -> list[float]:
            return [self._estimate_case_s(kind, interval) for kind in kinds]

        return choose_save_interval(estimate, self._settings.save_interval, self._remaining_s())

    def _is_case_over(self, kind: FaultKind, found: list[Event]) -> bool:
        # Only the node of the fault knows when it was planted; nothing looks like it before.
        timeline = read_fault_timeline(found, kind, None)
        if timeline.detected_at is None and number_of_starts(found) > 1:  # nobody was left to record it
            timeline = follow_restart(timeline, found)
        return timeline.is_over

    def _launch(
        self,
        name: str,
        kind: FaultKind | None,
        limit_s: float,
        is_over: IsOver,
        target: int = 0,
    ) -> dict[int, NodeDrillReport]:
        """Have all nodes launch the job, and wait for its end; gives their reports."""
        measured_s = self._hang_timeout_s if self._reference else None
        order = LaunchOrder(
            time=time.time(),
            place=str(self._folder / name),
            options=(
                *("--max-restarts", "1", "--restart-delay", str(RESTART_DELAY_S)),
                *("--hang-timeout", f"{choose_hang_timeout_s(measured_s, kind):.0f}"),
            ),
            words=self._list_settings(name),
            limit_s=limit_s,
            fault=kind.name if kind else None,
            target=target,
            # Between the first and the second checkpoint.
            after_step=self._save_interval + self._save_interval // 2,
        )
        self._exchange.send_order(order)
        code, planted = run_launch(order, self._job, 0, 0.0, is_over)
        own = structs.replace(self._nodes[0], planted=planted, exit_code=code)
        return self._exchange.collect_reports(own, STOP_S + COLLECT_S)

    def _list_settings(self, name: str) -> tuple[str, ...]:
        """Settings of every run of the drill: the same training, without what others would notice."""
        save = "null"
        if name == "fill-disk":
            save = str(Path(self._job.allowed.fill) / f"primus-drill-{self._folder.name}")
        return (
            *("--save", save, "--save_interval", str(self._save_interval)),
            *("--disable_wandb", "true", "--disable_mlflow", "true", "--disable_tensorboard", "true"),
            *("--sample_tokens", "0"),
        )

    def _estimate_case_s(self, kind: FaultKind, save_interval: int) -> float:
        """Expected duration of the run with this fault and an interval of checkpoints in steps."""
        times = self._reference
        assert times is not None
        lasts_s = {
            "hang": self._hang_timeout_s + INSPECTION_LIMIT_S / 2,
            "slow-rank": find_slow_time_s(times.step_s),
            "drop-network": plant.DROPPED_S + HEARTBEAT_TIMEOUT_S / 2,
            "fill-disk": 2 * save_interval * times.step_s,
        }.get(kind.name, 5.0)
        starts = 2 if kind.restarts else 1
        steps = 2 * save_interval + save_interval // 2
        return starts * self._start_s + steps * times.step_s + times.save_s + lasts_s + 5.0

    def _judge_case(
        self,
        kind: FaultKind,
        target: int,
        planted: PlantReport,
        ended_at: float | None,
        *,
        is_restarted_by_scheduler: bool,
    ) -> FaultCase:
        place = self._folder / kind.name
        run = find_run(place)
        folder = str(run.directory) if run else ""
        if planted.planted_at is None:
            reason = planted.problem or f"the run ended before; its logs are in {place}"
            self._remove_checkpoints(kind.name)
            return FaultCase(fault=kind.name, state="not planted", reason=reason, node=target, run=folder)
        timeline = read_fault_timeline_of(place, kind, planted, ended_at)
        losses = compare_losses(self._steps, read_run_events(place), planted.planted_at)
        self._remove_checkpoints(kind.name)
        host = self._nodes[target].host
        return FaultCase(
            fault=kind.name,
            state="recovered" if timeline.is_over else "not recovered",
            reason=timeline.reason,
            node=target,
            host=host,
            rank=planted.rank,
            step=planted.step,
            detect_s=_subtract(timeline.detected_at, planted.planted_at),
            restart_s=None if kind.name == "slow-rank" else _subtract(timeline.went_on_at, timeline.detected_at),
            steps_lost=timeline.steps_lost,
            restarted_by=_name_restarter(kind, timeline, by_scheduler=is_restarted_by_scheduler),
            blamed_rank=timeline.blamed_rank,
            blamed_hosts=timeline.blamed_hosts,
            is_blame_right=judge_blame(kind, timeline, planted.rank, host, self._layout.nnodes),
            losses=losses,
            run=folder,
        )

    def _remove_checkpoints(self, name: str) -> None:
        """The logs and events of a run remain, not its weights."""
        run = find_run(self._folder / name)
        if run is not None:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
        if name == "fill-disk":
            shutil.rmtree(self._list_settings(name)[1], ignore_errors=True)

    def _build_result(self, cases: Sequence[FaultCase], problem: str) -> DrillResult:
        times, settings = self._reference, self._settings
        assert times is not None
        self._remove_checkpoints(REFERENCE)
        run = find_run(self._folder / REFERENCE)
        outage = estimate_outage(cases, settings.policy, self._hang_timeout_s)
        goodput = estimate_goodput(
            settings.at_nodes if outage else (),
            failures_per_1000_node_days=settings.failure_rate,
            stall_s=times.stall_s,
            outage_s=outage.seconds if outage else 0.0,
            step_s=times.step_s,
        )
        return DrillResult(
            command=tuple(redact_args(self._job.command)),
            started=self._started,
            duration_s=time.time() - self._started,
            nnodes=self._layout.nnodes,
            nproc=self._layout.nproc,
            hosts=tuple(self._nodes[rank].host for rank in sorted(self._nodes)),
            version=primus.__version__,
            reference=times,
            reference_run=str(run.directory) if run else "",
            start_s=self._start_s,
            hang_timeout_s=self._hang_timeout_s,
            cases=tuple(cases),
            outage=outage,
            failure_rate=settings.failure_rate,
            failure_rate_source=settings.failure_rate_source,
            goodput=tuple(goodput),
            folder=str(self._folder),
            problem=problem,
        )


def read_fault_timeline_of(place: Path, kind: FaultKind, planted: PlantReport, ended_at: float | None) -> FaultTimeline:
    """The course of a fault in the run of an order.

    Where every launcher of the job was killed nobody recorded the fault: then the end of the launch, `ended_at`, is
    when it was seen, as a scheduler sees it.
    """
    found = read_run_events(place)
    timeline = read_fault_timeline(found, kind, planted.planted_at)
    if timeline.detected_at is not None or ended_at is None or number_of_starts(found) < 2:
        return timeline
    before = [each for each in found if each["time"] < ended_at]
    last = max((each["step"] for each in before if each["kind"] == "step"), default=0)
    seen = FaultTimeline(detected_at=ended_at, last_step=last, reason="its launcher ended")
    return follow_restart(seen, found[len(before) :])


def choose_save_interval(estimate: Callable[[int], Sequence[float]], longest: int, remaining_s: float) -> int:
    """The longest interval of checkpoints, in steps, with which all faults fit into the time left; else the shortest.

    Args:
        estimate: Expected durations of the runs with a fault, in s, for an interval.
        longest: Interval that is asked for.
        remaining_s: Time left.
    """
    for interval in range(longest, LEAST_SAVE_INTERVAL, -1):
        expected_s = estimate(interval)
        # Only the last run has to fit with its safety: the others leave to the next what they do not take.
        if sum(expected_s) + (SAFETY - 1) * max(expected_s, default=0.0) <= remaining_s:
            return interval
    return LEAST_SAVE_INTERVAL


def choose_hang_timeout_s(measured_s: float | None, kind: FaultKind | None) -> float:
    """Hang timeout of a launch, in s: what the undisturbed run gave (None in that run), or one for slowed steps."""
    is_slowed = kind is not None and kind.name == "slow-rank"
    return LONG_HANG_S if measured_s is None or is_slowed else measured_s


def number_of_starts(found: Sequence[Event]) -> int:
    """Attempts that have begun to train."""
    return sum(each["kind"] == "run_started" for each in found)


def judge_blame(kind: FaultKind, timeline: FaultTimeline, rank: int | None, host: str, nnodes: int) -> bool | None:
    """Whether a run blames the node, and of a fault of one rank this rank; None where nobody was left to blame it."""
    if kind.name == "fill-disk":  # all ranks write the checkpoint
        return "no space left" in timeline.reason.lower()
    if timeline.detected_at is None:
        return False
    if kind.name == "kill-node" and nnodes == 1:
        return None
    if kind.name in ("kill-node", "drop-network"):
        return timeline.blamed_hosts == (host,)
    return timeline.blamed_rank == rank and timeline.blamed_hosts == (host,)


def _name_restarter(kind: FaultKind, timeline: FaultTimeline, *, by_scheduler: bool) -> Restarter:
    if not kind.restarts or timeline.went_on_at is None:
        return ""
    return "scheduler" if by_scheduler else "launcher"


def estimate_outage(cases: Sequence[FaultCase], policy: RestartPolicy, hang_timeout_s: float) -> OutageEstimate | None:
    """The mean outage of the faults that ended ranks; None without one.

    The drill detects hangs and restarts sooner than the user's own launch would: the difference is added.
    """
    outages = []
    for case in cases:
        if case.detect_s is None or case.restart_s is None or not KINDS[case.fault].restarts:
            continue
        outage_s = case.detect_s + case.restart_s
        if case.fault == "hang":
            outage_s += policy.hang_timeout_s - hang_timeout_s
        if case.restarted_by == "launcher":
            outage_s += policy.backoff_s - RESTART_DELAY_S
        outages.append((case.fault, outage_s))
    if not outages:
        return None
    seconds = sum(outage_s for _, outage_s in outages) / len(outages)
    each = ", ".join(f"{name} {outage_s:.0f} s" for name, outage_s in outages)
    source = (
        f"mean of {each}; with a restart delay of {policy.backoff_s:g} s and a hang timeout of"
        f" {policy.hang_timeout_s:g} s, without the time in which a scheduler finds a node"
    )
    return OutageEstimate(seconds=seconds, source=source)


def _describe_shortfall(times: ReferenceTimes | None, found: Sequence[Event]) -> str:
    if times is None:
        steps = sum(each["kind"] == "step" for each in found)
        return f"took {steps} steps in its time" if steps else "took no step"
    return f"wrote no checkpoint in {times.steps} steps"


def _subtract(end: float | None, begin: float | None) -> float | None:
    return None if end is None or begin is None else max(0.0, end - begin)


def describe_case(case: FaultCase) -> str:
    """A fault that is over, in a line."""
    if case.state in ("skipped", "not planted"):
        return f"{case.fault}: {case.state}: {case.reason}"
    times = [f"detected in {case.detect_s:.1f} s"] if case.detect_s is not None else ["not detected"]
    times += [f"restarted in {case.restart_s:.1f} s"] if case.restart_s is not None else []
    return f"{case.fault}: {case.state}: {', '.join(times)}"
