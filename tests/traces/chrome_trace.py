"""Chrome traces whose answers are known by construction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STREAM_OF_COMPUTE, STREAM_OF_NCCL = 7, 13


class TraceWriter:
    """Events of one rank, written as torch.profiler writes them; times in microseconds."""

    def __init__(self, rank: int | None = None, base_ns: int = 1_700_000_000_000_000_000) -> None:
        self.events: list[dict[str, Any]] = []
        self.members: dict[str, Any] = {"baseTimeNanoseconds": base_ns, "deviceProperties": []}
        if rank is not None:
            self.members["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "nccl"}

    def add(self, category: str, name: str, start: float, end: float, tid: Any = 1, **args: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start}
        self.events.append({**event, "args": args})

    def add_kernel(self, name: str, start: float, end: float, stream: int = STREAM_OF_COMPUTE, **args: Any) -> None:
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.add(category, name, start, end, stream, stream=stream, device=0, **args)

    def add_memory(self, time: float, size: int, address: int, total: int, device_type: int = 0) -> None:
        args = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": device_type, "Device Id": -1}
        event = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": time}
        self.events.append({**event, "args": args})

    def format(self, indent: int | None = 2) -> str:
        return json.dumps({**self.members, "traceEvents": self.events, "traceName": "x"}, indent=indent)

    def write(self, path: Path) -> Path:
        path.write_text(self.format())
        return path
