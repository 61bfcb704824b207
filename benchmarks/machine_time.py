"""What knowing the machine costs: reading a recorded 8-GPU node, `env show`, and the preflight of this host.

    python benchmarks/machine_time.py --rounds 9

Beside them stands what the interpreter alone takes, measured in turns with them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from launch_time import COMMAND, ENVIRONMENT, HERE, REPOSITORY
from train_speed import machine

NODE = REPOSITORY / "tests" / "machines" / "mi300x-8"
PROBE = (
    "import sys, time; from pathlib import Path; from primus.machine.probe import probe; root = Path(sys.argv[1])\n"
    "probe(root); begin = time.process_time(); facts = probe(root); end = time.process_time()\n"
    "assert len(facts.devices) == 8; print(1e3 * (end - begin))"
)
COMMANDS = {
    "python": (sys.executable, "-c", "pass"),
    "env show": (*COMMAND, "direct", "--", "env", "show"),
    "env show --assume mi355x:8 --nnodes 2": (
        *COMMAND, "direct", "--", "env", "show", "--assume", "mi355x:8", "--nnodes", "2",
    ),
    "preflight --host": (*COMMAND, "direct", "--", "preflight", "--host"),
    "preflight": (*COMMAND, "direct", "--", "preflight"),
}  # fmt: skip
"""Whole commands by what they are called in the results."""
FIT_OR_NOT = (0, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    probes: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds):
        probes.append(probe_cpu_ms())
        for name, command in COMMANDS.items():
            taken[name].append(wall_ms(command))
    record = {
        "machine": machine(os.cpu_count()),
        "rounds": options.rounds,
        "probe_of_8_gpus_cpu_ms": summary(probes),
        "command_wall_ms": {name: summary(values) for name, values in taken.items()},
    }
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"machine_time-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def probe_cpu_ms() -> float:
    """Milliseconds of CPU that a second look at the recorded node takes, imports left out."""
    command = [sys.executable, "-c", PROBE, str(NODE)]
    return float(subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout)


def wall_ms(command: tuple[str, ...]) -> float:
    """Milliseconds from start to end of a whole command."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode not in FIT_OR_NOT:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return 1e3 * (time.perf_counter() - started)


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "min": round(min(values), 1), "max": round(max(values), 1)}


if __name__ == "__main__":
    main()
