"""One trace in memory, as arrays: activities of the device, operators and spans of the host, allocations."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from primus.errors import PrimusError, UsageError
from primus.machine.host.kernel_counters import read_free_memory
from primus.report.table import format_size
from primus.traces.chrome_events import EventArguments, TraceEvent, TraceFile

KERNEL, MEMCPY, MEMSET = 0, 1, 2
DEVICE_CATEGORIES = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "memset": MEMSET,
    "concurrent_kernel": KERNEL,
}
"""Kind of a device activity by the category of its event; the short names are those of older Kineto."""
RUNTIME_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "hip_api"})
OPERATOR_CATEGORIES = frozenset({"cpu_op", "operator"})
SPAN_CATEGORIES = frozenset({"user_annotation"})
CHECKED_BYTES = 64 << 20
"""Growth of the columns after which free memory is read again."""
_COPY_KERNELS = ("__amd_rocclr_copy", "CopyBuffer")
"""Copies that ROCm's runtime makes by kernels."""
STEP = re.compile(r"(?:ProfilerStep|Iteration|train_step|step)[#\s]*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\.\d+$")
_RANK_IN_NAME = re.compile(r"rank[-_\[]?(\d+)", re.IGNORECASE)


MEMORY_FACTOR = 4
"""Memory of the analysis as a multiple of the columns: their sorted copies, and intermediate arrays of intervals."""


class EventColumns:
    """Events of one kind, as rows of numbers that grow; names are indices into `Trace.names`."""

    def __init__(self, *extra: str) -> None:
        self.extra = extra
        self._times = array("d")
        """Start and end of each event."""
        self._numbers = array("q")
        """Name, lane and the extra columns of each event."""

    def append(self, start: float, end: float, name: int, lane: int, *values: int) -> None:
        # One call for several numbers: calls are most of the time of reading a trace.
        self._times.extend((start, end))
        self._numbers.extend((name, lane, *values))

    @property
    def num_bytes(self) -> int:
        return 8 * (len(self._times) + len(self._numbers))

    def build_table(self) -> EventTable:
        """The events in order of their start."""
        times = np.frombuffer(self._times, np.float64).reshape(-1, 2) if self._times else np.zeros((0, 2))
        width = 2 + len(self.extra)
        numbers = np.frombuffer(self._numbers, np.int64) if self._numbers else np.zeros(0, np.int64)
        order = np.argsort(times[:, 0], kind="stable")
        name, lane, *others = (column[order] for column in numbers.reshape(-1, width).T)
        extra = dict(zip(self.extra, others, strict=True))
        return EventTable(times[order, 0], times[order, 1], name, lane, extra)


@dataclass
class EventTable:
    """Events of one kind, as arrays of the same length."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    name: NDArray[np.int64]
    lane: NDArray[np.int64]
    """Thread of the host, or stream of a device."""
    extra: dict[str, NDArray[np.int64]]

    @property
    def duration(self) -> NDArray[np.float64]:
        return self.end - self.start

    def __len__(self) -> int:
        return len(self.start)

    def select(self, chosen: NDArray[Any]) -> EventTable:
        """The events that a mask or an array of indices chooses."""
        extra = {name: column[chosen] for name, column in self.extra.items()}
        return EventTable(self.start[chosen], self.end[chosen], self.name[chosen], self.lane[chosen], extra)


@dataclass
class Trace:
    """What the analysis needs of one file; times are microseconds of its clock."""

    path: Path
    names: list[str]
    shapes: list[OperatorShape]
    device: EventTable
    """Kernels and copies; `extra` has kind, correlation, external and collective."""
    runtime: EventTable
    """Calls of CUDA's or HIP's runtime; `extra` has correlation and external."""
    operators: EventTable
    """Operators of the host; `extra` has external and shape."""
    spans: EventTable
    """Named spans of the host."""
    memory: EventTable
    """Allocations and releases at `start`; `extra` has bytes, address, total and device."""
    rank: int | None
    world_size: int | None
    device_name: str
    """Model of the device that the trace names; empty if it names none."""
    base_us: float
    """What to add to a time for the clock of the host, in microseconds since the epoch."""
    host: str
    problem: str
    """Why a part of the file is missing; empty for a complete one."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_on_device(self) -> bool:
        """Whether the trace has activities of a device; if not, operators of the host are the timeline."""
        return len(self.device) > 0

    def list_names(self, table: EventTable) -> list[str]:
        """The name of each event."""
        return [self.names[index] for index in table.name]

    def find_named(self, table: EventTable, condition: Any) -> NDArray[np.bool_]:
        """A mask of the events whose name fulfils a condition, which is asked once for each name."""
        fulfils = np.fromiter((bool(condition(name)) for name in self.names), bool, len(self.names))
        return fulfils[table.name] if len(table) else np.zeros(0, bool)

    def list_steps(self) -> list[tuple[int, float, float]]:
        """Number, start and end of each step, in order of time."""
        found = []
        for index, name in enumerate(self.list_names(self.spans)):
            match = STEP.match(name)
            if match:
                found.append((int(match[1]), float(self.spans.start[index]), float(self.spans.end[index])))
        return sorted(found, key=lambda step: step[1])


