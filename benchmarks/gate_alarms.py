"""How often `runs gate` raises a false alarm, and how often it catches a slowdown of 3 %.

    python benchmarks/gate_alarms.py                    # simulated step times
    python benchmarks/gate_alarms.py --real-runs 21     # also short CPU runs, each against the one before

Simulated runs have a warm-up, correlated noise, stalls, and a speed that differs between runs. Of real runs, the step
times are used as they are; for a slowdown those of the tested run are multiplied.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import structs

from primus.runs import gate, store
from primus.runs.run_steps import RunSteps, load_run_steps

ROOT = Path(__file__).parents[1]
NOISES = {"quiet": (0.005, 0.3), "usual": (0.02, 0.5), "correlated": (0.02, 0.85), "noisy": (0.05, 0.5)}
"""Spread of the steps, and the correlation of neighbors."""
METRIC = "step_time_s"
TRAIN = [
    *(sys.executable, "-m", "primus", "direct", "--", "train", "pretrain"),
    *("--config", str(ROOT / "examples" / "quickstart.yaml"), "--micro_batch_size", "2", "--seq_length", "64"),
    *("--eval_interval", "0", "--save_interval", "0", "--disable_last_saving", "true"),
]
"""A step of about 50 ms on two cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="pairs of simulated runs of each kind")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", default="", help="any text, for other simulated runs")
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--run-spread", type=float, default=0.003, help="spread of the speed of simulated runs")
    parser.add_argument("--real-runs", type=int, default=0, help="number of short CPU runs")
    options = parser.parse_args()
    print("| step times | A/A alarms | slowdown caught | inconclusive of both |\n|---|---|---|---|")
    for name, (spread, correlation) in NOISES.items():
        rng = random.Random(name + options.seed)
        runs = [simulate_run(rng, options, spread, correlation) for _ in range(2 * options.trials)]
        print(format_row(name, list(zip(runs[::2], runs[1::2], strict=True)), options.slowdown), flush=True)
    if options.real_runs > 1:
        real = take_real_runs(options.real_runs, options.steps)
        print(format_row("real CPU runs", list(itertools.pairwise(real)), options.slowdown))


def simulate_run(rng: random.Random, options: argparse.Namespace, spread: float, correlation: float) -> RunSteps:
    typical, noise = 0.2 * rng.lognormvariate(0, options.run_spread), 0.0
    times: list[float | None] = []
    for step in range(options.steps):
        noise = correlation * noise + math.sqrt(1 - correlation**2) * rng.gauss(0, spread)
        warm_up = 4.0 if step == 0 else 0.5 * math.exp(-step / 2)
        times.append(typical * max(0.1, 1 + noise + warm_up) * (1.5 if rng.random() < 0.02 else 1.0))
    return RunSteps(
        run="simulated",
        name="simulated",
        created=0.0,
        machine="simulated",
        training={},
        versions={},
        steps=list(range(1, len(times) + 1)),
        starts=[0],
        columns={METRIC: times},
    )


def take_real_runs(num_runs: int, steps: int, minutes: float = math.inf) -> list[RunSteps]:
    """Short runs of the quick start, one after the other, of which the last one starts within so many minutes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as workspace:
        for _ in range(num_runs):
            if time.monotonic() - began > 60 * minutes:
                break
            subprocess.run(
                [*TRAIN, "--workspace", workspace, "--train_iters", str(steps)], check=True, stdout=subprocess.DEVNULL
            )
        return [load_run_steps(run) for run in store.list_runs(Path(workspace) / "quickstart")]


def format_row(name: str, pairs: list[tuple[RunSteps, RunSteps]], slowdown: float) -> str:
    same = [judge(run, baseline) for baseline, run in pairs]
    slowed = [judge(slow_down(run, slowdown), baseline) for baseline, run in pairs]
    counts = [same.count("slower"), slowed.count("slower"), (same + slowed).count("inconclusive")]
    return f"| {name} | {counts[0]} of {len(pairs)} | {counts[1]} of {len(pairs)} | {counts[2]} of {2 * len(pairs)} |"


def judge(run: RunSteps, baseline: RunSteps) -> str:
    return gate.compare_speed(run, [baseline], METRIC, tolerance=0.03).verdict


def slow_down(run: RunSteps, slowdown: float) -> RunSteps:
    slower = [time * (1 + slowdown) for time in run.columns[METRIC] if time]
    return structs.replace(run, columns={**run.columns, METRIC: slower})


if __name__ == "__main__":
    main()
