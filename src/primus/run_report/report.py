"""The report of a run as a value: facts, trace, limit and changes; and its tables, which page and text share."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from primus.errors import PrimusError
from primus.report import table
from primus.report.benchmark_history import read_best_figures
from primus.run_report.advice import SuggestedChange, describe_limit, suggest_changes
from primus.run_report.facts import RankCompute, RunFacts, collect_facts
from primus.run_report.speed_check import SpeedCheck, check_speed
from primus.runs.store import Run
from primus.traces.find_files import find_run_traces
from primus.traces.format import format_us, list_timeline_rows
from primus.traces.report import TraceReport, analyze_traces

NUM_OPERATORS = 12
MOST_RANKS = 16
"""In the table of ranks."""
SLOW_RANK = 1.1
"""Computation above this multiple of the median stands out."""
GEMM_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What `benchmark gemm` calls the types of runs."""
NO_CHANGES = "No rule finds a change that saves 3 % or more."
Rows = list[list[str]]


class RunReport(Struct, frozen=True, kw_only=True):
    """What the report says."""

    facts: RunFacts
    limit: str
    """What limits the run."""
    changes: list[SuggestedChange]
    trace: TraceReport | None
    """Of the newest profile; None if the run recorded none."""
    best_gemm_tflops: float | None = None
    """Of the fastest matrix product in the type of the run that `benchmark gemm` has measured on this device."""
    speed: SpeedCheck | None = None
    """Beside the prediction and published rows; None for a CPU, or a device without figures."""


class RunTable(Struct, frozen=True, kw_only=True):
    """A table of the report."""

    title: str
    header: list[str]
    rows: Rows
    right: list[int] = []
    """Columns of numbers."""
    text: str = ""
    """A sentence below it."""


def build_report(run: Run, environ: Mapping[str, str] | None = None) -> RunReport:
    """The report of a run folder in any state.

    Args:
        run: The run.
        environ: Says where results of benchmarks are kept; None for a report without them.
    """
    facts = collect_facts(run)
    trace = None
    files = find_run_traces(run)
    if files:
        try:
            trace = analyze_traces(files, NUM_OPERATORS)
        except PrimusError as error:
            facts.notes.append(f"the profile is not analyzed: {error.problem}")
        else:
            facts.notes.extend(trace.notes)
    return RunReport(
        facts=facts,
        limit=describe_limit(facts, trace),
        changes=suggest_changes(facts, trace),
        trace=trace,
        best_gemm_tflops=_find_best_gemm(facts, environ),
        speed=check_speed(run, facts.started, facts.steady_step_s, facts.tokens_per_s),
    )


def _find_best_gemm(facts: RunFacts, environ: Mapping[str, str] | None) -> float | None:
    """TFLOP/s of the fastest product; None if this host has measured none, or is not that of the run."""
    if environ is None or facts.machine.get("host") != socket.gethostname():
        return None
    device = "CPU" if facts.started.get("device_type") == "cpu" else str(facts.started.get("device"))
    dtype = GEMM_TYPES.get(str(facts.started.get("dtype")), "")
    best = read_best_figures(environ).get(device, {}).get(f"gemm_{dtype}")
    # One that the run exceeds was measured while the device had other work.
    return best if best and best > (facts.tflops_per_device or 0.0) else None


