"""The last result of each case of a benchmark on this machine, in the user's state folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from primus.benchmark import BenchmarkResult
from primus.errors import PrimusError
from primus.report.benchmark_comparison import find_record_key
from primus.report.benchmark_files import read_records
from primus.report.benchmark_table import Record, list_records
from primus.runs.files import find_state_folder, write_text


def find_history_file(benchmark: str, environ: Mapping[str, str]) -> Path:
    """File of a benchmark; hosts may share its folder."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return find_state_folder(environ) / "benchmarks" / host / f"{benchmark}.jsonl"


def read_best_figures(environ: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Best values on this machine by device and by test of preflight: ``{"NVIDIA H200": {"gemm_bf16": 790.0}}``.

    Only what preflight measures in the same way counts: square products with rotating operands, and STREAM's kernels. A
    damaged file counts as none, since the values are only shown next to those of preflight.
    """
    found: dict[str, dict[str, float]] = {}
    for benchmark in ("gemm", "memory"):
        file = find_history_file(benchmark, environ)
        records: list[Record] = []
        with contextlib.suppress(PrimusError):
            records = read_records(str(file)) if os.path.isfile(file) else []
        for record in records:
            test, value = _find_preflight_test(record), record["value"]
            if test and isinstance(value, int | float):
                of_device = found.setdefault(str(record.get("device")), {})
                of_device[test] = max(value, of_device.get(test, 0.0))
    return found


def _find_preflight_test(record: Record) -> str | None:
    if record.get("mode") != "steady":
        return None
    if "kernel" in record:
        return f"memory_{record['kernel']}" if record.get("bound") else None
    is_square = record.get("M") == record.get("N") == record.get("K")
    return f"gemm_{record['dtype']}" if is_square and record.get("trans") == "NN" else None


def keep_result(result: BenchmarkResult, environ: Mapping[str, str]) -> None:
    """Replace the rows of the same cases; rows without a value do not replace any.

    The device belongs to the case here: a host may be measured on its GPUs and on its CPUs.
    """
    file = find_history_file(result.benchmark, environ)
    records = read_records(str(file)) if os.path.isfile(file) else []
    records += [record for record in list_records(result) if record["value"] is not None]
    latest = {find_record_key(record): record for record in records}
    write_text(file, "".join(json.dumps(record) + "\n" for record in latest.values()))
