"""Measure the extraction of steps from logs of Megatron-LM: bytes per CPU second of one core, and peak memory.

    python benchmarks/log_extraction.py --megabytes 200 --rounds 5
    python benchmarks/log_extraction.py --pipe-gigabytes 5
    python benchmarks/log_extraction.py --before CHECKOUT --output record.json

Logs are generated: lines of steps only, of Primus (pairs of values), one in which three of four lines say something
else, and two of several ranks. Each is read in a process of its own, at its size and at a quarter of it. Memory grows
with the steps that are kept, by 8 bytes for each value, until there are 262,144; then it is constant. The pipe shows
that for a log of any size, without a file. The whole command, `compare extract --json`, is measured from its start to
its end; with --before that of another checkout takes turns with it, and what counts is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from train_speed import machine

HERE = Path(__file__).resolve().parents[1]
STEP = (
    " [2025-05-27 {clock}] iteration {step:8d}/ 1000000 | consumed samples: {samples:12d} | elapsed time per iteration"
    " (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | learning rate: {lr:.6E} | global batch size: "
    " 1024 | lm loss: {loss:.6E} | load_balancing_loss: 1.041994E+00 | loss scale: 1.0 | grad norm: {norm:.3f} | num"
    " zeros: 0.0 | params norm: 238.330 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
PRIMUS = (
    "[20251121 {clock}][rank-31/32][INFO ] [--------trainer.py:2488] :  iteration {step:8d}/ 1000000 | consumed"
    " samples: {samples:12d} | elapsed time per iteration (ms): {ms:.1f}/2712.7 | hip mem usage/free/total/usage_ratio:"
    " 227.35GB/28.63GB/255.98GB/88.81% | throughput per GPU (TFLOP/s/GPU): {tflops:.1f}/217.3 | tokens per GPU"
    " (tokens/s/GPU): 12130.4/12525.5 | learning rate: {lr:.6E} | global batch size:   256 | lm loss: {loss:.6E} | loss"
    " scale: 1.0 | grad norm: {norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
OTHERS = (
    "    forward-backward ...............................: (2644.20, 2650.31)\n"
    "    optimizer ......................................: (41.20, 42.31)\n"
    "WARNING:megatron.core.rerun_state_machine:Result validation enabled, which costs time: see the documentation\n"
)
PROGRAM = """
import json, resource, sys, time
from pathlib import Path
from primus.training_logs.read_log import read_log
began = time.process_time()
log = read_log(Path(sys.argv[1]))
passed = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([log.num_bytes / passed / 1e6, peak / 2**20, log.attempts[0].num_steps, log.num_unread]))
"""


def format_steps(line: str, others: str = "") -> Iterator[str]:
    rng = random.Random(1)
    step = 0
    while True:
        step += 1
        yield others + line.format(
            clock=f"{step // 3600 % 24:02}:{step // 60 % 60:02}:{step % 60:02}",
            step=step,
            samples=1024 * step,
            ms=2700 + 20 * rng.random(),
            tflops=400 + rng.random(),
            lr=1.5e-9 * step,
            loss=12 / step**0.1,
            norm=rng.random(),
        )


def format_ranks(ranks: int, line: str) -> Iterator[str]:
    """Lines of all ranks, in an order that changes with each step."""
    rng = random.Random(1)
    for text in format_steps(line):
        yield "".join(f"[default{rank}]:{text}" for rank in rng.sample(range(ranks), ranks))


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "Megatron-LM": lambda: format_steps(STEP),
    "Primus": lambda: format_steps(PRIMUS),
    "Megatron-LM, with other lines": lambda: format_steps(STEP, OTHERS),
    "Megatron-LM, 2 ranks": lambda: format_ranks(2, STEP),
    "Megatron-LM, 64 ranks": lambda: format_ranks(64, STEP),
}


def write_log(file: Path, lines: Iterator[str], megabytes: float) -> int:
    """Write a log of a size; gives its steps."""
    size = steps = 0
    with file.open("w") as log:
        while size < megabytes * 1e6:
            size += log.write(next(lines))
            steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, whose command takes turns")
    parser.add_argument("--output", type=Path, help="file of the record")
    parser.add_argument("--pipe-gigabytes", type=float, default=0.0, help="read a log of this size from a pipe instead")
    options = parser.parse_args()
    if options.pipe_gigabytes:
        read_pipe(options.pipe_gigabytes)
        return
    records = []
    print(f"{'log':32} {'MB/s':>6} {'least':>6} {'MiB':>6} {'MiB, a quarter':>15} {'--json':>7} {'CPU time':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for kind, lines in KINDS.items():
            files = [(Path(folder, f"{share}.log"), options.megabytes * share) for share in (1.0, 0.25)]
            steps = [write_log(file, lines(), size) for file, size in files]
            rates, peaks, commands, ratios = [], [], [], []
            for _ in range(options.rounds):
                found = [read_in_process(file) for file, _ in files]
                assert [each[2] for each in found] == steps and not any(each[3] for each in found)
                rates.append(found[0][0])
                peaks.append([each[1] for each in found])
                commands.append(options.megabytes / measure_command(files[0][0], HERE))
                if options.before:
                    before = measure_command(files[0][0], options.before)
                    ratios.append(options.megabytes / commands[-1] / before)
            whole, quarter = (max(peak[i] for peak in peaks) for i in (0, 1))
            ratio = f"{statistics.median(ratios):9.3f}" if ratios else ""
            print(
                f"{kind:32} {statistics.median(rates):6.0f} {min(rates):6.0f} {whole:6.0f} {quarter:15.0f}"
                f" {statistics.median(commands):7.0f} {ratio}",
                flush=True,
            )
            records.append(
                {"log": kind, "mb_per_s": rates, "peak_mib": whole, "peak_mib_of_a_quarter": quarter,
                 "json_command_mb_per_s": commands, "json_command_time_by_before": ratios}
            )  # fmt: skip
    record = {"machine": machine(1), "megabytes": options.megabytes, "logs": records}
    text = json.dumps(record, indent=1) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        print(text, end="")


def read_pipe(gigabytes: float) -> None:
    """Write a log to a pipe while it is read, and print the memory of the reader."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "pipe")
        os.mkfifo(pipe)
        reader = subprocess.Popen([sys.executable, "-c", PROGRAM, str(pipe)], stdout=subprocess.PIPE, text=True)
        steps = write_log(pipe, format_steps(STEP), 1000 * gigabytes)
        output, _ = reader.communicate()
    rate, peak, found, unread = json.loads(output)
    assert reader.returncode == 0 and found == steps and not unread
    print(f"{gigabytes:.1f} GB, {steps:,} steps: {rate:.0f} MB/s, at most {peak:.0f} MiB")


def measure_command(file: Path, checkout: Path) -> float:
    """CPU seconds of `compare extract --json` of a checkout, from start to end."""
    words = [sys.executable, "-m", "primus", "--json", "direct", "--", "compare", "extract", str(file)]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(checkout / "src")}
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime


def read_in_process(file: Path) -> list[float]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
