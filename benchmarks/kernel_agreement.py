"""Whether benchmarks of primus agree with other tools: `python benchmarks/kernel_agreement.py`.

- GEMM and attention with torch.utils.benchmark, on the same operands (3 %).
- GEMM with the best that MKL reaches for the shape: transposed and packed operands, too (at least 0.95 of it).
- The kernels of memory with STREAM's loops in C, with as many threads and the same arrays (5 %).
- The arithmetic of collectives with a line that nccl-tests printed (exact to its digits).
- Storage with fio, if it is installed (10 %).

The sides take turns every few calls, and who begins changes each time, so that a change of the machine's load meets
both. What counts is the median of the ratios of such pairs, with its 95 % interval; a pair of sides whose interval is
wider than the tolerance is undecided, not different. A record goes to results/.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "src"))

import torch  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402
from train_speed import machine  # noqa: E402

from primus.measure.devices import memory  # noqa: E402
from primus.measure.devices.device import find_array_bytes  # noqa: E402
from primus.measure.kernels import gemm  # noqa: E402
from primus.measure.kernels.attention import AttentionShape, create_inputs, find_attention  # noqa: E402
from primus.measure.network import collectives  # noqa: E402
from primus.measure.storage import storage  # noqa: E402
from primus.measure.timing import Effort, create_clock, measure_call  # noqa: E402
from primus.preflight.performance.storage_speed import parse_fio  # noqa: E402
from primus.statistics import bootstrap_interval  # noqa: E402

CALLS = 3
"""Calls of each side in a turn."""
EFFORT = Effort(warm_up_calls=1, warm_up_s=0.0, longest_warm_up_s=0.0, calls=CALLS, measure_s=0.0, fewest_calls=CALLS)
WARM_UP_TURNS = 3
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
TOLERANCES = {"gemm": 0.03, "attention": 0.03, "memory": 0.05, "storage": 0.10, "mkl": 0.05}
ONE_SIDED = ("mkl",)
"""Comparisons in which we may be faster."""


class ComparedSides(NamedTuple):
    """A measurement of ours, and the same by another tool."""

    name: str
    """Kind and case: ``gemm bf16 2048``."""
    ours: Callable[[], float]
    """Seconds of a call."""
    theirs: Callable[[], float]
    turns: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="pairs of turns of each comparison")
    parser.add_argument("--storage-turns", type=int, default=7, help="the same of files")
    parser.add_argument("--only", choices=TOLERANCES, nargs="*", default=tuple(TOLERANCES), help="what to compare")
    parser.add_argument("--size", type=int, default=2048, help="M, N and K of the products")
    parser.add_argument("--storage-mib", type=int, default=256)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"machine": machine(1), "turns": options.turns, "ratios": {}}
    for sides in list_sides(options, device):
        if sides.name.partition(" ")[0] not in options.only:
            continue
        record["ratios"][sides.name] = found = compare_in_turns(sides)
        low, high = found["interval"]
        print(
            f"{sides.name}: {found['median']:.3f} [{low:.3f}, {high:.3f}] of the other side's time: {found['verdict']}"
        )
    record["collectives"] = check_collectives()
    path = options.output or HERE / f"results/kernel_agreement-{options.machine}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(path)
    if any(each["verdict"] == "differs" for each in record["ratios"].values()):
        sys.exit(1)


def compare_in_turns(sides: ComparedSides) -> dict[str, Any]:
    """Median of the ratios of pairs, its interval, and the verdict."""
    kind = sides.name.partition(" ")[0]
    tolerance = TOLERANCES[kind]
    ratios = []
    for turn in range(-WARM_UP_TURNS, sides.turns):
        if turn % 2:
            ours, theirs = sides.ours(), sides.theirs()
        else:
            theirs, ours = sides.theirs(), sides.ours()
        if turn >= 0:
            ratios.append(ours / theirs)
    found = bootstrap_interval(ratios, block=None)
    is_near = found.estimate <= 1 + tolerance and (kind in ONE_SIDED or found.estimate >= 1 - tolerance)
    is_compatible = found.low <= 1 + tolerance and (kind in ONE_SIDED or found.high >= 1 - tolerance)
    verdict = "agrees" if is_near else "undecided: the machine is too noisy" if is_compatible else "differs"
    return {
        "median": found.estimate,
        "interval": [found.low, found.high],
        "tolerance": tolerance,
        "verdict": verdict,
        "all": ratios,
    }


def list_sides(options: argparse.Namespace, device: torch.device) -> list[ComparedSides]:
    """What is compared."""
    found = []
    shape = gemm.GemmShape(options.size, options.size, options.size)
    for dtype in ("fp32", "bf16"):
        [operands] = gemm.create_operands(device, shape, dtype, 1)
        call = partial(gemm.multiply_matrices, *operands)
        found.append(ComparedSides(f"gemm {dtype} {options.size}", *pair_calls(call, device), options.turns))
        if device.type == "cpu":
            found += list_mkl_sides(shape, dtype, operands, options.turns)
    attention = AttentionShape(1, 1024, 8, 8, 64, 64, causal=True)
    inputs = create_inputs(attention, torch.bfloat16, device, needs_grad=False)
    attend = find_attention("default", attention, device)
    found.append(ComparedSides("attention bf16 1024", *pair_calls(lambda: attend(*inputs), device), options.turns))
    if device.type == "cpu":
        found += list_memory_sides(device, options.turns)
    if shutil.which("fio"):
        found += list_storage_sides(options.storage_mib << 20, options.storage_turns)
    else:
        print("fio is not installed: storage is not compared")
    return found


def list_mkl_sides(shape: gemm.GemmShape, dtype: str, operands: gemm.Operands, turns: int) -> list[ComparedSides]:
    """Our product against the fastest of MKL's, which PyTorch's library for x86 exports."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    name = {"fp32": "cblas_sgemm", "bf16": "cblas_gemm_bf16bf16f32"}[dtype]
    # PyTorch exports only some of CBLAS: without cblas_sgemm, Fortran's sgemm_ is the same product.
    if (dtype == "fp32" and not hasattr(library, "sgemm_")) or (dtype == "bf16" and not hasattr(library, name)):
        print(f"this PyTorch has no MKL: gemm {dtype} is not compared with it")
        return []
    m, n, k = shape.m, shape.n, shape.k
    calls = {}
    for trans_a, trans_b in itertools.product((False, True), repeat=2):
        [other] = gemm.create_operands(torch.device("cpu"), shape._replace(trans_a=trans_a, trans_b=trans_b), dtype, 1)
        out = torch.empty(m, n)
        make = make_sgemm_call if dtype == "fp32" else make_bf16_call
        calls[f"{'NT'[trans_a]}{'NT'[trans_b]}"] = make(library, other, out, (m, n, k), trans_a, trans_b)
    clock = create_clock(torch.device("cpu"))
    times = {name: [measure_call(call, clock, EFFORT).median_s for _ in range(3)] for name, call in calls.items()}
    best = min(times, key=lambda each: min(times[each]))
    ours = partial(gemm.multiply_matrices, *operands)
    return [
        ComparedSides(
            f"mkl {dtype} {m} (best: {best})",
            lambda: measure_call(ours, clock, EFFORT).median_s,
            lambda: measure_call(calls[best], clock, EFFORT).median_s,
            turns,
        )
    ]


