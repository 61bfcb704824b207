"""Burn-in of a device: matrix products and memory patterns, compared bit by bit for a given time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import structs

from primus.machine.measurements import BurnIn, Dtype, LoadWindow
from primus.measure.kernels import gemm
from primus.measure.kernels.gemm import Multiply
from primus.measure.timing import Clock

BATCH_S = 0.25
"""Products queued at once; longer queues delay the end, shorter queues let the device idle."""
LONGEST_WINDOW_S = 20.0
"""Memory is checked between windows, which takes one to two seconds for a large memory."""
WINDOWS = 12
"""Minimum, so that the first and last windows can be compared."""
PATTERNS = (0x00000000, 0x7FFFFFFF, 0x55555555, 0x2AAAAAAA, None)
"""Words that fill the memory, each followed by its complement; None is the word's own index. They are the patterns of
memtest86+ and of CUDA GPU memtest: stuck bits, neighboring bits, and wrong addresses."""
CHUNK = 2**24
"""Words filled, checked or summed at a time."""
WORDS = {2: torch.int16, 4: torch.int32}
"""Integer type for comparing the bits of an element: NaN equals itself, and -0 differs from 0."""
MIXER = 2_654_435_761
"""Knuth's multiplicative hash constant, which makes a checksum depend on the position of each word."""


class BurnInLoad(NamedTuple):
    """What a burn-in computes and holds."""

    size: int
    """M, N and K of the products."""
    dtype: Dtype
    memory_bytes: int
    """Size of the memory that holds a pattern while the products run."""
    multiply: Multiply = gemm.multiply_matrices
    """The product; tests replace it to simulate a faulty device."""