def list_key_figures(report: RunReport) -> Rows:
    """Name and value of the figures of the summary."""
    facts, item = report.facts, report.facts.summary
    rate = table.format_number(facts.tokens_per_s)
    if facts.tokens_per_s_low is not None:
        low, high = table.format_number(facts.tokens_per_s_low), table.format_number(facts.tokens_per_s_high)
        rate += f" (5 % to 95 %: {low} to {high})"
    rows = [
        ("state", f"{item.state}{f': {facts.reason}' if facts.reason else ''}"),
        ("steps", _format_steps(facts) if facts.points else ""),
        ("loss", _format_loss(facts)),
        ("evaluation loss", table.format_number(item.eval_loss) if item.eval_loss is not None else ""),
        ("tokens/s", rate if facts.tokens_per_s is not None else ""),
        ("tokens/s over all steps", _format_optional(facts.overall_tokens_per_s)),
        ("step", f"{facts.steady_step_s:.4g} s" if facts.steady_step_s else ""),
        ("TFLOP/s of a device", _format_flops(facts)),
        ("share of the fastest matrix product measured here", _format_gemm_share(report)),
        ("MFU", f"{facts.mfu:.1%}" if facts.mfu is not None else ""),
        ("memory", _format_memory(facts)),
        ("time", table.format_duration(facts.wall_s)),
        ("stragglers", ", ".join(dict.fromkeys(facts.stragglers))),
    ]
    return [[name, value] for name, value in rows if value]


def _format_steps(facts: RunFacts) -> str:
    planned = facts.started.get("train_iters")
    return f"{facts.summary.steps:,} of {table.format_number(planned) if isinstance(planned, int) else '?'}"


def _format_loss(facts: RunFacts) -> str:
    last, first = facts.summary.last_loss, facts.not_finite_from
    text = table.format_number(last) if last is not None else ""
    if first is None:
        return text
    return f"not finite from step {first:,} on{f', {text} before' if text else ''}"


def list_tables(report: RunReport) -> Iterator[RunTable]:
    """The tables behind the summary, in order."""
    facts = report.facts
    if facts.time:
        rows = [[part.what, f"{part.seconds:,.1f} s", f"{part.share:.1%}"] for part in facts.time]
        yield RunTable(title="Time of the run", header=["", "time", "share"], rows=rows, right=[1, 2])
    if report.speed is not None:
        yield from _list_speed_tables(report.speed)
    if report.trace is not None:
        yield from _list_trace_tables(report.trace)
    measured = [rank for rank in facts.ranks if rank.compute_time_s is not None]
    if len(measured) > 1:
        yield _build_rank_table(measured)
    yield RunTable(title="Machine", header=["", ""], rows=[[*row] for row in facts.machine.items()])
    if facts.settings:
        rows = [[name, str(value)] for name, value in facts.settings.items()]
        yield RunTable(title="Settings", header=["", ""], rows=rows)


def _list_speed_tables(speed: SpeedCheck) -> Iterator[RunTable]:
    """Predicted beside measured, and published rows with what their settings explain."""
    terms = sorted(speed.terms.items(), key=lambda pair: -pair[1])
    yield RunTable(
        title="Predicted step",
        header=["term", "time", "share"],
        rows=[[name, f"{time:.4g} s", f"{time / speed.predicted_s:.1%}"] for name, time in terms],
        right=[1, 2],
        text=(
            f"{speed.layout}: predicted {speed.predicted_s:.4g} s, measured {speed.measured_s:.4g} s"
            f" ({speed.ratio:.2f} times); memory predicted: {speed.predicted_memory_gib:.1f} GiB"
        ),
    )
    for row in speed.published:
        yield RunTable(
            title=f"Published: {row.tokens_per_s_per_device:,.0f} tokens/s of a device, {row.ratio:.2f} times this run",
            header=["setting", "here", "there", "explains"],
            rows=[[each.setting, each.here, each.there, f"{each.factor:.2f} times"] for each in row.settings],
            right=[3],
            text=f"{row.source}; not explained by settings: {row.unexplained:.2f} times",
        )


