"""How often `compare report` shows a difference between equal cells, and how often it finds a slowdown of 3 %.

    python benchmarks/comparison_alarms.py                   # simulated step times
    python benchmarks/comparison_alarms.py --real-runs 63    # also short CPU runs, three for each cell
    python benchmarks/comparison_alarms.py --turn-cells 7    # also all pairs of so many equal cells that take turns

Simulated runs are those of gate_alarms.py: a warm-up, correlated noise, stalls, and a speed that differs between runs.
The runs of two cells alternate. For a slowdown, the steps of one cell are multiplied.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gate_alarms import METRIC, NOISES, ROOT, simulate_run, take_real_runs
from msgspec import structs

from primus.comparison.folder.comparison_folder import ComparisonFolder
from primus.comparison.matrix.cell_launch import CellHarness, launch_cells
from primus.comparison.matrix.cells import list_cells
from primus.comparison.matrix.matrix_file import load_matrix
from primus.comparison.results.result import ComparisonResult, ResultSteps
from primus.comparison.results.run_result import read_result
from primus.comparison.speed.cell_statistics import RatioEstimate, compare_times, find_warm_up, select_steady_times
from primus.comparison.speed.turn_ratio import compare_turns, group_by_turn
from primus.machine.probe import probe
from primus.runs.run_steps import RunSteps
from primus.runs.store import list_runs

TURN_MATRIX = {
    "name": "alarms",
    "experiment": str(ROOT / "examples" / "quickstart.yaml"),
    # One thread: several that wait for each other measure the scheduler where other processes run.
    "platforms": {"cpu": {"processes": 1, "env": {"OMP_NUM_THREADS": "1"}}},
    "frameworks": ["native"],
    "settings": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 192,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "seq_length": 32,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "lr_warmup_iters": 4,
        "lr_warmup_fraction": None,
        "compile": False,
    },
    "order": "alternating",
}
"""A step of about 5 ms."""
TIMEOUT_S = 600.0

CellPair = tuple[list[ComparisonResult], list[ComparisonResult]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="pairs of simulated cells of each kind")
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--run-spread", type=float, default=0.003, help="spread of the speed of simulated runs")
    parser.add_argument("--real-runs", type=int, default=0, help="number of short CPU runs")
    parser.add_argument("--turn-cells", type=int, default=0, help="number of equal cells that take turns")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no real run later")
    options = parser.parse_args()
    print("| step times | runs of each cell | A/A alarms | slowdown found | not found, and announced |")
    print("|---|---|---|---|---|")
    for name, (spread, correlation) in NOISES.items():
        for num_runs in sorted({1, options.runs}):
            rng = random.Random(f"{name} {num_runs}")
            runs = [simulate_run(rng, options, spread, correlation) for _ in range(2 * num_runs * options.trials)]
            print(format_row(name, runs, num_runs, options.slowdown), flush=True)
    if options.turn_cells > 1:
        print(format_turn_row(take_turn_runs(options), options), flush=True)
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


def take_turn_runs(options: argparse.Namespace) -> list[list[ComparisonResult]]:
    """The runs of each of the cells, which are equal and take turns in each repetition."""
    models = {f"model-{number}": {"preset": "llama_quickstart"} for number in range(options.turn_cells)}
    with tempfile.TemporaryDirectory() as path:
        settings = {**TURN_MATRIX["settings"], "train_iters": options.steps}
        matrix = {**TURN_MATRIX, "models": models, "settings": settings, "repetitions": options.runs, "output": path}
        file = Path(path) / "alarms.yaml"
        file.write_text(json.dumps(matrix))  # JSON is YAML
        facts, folder = probe(), ComparisonFolder(Path(path))
        cells = list_cells(load_matrix(file, os.environ), os.environ, facts, 1)
        harness = CellHarness(folder=folder, environ=os.environ, facts=facts, timeout_s=TIMEOUT_S, say=print)
        found: dict[str, list[ComparisonResult]] = {name: [] for name in models}
        for repetition in range(1, options.runs + 1):
            group = [cell for cell in cells if cell.place.repetition == repetition]
            for cell, end in zip(group, launch_cells(group, harness), strict=True):
                place = structs.replace(cell.place, turn_group=end.turn_group)
                run = list_runs(folder.runs / cell.name)[-1]
                found[cell.place.model].append(read_result(run, place, folder=folder.path))
        return list(found.values())


def format_turn_row(cells: Sequence[Sequence[ComparisonResult]], options: argparse.Namespace) -> str:
    """Of all pairs of the cells, which are not independent."""
    pairs = list(itertools.combinations(cells, 2))
    alarms = sum(compare_turn_cells(a, b, 1.0).is_difference for a, b in pairs)
    slowed = [compare_turn_cells(a, b, 1 + options.slowdown) for a, b in pairs]
    missed = [each for each in slowed if not each.is_difference]
    announced = sum(each.smallest_difference > options.slowdown for each in missed)
    found = f"{len(pairs) - len(missed)} of {len(pairs)} | {announced} of {len(missed)}"
    return f"| real CPU runs in turns | {options.runs} | {alarms} of {len(pairs)} | {found} |"


def compare_turn_cells(a: Sequence[ComparisonResult], b: Sequence[ComparisonResult], factor: float) -> RatioEstimate:
    warm_up = max(find_warm_up(a)[0], find_warm_up(b)[0])
    sides = []
    for runs, slower in ((a, 1.0), (b, factor)):
        times = [select_steady_times(run, warm_up) for run in runs]
        turns = [dict(zip(run.steps.number, run.steps.turn, strict=True)) for run in runs]
        sides.append(
            [
                group_by_turn(run.cell.turn_group, turn, {step: time * slower for step, time in own.items()})
                for run, turn, own in zip(runs, turns, times, strict=True)
            ]
        )
    found = compare_turns(sides[0], sides[1])
    assert found is not None, "the runs have too few turns"
    return found


if __name__ == "__main__":
    main()
