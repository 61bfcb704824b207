"""What a profile of some steps costs the other steps: `python benchmarks/profile_cost.py`.

Pairs of short runs of the quick start, of which one records `--profile`; who begins changes with each pair. The steps
outside of the window, after it and in it are compared. What counts is the median of the ratios of the pairs, with its
95 % interval: a profile costs nothing outside of its window if the interval includes 1. The losses must be equal, bit
by bit. A record goes to results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from train_speed import machine

from primus.runs import events, store
from primus.statistics import MAX_CORRELATED, bootstrap_interval, clip_outliers

HERE = Path(__file__).parent
WARM_UP = 5
TRAIN = [
    *(sys.executable, "-m", "primus", "direct", "--", "train", "pretrain"),
    *("--config", str(HERE.parent / "examples" / "quickstart.yaml"), "--micro_batch_size", "2", "--seq_length", "64"),
    *("--eval_interval", "0", "--save_interval", "0", "--disable_last_saving", "true"),
]
"""A step of about 50 ms on two cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--window", default="30:34", help="steps that are profiled")
    parser.add_argument("--engine", help="backend that trains (default: native)")
    parser.add_argument("--profile-memory", action="store_true")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    last = int(options.window.rpartition(":")[2])
    inside = range(int(options.window.partition(":")[0]), last + 1)
    ratios: dict[str, list[float]] = {"outside": [], "after": [], "inside": []}
    for number in range(options.pairs):
        order = (True, False) if number % 2 else (False, True)
        runs = {is_profiled: train(options, is_profiled=is_profiled) for is_profiled in order}
        profiled, plain = runs[True], runs[False]
        assert [step["loss"] for step in profiled] == [step["loss"] for step in plain], "a profile changes no loss"
        chosen = {
            "outside": lambda step: step["step"] not in inside,
            "after": lambda step: step["step"] > last,
            "inside": lambda step: step["step"] in inside,
        }
        for name, is_chosen in chosen.items():
            ratios[name].append(compute_mean(profiled, is_chosen) / compute_mean(plain, is_chosen))
    record: dict[str, Any] = {"machine": machine(1), "options": f"{options.pairs} pairs of {options.steps} steps"}
    for name, values in ratios.items():
        found = bootstrap_interval(values)
        record[name] = {"median": found.estimate, "interval": [found.low, found.high], "all": values}
        print(f"steps {name}: {found.estimate:.3f} [{found.low:.3f}, {found.high:.3f}] of the same without a profile")
    path = options.output or HERE / f"results/profile_cost-{options.machine}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path)


def train(options: argparse.Namespace, *, is_profiled: bool) -> list[dict[str, Any]]:
    """The steps of a run."""
    words = ["--train_iters", str(options.steps), *(("--framework", options.engine) if options.engine else ())]
    if is_profiled:
        words += ["--profile", f"steps={options.window}", *(["--profile-memory"] if options.profile_memory else [])]
    with tempfile.TemporaryDirectory() as workspace:
        subprocess.run([*TRAIN, "--workspace", workspace, *words], check=True, stdout=subprocess.DEVNULL)
        [run] = store.list_runs(Path(workspace) / "quickstart")
        return events.read_steps(run.events)


def compute_mean(steps: list[dict[str, Any]], is_chosen: Any) -> float:
    """Mean time of the chosen steps after the warm-up, with clipped outliers."""
    times = [step["step_time_s"] for step in steps if step["step"] > WARM_UP and is_chosen(step)]
    return fmean(clip_outliers(times, MAX_CORRELATED))


if __name__ == "__main__":
    main()