def _build_rank_table(ranks: Sequence[RankCompute]) -> RunTable:
    """The ranks, or the slowest of many; below, the slowest one if it stands out."""
    times = {rank.rank: rank.compute_time_s or 0.0 for rank in ranks}
    by_time = sorted(ranks, key=lambda rank: -times[rank.rank])
    slowest, median = by_time[0], statistics.median(times.values())
    is_short = len(ranks) <= MOST_RANKS
    title = "Ranks: computation in the last step"
    text = f"the median is {median:.4g} s"
    if median and times[slowest.rank] > SLOW_RANK * median:
        text += f"; rank {slowest.rank} on {slowest.host} takes {times[slowest.rank] / median:.2f} times that"
    return RunTable(
        title=title if is_short else f"{title}, the slowest {MOST_RANKS} of {len(ranks):,}",
        header=["rank", "host", "step", "forward and backward"],
        rows=[
            [str(each.rank), each.host, f"{each.step:,}", f"{times[each.rank]:.4g} s"]
            for each in (ranks if is_short else by_time[:MOST_RANKS])
        ],
        right=[0, 2, 3],
        text=text,
    )


def _list_trace_tables(trace: TraceReport) -> Iterator[RunTable]:
    found = trace.breakdown
    total = found.total_us or 1.0
    yield RunTable(
        title="Time of the profiled steps",
        header=["", "time", "share"],
        rows=[
            [f"idle: {name.strip()}" if name.startswith(" ") else name, format_us(time), f"{time / total:.1%}"]
            for name, time in list_timeline_rows(found)
        ],
        right=[1, 2],
        text=f"launch-bound: {found.launch_bound_share:.1%} of the time" if found.timeline == "device" else "",
    )
    yield RunTable(
        title="Kernels by category" if found.timeline == "device" else "Operators by category",
        header=["", "count", "time", "share"],
        rows=[[row.category, f"{row.count:,}", format_us(row.time_us), f"{row.share:.1%}"] for row in found.categories],
        right=[1, 2, 3],
    )
    if trace.operators:
        yield RunTable(
            title="Operators by shape",
            header=["operator", "shape", "count", "time", "share", "TFLOP/s"],
            rows=[
                [
                    row.name,
                    row.shape,
                    f"{row.count:,}",
                    format_us(row.time_us),
                    f"{row.share:.1%}",
                    table.format_number(row.tflops),
                ]
                for row in trace.operators
            ],
            right=[2, 3, 4, 5],
        )
    if trace.ranks is not None:
        straggler = trace.ranks.straggler
        yield RunTable(
            title="Ranks in the profile",
            header=["rank", "computation", "waits", "others wait for it"],
            rows=[
                [str(row.rank), format_us(row.computation_us), format_us(row.wait_us), format_us(row.caused_us)]
                for row in trace.ranks.ranks
            ],
            right=[0, 1, 2, 3],
            text="no straggler" if straggler is None else f"the others wait for rank {straggler}",
        )


def list_change_rows(report: RunReport) -> Rows:
    """The suggested changes as rows: change, reason, gain and basis."""
    return [
        [
            change.change,
            change.reason,
            f"at most {change.gain:.0%} of the {change.gain_of}'s time" if change.gain is not None else "not known",
            change.basis,
        ]
        for change in report.changes
    ]


def _format_optional(value: float | None) -> str:
    return "" if value is None else table.format_number(value)


def _format_flops(facts: RunFacts) -> str:
    if facts.tflops_per_device is None:
        return ""
    convention = f", {facts.gflop_per_token:.4g} GFLOP per token" if facts.gflop_per_token else ""
    counted = f": counted as {facts.convention}" if facts.convention else ""
    return f"{table.format_number(facts.tflops_per_device)}{convention}{counted}"


def _format_gemm_share(report: RunReport) -> str:
    reached, best = report.facts.tflops_per_device, report.best_gemm_tflops
    if reached is None or not best:
        return ""
    return f"{reached / best:.1%} of {table.format_number(best)} TFLOP/s (benchmark gemm)"


def _format_memory(facts: RunFacts) -> str:
    if facts.memory_gib is None:
        return ""
    capacity = f" of {facts.capacity_gib:.1f}" if facts.capacity_gib else ""
    return f"{facts.memory_gib:.2f}{capacity} GiB, peak of rank 0"
