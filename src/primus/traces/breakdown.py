"""Where the time of a trace goes: computing, communication, copies, idle and its causes.

The rows of a device follow TraceLens' `gpu_timeline` (AMD-AGI/TraceLens, gpu_event_analyser.py): computation is the
union of all kernels that are not NCCL's or RCCL's, over all streams; exposed communication is communication without
computation; an exposed copy is a copy without either; busy is their sum, and idle the rest of the time from the first
to the last activity. A trace without a device has operators of the host as its timeline: the time that an operator
spends itself, not in the operators that it calls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from primus.traces import intervals
from primus.traces.categories import (
    AUTOGRAD,
    CATEGORIES,
    COMMUNICATION,
    COPY,
    OTHER,
    find_category,
    find_collective,
    is_nccl,
)
from primus.traces.intervals import IntervalSet
from primus.traces.trace import KERNEL, MEMCPY, STEP, EventTable, Trace

SHORT_KERNEL_US = 10.0
"""A kernel below this takes about as long as its launch."""
DATA_SPANS = ("data", "enumerate(DataLoader)", "DataLoader")
"""Beginnings of the names of spans in which a process waits for its batch: ours, and torch's."""


class CategoryTime(Struct, frozen=True, kw_only=True):
    """Time of the kernels, or operators, of a category."""

    category: str
    count: int
    time_us: float
    """Sum of durations; kernels that run at the same time count twice."""
    share: float
    """Of the sum over all categories."""


class CollectiveTime(Struct, frozen=True, kw_only=True):
    """Time in which a kind of collective was in progress."""

    collective: str
    count: int
    time_us: float
    exposed_us: float
    """Time without computation."""


class IdleTime(Struct, frozen=True, kw_only=True):
    """Idle time by its cause."""

    data_us: float = 0.0
    """The host waited for a batch."""
    host_us: float = 0.0
    """The host had not launched the next kernel."""
    kernel_us: float = 0.0
    """The next kernel was launched, and had not begun: it waited for another one, or for its launch to arrive."""
    unknown_us: float = 0.0
    """The trace does not say who launched the next kernel."""


class TimeBreakdown(Struct, frozen=True, kw_only=True):
    """Where the time of one process goes, in microseconds."""

    timeline: str
    """``device``, or ``host`` for a trace without a device."""
    total_us: float
    busy_us: float
    idle_us: float
    computation_us: float
    communication_us: float
    exposed_communication_us: float
    hidden_communication_us: float
    copy_us: float
    exposed_copy_us: float
    idle: IdleTime
    categories: list[CategoryTime]
    collectives: list[CollectiveTime]
    num_kernels: int
    """Kernels, or operators of the host."""
    num_short_kernels: int
    """Kernels below `SHORT_KERNEL_US`; 0 for the host."""
    launch_bound_share: float
    """Share of the total time in short kernels, and waiting for launches."""
    num_steps: int
    step_us: float | None
    """Median duration of a step on the host; None without steps."""


def compute_breakdown(trace: Trace) -> TimeBreakdown:
    """The breakdown of a trace."""
    return _break_down_device(trace) if trace.is_on_device else _break_down_host(trace)


def find_misleading_parts(trace: Trace) -> list[str]:
    """Notes on rows that mean something else than a reader may think."""
    name = trace.path.name
    if not trace.is_on_device:
        # Kineto writes the activities of a device behind the operators of the host: a cut file has none of them.
        has_device = len(trace.runtime) > 0 or trace.problem != ""
        return [f"{name}: no activities of a device were read: the times are those of the host"] if has_device else []
    is_communication = _classify_device(trace) == CATEGORIES.index(COMMUNICATION)
    is_other = is_communication & ~trace.find_named(trace.device, is_nccl)
    if not is_other.any():
        return []
    time_ms = trace.device.duration[is_other].sum() / 1e3
    what = f"{int(is_other.sum()):,} kernels of communication are not NCCL's or RCCL's"
    return [f"{name}: {what}; the timeline counts their {time_ms:,.2f} ms as computation"]


def _break_down_device(trace: Trace) -> TimeBreakdown:
    device = trace.device
    is_copy, is_communication = _select_kinds(trace)
    computation = _merge_events(device.select(~is_copy & ~is_communication))
    communication = _merge_events(device.select(is_communication))
    copies = _merge_events(device.select(is_copy))
    total = float(device.end.max() - device.start.min())
    kernels = device.select(device.extra["kind"] == KERNEL)
    short = kernels.duration[kernels.duration < SHORT_KERNEL_US]
    idle = _find_idle_causes(trace, intervals.unite_sets(computation, communication, copies))
    launches = float(short.sum()) + idle.host_us + idle.kernel_us
    found = _build_breakdown(trace, total, _Activities(computation, communication, copies), idle)
    return structs.replace(
        found,
        timeline="device",
        categories=_sum_categories(_classify_device(trace), device.duration),
        collectives=_sum_collectives(trace, device.select(is_communication), computation),
        num_kernels=len(kernels),
        num_short_kernels=len(short),
        launch_bound_share=launches / total if total else 0.0,
    )


