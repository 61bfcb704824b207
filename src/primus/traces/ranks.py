"""Ranks of a run compared: who waits for whom in each collective, and by how much their starts are apart.

Definitions: a rank waits from its own start of a collective until the last rank has started it; the transfer is what
remains until the end. Clocks of hosts differ, so traces are first shifted until the collectives that end everywhere at
once (all-reduce, all-gather, reduce-scatter, all-to-all) do so in the median.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from primus.traces.breakdown import compute_breakdown, select_communication
from primus.traces.categories import find_collective
from primus.traces.trace import Trace

SYNCHRONOUS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")


class RankTraceTimes(Struct, frozen=True, kw_only=True):
    """One rank among the others; times in microseconds."""

    rank: int
    step_us: float | None
    computation_us: float
    wait_us: float
    """Time in which it waited for later ranks, over all collectives."""
    transfer_us: float
    caused_us: float
    """Time that the other ranks waited for it together, where it was the last."""
    times_last: int
    """Collectives that it began last."""


class RankComparison(Struct, frozen=True, kw_only=True):
    """The ranks of a run."""

    ranks: list[RankTraceTimes]
    num_collectives: int
    """Collectives that were found in all ranks."""
    median_skew_us: float
    """Time from the first to the last start of a collective."""
    largest_skew_us: float
    straggler: int | None
    """The rank for which the others waited longest; None if none stands out."""
    notes: list[str] = []


def compare_ranks(traces: Sequence[Trace]) -> RankComparison | None:
    """Compare the traces of several ranks; None if there is only one, or none has collectives in common."""
    traces = sorted(traces, key=lambda trace: trace.rank if trace.rank is not None else 1 << 30)
    if len(traces) < 2:
        return None
    starts, ends, notes = _align_collectives(traces)
    if starts.shape[1] == 0:
        return None
    latest = starts.max(axis=0)
    waits = latest - starts
    last = starts.argmax(axis=0)
    skew = latest - starts.min(axis=0)
    caused = np.bincount(last, waits.sum(axis=0), len(traces))
    counts = np.bincount(last, minlength=len(traces))
    rows = []
    for index, trace in enumerate(traces):
        found = compute_breakdown(trace)
        rows.append(
            RankTraceTimes(
                rank=trace.rank if trace.rank is not None else index,
                step_us=found.step_us,
                computation_us=found.computation_us,
                wait_us=float(waits[index].sum()),
                transfer_us=float(np.maximum(ends[index] - latest, 0).sum()),
                caused_us=float(caused[index]),
                times_last=int(counts[index]),
            )
        )
    return RankComparison(
        ranks=rows,
        num_collectives=starts.shape[1],
        median_skew_us=float(np.median(skew)),
        largest_skew_us=float(skew.max()),
        straggler=_find_straggler(rows),
        notes=notes,
    )


def _align_collectives(
    traces: Sequence[Trace],
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    """Starts and ends [R, N] of the collectives that all ranks have, on one clock; and notes."""
    # The first trace's clock: microseconds since the epoch are too large for fractions in 64 bits.
    found = [_list_collectives(trace, trace.base_us - traces[0].base_us) for trace in traces]
    common = [key for key in found[0] if all(key in each for each in found)]
    largest = max(len(each) for each in found)
    notes = [] if len(common) == largest else [f"{largest - len(common)} collectives are not in all traces"]
    times = np.array([[each[key] for key in common] for each in found]).reshape(len(traces), len(common), 2)
    is_synchronous = np.array([kind in SYNCHRONOUS for kind, _, _ in common], bool)
    if is_synchronous.any():
        ends = times[:, is_synchronous, 1]
        times -= np.median(ends - ends[0], axis=1)[:, None, None]
    return times[:, :, 0], times[:, :, 1], notes


def _list_collectives(trace: Trace, shift_us: float) -> dict[tuple[str, str, int], tuple[float, float]]:
    """Start and end of each collective, by kind, group and number: ranks of a group call them in the same order.

    `shift_us` is added to the times.
    """
    events = select_communication(trace)
    labels = events.extra.get("collective")
    found: dict[tuple[str, str, int], tuple[float, float]] = {}
    numbers: dict[tuple[str, str], int] = {}
    for index, name in enumerate(trace.list_names(events)):
        label = trace.names[labels[index]] if labels is not None and labels[index] >= 0 else name
        group = label.partition(" ")[2] if label is not name else ""
        kind = find_collective(label)
        number = numbers[kind, group] = numbers.get((kind, group), -1) + 1
        times = (float(events.start[index]) + shift_us, float(events.end[index]) + shift_us)
        found[kind, group, number] = times
    return found


def _find_straggler(rows: Sequence[RankTraceTimes]) -> int | None:
    """The rank that caused more than half of all waiting, if that is more than chance."""
    total = sum(row.caused_us for row in rows)
    worst = max(rows, key=lambda row: row.caused_us)
    share = max(0.5, 1.3 / len(rows))
    return worst.rank if total > 0 and worst.caused_us > share * total else None
