"""Ranks compared on one clock, and memory by category."""

from __future__ import annotations

from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from primus.traces.format import format_memory  # noqa: E402 - needs numpy
from primus.traces.memory import MEMORY_CATEGORIES, report_memory  # noqa: E402 - needs numpy
from primus.traces.ranks import compare_ranks  # noqa: E402
from primus.traces.trace import Trace, read_trace  # noqa: E402
from traces.chrome_trace import STREAM_OF_NCCL, TraceWriter  # noqa: E402


def write_rank(folder: Path, rank: int, starts: list[float], ends: list[float], shift_us: int) -> Trace:
    """A rank whose collectives begin and end at given times; its clock is ahead by `shift_us`."""
    writer = TraceWriter(rank, base_ns=1_700_000_000_000_000_000 + shift_us * 1000)
    for start, end in zip(starts, ends, strict=True):
        args = {"Collective name": "allreduce", "Process Group Name": "0"}
        writer.add_kernel("ncclDevKernel_Generic", start, end, STREAM_OF_NCCL, **args)
    return read_trace(writer.write(folder / f"rank_{rank}.json"))


@pytest.mark.parametrize("shift_us", [0, 5_000])
def test_the_rank_that_others_wait_for_is_found_on_clocks_that_differ(tmp_path: Path, shift_us: int) -> None:
    ends = [50.0, 150.0, 250.0]
    first = write_rank(tmp_path, 0, [10, 110, 210], ends, 0)
    late = write_rank(tmp_path, 1, [40, 140, 205], ends, shift_us)
    found = compare_ranks([late, first])
    assert found is not None
    zero, one = found.ranks
    assert (zero.rank, zero.wait_us, zero.caused_us, zero.times_last) == (0, 60, 5, 1)
    assert (one.rank, one.wait_us, one.caused_us, one.times_last) == (1, 5, 60, 2)
    assert zero.transfer_us == one.transfer_us == 10 + 10 + 40
    assert (found.median_skew_us, found.largest_skew_us, found.straggler) == (30, 30, 1)


def write_single_allocation(file: Path) -> Path:
    """A trace of a host, whose allocator counts from the start of the profile."""
    writer = TraceWriter()
    writer.add("cpu_op", "aten::mm", 10, 20)
    writer.add_memory(12, 1000, 0xA, 1000)
    return writer.write(file)


def test_allocations_are_categorised_by_when_they_are_made_and_released(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add("cpu_op", "aten::mm", 10, 20)
    writer.add("cpu_op", "aten::empty", 11, 12)
    writer.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 50, 80)
    writer.add("cpu_op", "aten::silu_backward", 55, 75)
    writer.add("user_annotation", "Optimizer.step#AdamW.step", 100, 120)
    rows = [
        (12, 1000, 0xA, 5000 + 1000),  # in mm, alive in backward: activation
        (30, 300, 0xB, 6300),  # released before backward: temporary
        (40, -300, 0xB, 6000),
        (60, 200, 0xC, 6200),  # in backward, alive in the optimizer: gradient
        (70, 50, 0xD, 6250),  # in backward, released there
        (72, -50, 0xD, 6200),
        (75, -1000, 0xA, 5200),
        (110, 400, 0xE, 5600),  # in the optimizer, never released
        (130, -200, 0xC, 5400),
        (140, -5000, 0xF, 400),  # allocated before the profile
    ]
    for time, size, address, total in rows:
        writer.add_memory(time, size, address, total)
    found = report_memory(read_trace(writer.write(tmp_path / "trace.json")))
    assert found is not None
    assert (found.device, found.peak_bytes, found.bytes_before, found.note) == ("host", 6300, 5000, "")
    levels = {
        sample.time_us: dict(zip(MEMORY_CATEGORIES, sample.bytes_by_category, strict=True)) for sample in found.samples
    }
    assert levels[58.0] == {
        "before the profile": 5000, "activation": 1000, "gradient": 200, "optimizer state": 0, "temporary": 50,
    }  # fmt: skip
    assert levels[128.0] == {
        "before the profile": 0, "activation": 0, "gradient": 0, "optimizer state": 400, "temporary": 0,
    }  # fmt: skip
    assert "within the profile" not in format_memory(found)
    within = report_memory(read_trace(write_single_allocation(tmp_path / "host.json")))
    assert within is not None and within.bytes_before == 0
    assert "only what was allocated within the profile counts" in format_memory(within)
    owners = [(row.owner, row.category, row.bytes) for row in found.owners]
    assert owners[1:] == [("aten::mm", "activation", 1000), ("outside of operators", "temporary", 300)]
