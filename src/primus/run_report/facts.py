"""The facts of a run that its report needs, from the run folder alone: of any engine, state and version."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from primus.errors import PrimusError
from primus.models.counts import Convention, detect_convention, flops_per_token
from primus.runs import events, summary
from primus.runs.events import Event
from primus.runs.run_steps import find_core_wait
from primus.runs.snapshot import read_system_info
from primus.runs.store import Run
from primus.runs.summary import WARM_UP_STEPS, RunSummary
from primus.statistics import compute_quantile

CONVENTIONS: tuple[Convention, ...] = ("causal", "full", "6N", "causal_window")
TIMED_EVENTS = {"eval": "evaluation", "profile": "writing profiles", "sample": "text sample"}
"""Parts of the time of the run, by the event that has it."""
SETTINGS = (
    "micro_batch_size", "global_batch_size", "seq_length", "train_iters", "bf16", "compile", "recompute_activations",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "num_workers", "eval_interval", "eval_iters", "save_interval", "async_save", "lr",
)  # fmt: skip
"""Settings that the report shows, if the run has them."""


class TimeShare(Struct, frozen=True, kw_only=True):
    """A part of the time of the run on the clock."""

    what: str
    seconds: float
    share: float


class StepPoint(Struct, frozen=True, kw_only=True):
    """A step, as the curves show it."""

    step: int
    loss: float | None
    tokens_per_s: float | None


class RankCompute(Struct, frozen=True, kw_only=True):
    """What a rank said of its last step."""

    rank: int = 0
    host: str = ""
    step: int = 0
    compute_time_s: float | None = None


class RunFacts(Struct, frozen=True, kw_only=True):
    """What is known of a run; None where its folder does not say it."""

    summary: RunSummary
    reason: str
    """Why it ended, if it failed."""
    started: Event
    """The newest event `run_started`; empty for runs that train nothing."""
    points: list[StepPoint]
    evaluations: list[StepPoint]
    not_finite_from: int | None
    """First of the last steps whose losses are all not finite."""
    steady_step_s: float | None
    """Median step after warm-up, without profiled steps."""
    tokens_per_s: float | None
    """Median after warm-up."""
    tokens_per_s_low: float | None
    """5th percentile."""
    tokens_per_s_high: float | None
    """95th percentile."""
    overall_tokens_per_s: float | None
    """All tokens by the time of all steps."""
    mfu: float | None
    tflops_per_device: float | None
    gflop_per_token: float | None
    """What the reported TFLOP/s imply."""
    convention: str
    """The convention that they follow; empty if none, or the model is not known."""
    data_share: float
    """Share of the time of steps that was spent waiting for batches."""
    compute_share: float | None
    """Share of the steady step in forward and backward passes of rank 0; None if it was not measured."""
    core_wait_share: float | None
    """Share of the time in which threads of rank 0 could run that they waited for a core; None if it is not known."""
    slow_first_s: float
    """Time of the first steps of each attempt above the median."""
    slow_later_s: float
    """Time of later steps above 1.5 times the median."""
    checkpoint_wait_s: float | None
    """Time that training waited for checkpoints; None if the run does not say it."""
    slow_saving_s: float
    """Time above the median of the steps during which a checkpoint was written (`async_save`)."""
    time: list[TimeShare]
    wall_s: float
    memory_gib: float | None
    """Largest peak of rank 0."""
    capacity_gib: float | None
    """Memory of its device, or of the host for a run on CPUs."""
    ranks: list[RankCompute]
    stragglers: list[str]
    settings: dict[str, Any]
    machine: dict[str, str]
    notes: list[str]


def collect_facts(run: Run) -> RunFacts:
    """The facts of a run folder."""
    recorded = list(events.read_events(run.events))
    steps = events.read_steps(run.events)
    started = next((event for event in reversed(recorded) if event["kind"] == "run_started"), {})
    found = summary.summarize_run(run)
    notes: list[str] = []
    steady = _choose_steady_steps(steps, recorded)
    rates = sorted(_list_numbers(steady, "tokens_per_s"))
    times = _list_numbers(steady, "step_time_s")
    step_s = statistics.median(times) if times else None
    tflops = _find_median(steady, "tflops_per_device")
    gflop = _compute_gflop_per_token(steady, tflops)
    settings = summary.flatten_run_settings(run)
    if settings.get("global_batch_size", 0) is None and started.get("global_batch_size"):
        settings["global_batch_size"] = started["global_batch_size"]
    slow_first, slow_later = _measure_slow_steps(steps, recorded, step_s)
    compute = _find_median(steady, "compute_time_s")
    wall = _measure_wall_time(run, recorded)
    return RunFacts(
        summary=found,
        reason=_read_reason(run),
        started=started,
        points=_list_points(steps),
        evaluations=_list_points([event for event in recorded if event["kind"] == "eval" and "step" in event]),
        not_finite_from=_find_not_finite(steps),
        steady_step_s=step_s,
        tokens_per_s=statistics.median(rates) if rates else None,
        tokens_per_s_low=compute_quantile(rates, 0.05) if rates else None,
        tokens_per_s_high=compute_quantile(rates, 0.95) if rates else None,
        overall_tokens_per_s=_compute_overall_rate(steps),
        mfu=_read_mfu(steady, notes),
        tflops_per_device=tflops,
        gflop_per_token=gflop,
        convention=_detect_convention(run, gflop, notes),
        data_share=_divide(sum(_list_numbers(steady, "data_time_s")), sum(times)),
        compute_share=_divide(compute, step_s) if compute and step_s else None,
        core_wait_share=find_core_wait(recorded),
        slow_first_s=slow_first,
        slow_later_s=slow_later,
        checkpoint_wait_s=_measure_checkpoint_wait(recorded),
        slow_saving_s=_measure_slow_saving(steps, recorded, step_s),
        time=_split_time(run, recorded, steps, wall),
        wall_s=wall,
        memory_gib=max(_list_numbers(steps, "memory_gib"), default=None),
        capacity_gib=_read_capacity(run, started),
        ranks=_read_ranks(run),
        stragglers=_list_stragglers(recorded),
        settings={name: settings[name] for name in SETTINGS if name in settings},
        machine=_describe_machine(run, started),
        notes=notes,
    )


def _compute_gflop_per_token(steady: Sequence[Event], tflops: float | None) -> float | None:
    per_device = _find_median(steady, "tokens_per_s_per_device")
    return tflops * 1e3 / per_device if tflops and per_device else None


def _compute_overall_rate(steps: Sequence[Event]) -> float | None:
    """Tokens per second over all steps, slow ones included."""
    seconds, tokens = sum(_list_numbers(steps, "step_time_s")), _list_numbers(steps, "tokens")
    return sum(tokens) / seconds if tokens and seconds > 0 else None


def _choose_steady_steps(steps: Sequence[Event], recorded: Sequence[Event]) -> list[Event]:
    """Steps after warm-up that were not profiled; all steps of a run that has no others."""
    profiled = {
        step
        for event in recorded
        if event["kind"] == "profile"
        for step in range(int(event.get("first_step", 0)), int(event.get("last_step", -1)) + 1)
    }
    chosen = [step for step in steps[WARM_UP_STEPS:] if step["step"] not in profiled]
    return chosen or list(steps[1:]) or list(steps)


def _list_numbers(found: Sequence[Event], name: str) -> list[float]:
    values = (event.get(name) for event in found)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _find_median(found: Sequence[Event], name: str) -> float | None:
    values = _list_numbers(found, name)
    return statistics.median(values) if values else None


def _read_mfu(steady: Sequence[Event], notes: list[str]) -> float | None:
    """The median MFU; None, with a note, for a value that cannot be."""
    mfu = _find_median(steady, "mfu")
    if mfu is None or 0 <= mfu <= 1:
        return mfu
    notes.append(
        f"the MFU of the run, {mfu:.2f}, is not possible: its FLOPs per token or the peak of its device are wrong;"
        " it is not shown"
    )
    return None


def _divide(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _list_points(found: Sequence[Event]) -> list[StepPoint]:
    def read_number(event: Event, name: str) -> float | None:
        return next(iter(_list_numbers([event], name)), None)

    return [
        StepPoint(step=event["step"], loss=read_number(event, "loss"), tokens_per_s=read_number(event, "tokens_per_s"))
        for event in found
    ]


def _find_not_finite(steps: Sequence[Event]) -> int | None:
    first = None
    for event in reversed(steps):
        if event.get("loss", 0.0) is not None:  # a step without the field reports no loss
            break
        first = event["step"]
    return first


def _measure_slow_steps(steps: Sequence[Event], recorded: Sequence[Event], median: float | None) -> tuple[float, float]:
    """Time above the median of the first steps of each attempt, and of later steps that are far above it."""
    if median is None:
        return 0.0, 0.0
    begins = [int(event.get("step", 0)) for event in recorded if event["kind"] == "run_started"] or [0]
    is_first = {begin + number for begin in begins for number in range(1, WARM_UP_STEPS + 1)}
    first = later = 0.0
    for step in steps:
        above = (step.get("step_time_s") or 0.0) - median
        if step["step"] in is_first:
            first += max(0.0, above)
        elif above > 0.5 * median:
            later += above
    return first, later


def _measure_checkpoint_wait(recorded: Sequence[Event]) -> float | None:
    saved = [event for event in recorded if event["kind"] == "checkpoint_saved"]
    waits = _list_numbers(saved, "wait_s")
    return sum(waits) if saved and len(waits) == len(saved) else None


def _measure_slow_saving(steps: Sequence[Event], recorded: Sequence[Event], median: float | None) -> float:
    """What the steps take longer that are taken while a checkpoint is written."""
    if median is None:
        return 0.0
    saved = [event for event in recorded if event["kind"] == "checkpoint_saved"]
    # The event follows the end of the writing, by at most a step.
    windows = [
        (event["time"] - event["time_s"] + event["wait_s"], event["time"])
        for event in saved
        if len(_list_numbers([event], "wait_s") + _list_numbers([event], "time_s")) == 2
    ]
    # The first steps are slow for another reason.
    times = [
        step.get("step_time_s") or median
        for step in steps[WARM_UP_STEPS:]
        if any(begin < step["time"] <= end for begin, end in windows)
    ]
    return max(0.0, sum(times) - median * len(times))


def _measure_wall_time(run: Run, recorded: Sequence[Event]) -> float:
    begin = recorded[0]["time"] if recorded else 0.0
    end = recorded[-1]["time"] if recorded else 0.0
    with contextlib.suppress(PrimusError):
        metadata = run.read_metadata()
        begin = min(metadata.started or begin, begin) if recorded else metadata.started or 0.0
        end = max(end, metadata.ended or end)
    return max(0.0, end - begin)


def _split_time(run: Run, recorded: Sequence[Event], steps: Sequence[Event], wall: float) -> list[TimeShare]:
    """The time on the clock, by what rank 0 did."""
    all_steps = [event for event in recorded if event["kind"] == "step"]
    repeated = sum(_list_numbers(all_steps, "step_time_s")) - sum(_list_numbers(steps, "step_time_s"))
    data = sum(_list_numbers(steps, "data_time_s"))
    spent = {kind: sum(_list_numbers([e for e in recorded if e["kind"] == kind], "time_s")) for kind in TIMED_EVENTS}
    parts = {
        "steps": sum(_list_numbers(steps, "step_time_s")) - data,
        "waiting for data": data,
        "steps that were repeated": repeated,
        **{what: spent[kind] for kind, what in TIMED_EVENTS.items()},
        "start": _measure_starts(run, recorded),
    }
    if wall <= 0:
        return []
    waited = _measure_checkpoint_wait(recorded)
    parts["checkpoints"] = waited or 0.0
    rest = wall - sum(parts.values())
    has_unknown = waited is None and any(event["kind"] == "checkpoint_saved" for event in recorded)
    parts["checkpoints, end and pauses" if has_unknown else "end and pauses"] = rest
    return [
        TimeShare(what=what, seconds=seconds, share=min(1.0, seconds / wall))
        for what, seconds in parts.items()
        if seconds > 0
    ]


def _measure_starts(run: Run, recorded: Sequence[Event]) -> float:
    """Time before the first step of each attempt: launch, imports, data, model and checkpoint."""
    total, begin = 0.0, recorded[0]["time"] if recorded else 0.0
    with contextlib.suppress(PrimusError):
        begin = min(begin, run.read_metadata().started or begin)
    is_waiting = True
    for event in recorded:
        if is_waiting and event["kind"] == "step":
            total += max(0.0, event["time"] - (event.get("step_time_s") or 0.0) - begin)
            is_waiting = False
        elif event["kind"] in ("attempt_ended", "run_ended", "interrupted"):
            begin, is_waiting = event["time"], True
    return total


def _detect_convention(run: Run, gflop: float | None, notes: list[str]) -> str:
    """The convention by which the reported FLOPs per token were counted."""
    if gflop is None:
        return ""
    from primus.experiment import load_run_experiment

    try:
        trainer = load_run_experiment(run).experiment.trainer
    except (PrimusError, OSError, ValueError):  # a run of another version, or without an experiment
        return ""
    spec, length = trainer.model, trainer.training.seq_length
    found = detect_convention(spec, length, gflop * 1e9)
    if found is not None:
        return found
    expected = {name: flops_per_token(spec, length, name) / 1e9 for name in CONVENTIONS}
    shown = ", ".join(f"{each} {value:.4g}" for each, value in expected.items())
    notes.append(f"the run counts {gflop:.4g} GFLOP per token, which no convention gives for its model ({shown})")
    return ""


def _read_capacity(run: Run, started: Event) -> float | None:
    """Memory of a device of the run, or of the host if it trains there."""
    info = read_system_info(run.directory / "env")
    if info is None:
        return None
    sizes = [device.memory_bytes for device in info.facts.devices] if info.facts else []
    size = info.memory_bytes if started.get("device_type") == "cpu" else next(filter(None, sizes), None)
    return size / 2**30 if size else None


def _read_ranks(run: Run) -> list[RankCompute]:
    """The last heartbeat of each rank in the newest attempt."""
    folders = sorted(run.directory.glob("logs/attempt_*"), key=lambda path: int(path.name.partition("_")[2] or 0))
    found = []
    for path in folders[-1].glob("rank_*.heartbeat.json") if folders else ():
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
            beat = msgspec.json.decode(path.read_bytes(), type=RankCompute)
            found.append(structs.replace(beat, rank=int(path.name.removeprefix("rank_").partition(".")[0])))
    return sorted(found, key=lambda each: each.rank)


def _list_stragglers(recorded: Sequence[Event]) -> list[str]:
    found = [event for event in recorded if event["kind"] == "straggler"]
    return [f"rank {event.get('rank', '?')} on {event.get('host', '?')}" for event in found]


def _read_reason(run: Run) -> str:
    with contextlib.suppress(PrimusError):
        return run.read_metadata().outcome.reason
    return "metadata.json cannot be read"


def _describe_machine(run: Run, started: Event) -> dict[str, str]:
    info = read_system_info(run.directory / "env")
    versions = started.get("versions") if isinstance(started.get("versions"), dict) else {}
    rows = {
        "host": info.host if info else None,
        "device": started.get("device") or _read_line(run.directory / "env" / "gpu_model.txt"),
        "processes": started.get("world_size"),
        "threads of each": started.get("threads"),
        "CPU": f"{info.cpu_model}, {info.cpu_cores} cores" if info and info.cpu_model else None,
        "kernel": info.kernel if info else None,
        **{str(name): version for name, version in (versions or {}).items()},
    }
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def _read_line(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
