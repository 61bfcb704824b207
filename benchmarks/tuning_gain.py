"""What `tune gemm`, `tune threads` and `tune inductor` gain end to end on this machine.

    python benchmarks/tuning_gain.py                                # all three on the quick start, within 10 minutes
    python benchmarks/tuning_gain.py --only gemm --repeats 3 --output gain.json

Each tuner runs once in an empty state folder; its result is then measured by whole runs of `train pretrain`, with it
and without it in turn, in fresh caches. A run's number is the median of its steps (gemm, threads), or the time from its
start to its end (inductor). The interval of the ratio is that of the geometric mean of the pairs, by Student's t.

Each tuner gets an equal share of the time that is left. Pairs that do not fit are left out; what runs at the limit is
ended, and the tuner is reported as unfinished.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from train_speed import machine

from primus.process import count_usable_cpus, run_command
from primus.runs.run_steps import load_run_steps
from primus.runs.store import list_workspace_runs
from primus.statistics import compute_t_quantile

ROOT = Path(__file__).parents[1]
QUIET = ["eval_interval=0", "save_interval=0", "disable_last_saving=true", "auto_continue_train=false"]
WARM_UP_STEPS = 5
TUNERS = {
    "gemm": ["--measure", "0.5", "--steps", "60"],
    # All CPUs of a process: what is searched is their placement and the allocator.
    "threads": ["--threads", str(count_usable_cpus()), "--steps", "18"],
    "inductor": ["--no-max-autotune"],
}
"""Options of each tuner, so that all fit into the time limit on two cores."""
OVERRIDES = {"gemm": ["compile=false"], "threads": ["compile=false"], "inductor": ["compile=true", "num_layers=2"]}
"""Settings of all runs of a tuner. To compile eight layers takes 40 s on two cores."""


class OutOfTimeError(Exception):
    """The time of a tuner is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples" / "quickstart.yaml"))
    parser.add_argument("--only", choices=TUNERS, nargs="+", default=list(TUNERS))
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs of each tuner")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run that measures steps")
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit of the whole program")
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    results = []
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        for number, tuner in enumerate(options.only):
            now = time.monotonic()
            share = (deadline - now) / (len(options.only) - number)
            results.append(measure_tuner(tuner, Path(folder) / tuner, options, now + share))
            print(format_row(results[-1]), flush=True)
    unfinished = [result["tuner"] for result in results if len(result["pairs"]) < options.repeats]
    if options.output:
        whole = {"machine": machine(count_usable_cpus()), "load": os.getloadavg(), "results": results}
        Path(options.output).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    if unfinished:
        sys.exit(f"not finished: {', '.join(unfinished)}; give more --minutes, or fewer tuners by --only")


def measure_tuner(tuner: str, folder: Path, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Tune once, then measure pairs of runs, until `deadline` of `time.monotonic`."""
    folder.mkdir()
    began = time.monotonic()
    result: dict[str, Any] = {"tuner": tuner, "tuning_s": None, "settings": [], "pairs": []}
    pairs: list[tuple[float, float]] = result["pairs"]
    words = ["tune", tuner, "--config", options.config, "--workspace", str(folder / "tune"), *TUNERS[tuner]]
    words += OVERRIDES[tuner]
    try:
        told = call_primus([], words, folder, deadline, json_output=True)
        result["tuning_s"] = time.monotonic() - began
        result["settings"] = find_settings(tuner, json.loads(told))
        while len(pairs) < options.repeats:
            # The order changes, so that a drift of the machine's speed favors neither.
            order = (True, False) if len(pairs) % 2 else (False, True)
            found = {
                is_tuned: measure_run(tuner, result["settings"], folder, options, deadline, is_tuned=is_tuned)
                for is_tuned in order
            }
            pairs.append((found[True], found[False]))
    except OutOfTimeError:
        print(f"tune {tuner}: the time is over after {len(pairs)} of {options.repeats} pairs", file=sys.stderr)
    return {**result, **compute_interval(pairs)}


def find_settings(tuner: str, told: Mapping[str, Any]) -> list[str]:
    """The overrides that the tuner recommends; gemm and inductor are found by the run itself."""
    if tuner != "threads" or not told["is_better"]:
        return []
    return [f"{key}={value}" for key, value in told["best"]["settings"].items()]


def measure_run(
    tuner: str, settings: Sequence[str], folder: Path, options: argparse.Namespace, deadline: float, *, is_tuned: bool
) -> float:
    """Seconds of a step, or of the whole run for inductor."""
    workspace = folder / "runs"
    shutil.rmtree(folder / "disk", ignore_errors=True)
    (folder / "disk").mkdir()
    steps = 5 if tuner == "inductor" else options.steps
    words = ["train", "pretrain", "--config", options.config, "--workspace", str(workspace), *QUIET]
    words += [f"train_iters={steps}", *OVERRIDES[tuner]]
    began = time.monotonic()
    call_primus([] if is_tuned else ["--no-tuned"], [*words, *(settings if is_tuned else ())], folder, deadline)
    if tuner == "inductor":
        return time.monotonic() - began
    run = max(list_workspace_runs(workspace), key=lambda each: each.id)
    times = [value for value in load_run_steps(run).columns["step_time_s"] if value is not None]
    return median(times[WARM_UP_STEPS:])


def call_primus(
    direct: Sequence[str], words: Sequence[str], folder: Path, deadline: float, *, json_output: bool = False
) -> str:
    command = [sys.executable, "-m", "primus", *(["--json"] if json_output else []), "direct", *direct, "--", *words]
    # An empty disk is that of a new node or container: nothing compiled before is found.
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "disk")}
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    (folder / "disk").mkdir(exist_ok=True)
    left = deadline - time.monotonic()
    answer = run_command(command, environ, limit_s=max(0.1, left), cwd=folder)
    if answer.state == "slow":
        raise OutOfTimeError
    if answer.state != "ok":
        sys.exit(f"{' '.join(command[2:])}: {answer.problem}")
    return answer.text


def compute_interval(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Ratio of the times with and without, and its 95 % interval."""
    if not pairs:
        return {"ratio": None, "low": None, "high": None}
    logarithms = [math.log(tuned / plain) for tuned, plain in pairs]
    center = fmean(logarithms)
    if len(pairs) < 2:
        return {"ratio": math.exp(center), "low": None, "high": None}
    reach = compute_t_quantile(0.975, len(pairs) - 1) * stdev(logarithms) / math.sqrt(len(pairs))
    return {"ratio": math.exp(center), "low": math.exp(center - reach), "high": math.exp(center + reach)}


def format_row(result: Mapping[str, Any]) -> str:
    if result["ratio"] is None:
        return f"tune {result['tuner']}: not finished"
    interval = "no interval" if result["low"] is None else f"95 % interval {result['low']:.3f} to {result['high']:.3f}"
    is_gain = result["high"] is not None and result["high"] < 1
    settings = " ".join(result["settings"])
    verdict = "a gain" if is_gain else "no gain beyond the noise"
    line = f"tune {result['tuner']}: time x {result['ratio']:.3f}, {interval}: {verdict}"
    return f"{line}; tuning took {result['tuning_s']:.0f} s {settings}".rstrip()


if __name__ == "__main__":
    main()
