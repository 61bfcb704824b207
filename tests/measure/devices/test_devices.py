"""One device is timed by its clock, on data that does not stay in the cache, with results that are checked."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from msgspec import structs

from fakes.clocks import BRIEF, DeviceClock
from primus.measure.devices import memory
from primus.measure.kernels import gemm
from primus.measure.kernels.gemm import OperandRotation
from primus.measure.network import collectives
from primus.measure.timing import (
    FULL,
    MOST_QUEUED,
    QUICK,
    HostClock,
    MeasuredDevice,
    limit_effort,
    measure_call,
    summarize_samples,
)

CPU = torch.device("cpu")


def test_a_summary_holds_median_percentiles_and_deviation() -> None:
    found = summarize_samples([4.0, 1.0, 2.0, 3.0, 100.0])
    assert (found.n, found.median_s, found.min_s, found.max_s, found.mad_s) == (5, 3.0, 1.0, 100.0, 1.0)
    assert found.p5_s == pytest.approx(1.2)
    assert summarize_samples([5.0]).p95_s == 5.0


def test_samples_are_not_waited_for_one_by_one() -> None:
    clock = DeviceClock(call_s=1e-3, resolution_s=5e-7)
    found = measure_call(clock.call, clock, structs.replace(BRIEF, fewest_calls=500))
    assert found.n == 500
    assert clock.waits < 200  # of warm-up rounds and batches; none within the samples


def test_marks_are_read_before_a_driver_runs_out_of_them_and_the_device_never_waits() -> None:
    clock = DeviceClock(call_s=1e-3, resolution_s=5e-7)
    found = measure_call(clock.call, clock, structs.replace(BRIEF, fewest_calls=20_000))
    assert found.n == 20_000 and found.median_s == pytest.approx(1e-3, rel=1e-2)
    assert clock.most_queued <= 2 * MOST_QUEUED and not clock.was_idle


def test_calls_shorter_than_the_clock_sees_are_batched() -> None:
    clock = DeviceClock(call_s=2e-7, resolution_s=1e-6)
    found = measure_call(clock.call, clock, BRIEF)
    assert found.calls > 1
    assert found.median_s == pytest.approx(2e-7, rel=0.05)


def test_the_time_of_the_wall_is_that_of_one_call_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DeviceClock(call_s=2e-5, resolution_s=1e-6)
    monkeypatch.setattr("primus.measure.timing.time.perf_counter", lambda: clock.now_s)
    found = measure_call(clock.call, clock, BRIEF)
    assert found.calls > 1 and found.wall_s == pytest.approx(2e-5)


def test_a_clock_that_stands_still_does_not_give_zero() -> None:
    clock = DeviceClock(call_s=0.0, resolution_s=1.0)
    found = measure_call(clock.call, clock, BRIEF)
    assert found.min_s > 0


def test_a_warm_up_ends_when_times_are_steady_or_says_that_they_are_not() -> None:
    steady, drifting = DeviceClock(1e-3, 1e-9), DeviceClock(1e-3, 1e-9)

    def slower() -> None:
        drifting.call_s *= 1.1
        drifting.call()

    assert measure_call(steady.call, steady, BRIEF).is_settled
    assert not measure_call(slower, drifting, structs.replace(BRIEF, longest_warm_up_s=0.0)).is_settled


def test_a_product_has_two_operations_for_each_multiplication() -> None:
    assert gemm.count_flop(8192, 8192, 8192) == 2 * 8192**3


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_products_are_measured_and_right(dtype: gemm.Dtype) -> None:
    found = gemm.run(MeasuredDevice(CPU, HostClock(), BRIEF, 2**20, 2**24), 96, dtype)
    assert (found.test, found.wrong, found.problem) == (f"gemm_{dtype}", 0, "")
    assert found.timing is not None and found.value is not None
    assert found.value == pytest.approx(2 * 96**3 / found.timing.median_s / 1e12)


def test_operands_outrun_the_cache() -> None:
    one = 3 * 64 * 64 * 4
    assert gemm.num_sets(one, cache_bytes=10 * one, max_bytes=2**40) == 11
    assert gemm.num_sets(one, cache_bytes=10 * one, max_bytes=4 * one) == 4
    assert gemm.num_sets(one, cache_bytes=0, max_bytes=0) == 2


def test_operands_change_from_call_to_call() -> None:
    # AMD-AGI/Primus has an index that never changes: its operands stay in the cache.
    seen: list[int] = []

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(a.data_ptr())
        torch.mm(a, b, out=out)

    found = gemm.run(MeasuredDevice(CPU, HostClock(), BRIEF, 2 * 49152, 2**24), 64, "fp32", multiply)
    assert found.wrong == 0
    assert all(now != before for before, now in itertools.pairwise(seen))
    assert len(set(seen)) == 3


def test_operands_that_do_not_change_are_refused() -> None:
    one = gemm.create_operands(CPU, gemm.GemmShape(8, 8, 8), "fp32", 1)[0]
    with pytest.raises(AssertionError, match="must not stay in the cache"):
        OperandRotation([one, one])


@pytest.mark.parametrize("fault", ["nan", "one element", "never written"])
def test_a_wrong_product_is_found(fault: str) -> None:
    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        if fault == "never written":
            return
        torch.mm(a, b, out=out)
        out[0, 5] = math.nan if fault == "nan" else out[0, 5] + 1

    found = gemm.run(MeasuredDevice(CPU, HostClock(), BRIEF, 0, 0), 64, "fp32", multiply)
    assert found.wrong == (2 * 64 * 64 if fault == "never written" else 2)
    assert "differ" in found.problem


def test_a_large_product_in_a_small_type_is_within_its_tolerance() -> None:
    checked = gemm.create_operands(CPU, gemm.GemmShape(768, 768, 768), "bf16", 1)[0]
    gemm.multiply_matrices(*checked)
    assert gemm.wrong_elements(checked) == 0
    checked.out[0] *= 1.2  # beyond what bf16 rounds
    assert gemm.wrong_elements(checked) > 100


def test_memory_kernels_move_what_babelstream_counts() -> None:
    moved = {name: kernel.arrays_moved for name, kernel in memory.KERNELS.items()}
    assert moved == {"copy": 2, "mul": 2, "add": 3, "triad": 3, "dot": 2}
    found = list(memory.run(MeasuredDevice(CPU, HostClock(), BRIEF, 2**18, 3 * 2**20)))
    assert [figure.test for figure in found] == [f"memory_{name}" for name in moved]
    for figure, arrays in zip(found, moved.values(), strict=True):
        assert figure.wrong == 0, figure
        assert figure.timing is not None and figure.value is not None
        assert figure.value == pytest.approx(arrays * 2**20 / figure.timing.median_s / 1e9)


def test_arrays_are_four_times_the_cache_where_that_fits() -> None:
    assert memory.count_array_elements(cache_bytes=256 * 2**20, max_bytes=2**40) * 4 == 2**30
    assert memory.count_array_elements(cache_bytes=256 * 2**20, max_bytes=3 * 2**20) * 4 == 2**20


def test_a_figure_of_the_cache_says_so() -> None:
    small, large = (
        next(memory.run(MeasuredDevice(CPU, HostClock(), BRIEF, cache, 3 * 2**20))) for cache in (2**20, 2**18)
    )
    assert "the rate includes cache hits" in small.convention
    assert "the rate includes cache hits" not in large.convention


@pytest.mark.parametrize("name", list(memory.KERNELS))
def test_wrong_values_in_memory_are_found(name: str) -> None:
    kernel = memory.KERNELS[name]

    def spoilt(arrays: memory.Arrays) -> None:
        kernel.run(arrays)
        arrays.c[777] += 0.01
        arrays.total.add_(0.02 * len(arrays.a))

    found = next(memory.run(MeasuredDevice(CPU, HostClock(), BRIEF, 0, 3 * 2**16), {name: kernel._replace(run=spoilt)}))
    assert found.wrong == 1
    assert found.problem


@pytest.mark.parametrize(("num_local", "num_copies"), [(1, 0), (2, 2), (8, 8), (16, 16), (17, 9), (63, 16), (64, 16)])
def test_few_ranks_of_a_node_open_a_context_on_another_device(num_local: int, num_copies: int) -> None:
    peers = {rank: memory.find_peer(rank, num_local) for rank in range(num_local)}
    copies = {rank: peer for rank, peer in peers.items() if peer is not None}
    assert len(copies) == num_copies
    assert sorted(copies.values()) == sorted(copies)  # each device of them receives one copy
    assert all(rank != peer and peer < num_local for rank, peer in copies.items())


def test_the_last_level_cache_is_read_from_the_kernel(tmp_path: Path) -> None:
    for index, (level, size) in enumerate([("1", "48K"), ("2", "2048K"), ("3", "32768K")]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert memory.read_host_cache_bytes(tmp_path) == 32 * 2**20
    assert memory.read_host_cache_bytes(tmp_path / "nothing") == 32 * 2**20


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # nccl-tests prints 8589934592 B in 40903 us on 8 ranks as algbw 210.01, busbw 367.51.
    assert collectives.compute_algorithm_bandwidth(8589934592, 40903e-6) == pytest.approx(210.01, abs=0.005)
    assert collectives.compute_bus_bandwidth("all_reduce", 8589934592, 40903e-6, 8) == pytest.approx(367.51, abs=0.005)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    assert collectives.compute_bus_bandwidth(operation, 10**9, 1.0, 8) == pytest.approx(factor)
    assert collectives.compute_bus_bandwidth(operation, 10**9, 1.0, 1) is None


@pytest.mark.parametrize(("asked", "ranks", "measured"), [(8, 5, 20), (1000, 3, 996), (2**20, 8, 2**20), (0, 4, 16)])
def test_sizes_are_whole_elements_for_each_rank(asked: int, ranks: int, measured: int) -> None:
    # AMD-AGI/Primus takes the bytes of one rank for all_gather and reduce_scatter: 8 times too low on 8 devices.
    assert collectives.round_bytes(asked, ranks) == measured


def test_a_single_rank_measures_nothing_and_says_so() -> None:
    alone = collectives.RankGroup("node", (0,), 0, CPU, None)
    found = collectives.run("all_reduce", 1024, alone, 0.1)
    assert (found.busbw_gb_per_s, found.algbw_gb_per_s) == (None, None)
    assert found.problem.startswith("single rank")


def test_codes_tell_sources_apart_and_sums_are_exact() -> None:
    index = torch.arange(5)
    assert len({int(collectives.encode_element(rank, 3, index)[2]) for rank in range(4096)}) == 4096
    total = sum(collectives.compute_term(rank, index) for rank in range(8192))
    assert isinstance(total, torch.Tensor)
    assert int(total.max()) < 2**24  # what fp32 holds exactly


def test_an_effort_keeps_within_a_time_limit() -> None:
    short = limit_effort(FULL, limit_s=4.0)
    assert (short.longest_warm_up_s, short.measure_s) == (1.0, 1.0)
    assert limit_effort(FULL, limit_s=1000.0) == FULL


def test_quick_tests_are_brief() -> None:
    assert QUICK.longest_warm_up_s + QUICK.measure_s < 1.0