@dataclass(frozen=True)
class OperatorShape:
    """Shapes and types of the inputs of an operator."""

    dims: tuple[Any, ...]
    types: tuple[str, ...]
    is_causal: bool = False

    def __str__(self) -> str:
        shown = [f"[{','.join(map(str, dims))}]" for dims in self.dims if dims]
        return " ".join(shown)


def read_trace(path: Path) -> Trace:
    """Read a file.

    Raises:
        UsageError: It is not a trace, or has no events of time.
        PrimusError: The analysis of its events needs more memory than is free.
    """
    file = TraceFile(path)
    builder = _TraceBuilder()
    num_events, num_checked = 0, 0
    for block in file.read_events():
        for event in block:
            builder.add_event(event)
        num_events += len(block)
        if builder.num_bytes - num_checked > CHECKED_BYTES:
            num_checked = builder.num_bytes
            check_memory(path, num_events, num_checked)
    trace = builder.build(path, file.metadata, file.problem)
    if not (len(trace.device) or len(trace.operators)):
        raise UsageError(
            f"{path}: the trace has neither kernels nor operators{f': {file.problem}' if file.problem else ''}",
            "record one with train --profile steps=5:8",
        )
    if not any((table.end > table.start).any() for table in (trace.device, trace.operators)):
        raise UsageError(f"{path}: no event of the trace has a duration", "record one with train --profile steps=5:8")
    _drop_earlier_launches(trace)
    if file.problem:
        trace.notes.append(f"{path.name}: {file.problem}; what was read is analyzed")
    if file.num_skipped:
        trace.notes.append(f"{path.name}: {file.num_skipped:,} events of an unknown form are skipped")
    return trace


def _drop_earlier_launches(trace: Trace) -> None:
    """Leave out activities that were launched before the recording began: they belong to steps before it.

    Their calls are missing in the trace, and they run before the first activity whose call is there. TraceLens leaves
    them out, too.
    """
    device, calls = trace.device, trace.runtime.extra["correlation"]
    launched = device.start[np.isin(device.extra["correlation"], calls[calls > 0])]
    if len(launched) == 0:  # launches are not recorded
        return
    is_earlier = (device.start < launched.min()) & (device.extra["correlation"] > 0)
    if is_earlier.any():
        trace.device = device.select(~is_earlier)
        trace.notes.append(
            f"{trace.path.name}: what was launched before the recording began is excluded: {int(is_earlier.sum()):,} of"
            f" {len(device):,} activities of the device"
        )


def check_memory(path: Path, num_events: int, num_bytes: int, root: Path = Path("/")) -> None:
    """Check that the events of a trace can be analyzed, before the kernel ends the process.

    Args:
        path: The file.
        num_events: Events that were read so far.
        num_bytes: Memory that their columns take already.
        root: Of the files of the system.

    Raises:
        PrimusError: They cannot.
    """
    free = read_free_memory(root)
    needed = (MEMORY_FACTOR - 1) * num_bytes
    if free is not None and needed > free:
        raise PrimusError(
            f"{path}: too large for the memory of this machine: the first {num_events:,} events need"
            f" {format_size(needed)} more, and {format_size(free)} are free",
            "record fewer steps (--profile steps=5:5), or analyze it on a machine with more memory",
        )


