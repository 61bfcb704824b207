"""A timed call becomes a row with its rate, its limit, and what limits it."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from msgspec import structs

from fakes.clocks import BRIEF, DeviceClock
from primus.benchmark import BenchmarkRank, BenchmarkResult, DevicePeaks, MeasuredCall
from primus.errors import PrimusError
from primus.measure.devices import device_peaks
from primus.measure.devices.device import share_cores
from primus.measure.devices.roofline import build_row, find_bound
from primus.measure.kernels import block_scaled, gemm
from primus.measure.timing import EventClock, HostClock, measure_call, summarize_samples
from primus.report.benchmark_table import describe_result

CPU = torch.device("cpu")
PEAKS = DevicePeaks(tflops={"bf16": 100.0}, gb_per_s=1000.0, launch_s=1e-5)


def make_measured(flop: float, moved_bytes: float) -> MeasuredCall:
    return MeasuredCall(call=lambda: None, flop=flop, moved_bytes=moved_bytes, dtype="bf16")


def test_the_roofline_names_what_limits_a_call() -> None:
    assert find_bound(make_measured(1e12, 1e9), PEAKS) == "compute"
    assert find_bound(make_measured(1e10, 1e9), PEAKS) == "memory"
    assert find_bound(make_measured(1e6, 1e3), PEAKS) == "launch"
    assert find_bound(make_measured(1e12, 1e9), DevicePeaks(gb_per_s=1.0)) == ""


def test_a_row_has_the_rate_of_the_median_and_its_share() -> None:
    row = build_row({"M": 1}, make_measured(5e11, 1e9), summarize_samples([0.01, 0.02, 0.01]), PEAKS)
    assert (row.value, row.unit, row.share, row.figures["gb_per_s"]) == (50.0, "TFLOP/s", 0.5, 100.0)
    assert row.interval is not None and row.interval[0] <= 50.0 <= row.interval[1]
    time = build_row({}, structs.replace(make_measured(1.0, 1.0), value="time"), summarize_samples([2e-6]), PEAKS)
    assert (time.value, time.unit) == (2.0, "us")


def test_a_rate_above_the_limit_of_its_device_is_a_warning_with_its_case() -> None:
    def warn(seconds: float) -> list[str]:
        fine = build_row({"M": 1}, make_measured(5e11, 1e9), summarize_samples([0.01]), PEAKS)
        odd = build_row({"M": 77}, make_measured(5e11, 1e9), summarize_samples([seconds]), PEAKS)
        rank = BenchmarkRank(rank=0, host="a", device="cpu", device_name="", rows=(fine, odd))
        return [line for line in describe_result(BenchmarkResult(benchmark="mine", ranks=(rank,))) if "warning" in line]

    assert warn(0.0048) == [], "the measured limit is a few percent off"
    assert "warning: 1 of 2 rows exceed the limit" in warn(5e-4)[0] and "1000.0% of peak (M=77)" in warn(5e-4)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="an event of a device cannot be made by hand")
def test_times_of_events_of_a_device_are_seconds() -> None:
    class RecordedEvent(torch.cuda.Event):
        """An event that no device recorded: torch counts milliseconds between two (torch.cuda.Event.elapsed_time)."""

        def __new__(cls) -> RecordedEvent:
            return object.__new__(cls)

        def __init__(self) -> None:
            pass

        def elapsed_time(self, end_event: object) -> float:
            return 250.0

    begin, end = RecordedEvent(), RecordedEvent()
    assert EventClock(CPU).compute_seconds(begin, end) == 0.25


def test_threads_follow_the_user_and_other_processes_are_named() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        share_cores({"OMP_NUM_THREADS": "3"}, 1000)
        assert torch.get_num_threads() == 3
        share_cores({}, 1000)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    rank = BenchmarkRank(rank=0, host="a", device="cpu", device_name="CPU", core_wait_share=0.04)
    result = BenchmarkResult(benchmark="gemm", ranks=(rank, structs.replace(rank, rank=1)))
    assert describe_result(result) == ["device: CPU"]
    contended = structs.replace(result, ranks=(rank, structs.replace(rank, rank=1, core_wait_share=0.41)))
    assert "threads waited up to 41% of the time for a core" in describe_result(contended)[-1]


def test_sampling_ends_when_the_median_is_known() -> None:
    steady = DeviceClock(call_s=1e-3, resolution_s=1e-9)
    effort = structs.replace(BRIEF, calls=100_000, measure_s=30.0, precision=0.01, fewest_calls=20)
    assert measure_call(steady.call, steady, effort).n == 100

    noisy = DeviceClock(call_s=1e-3, resolution_s=1e-9)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        noisy.call_s = 1e-3 if calls % 2 else 2e-3
        noisy.call()

    timing = measure_call(call, noisy, structs.replace(effort, calls=1000))
    assert timing.n == 1000
    assert timing.interval_s is not None and timing.interval_s[1] - timing.interval_s[0] > 0.01 * timing.median_s


def test_sampling_ends_at_its_time_limit_though_the_median_is_not_known() -> None:
    clock = DeviceClock(call_s=0.0, resolution_s=1e-9)
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.now_s += 1e-3 * (1 + 0.618 * calls % 1)  # spread evenly, so that the interval has a width
        time.sleep(5e-3)

    effort = structs.replace(BRIEF, calls=200_000, measure_s=1.0, precision=1e-9, fewest_calls=20)
    # The device alone would do about 700 calls in that time, and the host does at most 200.
    assert 20 <= measure_call(call, clock, effort).n <= 300
    few = structs.replace(effort, measure_s=0.0, fewest_calls=7)
    assert measure_call(call, clock, few).n >= 7


def test_measurements_that_take_turns_see_the_machine_at_the_same_times() -> None:
    clock, order = DeviceClock(call_s=1e-3, resolution_s=1e-9), list[str]()

    def call() -> None:
        order.append("product")
        clock.call()

    effort = structs.replace(BRIEF, calls=200, measure_s=30.0, fewest_calls=3)
    timing = measure_call(call, clock, effort, beside=lambda: order.append("peak"))
    assert (timing.n, timing.median_s) == (200, pytest.approx(1e-3))
    first = order.index("peak")
    assert order[first:].count("peak") >= 10
    groups = "".join(name[1] for name in order[first:]).split("e")[1:]
    assert max(map(len, groups)) <= 20, "no turn is longer than a tenth of the measurement"


def test_a_turn_of_the_peak_without_other_work_does_not_count_more_than_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([*(time for turn in range(9) for time in (turn, turn + 0.5)), 9.0, 9.001])
    monkeypatch.setattr("primus.measure.devices.device_peaks.time.perf_counter", lambda: next(now))
    turns = device_peaks.PeakTurns(lambda rounds: 1e12, 1)
    turns.measure()
    assert turns.tflops == 2.0, "a product is compared by its median, too"


@pytest.mark.parametrize(("name", "gb_per_s"), [("AMD Instinct MI250X", 3277 / 2), ("AMD Instinct MI300X", 5300.0)])
def test_the_memory_of_a_device_that_is_half_a_card_has_half_of_its_bandwidth(
    name: str, gb_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peaks = device_peaks._read_profile(torch.device("cuda"), launch_s=1e-6)
    assert peaks.gb_per_s == pytest.approx(gb_per_s, rel=1e-3) and peaks.tflops["bf16"] > 100


@pytest.mark.skipif(shutil.which("cc") is None, reason="the limits of a CPU are measured by a compiled loop")
def test_the_peak_beside_a_product_is_the_median_of_its_turns_at_the_speed_of_that_time() -> None:
    def count(rounds: int) -> float:
        time.sleep(2e-3)
        return 1e9

    slow = device_peaks.PeakTurns(count, 2)
    slow.measure()
    assert 0 < slow.tflops <= 2 * 1e9 / 2e-3 / 1e12, "the operations of both threads by the time of the wall"
    turns = device_peaks.create_peak_turns(CPU, "fp32", 1)
    assert turns is not None
    turns.measure()
    assert 1e-5 < turns.tflops < 10
    assert device_peaks.create_peak_turns(CPU, "fp8", 1) is None
    assert device_peaks.create_peak_turns(torch.device("cuda"), "fp32", 1) is None, "it is in the profile of a GPU"


def test_emptying_the_cache_is_not_timed() -> None:
    clock = DeviceClock(call_s=1e-3, resolution_s=1e-9)

    def flush() -> None:
        clock.now_s += 1.0

    assert measure_call(clock.call, clock, BRIEF, flush).median_s == pytest.approx(1e-3)


@pytest.mark.skipif(shutil.which("cc") is None, reason="the limits of a CPU are measured by a compiled loop")
def test_the_limits_of_a_cpu_are_above_what_a_product_reaches() -> None:
    peaks = device_peaks.find_device_peaks(CPU, HostClock(), num_threads=torch.get_num_threads(), max_bytes=3 << 20)
    assert peaks.gb_per_s and peaks.launch_s
    matrix = torch.randn(512, 512)
    found = []
    for _ in range(5):
        started = time.thread_time()
        matrix @ matrix
        found.append(2 * 512**3 / (time.thread_time() - started) / 1e12)
    assert 0.8 * max(found) < peaks.tflops["fp32"] < 10


@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_every_layout_are_right(transposes: tuple[bool, bool]) -> None:
    shape = gemm.GemmShape(24, 40, 56, *transposes)
    [operands] = gemm.create_operands(CPU, shape, "bf16", 1)
    assert (operands.a.shape, operands.b.shape) == ((24, 56), (56, 40))
    assert (operands.a.is_contiguous(), operands.b.is_contiguous()) == tuple(not each for each in transposes)
    gemm.multiply_matrices(*operands)
    assert gemm.wrong_elements(operands) == 0
    operands.out[-1, -1] += 8
    assert gemm.wrong_elements(operands) == 1


def test_fp8_operands_are_cast_before_the_call() -> None:
    # AMD-AGI/Primus times the cast with the product.
    [operands] = gemm.create_operands(CPU, gemm.GemmShape(32, 32, 64, False, True), "fp8", 1)
    assert operands.a.dtype == operands.b.dtype == torch.float8_e4m3fn
    gemm.create_multiply(CPU, gemm.GemmShape(32, 32, 64), "fp8")(*operands)
    assert gemm.wrong_elements(operands) == 0


@pytest.mark.parametrize(("dtype", "grid"), [("mxfp8", None), ("mxfp4", 0.5), ("nvfp4", 0.5)])
def test_operands_of_block_formats_are_checked_by_the_values_that_they_hold(dtype: str, grid: float | None) -> None:
    [operands] = gemm.create_operands(CPU, gemm.GemmShape(48, 40, 96, False, True), dtype, 1)
    rows, columns = torch.arange(48), torch.arange(40)
    a, b = gemm._to_fp64(operands.a, 0, rows), gemm._to_fp64(operands.b, 1, columns)
    assert (a.shape, b.shape) == ((48, 96), (96, 40))
    generator = torch.Generator(CPU).manual_seed(gemm.SEED)
    drawn = torch.empty(48, 96).normal_(generator=generator).double()
    if grid:  # of e2m1: steps of a half up to 2, of one up to 4
        assert (a[a.abs() < 2] % grid == 0).all() and a.abs().max() <= 6
        assert ((a - drawn).abs() <= grid / 2 * (1 + (drawn.abs() >= 2))).all()
    else:
        assert ((a - drawn).abs() <= drawn.abs() / 16 + 2.0**-10).all()
    operands.out.copy_(a @ b)
    assert gemm.wrong_elements(operands) == 0
    operands.out[0, 5] += 9
    assert gemm.wrong_elements(operands) == 1


def test_block_formats_have_a_scale_for_each_block_in_tiles_of_128_by_4() -> None:
    assert block_scaled.make_scales(130, 96, "mxfp8", CPU).numel() == 256 * 4
    assert block_scaled.make_scales(128, 160, "mxfp4", CPU).numel() == 128 * 8
    scales = block_scaled.make_scales(1, 96, "nvfp4", CPU)
    assert scales.numel() == 128 * 8 and (scales.float() == 1).all()
    assert (block_scaled.make_scales(1, 32, "mxfp8", CPU).float() == 1).all()
    assert gemm.count_set_bytes(gemm.GemmShape(64, 64, 64), "nvfp4") == 2 * 64 * 64 * 9 // 16 + 2 * 64 * 64


@pytest.mark.parametrize(
    ("name", "dtype", "problem"),
    [
        ("NVIDIA H200", "mxfp8", "mxfp8: the matrix units of H200 have no scales of blocks"),
        ("AMD Instinct MI355X", "nvfp4", "nvfp4: a format of NVIDIA; MI355X has mxfp8 and mxfp4"),
        ("NVIDIA B200", "nvfp4", "nvfp4: K=40 is not a multiple of 32"),
    ],
)
def test_a_gpu_without_a_block_format_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, problem: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    with pytest.raises(PrimusError, match=problem):
        block_scaled.check_device(torch.device("cuda"), dtype, 40)


def test_a_cpu_has_no_block_formats() -> None:
    with pytest.raises(PrimusError, match="mxfp4: not offered by cpu: only matrix units of GPUs have scales of blocks"):
        block_scaled.check_device(CPU, "mxfp4", 64)
