"""The processor time of a command that starts nothing."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

DRY_RUN = (
    *(
        "--dry-run",
        "slurm",
        "sbatch",
        "-N",
        "1000",
        "-p",
        "gpu-prod",
        "--",
        "container",
        "--image",
        "rocm/primus:v25.10",
    ),
    *("--", "train", "pretrain", "--config", "examples/quickstart.yaml"),
)
ADDITIONS = compile("total = 0\nfor number in range(10**6): total += number", "<additions>", "exec")
ADDITIONS_MS = 50
"""Processor time of 10^6 additions at the top level of a module, by definition: it removes the machine's speed."""
LIMIT_MS = 100


def test_a_nested_dry_run_takes_at_most_100_ms_of_processor_time_of_a_machine_that_adds_a_million_times_in_50(
    tmp_path: Path,
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    _measure_dry_run_s(environment)  # writes the bytecode
    rounds = [(_measure_dry_run_s(environment), _measure_additions_s()) for _ in range(3)]
    dry_run_s, additions_s = (min(times) for times in zip(*rounds, strict=True))
    assert dry_run_s / additions_s * ADDITIONS_MS <= LIMIT_MS


def _measure_dry_run_s(environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-m", "primus", *DRY_RUN]
    subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measure_additions_s() -> float:
    began = time.process_time()
    exec(ADDITIONS, {})
    return time.process_time() - began