def _break_down_host(trace: Trace) -> TimeBreakdown:
    operators = trace.operators
    starts, ends, owners = find_own_times(operators)
    is_communication = trace.find_named(operators, lambda name: find_category(name) == COMMUNICATION)
    # Work of gloo and MPI is a span in a thread of theirs.
    waits = select_communication(trace)
    is_own = is_communication[owners]
    # The own time of a node of autograd is Python, or the wait of FSDP for other processes: its operators compute.
    is_computing = ~(is_communication | trace.find_named(operators, lambda name: find_category(name) == AUTOGRAD))[
        owners
    ]
    computation = intervals.merge_intervals(starts[is_computing], ends[is_computing])
    communication = intervals.unite_sets(intervals.merge_intervals(starts[is_own], ends[is_own]), _merge_events(waits))
    low, high = _find_window(trace, operators)
    window = np.array([[low, high]])
    computation = intervals.intersect_sets(computation, window)
    communication = intervals.intersect_sets(communication, window)
    gaps = intervals.subtract_set(window, intervals.unite_sets(computation, communication))
    data = intervals.measure_set(intervals.intersect_sets(gaps, _find_data_waits(trace)))
    own_times = np.zeros(len(operators))
    np.add.at(own_times, owners, ends - starts)
    idle = IdleTime(data_us=data, host_us=intervals.measure_set(gaps) - data)
    activities = _Activities(computation, communication, np.empty((0, 2)))
    return structs.replace(
        _build_breakdown(trace, high - low, activities, idle),
        categories=_sum_categories(_classify_names(trace)[operators.name], own_times),
        collectives=_sum_collectives(trace, waits, computation, window),
        num_kernels=len(operators),
    )


class _Activities(NamedTuple):
    """When a process does what."""

    computation: IntervalSet
    communication: IntervalSet
    copies: IntervalSet


def _build_breakdown(trace: Trace, total: float, activities: _Activities, idle: IdleTime) -> TimeBreakdown:
    """The times of a host's timeline, without its operators."""
    computation, communication, copies = activities
    exposed = intervals.measure_set(intervals.subtract_set(communication, computation))
    working = intervals.unite_sets(computation, communication)
    exposed_copies = intervals.measure_set(intervals.subtract_set(copies, working))
    computing, communicating = intervals.measure_set(computation), intervals.measure_set(communication)
    busy = computing + exposed + exposed_copies
    durations = [end - start for _, start, end in trace.list_steps()]
    return TimeBreakdown(
        timeline="host",
        total_us=total,
        busy_us=busy,
        idle_us=max(0.0, total - busy),
        computation_us=computing,
        communication_us=communicating,
        exposed_communication_us=exposed,
        hidden_communication_us=communicating - exposed,
        copy_us=intervals.measure_set(copies),
        exposed_copy_us=exposed_copies,
        idle=idle,
        categories=[],
        collectives=[],
        num_kernels=0,
        num_short_kernels=0,
        launch_bound_share=0.0,
        num_steps=len(durations),
        step_us=float(np.median(durations)) if durations else None,
    )


def select_communication(trace: Trace) -> EventTable:
    """The communication kernels of the device, or the spans of gloo and MPI on the host."""
    if trace.is_on_device:
        return trace.device.select(trace.find_named(trace.device, is_nccl) & (trace.device.extra["kind"] != MEMCPY))
    return trace.spans.select(trace.find_named(trace.spans, _is_communication_span))


