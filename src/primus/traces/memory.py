"""Memory over time by category, and the owners of its peak, from the allocations of a trace of `--profile-memory`.

An allocation belongs to the phase in which it was made, and to a category by when it was released:

    forward    and lives until a backward pass  activation      else  temporary
    backward   and lives until the optimizer    gradient        else  temporary
    optimizer  and outlives its step            optimizer state else  temporary

What was allocated before the profile began is one category: weights, and what optimizer and gradients kept.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from primus.traces import intervals
from primus.traces.breakdown import find_own_times
from primus.traces.intervals import IntervalSet
from primus.traces.trace import EventTable, Trace

BEFORE, ACTIVATION, GRADIENT = "before the profile", "activation", "gradient"
OPTIMIZER_STATE, TEMPORARY = "optimizer state", "temporary"
MEMORY_CATEGORIES = (BEFORE, ACTIVATION, GRADIENT, OPTIMIZER_STATE, TEMPORARY)
NUM_SAMPLES = 240
_ALLOCATORS = ("aten::empty", "aten::resize_", "aten::set_", "aten::new_empty", "[memory]")
"""Operators that allocate for the one that calls them."""


class MemorySample(Struct, frozen=True, kw_only=True):
    """Bytes at a time, by category in the order of `MEMORY_CATEGORIES`."""

    time_us: float
    """Since the first allocation."""
    bytes_by_category: list[int]


class MemoryOwner(Struct, frozen=True, kw_only=True):
    """An operator whose allocations were alive at the peak."""

    owner: str
    category: str
    count: int
    bytes: int


class MemoryReport(Struct, frozen=True, kw_only=True):
    """Memory of one device during a profile."""

    device: str
    """``host`` or ``device``."""
    peak_bytes: int
    peak_time_us: float
    bytes_before: int
    """Allocated before the profile began."""
    samples: list[MemorySample]
    owners: list[MemoryOwner]
    """Of the peak, the largest first."""

    @property
    def note(self) -> str:
        """What the figures do not contain; empty if the allocator has counted what was there before."""
        if self.bytes_before:
            return ""
        return (
            "only what was allocated within the profile counts: weights, gradients and optimizer state from before it "
            "are not in these figures"
        )


def report_memory(trace: Trace) -> MemoryReport | None:
    """The memory of the device, or of the host where the trace has no other; None without allocations."""
    events = trace.memory
    if len(events) == 0:
        return None
    kinds = events.extra["device"] >> 16  # c10::DeviceType: 0 is the host
    is_device = kinds > 0
    chosen = events.select(is_device if is_device.any() else ~is_device)
    made, sizes, released = _match_releases(chosen)
    categories = _classify_allocations(trace, made, released)
    owners = _find_owners(trace, made)
    first_total, first_bytes = int(chosen.extra["total"][0]), int(chosen.extra["bytes"][0])
    before = max(0, first_total - first_bytes)
    # Releases of what was allocated before the profile make it smaller.
    old = _sum_old_releases(chosen)
    times = np.unique(np.concatenate((made.start, released[np.isfinite(released)], old[:, 0])))
    levels = _count_levels(times, made.start, released, sizes, categories)
    levels[0] += before - _count_until(times, old)
    totals = levels.sum(axis=0)
    peak = int(totals.argmax()) if len(times) else 0
    origin = float(chosen.start[0])
    is_alive = (made.start <= times[peak]) & (released > times[peak])
    rows = np.unique(np.linspace(0, len(times) - 1, min(NUM_SAMPLES, len(times))).astype(int))
    rows = np.union1d(rows, [peak])
    return MemoryReport(
        device="device" if is_device.any() else "host",
        peak_bytes=int(totals[peak]),
        peak_time_us=float(times[peak]) - origin,
        bytes_before=before,
        samples=[
            MemorySample(time_us=float(times[i]) - origin, bytes_by_category=levels[:, i].astype(int).tolist())
            for i in rows.tolist()
        ],
        owners=_sum_owners(owners, categories, sizes, is_alive, int(levels[0, peak])),
    )


def _match_releases(events: EventTable) -> tuple[EventTable, NDArray[np.int64], NDArray[np.float64]]:
    """The allocations, their sizes, and the time at which each was released; infinity if it was not."""
    open_at: dict[tuple[int, int], int] = {}
    rows: list[int] = []
    released: list[float] = []
    columns = (events.extra[name].tolist() for name in ("bytes", "address", "device"))
    for row, (size, address, device) in enumerate(zip(*columns, strict=True)):
        if size > 0:
            open_at[address, device] = len(rows)
            rows.append(row)
            released.append(np.inf)
        elif (address, device) in open_at:
            released[open_at.pop((address, device))] = float(events.start[row])
    made = events.select(np.array(rows, np.int64))
    return made, made.extra["bytes"], np.array(released, np.float64)


def _sum_old_releases(events: EventTable) -> NDArray[np.float64]:
    """Times and sizes [N, 2] of releases of what was allocated before the profile."""
    known: set[tuple[int, int]] = set()
    found = []
    columns = (events.extra[name].tolist() for name in ("bytes", "address", "device"))
    for row, (size, address, device) in enumerate(zip(*columns, strict=True)):
        if size > 0:
            known.add((address, device))
        elif (address, device) not in known:
            found.append((float(events.start[row]), float(-size)))
        else:
            known.discard((address, device))
    return np.array(found, np.float64).reshape(-1, 2)


def _count_until(times: NDArray[np.float64], old: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes that were released until each time."""
    sums = np.concatenate(([0.0], np.cumsum(old[:, 1])))
    return np.asarray(sums[np.searchsorted(old[:, 0], times, side="right")])


