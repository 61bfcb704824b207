"""How often `compare report` shows a difference between equal cells, and how often it finds a slowdown of 3 %.

    python benchmarks/comparison_alarms.py                   # simulated step times
    python benchmarks/comparison_alarms.py --real-runs 63    # also short CPU runs, three for each cell

Simulated runs are those of gate_alarms.py: a warm-up, correlated noise, stalls, and a speed that differs between runs.
The runs of two cells alternate. For a slowdown, the steps of one cell are multiplied.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from gate_alarms import METRIC, NOISES, simulate_run, take_real_runs

from primus.comparison.cell_statistics import RatioEstimate, compare_times, find_warm_up, select_steady_times
from primus.comparison.result import ComparisonResult, ResultSteps
from primus.runs.run_steps import RunSteps

CellPair = tuple[list[ComparisonResult], list[ComparisonResult]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="pairs of simulated cells of each kind")
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--run-spread", type=float, default=0.003, help="spread of the speed of simulated runs")
    parser.add_argument("--real-runs", type=int, default=0, help="number of short CPU runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no real run later")
    options = parser.parse_args()
    print("| step times | runs of each cell | A/A alarms | slowdown found | not found, and announced |")
    print("|---|---|---|---|---|")
    for name, (spread, correlation) in NOISES.items():
        for num_runs in sorted({1, options.runs}):
            rng = random.Random(f"{name} {num_runs}")
            runs = [simulate_run(rng, options, spread, correlation) for _ in range(2 * num_runs * options.trials)]
            print(format_row(name, runs, num_runs, options.slowdown), flush=True)
    if options.real_runs >= 2 * options.runs:
        runs = take_real_runs(options.real_runs, options.steps, options.minutes)
        print(
            f"{len(runs)} of {options.real_runs} real runs started within {options.minutes:g} minutes", file=sys.stderr
        )
        if len(runs) >= 2 * options.runs:
            print(format_row("real CPU runs", runs, options.runs, options.slowdown))


def format_row(name: str, runs: Sequence[RunSteps], num_runs: int, slowdown: float) -> str:
    pairs = list_pairs(runs, num_runs)
    alarms = sum(compare_cells(a, b, 1.0).is_difference for a, b in pairs)
    slowed = [compare_cells(a, b, 1 + slowdown) for a, b in pairs]
    missed = [each for each in slowed if not each.is_difference]
    announced = sum(each.smallest_difference > slowdown for each in missed)
    found = f"{len(pairs) - len(missed)} of {len(pairs)} | {announced} of {len(missed)}"
    return f"| {name} | {num_runs} | {alarms} of {len(pairs)} | {found} |"


def list_pairs(runs: Sequence[RunSteps], num_runs: int) -> list[CellPair]:
    """Cells of successive runs, which alternate. Real runs are few: each pair begins one run after the one before."""
    size, results = 2 * num_runs, [build_result(run) for run in runs]
    stride = size if runs[0].run == "simulated" else 2
    windows = [results[first : first + size] for first in range(0, len(results) - size + 1, stride)]
    return [(window[::2], window[1::2]) for window in windows]


def build_result(run: RunSteps) -> ComparisonResult:
    times = run.columns[METRIC]
    return ComparisonResult(platform="cpu", steps=ResultSteps(number=run.steps, time_s=times))


def compare_cells(a: Sequence[ComparisonResult], b: Sequence[ComparisonResult], factor: float) -> RatioEstimate:
    warm_up = max(find_warm_up(a)[0], find_warm_up(b)[0])
    times = [[select_steady_times(run, warm_up) for run in side] for side in (a, b)]
    slowed = [{step: time * factor for step, time in run.items()} for run in times[1]]
    found = compare_times(times[0], slowed)
    assert found is not None, "the runs have too few steps"
    return found


if __name__ == "__main__":
    main()