class _TraceBuilder:
    """Sorts events into columns."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._shapes: dict[OperatorShape, int] = {}
        self._shape_texts: dict[tuple[bytes, ...], int] = {}
        self._lanes: dict[tuple[Any, Any], int] = {}
        self._labels: dict[Any, str] = {}
        """Names of processes, and of threads by process and thread."""
        self._device = EventColumns("kind", "correlation", "external", "collective")
        self._runtime = EventColumns("correlation", "external")
        self._operators = EventColumns("external", "shape")
        self._spans = EventColumns()
        self._memory = EventColumns("bytes", "address", "total", "device")

    @property
    def num_bytes(self) -> int:
        """Memory of the columns."""
        columns = (self._device, self._runtime, self._operators, self._spans, self._memory)
        return sum(each.num_bytes for each in columns)

    def add_event(self, event: TraceEvent) -> None:
        if event.ph == "X":
            self._add_complete_event(event)
        elif event.name == "[memory]" and event.args is not None:
            self._add_allocation(event, event.args)
        elif event.ph == "M" and event.args is not None and event.args.name is not None:
            place = event.pid if event.name == "process_name" else (event.pid, event.tid)
            self._labels[place] = str(event.args.name)

    def _add_complete_event(self, event: TraceEvent) -> None:
        start = _to_float(event.ts)
        if start is None:
            return
        end = start + max(0.0, _to_float(event.dur) or 0.0)
        category = str(event.cat or "").lower()
        args = event.args or _NO_ARGUMENTS
        kind = DEVICE_CATEGORIES.get(category)
        if not category:
            kind, category = self._classify_unlabeled(event)
        if kind is not None:
            lane = self._find_lane(args.device if args.device is not None else event.pid, args.stream or event.tid)
            if kind == KERNEL and str(event.name).startswith(_COPY_KERNELS):
                kind = MEMCPY
            collective = -1 if args.collective is None else self._find_name(f"{args.collective} {args.group or ''}")
            ids = (_to_int(args.correlation), _to_int(args.external_id))
            self._device.append(start, end, self._find_name(event.name), lane, kind, *ids, collective)
        elif category in OPERATOR_CATEGORIES:
            # XLA numbers its operations: fusion.12.
            name = event.name if args.hlo_op is None else _NUMBER.sub("", str(event.name))
            values = (_to_int(args.external_id), self._find_shape(args))
            self._operators.append(start, end, self._find_name(name), self._find_lane(event.pid, event.tid), *values)
        elif category in RUNTIME_CATEGORIES:
            lane = self._find_lane(event.pid, event.tid)
            calls = (_to_int(args.correlation), _to_int(args.external_id))
            self._runtime.append(start, end, self._find_name(event.name), lane, *calls)
        elif category in SPAN_CATEGORIES:
            self._spans.append(start, end, self._find_name(event.name), self._find_lane(event.pid, event.tid))

    def _classify_unlabeled(self, event: TraceEvent) -> tuple[int | None, str]:
        """Kind and category of an event without category, as XLA writes it: names of process and thread say it."""
        process = self._labels.get(event.pid, "")
        thread = self._labels.get((event.pid, event.tid), "")
        name = str(event.name)
        if "/device:" in process:
            is_kernel = thread.startswith("Stream") or "XLA Ops" in thread
            return (MEMCPY if "memcpy" in name.lower() else KERNEL) if is_kernel else None, ""
        if STEP.match(name) or name == "data":
            return None, "user_annotation"
        if event.args is not None and event.args.hlo_op is not None and not name.startswith("end: "):
            return None, "cpu_op"
        return None, ""

    def _add_allocation(self, event: TraceEvent, args: EventArguments) -> None:
        time = _to_float(event.ts)
        if time is None or args.num_bytes is None:
            return
        device = _to_int(args.device_type) << 16 | max(0, _to_int(args.device_id))
        values = (_to_int(args.num_bytes), _to_int(args.address), _to_int(args.total_allocated), device)
        lane = self._find_lane(event.pid, event.tid)
        self._memory.append(time, time, self._find_name("[memory]"), lane, *values)

    def _find_name(self, name: Any) -> int:
        return self._names.setdefault(str(name), len(self._names))

    def _find_lane(self, process: Any, thread: Any) -> int:
        return self._lanes.setdefault((process, thread), len(self._lanes))

    def _find_shape(self, args: EventArguments) -> int:
        text = (bytes(args.input_dims), bytes(args.input_type), bytes(args.concrete_inputs))
        found = self._shape_texts.get(text)
        if found is None:
            dims, types, values = map(_decode_list, text)
            shape = OperatorShape(
                dims=tuple(map(_freeze_dims, dims)),
                types=tuple(map(str, types)),
                is_causal="True" in values[3:6],
            )
            found = self._shapes.setdefault(shape, len(self._shapes)) if dims else -1
            self._shape_texts[text] = found
        return found

    def build(self, path: Path, metadata: dict[str, Any], problem: str) -> Trace:
        distributed = metadata.get("distributedInfo")
        distributed = distributed if isinstance(distributed, dict) else {}
        devices = metadata.get("deviceProperties")
        first = devices[0] if isinstance(devices, list) and devices else {}
        in_name = _RANK_IN_NAME.search(path.name)
        rank = distributed.get("rank", int(in_name[1]) if in_name else None)
        return Trace(
            path=path,
            names=list(self._names),
            shapes=list(self._shapes),
            device=self._device.build_table(),
            runtime=self._runtime.build_table(),
            operators=self._operators.build_table(),
            spans=self._spans.build_table(),
            memory=self._memory.build_table(),
            rank=rank if isinstance(rank, int) else None,
            world_size=distributed.get("world_size"),
            device_name=str(first.get("name", "")) if isinstance(first, dict) else "",
            base_us=(_to_float(metadata.get("baseTimeNanoseconds")) or 0.0) / 1000,
            host=str(metadata.get("host_name", "")),
            problem=problem,
        )


_NO_ARGUMENTS = EventArguments()


def _decode_list(text: bytes) -> list[Any]:
    """The list that a member of an event holds; empty for anything else."""
    found = msgspec.json.decode(text) if text else None
    return found if isinstance(found, list) else []


def _freeze_dims(dims: Any) -> tuple[Any, ...]:
    if not isinstance(dims, list):
        return ()
    return tuple(_freeze_dims(each) if isinstance(each, list) else each for each in dims)


def _to_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _to_int(value: Any) -> int:
    """An integer of 64 bits; -1 for anything else."""
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else -1
