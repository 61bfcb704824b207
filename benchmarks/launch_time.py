"""What starting costs: command to first step beside plain torchrun of the same worker, and CPU time of planning.

    python benchmarks/launch_time.py --rounds 7
    python benchmarks/launch_time.py --planning --primus CHECKOUT

The sides of a comparison take turns, so that whatever else the machine does meets both. What counts are the medians
over rounds of the ratios, or differences, in one round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from train_speed import machine

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
COMMAND = (sys.executable, "-c", "import sys; from primus.cli.main import main; sys.exit(main())")
TRAIN = ("train", "pretrain", "--config", "examples/quickstart.yaml")
CHECK = ("direct", "--", "config", "check", "--config")
ONE_STEP = ("--dataset", "null", "--mock_data", "true", "--train_iters", "1", "--micro_batch_size", "1")
BATCH = (
    *(
        "slurm",
        "sbatch",
        "-N",
        "1000",
        "-p",
        "gpu-prod",
        "-t",
        "72:00:00",
        "--job-name=prod",
        "-o",
        "logs/train_%j.log",
    ),
    *("--", "container", "--image", "rocm/primus:v25.10", "--mount", "/data:/data"),
)
PLANNING = {
    "--help": ("--help",),
    "config check": (*CHECK, "examples/quickstart.yaml"),
    "config check of an experiment of Primus": (*CHECK, "examples/megatron/configs/MI300X/llama3.1_8B-pretrain.yaml"),
    "--dry-run direct --nproc 2 -- train pretrain": ("--dry-run", "direct", "--nproc", "2", "--", *TRAIN),
    "--dry-run slurm sbatch -N 1000 -- container -- train pretrain": ("--dry-run", *BATCH, "--", *TRAIN),
}
"""Commands of the control plane by what they are called in the results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--planning", action="store_true", help="measure the CPU time of planning only, and print it")
    parser.add_argument("--primus", type=Path, help="checkout of AMD-AGI/Primus, whose examples are checked as well")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    if options.planning:
        print(json.dumps(planning(options.rounds) | examples(options.primus, options.rounds), indent=1))
        return
    record = {
        "machine": machine(os.cpu_count()),
        "rounds": options.rounds,
        "seconds_to_first_step": {f"{n} processes": launches(n, options.rounds) for n in (1, 2)},
        "planning_cpu_ms": planning(options.rounds) | examples(options.primus, options.rounds),
        "second_start_ms": second_start(3 * options.rounds),
    }
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"launch_time-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def launches(nproc: int, rounds: int) -> dict[str, object]:
    """Seconds from command to the end of step 1: primus-cli, and torchrun of the worker in a run folder made before."""
    direct = ("direct", "--nproc", str(nproc), "--", *TRAIN, *ONE_STEP)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        first_step([*COMMAND, *direct, "--workspace", folder], workspace)  # fills the caches of both; a run to copy
        made = newest(workspace)

        def ours() -> float:
            return first_step([*COMMAND, *direct, "--workspace", folder], workspace)

        def plain() -> float:
            copy = workspace / "copies" / str(time.time_ns())
            shutil.copytree(
                made, copy, ignore=shutil.ignore_patterns("events.jsonl", "logs", "checkpoints", "tensorboard")
            )
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
            return first_step([*torchrun, "-m", "primus.worker", str(copy), "0"], copy)

        return compared("primus-cli", ours, "torchrun", plain, rounds, ratio)


def first_step(command: list[str], workspace: Path) -> float:
    """Run `command` to its end; seconds until the first step was recorded in the newest run of `workspace`."""
    started = time.time()
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    events = map(json.loads, (newest(workspace) / "events.jsonl").read_text().splitlines())
    return float(next(event["time"] for event in events if event["kind"] == "step")) - started


def newest(workspace: Path) -> Path:
    """The run folder in `workspace` whose events are the latest."""
    return max(workspace.rglob("events.jsonl"), key=lambda file: file.stat().st_mtime_ns).parent


def planning(rounds: int) -> dict[str, object]:
    """Median user and system time of each command, interpreter included."""
    taken: dict[str, list[float]] = {name: [] for name in PLANNING}
    for _ in range(rounds):
        for name, words in PLANNING.items():
            taken[name].append(cpu_ms([*COMMAND, *words]))
    return {name: round(statistics.median(values), 1) for name, values in taken.items()}


def examples(checkout: Path | None, rounds: int) -> dict[str, object]:
    """Median and largest time of `config check` over the examples of Primus that one run accepts, and which is largest.

    Each example is checked in every round; the fastest round counts, as each takes the same instructions.
    """
    if checkout is None:
        return {}
    taken: dict[str, float] = {}
    for file in sorted(checkout.glob("examples/*/configs/**/*.yaml")):
        command = [*COMMAND, *CHECK, str(file)]
        if subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, check=False).returncode == 0:
            taken[str(file.relative_to(checkout))] = min(cpu_ms(command) for _ in range(rounds))
    slowest = max(taken, key=lambda name: taken[name])
    return {
        "config check of the examples of Primus": {
            "examples": len(taken),
            "median": round(statistics.median(taken.values()), 1),
            "largest": round(taken[slowest], 1),
            "largest_of": slowest,
        }
    }


def cpu_ms(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def second_start(rounds: int) -> dict[str, object]:
    """Milliseconds of `./primus-cli --version` when its environment exists, and of the interpreter alone doing it."""
    script = REPOSITORY / "primus-cli"
    made = subprocess.run([script, "setup"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    ours = [str(script), "--version"]
    plain = [f"{made}/bin/python", f"{made}/bin/primus-cli", "--version"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PRIMUS_VENV": made}

    def milliseconds(command: list[str]) -> float:
        started = time.perf_counter()
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
        return 1e3 * (time.perf_counter() - started)

    return compared("primus-cli", lambda: milliseconds(ours), "python", lambda: milliseconds(plain), rounds, difference)


def compared(
    our_name: str,
    ours: Callable[[], float],
    their_name: str,
    theirs: Callable[[], float],
    rounds: int,
    relation: Callable[[float, float], float],
) -> dict[str, object]:
    """Medians of both, and of their `relation` in each round; who is first alternates."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second, first = theirs(), ours()
            pairs.append((first, second))
        else:
            pairs.append((ours(), theirs()))
    return {
        our_name: round(statistics.median(first for first, _ in pairs), 3),
        their_name: round(statistics.median(second for _, second in pairs), 3),
        relation.__name__: round(statistics.median(relation(*pair) for pair in pairs), 3),
        "pairs": [[round(value, 3) for value in pair] for pair in pairs],
    }


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs


def difference(ours: float, theirs: float) -> float:
    return ours - theirs


if __name__ == "__main__":
    main()