def make_sgemm_call(
    library: ctypes.CDLL, operands: gemm.Operands, out: torch.Tensor, sizes: tuple[int, int, int], *trans: bool
) -> Callable[[], object]:
    """The product by `sgemm_`, which is column-major: it computes the transpose, of the operands in turn."""
    m, n, k = (ctypes.c_int(size) for size in sizes)
    trans_a, trans_b = trans
    stored_a, stored_b = (operands.a.t() if trans_a else operands.a), (operands.b.t() if trans_b else operands.b)
    words = [ctypes.c_char(b"T" if flag else b"N") for flag in (trans_b, trans_a)]
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    rows = [ctypes.c_int(each.shape[1]) for each in (stored_b, stored_a, out)]
    stored = (stored_b, stored_a, out)
    by_reference = ctypes.byref

    def call() -> object:
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in stored]  # here, so that the operands stay alive
        return library.sgemm_(
            *map(by_reference, (*words, n, m, k, one)), pointers[0], by_reference(rows[0]),
            pointers[1], by_reference(rows[1]), by_reference(zero), pointers[2], by_reference(rows[2]),
        )  # fmt: skip

    call()
    assert gemm.wrong_elements(operands._replace(out=out)) == 0
    return call


def make_bf16_call(
    library: ctypes.CDLL, operands: gemm.Operands, out: torch.Tensor, sizes: tuple[int, int, int], *trans: bool
) -> Callable[[], object]:
    """The product by `cblas_gemm_bf16bf16f32`, whose result is fp32."""
    row_major, codes = 101, {False: 111, True: 112}  # CBLAS: CblasRowMajor, CblasNoTrans, CblasTrans
    stored_a, stored_b = (
        each.t() if flag else each for each, flag in zip((operands.a, operands.b), trans, strict=True)
    )
    function = library.cblas_gemm_bf16bf16f32
    function.restype = None

    def call() -> object:
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (stored_a, stored_b, out)]
        return function(
            row_major, *(codes[flag] for flag in trans), *sizes, ctypes.c_float(1.0),
            pointers[0], stored_a.shape[1], pointers[1], stored_b.shape[1], ctypes.c_float(0.0), pointers[2], sizes[1],
        )  # fmt: skip

    call()
    assert gemm.wrong_elements(operands._replace(out=out)) == 0
    return call


