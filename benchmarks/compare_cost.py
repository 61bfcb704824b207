"""What the harness of `compare run` costs a run: steps with its records and its sampling, and steps without.

Trains the same experiment by `train pretrain` and as a cell, in turns, and compares the medians of the steady steps.
The figure for docs is that of a quiet machine; the target is less than 1 % of the throughput. Before that, the CPU time
of what the harness adds is measured directly, which means something on a busy machine as well: the samples of the
machine, on any of its CPUs, and the record of each step's tokens, between the steps of a process.

    python benchmarks/compare_cost.py --pairs 10 --steps 60
    python benchmarks/compare_cost.py --pairs 0          # the CPU time only
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from primus.comparison.matrix.machine_load import LoadRecorder
from primus.machine.probe import probe
from primus.runs import events
from primus.runs.store import list_workspace_runs
from primus.session.batches.batch_record import format_record
from primus.statistics import bootstrap_interval, find_steady_window

SAMPLES, SEQUENCE = 8, 256
"""Of a step."""
EXPERIMENT = """\
exp_name: plain
workspace: {folder}/plain
modules:
  pre_trainer:
    framework: {framework}
    model: tiny
    overrides: {{mock_data: true, seq_length: {sequence}, micro_batch_size: {samples}, bf16: false, lr: 1.0e-3,
                 hidden_size: 256, ffn_hidden_size: 704, num_layers: 4, compile: auto, device: cpu}}
"""
MATRIX = """\
name: cell
experiment: plain.yaml
output: {folder}/cell
platforms: {{cpu: {{processes: 1}}}}
frameworks: [{framework}]
models: {{tiny: {{preset: tiny}}}}
settings: {{train_iters: {steps}}}
repetitions: {pairs}
"""
QUIET = ("--eval_iters", "0", "--sample_tokens", "0", "--disable_last_saving", "true", "--disable_tensorboard", "true")


def measure_median(file: Path) -> float:
    """Median of the steady steps of a run in seconds."""
    times = [event["step_time_s"] for event in events.read_steps(file)][1:]
    return statistics.median(times[find_steady_window(times).start :])


def run_primus(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "primus", "direct", *words]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure_pair(folder: Path, steps: int, number: int) -> float:
    """Time of a step in a cell, relative to that of a plain run. The order alternates."""

    def run_plain() -> float:
        words = ("--nproc", "1", "--", "train", "pretrain", "--config", "plain.yaml", "--model", "tiny")
        run_primus(folder, *words, "--train_iters", str(steps), *QUIET)
        return measure_median(list_workspace_runs(folder / "plain")[-1].events)

    def run_cell() -> float:
        run_primus(folder, "--", "compare", "run", "--matrix", "cell.yaml", "--repetitions", str(number))
        return measure_median(list_workspace_runs(folder / "cell" / "runs")[-1].events)

    if number % 2:
        return (1 / run_plain()) * run_cell()
    cell = run_cell()
    return cell / run_plain()


def measure_sampling(seconds: float = 10.0) -> float:
    """CPU seconds that a second of sampling takes."""
    with LoadRecorder(probe(), os.environ):
        time.sleep(1.0)  # the first sample imports what it needs
        began = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - began) / seconds


def measure_record(step_samples: int, sequence: int, repetitions: int = 300) -> float:
    """CPU seconds that the record of a step takes."""
    batches = [np.random.default_rng(0).integers(0, 50_000, (step_samples, sequence + 1))]
    with tempfile.TemporaryFile("w") as file:
        began = time.process_time()
        for step in range(repetitions):
            file.write(format_record(batches, step * step_samples, (step + 1) * step_samples, (0, 1)))
            file.flush()
        return (time.process_time() - began) / repetitions


def describe_cpu_cost(step_s: float) -> dict[str, float]:
    """CPU time of the harness, and its share of steps that take so long."""
    sampling, record = measure_sampling(), measure_record(SAMPLES, SEQUENCE)
    share = record / step_s + sampling / (os.cpu_count() or 1)
    return {
        "sampling_cpu_s_per_s": round(sampling, 6),
        "record_cpu_s_per_step": round(record, 6),
        "step_s": round(step_s, 4),
        "share_of_throughput": round(share, 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no pair later")
    parser.add_argument("--framework", default="native")
    parser.add_argument("--step-s", type=float, default=0.1, help="time of a step that the CPU time is compared with")
    options = parser.parse_args()
    print(json.dumps(describe_cpu_cost(options.step_s), indent=2))
    if not options.pairs:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = {"folder": folder, "framework": options.framework, "steps": options.steps, "pairs": options.pairs,
                  "samples": SAMPLES, "sequence": SEQUENCE}  # fmt: skip
        (folder / "plain.yaml").write_text(EXPERIMENT.format(**values))
        (folder / "cell.yaml").write_text(MATRIX.format(**values))
        began, ratios = time.monotonic(), []
        while len(ratios) < options.pairs and time.monotonic() - began <= 60 * options.minutes:
            ratios.append(measure_pair(folder, options.steps, len(ratios) + 1))
    if not ratios:
        return
    found = bootstrap_interval(ratios) if len(ratios) > 1 else None
    result = {
        "pairs": len(ratios),
        "asked": options.pairs,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 4),
        "interval": [round(found.low, 4), round(found.high, 4)] if found else None,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
