"""The analysis of traces: breakdown, operators, ranks, memory, and the difference from another trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.traces.breakdown import TimeBreakdown, compute_breakdown, find_misleading_parts
from primus.traces.memory import MemoryReport, report_memory
from primus.traces.operators import OperatorTime, list_operators
from primus.traces.ranks import RankComparison, compare_ranks
from primus.traces.trace import Trace, read_trace


class TraceReport(Struct, frozen=True, kw_only=True):
    """What the traces of a run say."""

    files: list[str]
    rank: int | None
    """Rank of the trace that is broken down: the first file's."""
    device_name: str
    breakdown: TimeBreakdown
    operators: list[OperatorTime]
    memory: MemoryReport | None
    ranks: RankComparison | None
    notes: list[str]


class TimeDifference(Struct, frozen=True, kw_only=True):
    """A time in two traces, in microseconds of a step, or of the whole trace if one of them has no steps."""

    what: str
    a_us: float
    b_us: float

    @property
    def change_us(self) -> float:
        return self.b_us - self.a_us


class TraceDifference(Struct, frozen=True, kw_only=True):
    """Two traces compared."""

    unit: str
    """``step`` or ``trace``."""
    times: list[TimeDifference]
    """Rows of the timeline and categories."""
    operators: list[TimeDifference]
    """Operators by shape, the largest change first."""


def analyze_traces(files: Sequence[Path], num_operators: int) -> TraceReport:
    """Analyze the traces of one run.

    Raises:
        UsageError: A file is not a trace.
        PrimusError: The traces need more memory than there is.
    """
    try:
        return _analyze([read_trace(file) for file in files], files, num_operators)
    except MemoryError:  # a limit of the process, such as ulimit -v
        raise PrimusError(
            f"{', '.join(map(str, files))}: the analysis needs more memory than this process may use",
            "record fewer steps or ranks, or raise the limit (ulimit -v)",
        ) from None


def _analyze(traces: Sequence[Trace], files: Sequence[Path], num_operators: int) -> TraceReport:
    first = traces[0]
    return TraceReport(
        files=[str(file) for file in files],
        rank=first.rank,
        device_name=first.device_name,
        breakdown=compute_breakdown(first),
        operators=list_operators(first, num_operators),
        memory=report_memory(first),
        ranks=compare_ranks(traces),
        notes=[note for trace in traces for note in (*trace.notes, *find_misleading_parts(trace))],
    )


def compare_reports(a: TraceReport, b: TraceReport, num_operators: int) -> TraceDifference:
    """Compare two analyses, step by step where both have steps."""
    has_steps = bool(a.breakdown.num_steps and b.breakdown.num_steps)
    sizes = tuple(each.breakdown.num_steps if has_steps else 1 for each in (a, b))
    tables = [_list_times(each.breakdown) for each in (a, b)]
    names = list(dict.fromkeys([*tables[0], *tables[1]]))
    by_shape = [{f"{row.name} {row.shape}".strip(): row.time_us for row in each.operators} for each in (a, b)]

    def compare(name: str, values: Sequence[dict[str, float]]) -> TimeDifference:
        first, second = (values[i].get(name, 0.0) / sizes[i] for i in range(2))
        return TimeDifference(what=name, a_us=first, b_us=second)

    operators = [compare(name, by_shape) for name in by_shape[0].keys() | by_shape[1].keys()]
    return TraceDifference(
        unit="step" if has_steps else "trace",
        times=[compare(name, tables) for name in names],
        operators=sorted(operators, key=lambda row: -abs(row.change_us))[:num_operators],
    )


def _list_times(found: TimeBreakdown) -> dict[str, float]:
    return {
        "total": found.total_us,
        "computation": found.computation_us,
        "exposed communication": found.exposed_communication_us,
        "exposed copies": found.exposed_copy_us,
        "idle": found.idle_us,
        "idle: data": found.idle.data_us,
        "idle: host": found.idle.host_us,
        "idle: launched kernel": found.idle.kernel_us,
        **{f"{row.category}": row.time_us for row in found.categories},
    }
