"""What the harness of `compare run` costs a run: steps with its records and its sampling, and steps without.

Trains the same experiment by `train pretrain` and as a cell, in turns, and compares the medians of the steady steps.

    python benchmarks/compare_cost.py --pairs 10 --steps 60

The figure for docs is that of a quiet machine; the target is less than 1 % of the throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from primus.runs import events
from primus.runs.store import list_workspace_runs
from primus.statistics import bootstrap_interval, find_steady_window

EXPERIMENT = """\
exp_name: plain
workspace: {folder}/plain
modules:
  pre_trainer:
    framework: {framework}
    model: tiny
    overrides: {{mock_data: true, seq_length: 256, micro_batch_size: 8, bf16: false, lr: 1.0e-3, hidden_size: 256,
                 ffn_hidden_size: 704, num_layers: 4, compile: auto, device: cpu}}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--framework", default="native")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = {"folder": folder, "framework": options.framework, "steps": options.steps, "pairs": options.pairs}
        (folder / "plain.yaml").write_text(EXPERIMENT.format(**values))
        (folder / "cell.yaml").write_text(MATRIX.format(**values))
        ratios = [measure_pair(folder, options.steps, number) for number in range(1, options.pairs + 1)]
    found = bootstrap_interval(ratios) if len(ratios) > 1 else None
    result = {
        "pairs": options.pairs,
        "ratios": [round(ratio, 4) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 4),
        "interval": [round(found.low, 4), round(found.high, 4)] if found else None,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
