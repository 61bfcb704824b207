"""The numbers of a run's steps with what they depend on: machine, training, versions."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from primus.errors import PrimusError, UsageError, did_you_mean
from primus.runs import events, summary
from primus.runs.files import read_json
from primus.runs.snapshot import SystemInfo
from primus.runs.store import Run

RATES = ("tflops_per_device", "mfu")
"""Metrics of which more is better although their name has no `per_s`."""
TRAINING_KEYS = ("parameters", "seq_length", "global_batch_size", "dtype", "data_fingerprint", "backend", "compiled")
"""Fields of the event `run_started` that are compared."""


class RunSteps(Struct, frozen=True, kw_only=True):
    """The steps of one run in columns."""

    run: str
    """Id of the run."""
    name: str
    """Its experiment."""
    created: float
    """Seconds since the epoch."""
    machine: str
    """Machine class: runs of different classes have different speeds."""
    training: dict[str, Any]
    """What was trained, by name; see `TRAINING_KEYS`."""
    versions: dict[str, str]
    """Versions of the libraries."""
    steps: list[int]
    starts: list[int]
    """Index of the first step of each attempt."""
    columns: dict[str, list[float | None]]
    """Numbers of each step by name; None if not finite."""
    profiled: list[int] = []
    """Steps that were recorded by a profiler, which makes them slower."""
    core_wait: float | None = None
    """Of a run on CPUs: share of the time in which threads of rank 0 could run that they waited for a core."""

    def read_costs(self, metric: str) -> list[list[float]]:
        """The values of `metric` of each attempt as costs: more is slower. Rates are inverted, profiled steps excluded.

        Raises:
            UsageError: The run has no such metric, or it does not measure speed.
            PrimusError: A value is missing or not positive.
        """
        check_metric(metric, self)
        column = self.columns[metric]
        wrong = next((step for step, value in zip(self.steps, column, strict=True) if not value or value < 0), None)
        if wrong is not None:
            raise PrimusError(f"run {self.run}: {metric} is missing or not positive at step {wrong}")
        costs = [1 / value if is_rate(metric) else value for value in column if value]
        ends = [*self.starts[1:], len(costs)]
        profiled = set(self.profiled)
        return [
            [costs[index] for index in range(begin, end) if self.steps[index] not in profiled]
            for begin, end in zip(self.starts, ends, strict=True)
        ]


def is_rate(metric: str) -> bool:
    """Whether more of `metric` is better."""
    return "per_s" in metric or metric in RATES


def check_metric(metric: str, run: RunSteps) -> None:
    """Check that `metric` measures speed or memory, and that the run has it.

    Raises:
        UsageError: It does not.
    """
    usable = [name for name in run.columns if is_rate(name) or name.endswith(("_s", "_gib"))]
    if metric in run.columns and metric not in usable:
        raise UsageError(
            f"metric '{metric}' is neither a rate nor a cost",
            f"compare losses by --loss-tolerance; {did_you_mean('', usable)}",
        )
    if metric not in usable:
        raise UsageError(f"run {run.run} has no metric '{metric}'", did_you_mean(metric, usable))


def load_run_steps(run: Run) -> RunSteps:
    """The steps of a run that has ended.

    Raises:
        UsageError: The run is executing.
        PrimusError: It failed, or it is damaged or without steps.
    """
    metadata = run.read_metadata()
    state = summary.find_run_state(run, metadata)
    if state in ("running", "planned"):
        raise UsageError(
            f"run {run.id} is {state}", "wait until it has ended: primus-cli direct -- runs show " + run.id
        )
    if state != "done":
        reason = f": {metadata.outcome.reason}" if metadata.outcome.reason else ""
        raise PrimusError(f"run {run.id} {state}{reason}", f"find the cause: primus-cli direct -- diagnose {run.id}")
    others = list(events.read_events(run.events))
    started = [event for event in others if event["kind"] == "run_started"]
    recorded = events.read_steps(run.events)
    if not recorded or not started:
        raise PrimusError(f"run {run.id} has no steps", "a gate compares training runs")
    steps = [event["step"] for event in recorded]
    names = [name for name, value in recorded[-1].items() if _is_number(value) or name == "loss"]
    return RunSteps(
        run=run.id,
        name=metadata.name,
        created=metadata.created,
        machine=_describe_machine(run, started[-1]),
        training={key: started[-1][key] for key in TRAINING_KEYS if key in started[-1]},
        versions={name: str(version) for name, version in (started[-1].get("versions") or {}).items()},
        steps=steps,
        starts=_find_attempt_starts(steps, {event.get("step", 0) for event in started}),
        columns={
            name: [float(event[name]) if _is_number(event.get(name)) else None for event in recorded]
            for name in names
            if name not in ("step", "time")
        },
        profiled=_list_profiled_steps(others),
        core_wait=find_core_wait(others) if started[-1].get("device_type") == "cpu" else None,
    )


def _find_attempt_starts(steps: list[int], resumed_from: set[int]) -> list[int]:
    return [index for index, step in enumerate(steps) if index == 0 or step - 1 in resumed_from]


def _list_profiled_steps(recorded: list[events.Event]) -> list[int]:
    windows = [event for event in recorded if event["kind"] == "profile" and "first_step" in event]
    return sorted({step for window in windows for step in range(window["first_step"], window["last_step"] + 1)})


def find_core_wait(recorded: list[events.Event]) -> float | None:
    """Share of waiting for cores of the attempt which waited most; None if no event has one."""
    shares = [event.get("core_wait_share") for event in recorded if event["kind"] == "training_ended"]
    return max((float(share) for share in shares if isinstance(share, int | float) and 0 <= share <= 1), default=None)


def find_other_load(recorded: list[events.Event]) -> float | None:
    """Share of the CPUs that other processes used during the attempt in which it was largest; None if not recorded."""
    shares = [event.get("other_cpu_share") for event in recorded if event["kind"] == events.LOAD_EVENT]
    return max((float(share) for share in shares if isinstance(share, int | float) and share >= 0), default=None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe_machine(run: Run, started: events.Event) -> str:
    world = started.get("world_size", 1)
    if started.get("device_type") != "cpu":
        return f"{world} x {started.get('device', 'unknown device')}"
    system = read_json(run.directory / "env" / "system_info.json", SystemInfo)
    return f"{system.cpu_model}, {system.cpu_cores} cores, {world} x {started.get('threads', '?')} threads"
