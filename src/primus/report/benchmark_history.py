"""The last result of each case of a benchmark on this machine, in the user's state folder."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from primus.benchmark import BenchmarkResult
from primus.report.benchmark_comparison import find_record_key
from primus.report.benchmark_files import read_records
from primus.report.benchmark_table import list_records
from primus.runs.files import write_text


def find_history_file(benchmark: str, environ: Mapping[str, str]) -> Path:
    """File of a benchmark, below $XDG_STATE_HOME (XDG Base Directory Specification); hosts may share that folder."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    return Path(home) / "primus" / "benchmarks" / host / f"{benchmark}.jsonl"


def keep_result(result: BenchmarkResult, environ: Mapping[str, str]) -> None:
    """Replace the rows of the same cases; rows without a value do not replace any.

    The device belongs to the case here: a host may be measured on its GPUs and on its CPUs.
    """
    file = find_history_file(result.benchmark, environ)
    records = read_records(str(file)) if file.is_file() else []
    records += [record for record in list_records(result) if record["value"] is not None]
    latest = {find_record_key(record): record for record in records}
    write_text(file, "".join(json.dumps(record) + "\n" for record in latest.values()))