def run(
    device: torch.device,
    clock: Clock,
    load: BurnInLoad,
    duration_s: float,
    *,
    on_window: Callable[[BurnIn], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> BurnIn:
    """Load `device` for a time; every product must equal the first one bit by bit.

    Args:
        device: The device to load.
        clock: Clock of the device.
        load: The products and the memory.
        duration_s: Duration; at least one window is measured.
        on_window: Called with the result so far after each window.
        is_stopped: Returns whether to stop early.
    """
    # At most `LONGEST_WINDOW_S`, and at least `WINDOWS` windows in a short burn-in, so that slowing down is visible.
    window_s = min(LONGEST_WINDOW_S, duration_s / WINDOWS)
    # A batch of at most half a window, so that a short burn-in still ends on time.
    state = _BurnInState(device, clock, load, min(BATCH_S, window_s / 2))
    started = time.monotonic()
    result = BurnIn(
        key=build_comparable_key(device, load.size, load.dtype),
        digest=state.digest,
        wrong_at_first=state.wrong_at_first,
    )
    # Stop requests, the deadline and the heartbeat are handled only between windows.
    while True:
        before = time.monotonic()
        rate = state.run_window(window_s)
        now = time.monotonic() - started
        is_wrong = bool(state.wrong_words or state.wrong_memory)
        result = structs.replace(
            result,
            duration_s=now,
            products=state.products,
            wrong_words=state.wrong_words,
            wrong_memory=state.wrong_memory,
            first_wrong_s=now if is_wrong and result.first_wrong_s is None else result.first_wrong_s,
            windows=(*result.windows, LoadWindow(begin_s=before - started, tflops=rate)),
        )
        # The result is passed on after every window: a device that hangs later loses only the current window.
        on_window(result)
        if now >= duration_s or is_stopped():
            return result


class _BurnInState:
    """Operands with their first products, and memory that holds a pattern."""

    def __init__(self, device: torch.device, clock: Clock, load: BurnInLoad, batch_s: float) -> None:
        self._clock, self._multiply = clock, load.multiply
        shape = gemm.GemmShape(load.size, load.size, load.size)
        self._sets, self._flop = gemm.create_operands(device, shape, load.dtype, 2), shape.flop
        self._words = WORDS[gemm.DTYPES[load.dtype].itemsize]
        self._memory = torch.empty(max(2, load.memory_bytes // 4), dtype=torch.int32, device=device)
        # Counted on the device: reading it after each product would make the device wait for the host.
        self._differing = torch.zeros((), dtype=torch.int64, device=device)
        self.products = self.wrong_words = self.wrong_memory = self._num_windows = 0
        for one in self._sets:
            gemm.multiply_matrices(*one)  # reference by the library itself, before any simulated fault
        clock.synchronize()
        self._first = [one.out.clone() for one in self._sets]
        self.wrong_at_first = sum(gemm.wrong_elements(one) for one in self._sets)
        self.digest = "".join(compute_checksum(product.view(self._words)) for product in self._first)
        self._calls = self._count_calls(batch_s)

    def _count_calls(self, batch_s: float) -> int:
        """Products of one batch."""
        begin = time.perf_counter()
        for index in range(len(self._sets)):
            self._multiply_and_compare(index)
        self._clock.synchronize()
        return max(1, round(batch_s * len(self._sets) / max(time.perf_counter() - begin, 1e-6)))

    def run_window(self, seconds: float) -> float:
        """Fill the memory, multiply for one window, check both; returns TFLOP/s."""
        # Another pattern for each window, so that every bit holds 0 and 1 in the course of the burn-in.
        pattern = PATTERNS[self._num_windows % len(PATTERNS)]
        self._num_windows += 1
        _fill_memory(self._memory, pattern)
        self._clock.synchronize()
        begin, products = time.perf_counter(), 0
        while True:
            calls = self._calls
            for call in range(calls):
                self._multiply_and_compare(call)
            # Waits once per batch: within it the queue is never empty and the device stays under full load.
            self._clock.synchronize()
            products += calls
            spent = time.perf_counter() - begin
            if spent >= seconds:
                break
        self.products += products
        # Copied to the host once per window, not after each product.
        self.wrong_words = int(self._differing)
        self.wrong_memory += count_wrong(self._memory, pattern)
        return products * self._flop / spent / 1e12

    def _multiply_and_compare(self, call: int) -> None:
        index = call % len(self._sets)
        one = self._sets[index]
        self._multiply(*one)
        # Integer views compare bits: NaN equals itself, so that a product with NaN is not reported again and again.
        self._differing += (one.out.view(self._words) != self._first[index].view(self._words)).sum()


def _fill_memory(memory: torch.Tensor, pattern: int | None) -> None:
    for begin in range(0, len(memory), CHUNK):
        part = memory[begin : begin + CHUNK]
        part.copy_(_build_expected(part, begin, pattern))


def count_wrong(memory: torch.Tensor, pattern: int | None) -> int:
    """Number of words that no longer hold the pattern."""
    wrong = 0
    for begin in range(0, len(memory), CHUNK):
        part = memory[begin : begin + CHUNK]
        wrong += int((part != _build_expected(part, begin, pattern)).sum())
    return wrong


def _build_expected(part: torch.Tensor, begin: int, pattern: int | None) -> torch.Tensor:
    index = torch.arange(begin, begin + len(part), device=part.device)
    if pattern is None:
        return index.to(torch.int32)
    return torch.where(index % 2 == 0, pattern, ~pattern).to(torch.int32)


def compute_checksum(words: torch.Tensor) -> str:
    """Checksum of 16 hexadecimal digits that depends on each word and its position, and not on the device."""
    flat, total = words.reshape(-1), 0
    for begin in range(0, len(flat), CHUNK):
        part = flat[begin : begin + CHUNK].to(torch.int64)
        index = torch.arange(begin, begin + len(part), device=flat.device)
        total += int((part * (index * MIXER + 1)).sum())
    return f"{total % 2**64:016x}"


def build_comparable_key(device: torch.device, size: int, dtype: str) -> str:
    """Key that is equal for devices that compute the same bits: model, library, shape and type."""
    what = f"{size} {dtype}, torch {torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {what}"
    return f"{_read_processor()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {what}"


def _read_processor(root: Path = Path("/")) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