def pair_calls(call: Callable[[], object], device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """Our time of a call, and that of torch.utils.benchmark with the same number of threads."""

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())

    def theirs() -> float:
        timer.timeit(1)  # the clock of ours has a warm-up call, too
        return statistics.median(timer.timeit(1).median for _ in range(CALLS))

    return lambda: measure_call(call, create_clock(device), EFFORT).median_s, theirs


def list_memory_sides(device: torch.device, turns: int) -> list[ComparedSides]:
    """The kernels of STREAM by torch and by C."""
    library = compile_stream()
    elements = memory.count_array_elements(memory.read_host_cache_bytes(), find_array_bytes(device, 1))
    arrays = memory.allocate_arrays(device, elements)
    clock, found = create_clock(device), []
    library.omp_set_num_threads(torch.get_num_threads())
    size = ctypes.c_size_t(elements)
    pointers = {name: ctypes.c_void_p(getattr(arrays, name).data_ptr()) for name in "abc"}
    for name, reads in (("copy", "a"), ("mul", "b"), ("add", "ab"), ("triad", "ab")):
        kernel, function = memory.KERNELS[name], getattr(library, name)
        words = [pointers["c"], *(pointers[each] for each in reads), size]
        found.append(ComparedSides(
            f"memory {name}",
            lambda kernel=kernel: measure_call(lambda: kernel.run(arrays), clock, EFFORT).median_s,
            lambda function=function, words=words: measure_call(lambda: function(*words), clock, EFFORT).median_s,
            turns,
        ))  # fmt: skip
    return found


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


def list_storage_sides(size: int, turns: int) -> list[ComparedSides]:
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
            # A file as for our side: how it was written changes the speed of reading it.
            with storage.StorageFile(path, size):
                done = subprocess.run(words, capture_output=True, text=True, check=True)
            return size / (parse_fio(done.stdout, direction) or float("nan"))
        finally:
            path.unlink(missing_ok=True)

    return [
        ComparedSides(f"storage {each}", partial(ours, each), partial(theirs, each), turns)
        for each in ("write", "read")
    ]


def check_collectives() -> dict[str, float]:
    """The bandwidths of the line of nccl-tests: 8589934592 B, 40903 us, 8 ranks: 210.01 and 367.51 GB/s."""
    found = {
        "algbw": round(collectives.compute_algorithm_bandwidth(8589934592, 40903e-6), 2),
        "busbw": round(collectives.compute_bus_bandwidth("all_reduce", 8589934592, 40903e-6, 8) or 0.0, 2),
    }
    assert found == {"algbw": 210.01, "busbw": 367.51}, found
    return found


if __name__ == "__main__":
    main()
