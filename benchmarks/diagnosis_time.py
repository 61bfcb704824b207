"""Measure the time of a diagnosis: of the logs of 2,048 ranks, and of 8 while a job waits for the decision.

    python benchmarks/diagnosis_time.py --rounds 3

The logs are generated: training lines of Megatron and Primus, lines of NCCL, then one root cause at one rank and its
effects at all others. As they have just been written, most of them are read from memory, not from a disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch_time import COMMAND, ENVIRONMENT, HERE, REPOSITORY
from train_speed import machine

RANKS = 2048
PER_NODE = 8
SMALLEST, LARGEST = 300_000, 2_000_000
"""Bytes of a rank's log before the failure."""
BAD_RANK = 1357
STEP = (
    "[20251121 {clock}][rank-{rank}/{ranks}][INFO ] [--------trainer.py:2488] :  iteration {step:8}/   36000 "
    "| consumed samples: {samples:12} | elapsed time per iteration (ms): {ms:.1f}/2712.7 "
    "| hip mem usage/free/total/usage_ratio: 227.35GB/28.63GB/255.98GB/88.81% "
    "| throughput per GPU (TFLOP/s/GPU): {tflops:.1f}/217.3 | tokens per GPU (tokens/s/GPU): {tokens:.1f}/12525.5 "
    "| learning rate: 1.587349E-04 | global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 "
    "| grad norm: {norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
INFO = (
    "node{node}:{pid}:{pid} [{local}] NCCL INFO Channel {channel:02}/0 : {rank}[{local}] -> {other}[{local}] "
    "via P2P/IPC\n"
)
ROOT = """\
Traceback (most recent call last):
  File "/opt/primus/train.py", line 12, in <module>
    main()
  File "/opt/primus/train.py", line 8, in main
    loss.backward()
torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 5 has a total capacity of 255.98 GiB
"""
CASCADE = (
    "[rank{rank}]:[E1121 12:31:{second:02}.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
    "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    "[rank{rank}]:[E1121 12:31:{second:02}.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {rank}] Exception (either "
    "an error or timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582.\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x{address:x} (0x7fe3c6483d89 in libc10.so)\n"
    "RuntimeError: [../gloo/transport/tcp/pair.cc:561] Connection closed by peer [10.0.0.{octet}]:46806.\n"
    "W1121 12:31:{second:02}.626000 81 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 8 closing "
    "signal SIGTERM\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--machine", default=f"cpu-{os.cpu_count()}-cores", help="machine class in the name of the file"
    )
    parser.add_argument("--folder", help="folder of the temporary logs")
    parser.add_argument("--output", type=Path, help="file of the record, instead of one in results/")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="primus-logs-", dir=options.folder))
    try:
        record = {
            "machine": machine(os.cpu_count()),
            "rounds": options.rounds,
            "all": measure(folder / "all", options.ranks, min(BAD_RANK, options.ranks - 1), options.rounds),
            "one_node": measure(folder / "node", PER_NODE, 5, options.rounds)
            | measure_quick_diagnosis(folder / "node", options.rounds),
        }
    finally:
        shutil.rmtree(folder)
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"diagnosis-{options.machine}.json"
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def measure(run: Path, ranks: int, bad: int, rounds: int) -> dict[str, object]:
    """Generate the logs of a run, and time the command on it."""
    size = write_run(run, ranks, bad)
    taken = [run_command(run, bad) for _ in range(rounds)]
    return {
        "ranks": ranks,
        "logs_bytes": size,
        "command_wall_s": summarize([wall for wall, _, _ in taken]),
        "command_cpu_s": summarize([cpu for _, cpu, _ in taken]),
        "peak_memory_mib": max(memory for _, _, memory in taken),
    }


def write_run(run: Path, ranks: int, bad: int) -> int:
    """Write a run folder of an attempt in which rank `bad` failed first. Returns the bytes of its logs."""
    randomness = random.Random(7)
    folder = run / "logs" / "attempt_0"
    folder.mkdir(parents=True)
    metadata = {"id": run.name, "name": "bench", "task": "train pretrain", "created": 1.0, "attempts": 1}
    (run / "metadata.json").write_text(json.dumps(metadata | {"outcome": {"state": "failed", "exit_code": 1}}))
    steps = [format_step(number, randomness) for number in range(LARGEST // 450)]
    total = 0
    for rank in range(ranks):
        total += write_log(folder / f"rank_{rank}.log", rank, ranks, rank == bad, steps, randomness)
    return total


def format_step(number: int, randomness: random.Random) -> str:
    return STEP.format(
        clock=f"{10 + number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}",
        rank="{rank}",
        ranks="{ranks}",
        step=number,
        samples=number * 256,
        ms=randomness.gauss(2700, 20),
        tflops=randomness.gauss(210, 2),
        tokens=randomness.gauss(12130, 90),
        loss=11 / (1 + number / 500) + randomness.random() / 10,
        norm=randomness.random(),
    )


def write_log(path: Path, rank: int, ranks: int, is_bad: bool, steps: list[str], randomness: random.Random) -> int:
    place = {"node": rank // PER_NODE, "local": rank % PER_NODE, "rank": rank, "pid": 4000 + rank, "other": rank + 1}
    head = "".join(INFO.format(channel=channel, **place) for channel in range(64))
    begin, size = randomness.randrange(500), randomness.randrange(SMALLEST, LARGEST)
    body = "".join(steps[begin:])[:size].replace("{rank}", str(rank)).replace("{ranks}", str(ranks))
    end = ROOT if is_bad else CASCADE.format(rank=rank, second=rank % 60, address=rank * 977, octet=rank % 250)
    data = f"{head}{body}\n{end}".encode()
    path.write_bytes(data)
    return len(data)


def run_command(run: Path, bad: int) -> tuple[float, float, int]:
    """Wall time, CPU time and peak memory of the whole command, whose answer must be right."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    words = [*COMMAND, "direct", "--", "diagnose", str(run), "--json"]
    done = subprocess.run(words, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)["diagnosis"] if done.returncode == 0 else {"first_rank": None}
    if found["first_rank"] != bad or found["causes"][0]["signature"] != "gpu-out-of-memory":
        raise SystemExit(f"a wrong answer: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss // 1024


QUICK_DIAGNOSIS = (
    "import sys, time; from pathlib import Path; begin = time.perf_counter()\n"
    "from primus.diagnosis.diagnose import diagnose_run; from primus.runs.store import Run\n"
    "loaded = time.perf_counter()\n"
    "found = diagnose_run(Run(Path(sys.argv[1]))); end = time.perf_counter()\n"
    "assert found.cause.signature == 'gpu-out-of-memory'; print(end - loaded, loaded - begin)"
)


def measure_quick_diagnosis(run: Path, rounds: int) -> dict[str, object]:
    """Times for which a launcher waits at a failure: of the diagnosis, and of its imports."""
    taken = []
    for _ in range(rounds):
        words = [sys.executable, "-c", QUICK_DIAGNOSIS, str(run)]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        taken.append([float(word) for word in done.stdout.split()])
    return {"of_run_s": summarize([each[0] for each in taken]), "imports_s": summarize([each[1] for each in taken])}


def summarize(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    main()
