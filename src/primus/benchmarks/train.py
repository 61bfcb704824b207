"""Training of an experiment on one or several engines, after the warm-up: tokens/s."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from primus.benchmark import BenchmarkOptions, BenchmarkRow, CaseValue
from primus.errors import UsageError
from primus.launch.child_run import ChildRun, train_in_child
from primus.launch.signals import Terminated
from primus.machine.measurements import Timing
from primus.package_files import locate_config
from primus.runs import events
from primus.runs.store import Run
from primus.statistics import bootstrap_interval, compute_mad, compute_quantile, find_steady_window
from primus.task import TaskContext

FEWEST_STEPS = 4
"""Steps after the warm-up that an interval needs."""


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark train`."""

    config: str | None = None
    """Experiment file."""
    engines: str | None = None
    """Engines, separated by commas (default: that of the experiment)."""
    steps: Annotated[int, Meta(ge=5)] = 30
    """Optimizer steps; the warm-up is found in their times and excluded."""
    set: tuple[str, ...] = ()
    """Overrides of the experiment: micro_batch_size=4 seq_length=2048."""


def check_options(options: Options) -> None:
    """Refuse a missing experiment and overrides without a value."""
    if options.config is None:
        raise UsageError("benchmark train needs --config", "an experiment file, such as examples/quickstart.yaml")
    if not locate_config(Path(options.config)).is_file():
        raise UsageError(f"--config {options.config}: not a file")
    for word in options.set:
        if "=" not in word:
            raise UsageError(f"--set {word}: expected KEY=VALUE")


def measure_launches(options: Options, context: TaskContext) -> Iterator[BenchmarkRow]:
    """A row for each engine; a run that fails is a row with the reason."""
    assert options.config is not None
    nproc = context.layout.nproc if context.layout else None
    for engine in options.engines.split(",") if options.engines else [""]:
        words = [*(f"--{word}" for word in options.set), "--train_iters", str(options.steps)]
        words += ["--framework", engine] if engine else []
        case: dict[str, CaseValue] = {
            "experiment": os.path.relpath(options.config),
            "engine": engine or "of the experiment",
            "overrides": " ".join(options.set),
            "processes": context.layout.world_size if context.layout else 1,
            "steps": options.steps,
        }
        child = train_in_child(Path(options.config), words, context.environ, nproc)
        if child.interrupted_by is not None:
            raise Terminated(child.interrupted_by)
        yield summarize_run(child, case)


def summarize_run(child: ChildRun, case: dict[str, CaseValue]) -> BenchmarkRow:
    """The row of one run."""
    if child.printed.get("outcome", {}).get("state") != "done":
        lines = [line.removeprefix("primus-cli: ") for line in child.errors.strip().splitlines()]
        reason = child.printed.get("outcome", {}).get("reason")
        return BenchmarkRow(case=case, problem=str(reason or (lines[0] if lines else f"exit code {child.exit_code}")))
    steps = events.read_steps(Run(Path(child.printed["run"])).events)
    return summarize_steps([float(step["step_time_s"]) for step in steps], float(steps[-1]["tokens"]), case)


def summarize_steps(times_s: list[float], tokens: float, case: dict[str, CaseValue]) -> BenchmarkRow:
    """Tokens/s of the steps after the warm-up, whose times may depend on each other."""
    window = find_steady_window(times_s)
    steady = times_s[window.start :]
    if len(steady) < FEWEST_STEPS:
        return BenchmarkRow(case=case, problem=f"{len(steady)} steps after the warm-up: measure more --steps")
    interval = bootstrap_interval(steady, block=None)
    ordered = sorted(steady)
    timing = Timing(
        n=len(steady),
        median_s=interval.estimate,
        p5_s=compute_quantile(ordered, 0.05),
        p95_s=compute_quantile(ordered, 0.95),
        min_s=ordered[0],
        max_s=ordered[-1],
        mad_s=compute_mad(steady),
        interval_s=(interval.low, interval.high),
        is_settled=window.is_steady,
    )
    return BenchmarkRow(
        case=case,
        value=tokens / interval.estimate,
        unit="tokens/s",
        interval=(tokens / interval.high, tokens / interval.low),
        timing=timing,
        figures={"warm_up_steps": float(window.start)},
        convention="tokens of the global batch / median step time after the warm-up, without evaluations and saves",
    )
