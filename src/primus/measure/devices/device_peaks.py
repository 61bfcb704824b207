"""Limits of a device for rooflines: of a GPU from its profile, of a host by measurement."""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import get_args

import torch

from primus.benchmark import DevicePeaks
from primus.machine.profile import Dtype, find_peak_tflops, find_profile_by_name
from primus.measure.devices import memory
from primus.measure.timing import Clock, Effort, measure_call
from primus.process import run_command
from primus.report.table import format_size

HostFunction = Callable[[int], float]
SOURCE = Path(__file__).with_name("host_peak.c")
ROUNDS = 1_000_000
"""Rounds of the registers' loop in one call: about 3 ms."""
REPEATS = 10
COMPILE_S = 60.0
BRIEF = Effort(warm_up_calls=3, warm_up_s=0.05, longest_warm_up_s=0.2, calls=30, measure_s=0.2, fewest_calls=5)


def find_device_peaks(device: torch.device, clock: Clock, *, num_threads: int, max_bytes: int) -> DevicePeaks:
    """The limits of `device`, as far as they are known.

    Args:
        num_threads: Threads of this process, for a host.
        max_bytes: Limit of the memory for arrays.
    """
    small = torch.zeros(1, device=device)
    launch_s = measure_call(lambda: small.add_(1), clock, BRIEF).median_s
    if device.type == "cuda":
        return _read_profile(device, launch_s)
    tflops, source = _measure_host(num_threads)
    arrays = memory.allocate_arrays(device, memory.count_array_elements(memory.read_host_cache_bytes(), max_bytes))
    timing = measure_call(lambda: memory.KERNELS["triad"].run(arrays), clock, BRIEF)
    gb_per_s = 3 * arrays.a.nbytes / timing.p5_s / 1e9
    source = f"{source}; memory: triad of STREAM on arrays of {format_size(arrays.a.nbytes)}"
    return DevicePeaks(tflops=tflops, gb_per_s=gb_per_s, launch_s=launch_s, source=source)


def _read_profile(device: torch.device, launch_s: float) -> DevicePeaks:
    name = torch.cuda.get_device_name(device)
    profile = find_profile_by_name(name)
    peaks = {dtype: find_peak_tflops(name, dtype) for dtype in get_args(Dtype)}
    return DevicePeaks(
        tflops={dtype: peak for dtype, peak in peaks.items() if peak},
        gb_per_s=profile.memory_gb_per_s / profile.devices_per_gpu if profile and profile.memory_gb_per_s else None,
        launch_s=launch_s,
        source=f"profile of {profile.model}: {profile.source}" if profile else f"no profile of {name}",
    )


def _measure_host(num_threads: int) -> tuple[dict[str, float], str]:
    """TFLOP/s of multiply-adds on registers by data type, and how they were measured."""
    functions = load_host_functions()
    if isinstance(functions, str):
        return {}, f"the peak of this CPU is not measured: {functions}"
    found = {dtype: _measure_threads(function, num_threads) for dtype, function in functions.items()}
    source = f"measured: multiply-adds on registers by {num_threads} thread{'s' * (num_threads > 1)}"
    return found, f"{source}; of a product, in turns with it"


@cache
def load_host_functions() -> dict[str, HostFunction] | str:
    """By data type, a function that does rounds of multiply-adds and returns their operations; or why there is none."""
    with tempfile.TemporaryDirectory(prefix="primus-peak-") as folder:
        library = Path(folder, "host_peak.so")
        words = ["cc", "-O2", "-march=native", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
        built = run_command(words, limit_s=COMPILE_S)
        if built.state != "ok":
            return built.problem
        compiled = ctypes.CDLL(str(library))
    found = {}
    for dtype in ("fp32", "bf16"):
        function = getattr(compiled, f"run_{dtype}")
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long]
        if function(1) > 0:
            found[dtype] = function
    if "fp32" in found:  # without bf16 instructions, bf16 is converted and multiplied in fp32
        found.setdefault("bf16", found["fp32"])
    return found


class PeakTurns:
    """Measures the peak of a host again and again beside a product, which sees the same clock and other processes."""

    def __init__(self, function: HostFunction, num_threads: int) -> None:
        self._function = function
        self._num_threads = num_threads
        self._rates: list[float] = []

    def measure(self) -> None:
        """One turn."""
        with ThreadPoolExecutor(self._num_threads) as pool:
            for _ in range(REPEATS):
                started = time.perf_counter()
                flop = sum(pool.map(self._function, [ROUNDS] * self._num_threads))
                self._rates.append(flop / (time.perf_counter() - started) / 1e12)

    @property
    def tflops(self) -> float:
        """Median, as the rate of the product is."""
        return statistics.median(self._rates)


def create_peak_turns(device: torch.device, dtype: str, num_threads: int) -> PeakTurns | None:
    """Turns of the peak beside a product of a data type; None for a GPU, whose peak is in its profile."""
    functions = load_host_functions() if device.type == "cpu" else {}
    if isinstance(functions, str) or dtype not in functions:
        return None
    return PeakTurns(functions[dtype], num_threads)


def _measure_threads(function: HostFunction, num_threads: int) -> float:
    """TFLOP/s of all threads together; the best of some repeats, since a limit is wanted."""

    def measure_thread(rounds: int) -> float:
        # The time that the thread computes: other processes must not lower the limit of the machine.
        started = time.thread_time()
        flop = function(rounds)
        return flop / max(time.thread_time() - started, 1e-9)

    # ctypes releases the interpreter's lock, so that the threads run at the same time.
    with ThreadPoolExecutor(num_threads) as pool:
        return max(sum(pool.map(measure_thread, [ROUNDS] * num_threads)) for _ in range(REPEATS)) / 1e12