def _count_levels(
    times: NDArray[np.float64],
    made: NDArray[np.float64],
    released: NDArray[np.float64],
    sizes: NDArray[np.int64],
    categories: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Bytes [C, T] of each category after each time."""
    levels = np.zeros((len(MEMORY_CATEGORIES), len(times)))
    for index in range(1, len(MEMORY_CATEGORIES)):
        chosen = categories == index
        np.add.at(levels[index], np.searchsorted(times, made[chosen]), sizes[chosen])
        ends = chosen & np.isfinite(released)
        np.add.at(levels[index], np.searchsorted(times, released[ends]), -sizes[ends])
    return np.asarray(levels.cumsum(axis=1))


def _classify_allocations(trace: Trace, made: EventTable, released: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the category of each allocation."""
    backward = _select_times(trace, trace.operators, lambda name: name.startswith("autograd::engine::evaluate"))
    optimizer = _select_times(trace, trace.spans, lambda name: name.startswith("Optimizer.step"))
    in_backward, in_optimizer = _is_inside(backward, made.start), _is_inside(optimizer, made.start)
    found = np.full(len(made), MEMORY_CATEGORIES.index(TEMPORARY))
    is_forward = ~in_backward & ~in_optimizer
    found[is_forward & (released >= _find_next_start(backward, made.start))] = MEMORY_CATEGORIES.index(ACTIVATION)
    found[in_backward & (released >= _find_next_start(optimizer, made.start))] = MEMORY_CATEGORIES.index(GRADIENT)
    ends = (
        optimizer[np.clip(np.searchsorted(optimizer[:, 0], made.start, side="right") - 1, 0, None), 1]
        if len(optimizer)
        else np.full(len(made), np.inf)
    )
    found[in_optimizer & (released > ends)] = MEMORY_CATEGORIES.index(OPTIMIZER_STATE)
    return found


def _select_times(trace: Trace, events: EventTable, condition: object) -> IntervalSet:
    chosen = events.select(trace.find_named(events, condition))
    return intervals.merge_intervals(chosen.start, chosen.end)


def _is_inside(found: IntervalSet, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    if len(found) == 0:
        return np.zeros(len(times), bool)
    place = np.searchsorted(found[:, 0], times, side="right") - 1
    return np.asarray((place >= 0) & (times < found[np.maximum(place, 0), 1]))


def _find_next_start(found: IntervalSet, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Start of the first interval after each time; infinity if there is none, so that only what is never released
    lives until then."""
    starts = np.append(found[:, 0], np.inf)
    return np.asarray(starts[np.searchsorted(found[:, 0], times, side="right")])


def _find_owners(trace: Trace, made: EventTable) -> list[str]:
    """The innermost operator around each allocation that does not only allocate."""
    operators = trace.operators.select(~trace.find_named(trace.operators, lambda name: name.startswith(_ALLOCATORS)))
    starts, ends, owned = find_own_times(operators)
    if len(owned) == 0:
        return ["unknown"] * len(made)
    lanes = operators.lane[owned]
    found = ["outside of operators"] * len(made)
    for lane in np.unique(made.lane).tolist():
        rows, chosen = np.flatnonzero(made.lane == lane), np.flatnonzero(lanes == lane)
        if len(chosen) == 0:
            continue
        place = np.searchsorted(starts[chosen], made.start[rows], side="right") - 1
        for row, where in zip(rows.tolist(), place.tolist(), strict=True):
            segment = chosen[max(where, 0)]
            if where >= 0 and made.start[row] <= ends[segment]:
                found[row] = trace.names[operators.name[owned[segment]]]
    return found


def _sum_owners(
    owners: list[str],
    categories: NDArray[np.int64],
    sizes: NDArray[np.int64],
    is_alive: NDArray[np.bool_],
    before: int,
) -> list[MemoryOwner]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in np.flatnonzero(is_alive).tolist():
        total = sums[owners[row], MEMORY_CATEGORIES[categories[row]]]
        total[0] += 1
        total[1] += int(sizes[row])
    found = [
        MemoryOwner(owner=owner, category=category, count=count, bytes=size)
        for (owner, category), (count, size) in sums.items()
    ]
    if before > 0:
        found.append(
            MemoryOwner(owner="weights, and what optimizer and gradients kept", category=BEFORE, count=1, bytes=before)
        )
    return sorted(found, key=lambda each: -each.bytes)
