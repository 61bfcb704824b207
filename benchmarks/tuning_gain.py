"""What `tune gemm`, `tune threads` and `tune inductor` gain end to end on this machine.

    python benchmarks/tuning_gain.py                                # all three on the quick start, 3 repetitions
    python benchmarks/tuning_gain.py --only gemm --repeats 3 --output gain.json

Each tuner runs once in an empty state folder; its result is then measured by whole runs of `train pretrain`, with it
and without it in turn, in fresh caches. A run's number is the median of its steps (gemm, threads), or the time from its
start to its end (inductor). The interval of the ratio is that of the geometric mean of the pairs, by Student's t.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from primus.process import count_usable_cpus
from primus.runs.run_steps import load_run_steps
from primus.runs.store import list_workspace_runs
from primus.statistics import compute_t_quantile

ROOT = Path(__file__).parents[1]
QUIET = ["eval_interval=0", "save_interval=0", "disable_last_saving=true", "auto_continue_train=false"]
WARM_UP_STEPS = 5
TUNERS = ("gemm", "threads", "inductor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples" / "quickstart.yaml"))
    parser.add_argument("--only", choices=TUNERS, nargs="+", default=list(TUNERS))
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs of each tuner")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run that measures steps")
    parser.add_argument("--output", help="write the result as JSON")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for tuner in options.only:
            results.append(measure_tuner(tuner, Path(folder) / tuner, options))
            print(format_row(results[-1]), flush=True)
    if options.output:
        machine = {"cpu": platform.processor() or platform.machine(), "cpus": count_usable_cpus()}
        whole = {"machine": machine, "created": time.time(), "load": os.getloadavg(), "results": results}
        Path(options.output).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def measure_tuner(tuner: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tune once, then measure pairs of runs."""
    folder.mkdir()
    began = time.perf_counter()
    words = ["tune", tuner, "--config", options.config, "--workspace", str(folder / "tune")]
    told = call_primus([], words, folder, json_output=True)
    tuning_s = time.perf_counter() - began
    settings = find_settings(tuner, json.loads(told))
    pairs = []
    for number in range(options.repeats):
        # The order changes, so that a drift of the machine's speed favors neither.
        order = (True, False) if number % 2 else (False, True)
        found = {is_tuned: measure_run(tuner, settings, folder, options, is_tuned=is_tuned) for is_tuned in order}
        pairs.append((found[True], found[False]))
    return {"tuner": tuner, "tuning_s": tuning_s, "settings": settings, "pairs": pairs, **compute_interval(pairs)}


def find_settings(tuner: str, told: Mapping[str, Any]) -> list[str]:
    """The overrides that the tuner recommends; gemm and inductor are found by the run itself."""
    if tuner != "threads" or not told["is_better"]:
        return []
    return [f"{key}={value}" for key, value in told["best"]["settings"].items()]


def measure_run(
    tuner: str, settings: Sequence[str], folder: Path, options: argparse.Namespace, *, is_tuned: bool
) -> float:
    """Seconds of a step, or of the whole run for inductor."""
    workspace = folder / "runs"
    shutil.rmtree(folder / "disk", ignore_errors=True)
    (folder / "disk").mkdir()
    steps = 10 if tuner == "inductor" else options.steps
    words = ["train", "pretrain", "--config", options.config, "--workspace", str(workspace), *QUIET]
    words += [f"train_iters={steps}", f"compile={'true' if tuner == 'inductor' else 'false'}"]
    began = time.perf_counter()
    call_primus([] if is_tuned else ["--no-tuned"], [*words, *(settings if is_tuned else ())], folder)
    if tuner == "inductor":
        return time.perf_counter() - began
    run = max(list_workspace_runs(workspace), key=lambda each: each.id)
    times = [value for value in load_run_steps(run).columns["step_time_s"] if value is not None]
    return median(times[WARM_UP_STEPS:])


def call_primus(direct: Sequence[str], words: Sequence[str], folder: Path, *, json_output: bool = False) -> str:
    command = [sys.executable, "-m", "primus", *(["--json"] if json_output else []), "direct", *direct, "--", *words]
    # An empty disk is that of a new node or container: nothing compiled before is found.
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "disk")}
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    (folder / "disk").mkdir(exist_ok=True)
    done = subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def compute_interval(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Ratio of the times with and without, and its 95 % interval."""
    logarithms = [math.log(tuned / plain) for tuned, plain in pairs]
    center = fmean(logarithms)
    if len(pairs) < 2:
        return {"ratio": math.exp(center), "low": None, "high": None}
    reach = compute_t_quantile(0.975, len(pairs) - 1) * stdev(logarithms) / math.sqrt(len(pairs))
    return {"ratio": math.exp(center), "low": math.exp(center - reach), "high": math.exp(center + reach)}


def format_row(result: Mapping[str, Any]) -> str:
    interval = "no interval" if result["low"] is None else f"95 % interval {result['low']:.3f} to {result['high']:.3f}"
    is_gain = result["high"] is not None and result["high"] < 1
    settings = " ".join(result["settings"])
    verdict = "a gain" if is_gain else "no gain beyond the noise"
    line = f"tune {result['tuner']}: time x {result['ratio']:.3f}, {interval}: {verdict}"
    return f"{line}; tuning took {result['tuning_s']:.0f} s {settings}".rstrip()


if __name__ == "__main__":
    main()