def find_own_times(operators: EventTable) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Starts, ends and operator of the intervals that each operator spends itself, thread by thread."""
    starts, ends, owners = [], [], []
    order = np.lexsort((-operators.end, operators.start, operators.lane))
    first, last = operators.start.tolist(), operators.end.tolist()
    lanes = operators.lane.tolist()
    stack: list[int] = []
    now, lane = 0.0, None

    def close_until(time: float) -> None:
        """End the operators that are over at `time`; what is above in the stack began later."""
        nonlocal now
        while stack and last[stack[-1]] <= time:
            index = stack.pop()
            if last[index] > now:
                add(now, last[index], index)
                now = last[index]

    def add(start: float, end: float, index: int) -> None:
        starts.append(start)
        ends.append(end)
        owners.append(index)

    for index in order.tolist():
        if lanes[index] != lane:
            close_until(np.inf)
            lane = lanes[index]
        close_until(first[index])
        if stack and first[index] > now:
            add(now, first[index], stack[-1])
        now = first[index]
        stack.append(index)
    close_until(np.inf)
    return np.array(starts, np.float64), np.array(ends, np.float64), np.array(owners, np.int64)


def _find_window(trace: Trace, operators: EventTable) -> tuple[float, float]:
    """From the first to the last step; without steps, from the first to the last operator."""
    steps = trace.list_steps()
    if steps:
        return min(step[1] for step in steps), max(step[2] for step in steps)
    return float(operators.start.min()), float(operators.end.max())


def _find_idle_causes(trace: Trace, busy: IntervalSet) -> IdleTime:
    """Split each gap by what the host did: before the next kernel was launched, and after."""
    gaps = intervals.find_gaps(busy)
    if len(gaps) == 0:
        return IdleTime()
    device, runtime = trace.device, trace.runtime
    following = np.searchsorted(device.start, gaps[:, 1])  # the activity that ends the gap begins where it ends
    wanted = device.extra["correlation"][np.minimum(following, len(device) - 1)]
    calls = dict(zip(runtime.extra["correlation"].tolist(), runtime.end.tolist(), strict=True))
    launched = np.array([calls.get(each, np.nan) if each >= 0 else np.nan for each in wanted.tolist()])
    is_known = ~np.isnan(launched)
    launched = np.clip(np.where(is_known, launched, gaps[:, 1]), gaps[:, 0], gaps[:, 1])
    waits = np.stack((gaps[:, 0], launched), axis=1)[is_known]
    host = intervals.merge_intervals(waits[:, 0], waits[:, 1])
    data = intervals.measure_set(intervals.intersect_sets(host, _find_data_waits(trace)))
    return IdleTime(
        data_us=data,
        host_us=intervals.measure_set(host) - data,
        kernel_us=float((gaps[:, 1] - launched)[is_known].sum()),
        unknown_us=float((gaps[:, 1] - gaps[:, 0])[~is_known].sum()),
    )


def _find_data_waits(trace: Trace) -> IntervalSet:
    return _merge_events(trace.spans.select(trace.find_named(trace.spans, lambda name: name.startswith(DATA_SPANS))))


def _is_communication_span(name: str) -> bool:
    return name.startswith(("gloo:", "mpi:", "ucc:")) and not STEP.match(name)


def _merge_events(events: EventTable) -> IntervalSet:
    return intervals.merge_intervals(events.start, events.end)


def _select_kinds(trace: Trace) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Masks of the copies, and of the kernels of NCCL and RCCL."""
    is_copy = trace.device.extra["kind"] == MEMCPY
    return is_copy, trace.find_named(trace.device, is_nccl) & ~is_copy


def _classify_device(trace: Trace) -> NDArray[np.int64]:
    """The category of each activity: by its name, else by that of the operator that launched it."""
    is_copy, is_communication = _select_kinds(trace)
    found = _classify_names(trace)[trace.device.name]
    is_vague = (found == CATEGORIES.index(OTHER)) | (found == CATEGORIES.index(COMMUNICATION))
    owners = find_launching_operators(trace)
    has_owner = is_vague & (owners >= 0)
    found[is_vague] = CATEGORIES.index(OTHER)
    found[has_owner] = _classify_names(trace)[trace.operators.name[owners[has_owner]]]
    found[is_copy], found[is_communication] = CATEGORIES.index(COPY), CATEGORIES.index(COMMUNICATION)
    return found


def find_launching_operators(trace: Trace) -> NDArray[np.int64]:
    """Index of the operator that launched each activity of the device; -1 if the trace does not say it."""
    external = trace.device.extra["external"]
    if len(trace.operators) == 0:
        return np.full(len(external), -1)
    calls = dict(
        zip(trace.runtime.extra["correlation"].tolist(), trace.runtime.extra["external"].tolist(), strict=True)
    )
    by_call = np.array([calls.get(each, -1) for each in trace.device.extra["correlation"].tolist()], np.int64)
    external = np.where(external >= 0, external, by_call)
    ids = trace.operators.extra["external"]
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], external), len(ids) - 1)
    owner = order[place]
    return np.where((external >= 0) & (ids[owner] == external), owner, -1)


def _classify_names(trace: Trace) -> NDArray[np.int64]:
    return np.array([CATEGORIES.index(find_category(name)) for name in trace.names], np.int64)


def _sum_categories(categories: NDArray[np.int64], times: NDArray[np.float64]) -> list[CategoryTime]:
    """Times by category, the longest first."""
    sums = np.bincount(categories, times, len(CATEGORIES))
    counts = np.bincount(categories, minlength=len(CATEGORIES))
    total = float(sums.sum()) or 1.0
    found = [
        CategoryTime(category=name, count=int(count), time_us=float(time), share=float(time) / total)
        for name, count, time in zip(CATEGORIES, counts, sums, strict=True)
        if count
    ]
    return sorted(found, key=lambda each: -each.time_us)


def _sum_collectives(
    trace: Trace, events: EventTable, computation: IntervalSet, window: IntervalSet | None = None
) -> list[CollectiveTime]:
    """Times by kind of collective, inside of `window` if there is one, the longest first."""
    labels = events.extra.get("collective", np.full(len(events), -1))
    kinds = np.array(
        [
            find_collective(trace.names[label] if label >= 0 else trace.names[name])
            for name, label in zip(events.name.tolist(), labels.tolist(), strict=True)
        ]
    )
    found = []
    for kind in sorted(set(kinds.tolist())):
        chosen = events.select(kinds == kind)
        times = _merge_events(chosen)
        if window is not None:
            times = intervals.intersect_sets(times, window)
        exposed = intervals.measure_set(intervals.subtract_set(times, computation))
        found.append(
            CollectiveTime(collective=kind, count=len(chosen), time_us=intervals.measure_set(times), exposed_us=exposed)
        )
    return sorted(found, key=lambda each: -each.time_us)
