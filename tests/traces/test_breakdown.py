"""Where the time goes: against sums over single ticks, TraceLens' published rows, and real traces of a CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fakes import cli
from primus.errors import PrimusError, UsageError

np = pytest.importorskip("numpy")

from primus.traces.breakdown import (  # noqa: E402 - needs numpy
    TimeBreakdown,
    compute_breakdown,
    find_launching_operators,
    find_misleading_parts,
    find_own_times,
)
from primus.traces.format import format_timeline  # noqa: E402
from primus.traces.operators import list_operators  # noqa: E402
from primus.traces.trace import check_memory, read_trace  # noqa: E402
from traces.chrome_trace import STREAM_OF_NCCL, TraceWriter  # noqa: E402

NAMES = ("Cijk_gemm_bf16", "flash_fwd_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "Memcpy HtoD", "Memset")


def break_down(writer: TraceWriter, folder: Path) -> TimeBreakdown:
    return compute_breakdown(read_trace(writer.write(folder / "trace.json")))


def test_damaged_durations_take_no_time_and_a_trace_without_any_is_refused(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add_kernel("Cijk_gemm_bf16", 0, 10)
    writer.add_kernel("Cijk_gemm_bf16", 20, 12)
    found = break_down(writer, tmp_path)
    assert (found.computation_us, found.total_us) == (10, 20)
    writer.events[:] = [{**event, "dur": "long"} for event in writer.events]
    with pytest.raises(UsageError, match="no event of the trace has a duration"):
        read_trace(writer.write(tmp_path / "trace.json"))


@pytest.mark.parametrize("seed", range(5))
def test_random_timelines_agree_with_counting_ticks(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    writer = TraceWriter()
    ticks: dict[str, set[int]] = {"computation": set(), "communication": set(), "copy": set()}
    for _ in range(80):
        name, start, length = dice.choice(NAMES), dice.randrange(1000), dice.randrange(1, 40)
        writer.add_kernel(name, start, start + length, dice.randrange(3))
        kind = "communication" if "nccl" in name else "copy" if "Memcpy" in name else "computation"
        ticks[kind] |= set(range(start, start + length))
    found = break_down(writer, tmp_path)
    computing, talking, copying = ticks["computation"], ticks["communication"], ticks["copy"]
    assert found.computation_us == len(computing)
    assert found.communication_us == len(talking)
    assert found.exposed_communication_us == len(talking - computing)
    assert found.hidden_communication_us == len(talking & computing)
    assert found.exposed_copy_us == len(copying - computing - talking)
    everything = computing | talking | copying
    assert found.busy_us == len(everything)
    assert found.total_us == max(everything) + 1 - min(everything)
    assert found.idle_us == found.total_us - len(everything)


def test_the_rows_of_tracelens_are_reproduced(tmp_path: Path) -> None:
    """The gpu_timeline that TraceLens publishes (docs of AMD-AGI/TraceLens, ms), from activities that give it."""
    writer = TraceWriter()
    end = 56305.19e3
    writer.add_kernel("Cijk_gemm", 0, end)
    writer.add_kernel("ncclDevKernel_Generic", end - 5000, end + 240.88e3, STREAM_OF_NCCL)
    writer.add_kernel("Memcpy DtoD", end + 200e3, end + 255.32e3, 3)
    writer.add_kernel("Cijk_gemm", end + 398.48e3, end + 398.48e3)
    found = break_down(writer, tmp_path)
    rows = (found.computation_us, found.exposed_communication_us, found.exposed_copy_us, found.busy_us, found.idle_us)
    assert [round(row / 1e3, 2) for row in rows] == [56305.19, 240.88, 14.44, 56560.51, 143.16]
    assert round(found.total_us / 1e3, 2) == 56703.67


def test_idle_time_is_blamed_on_data_host_or_the_kernels_before(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add_kernel("gemm", 0, 100, correlation=1)
    writer.add_kernel("gemm", 200, 300, correlation=2)  # launched 70 late, of which 30 waiting for data
    writer.add_kernel("gemm", 340, 345, correlation=3)  # launched in time
    writer.add_kernel("gemm", 350, 400)  # launched by nobody that the trace knows
    for correlation, end in ((1, -5), (2, 170), (3, 290)):
        writer.add("cuda_runtime", "hipLaunchKernel", end - 5, end, correlation=correlation)
    writer.add("user_annotation", "data", 120, 150)
    writer.add("user_annotation", "ProfilerStep#4", 0, 400)
    found = break_down(writer, tmp_path)
    idle = found.idle
    assert (idle.data_us, idle.host_us, idle.kernel_us, idle.unknown_us) == (30, 40, 30 + 40, 5)
    assert found.idle_us == 30 + 40 + 70 + 5
    assert (found.num_short_kernels, found.num_kernels) == (1, 4)
    assert (found.num_steps, found.step_us) == (1, 400)


def test_kernels_count_for_the_operator_that_launched_them(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.members["deviceProperties"] = [{"name": "AMD Instinct MI300X"}]
    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    writer.add("cpu_op", "aten::mm", 0, 10, **{"External id": 5}, **shapes)
    writer.add_kernel("Cijk_unknown_name", 20, 220, **{"External id": 5})
    writer.add("cpu_op", "aten::relu", 11, 12, **{"External id": 6})
    writer.add_kernel("elementwise", 220, 270, **{"External id": 6})
    trace = read_trace(writer.write(tmp_path / "trace.json"))
    row, other = list_operators(trace)
    assert (row.share, other.share) == (0.8, 0.2) and other.tflops is None
    assert row.gb_per_s == pytest.approx(3 * 2 * 4096**2 / 200e-6 / 1e9)
    assert (row.name, row.count, row.time_us, row.category) == ("aten::mm", 1, 200, "gemm")
    rate = 2 * 4096**3 / 200e-6 / 1e12
    assert row.tflops == pytest.approx(rate)
    assert (row.bound, row.roofline_share) == ("compute", pytest.approx(rate / 1307.4, rel=1e-3))


def test_a_trace_of_a_cpu_has_operators_as_its_timeline(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import profile, record_function

    a = torch.randn(256, 256, requires_grad=True)
    with profile(record_shapes=True) as recorded:
        for step in range(2):
            with record_function(f"ProfilerStep#{step}"):
                (a @ a).sum().backward()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(tmp_path / "trace.json")
    found = compute_breakdown(trace)
    assert (found.timeline, found.num_steps, found.communication_us) == ("host", 2, 0)
    assert found.busy_us + found.idle_us == pytest.approx(found.total_us)
    assert 0 < found.computation_us <= found.total_us
    (product, *_) = [row for row in list_operators(trace) if row.name == "aten::mm"]
    assert (product.shape, product.count) == ("[256,256] [256,256]", 2 * 3)
    assert product.tflops == pytest.approx(2 * 256**3 * product.count / product.time_us / 1e6)


def test_a_trace_that_memory_cannot_hold_is_refused_before_memory_is_gone(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1000000 kB\n")
    check_memory(Path("t.json"), 7, 300 << 20, tmp_path)
    with pytest.raises(PrimusError, match=r"t\.json: too large for the memory of this machine: the first 9 events"):
        check_memory(Path("t.json"), 9, 400 << 20, tmp_path)


def test_a_limit_of_memory_of_the_process_is_one_message(tmp_path: Path) -> None:
    writer = TraceWriter()
    for number in range(100_000):
        writer.add("cpu_op", f"aten::op_{number % 7}", 10 * number, 10 * number + 5)
    path = writer.write(tmp_path / "rank_0.json")
    before = "import resource, numpy; used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    before += "resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)"
    done = cli.run("direct", "--", "analyze", "trace", str(path), cwd=tmp_path, before=before, OPENBLAS_NUM_THREADS="1")
    assert (done.returncode, "needs more memory than this process may use" in done.stderr) == (1, True), done.stderr


def test_kernels_of_the_step_before_the_recording_are_left_out(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add_kernel("gemm_before", 0, 40, correlation=7)
    writer.add("cuda_runtime", "cudaLaunchKernel", 45, 46, correlation=8)
    writer.add_kernel("gemm", 50, 60, correlation=8)
    writer.add_kernel("gemm_of_a_graph", 70, 80, correlation=9)
    trace = read_trace(writer.write(tmp_path / "rank_0.json"))
    assert compute_breakdown(trace).total_us == 30
    assert trace.notes == [
        "rank_0.json: what was launched before the recording began is excluded: 1 of 3 activities of the device"
    ]


def test_collectives_of_a_host_are_cut_at_the_steps(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add("user_annotation", "ProfilerStep#3", 1000, 2000)
    writer.add("cpu_op", "aten::mm", 1000, 1400)
    writer.add("user_annotation", "gloo:all_reduce", 1300, 9000, tid=2)  # ends long after the last step
    writer.add("user_annotation", "gloo:broadcast", 5000, 9000, tid=2)
    found = break_down(writer, tmp_path)
    assert found.exposed_communication_us == 600
    assert [(row.collective, row.time_us, row.exposed_us) for row in found.collectives] == [
        ("all-reduce", 700, 600),
        ("broadcast", 0, 0),
    ]
    assert "\n1 step, 1.00 ms" in format_timeline(found)


def test_notes_name_rows_that_are_read_wrongly(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add("cpu_op", "aten::mm", 0, 100)
    writer.add("cuda_runtime", "hipLaunchKernel", 10, 20)
    path = writer.write(tmp_path / "cut.json")
    assert "the times are those of the host" in find_misleading_parts(read_trace(path))[0]
    writer.add_kernel("Cijk_gemm_bf16", 0, 100)
    assert find_misleading_parts(read_trace(writer.write(path))) == []
    writer.add("cpu_op", "symm_mem::multimem_all_reduce_", 90, 100, **{"External id": 7})
    writer.add_kernel("multimem_all_reduce_kernel", 100, 2100, **{"External id": 7})
    (note,) = find_misleading_parts(read_trace(writer.write(path)))
    assert "1 kernels of communication" in note and "2.00 ms as computation" in note


def list_own_times(writer: TraceWriter, folder: Path) -> dict[str, float]:
    trace = read_trace(writer.write(folder / "trace.json"))
    found: dict[str, float] = {}
    for start, end, owner in zip(*find_own_times(trace.operators), strict=True):
        name = trace.names[trace.operators.name[owner]]
        found[name] = found.get(name, 0.0) + float(end - start)
    return found


def test_operators_of_several_threads_at_the_same_time_are_nested_by_thread(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add("cpu_op", "outer", 0, 100, tid=1)
    writer.add("cpu_op", "backward", 10, 90, tid=2)
    writer.add("cpu_op", "inner", 20, 50, tid=1)
    writer.add("cpu_op", "leaf", 30, 40, tid=2)
    found = list_own_times(writer, tmp_path)
    assert found == {"outer": 70, "inner": 30, "backward": 70, "leaf": 10}


def test_of_operators_that_start_together_the_longer_one_contains_the_other(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add("cpu_op", "child", 5, 9)
    writer.add("cpu_op", "parent", 5, 25)
    writer.add("cpu_op", "twin", 25, 26)
    assert list_own_times(writer, tmp_path) == {"parent": 16, "child": 4, "twin": 1}


def test_a_kernel_of_an_operator_that_the_trace_lacks_belongs_to_no_other(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add("cpu_op", "aten::mm", 0, 1, **{"External id": 5})
    writer.add("cpu_op", "aten::relu", 1, 2, **{"External id": 9})
    writer.add_kernel("a", 10, 20, **{"External id": 5})
    writer.add_kernel("b", 20, 30, **{"External id": 6})
    writer.add_kernel("c", 30, 40, **{"External id": 10})
    writer.add("cuda_runtime", "hipLaunchKernel", 3, 4, correlation=77, **{"External id": 9})
    writer.add_kernel("d", 40, 50, correlation=77)
    owners = find_launching_operators(read_trace(writer.write(tmp_path / "trace.json")))
    assert owners.tolist() == [0, -1, -1, 1]


def test_the_launch_bound_share_is_short_kernels_and_late_launches_of_the_whole_time(tmp_path: Path) -> None:
    writer = TraceWriter()
    writer.add_kernel("gemm", 0, 100, correlation=1)
    writer.add_kernel("tiny", 160, 164, correlation=2)  # launched 40 late, 20 after its launch
    writer.add_kernel("gemm", 164, 200, correlation=3)
    for correlation, end in ((1, -5), (2, 140), (3, 150)):
        writer.add("cuda_runtime", "hipLaunchKernel", end - 5, end, correlation=correlation)
    found = break_down(writer, tmp_path)
    assert found.launch_bound_share == pytest.approx((4 + 40 + 20) / 200)
