"""Whether benchmarks of primus agree with other tools: `python benchmarks/kernel_agreement.py`.

- GEMM and attention with torch.utils.benchmark, on the same operands (3 %).
- The kernels of memory with STREAM's loops in C, with as many threads and the same arrays (5 %).
- The arithmetic of collectives with a line that nccl-tests printed (exact to its digits).
- Storage with fio, if it is installed (10 %).

The sides take turns in each round, and the medians of the ratios count, so that a change of the machine's load meets
both. A record goes to results/.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402
from train_speed import machine  # noqa: E402

from primus.measure import collectives, gemm, memory, storage  # noqa: E402
from primus.measure.attention import AttentionShape, create_inputs, find_attention  # noqa: E402
from primus.measure.device import find_array_bytes  # noqa: E402
from primus.measure.timing import Effort, create_clock, measure_call  # noqa: E402
from primus.preflight.storage_speed import parse_fio  # noqa: E402

EFFORT = Effort(warm_up_s=0.5, longest_warm_up_s=3.0, calls=10_000, measure_s=1.0, fewest_calls=10)
STREAM = """
#include <stddef.h>
/* The four kernels of STREAM (J. McCalpin, cs.virginia.edu/stream), on floats as torch computes them. */
void copy(float *restrict c, const float *restrict a, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) c[i] = a[i];
}
void mul(float *restrict c, const float *restrict b, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) c[i] = 0.4f * b[i];
}
void add(float *restrict c, const float *restrict a, const float *restrict b, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) c[i] = a[i] + b[i];
}
void triad(float *restrict c, const float *restrict a, const float *restrict b, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) c[i] = a[i] + 0.4f * b[i];
}
"""
FIO_BLOCK = 4 << 20
TOLERANCES = {"gemm": 0.03, "attention": 0.03, "memory": 0.05, "storage": 0.10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=2048, help="M, N and K of the products")
    parser.add_argument("--storage-mib", type=int, default=256)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine(1), "rounds": options.rounds, "ratios": {}}
    for name, ours, theirs in list_pairs(options, device):
        ratios = [ours() / theirs() for _ in range(options.rounds)]
        kind = name.partition(" ")[0]
        ratio = statistics.median(ratios)
        agrees = abs(ratio - 1) <= TOLERANCES[kind]
        record["ratios"][name] = {"median": ratio, "all": ratios, "tolerance": TOLERANCES[kind], "agrees": agrees}
        print(f"{name}: {ratio:.3f} of the other tool's time{'' if agrees else '  DIFFERS'}", flush=True)
    record["collectives"] = check_collectives()
    path = options.output or HERE / f"results/kernel_agreement-{options.machine}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path)
    if not all(each["agrees"] for each in record["ratios"].values()):
        sys.exit(1)


def list_pairs(
    options: argparse.Namespace, device: torch.device
) -> list[tuple[str, Callable[[], float], Callable[[], float]]]:
    """Name, our seconds and the other tool's."""
    pairs = []
    shape = gemm.GemmShape(options.size, options.size, options.size)
    for dtype in ("fp32", "bf16"):
        [operands] = gemm.create_operands(device, shape, dtype, 1)
        pairs.append(
            (f"gemm {dtype} {options.size}", *pair_calls(lambda o=operands: torch.mm(o.a, o.b, out=o.out), device))
        )
    attention = AttentionShape(1, 1024, 8, 8, 64, 64, causal=True)
    inputs = create_inputs(attention, torch.bfloat16, device, needs_grad=False)
    attend = find_attention("default", attention, device)
    pairs.append(("attention bf16 1024", *pair_calls(lambda: attend(*inputs), device)))
    if device.type == "cpu":
        pairs += list_memory_pairs(device)
    if shutil.which("fio"):
        pairs += list_storage_pairs(options.storage_mib << 20)
    else:
        print("fio is not installed: storage is not compared")
    return pairs


def pair_calls(call: Callable[[], object], device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """Our time of a call, and that of torch.utils.benchmark with the same number of threads."""

    def theirs() -> float:
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=1.0).median)

    return lambda: measure_call(call, create_clock(device), EFFORT).median_s, theirs


def list_memory_pairs(device: torch.device) -> list[tuple[str, Callable[[], float], Callable[[], float]]]:
    """The kernels of STREAM by torch and by C."""
    library = compile_stream()
    elements = memory.array_elements(memory.host_cache_bytes(), find_array_bytes(device, 1))
    arrays = memory.allocate_arrays(device, elements)
    clock, pairs = create_clock(device), []
    library.omp_set_num_threads(torch.get_num_threads())
    size = ctypes.c_size_t(elements)
    pointers = {name: ctypes.c_void_p(getattr(arrays, name).data_ptr()) for name in "abc"}
    for name, reads in (("copy", "a"), ("mul", "b"), ("add", "ab"), ("triad", "ab")):
        kernel, function = memory.KERNELS[name], getattr(library, name)
        words = [pointers["c"], *(pointers[each] for each in reads), size]
        pairs.append((
            f"memory {name}",
            lambda kernel=kernel: measure_call(lambda: kernel.run(arrays), clock, EFFORT).median_s,
            lambda function=function, words=words: measure_call(lambda: function(*words), clock, EFFORT).median_s,
        ))  # fmt: skip
    return pairs


def compile_stream() -> ctypes.CDLL:
    """STREAM's loops as a library."""
    folder = Path(tempfile.mkdtemp(prefix="primus-stream-"))
    (folder / "stream.c").write_text(STREAM)
    library = folder / "stream.so"
    words = ["cc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-o", library, folder / "stream.c"]
    subprocess.run(words, check=True)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    return loaded


def list_storage_pairs(size: int) -> list[tuple[str, Callable[[], float], Callable[[], float]]]:
    """Sequential writes and reads by us and by fio, in the folder of temporary files of the user."""
    folder = Path.home()

    def ours(direction: str) -> float:
        path = folder / ".primus-agreement"
        try:
            with storage.StorageFile(path, size) as file:
                offsets = file.list_offsets(FIO_BLOCK, is_random=False)
                run_pass = file.write_blocks if direction == "write" else file.read_blocks
                return run_pass(offsets, FIO_BLOCK)
        finally:
            path.unlink(missing_ok=True)

    def theirs(direction: str) -> float:
        path = folder / ".primus-agreement-fio"
        words = ["fio", "--name=primus", f"--filename={path}", f"--rw={direction}", f"--size={size}"]
        words += [f"--bs={FIO_BLOCK}", "--direct=1", "--ioengine=psync", "--end_fsync=1", "--output-format=json"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            return size / (parse_fio(done.stdout, direction) or float("nan"))
        finally:
            path.unlink(missing_ok=True)

    return [
        (f"storage {each}", lambda each=each: ours(each), lambda each=each: theirs(each)) for each in ("write", "read")
    ]


def check_collectives() -> dict[str, float]:
    """The bandwidths of the line of nccl-tests: 8589934592 B, 40903 us, 8 ranks: 210.01 and 367.51 GB/s."""
    found = {
        "algbw": round(collectives.algorithm_bandwidth(8589934592, 40903e-6), 2),
        "busbw": round(collectives.bus_bandwidth("all_reduce", 8589934592, 40903e-6, 8) or 0.0, 2),
    }
    assert found == {"algbw": 210.01, "busbw": 367.51}, found
    return found


if __name__ == "__main__":
    main()
