"""Measurements on a device are possible ones; with the marker `gpu` on a CUDA or ROCm device, and always on the CPU.

The same bodies run on both, so that those for GPUs do not rot on machines without one.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
import torch

from fakes import cli
from machine.test_health import LISTED, METRIC, amd_smi, machine
from primus.errors import PrimusError
from primus.machine.health import DeviceHealth, read_health
from primus.machine.probe import probe
from primus.measure.devices import memory
from primus.measure.devices.device import find_cache_bytes, find_free_bytes
from primus.measure.devices.device_peaks import find_device_peaks
from primus.measure.kernels import block_scaled, gemm
from primus.measure.timing import QUICK, MeasuredDevice, create_clock, measure_call
from primus.session.ranks import torch_processes

pytestmark = pytest.mark.native
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ABOVE_PEAK = 1.02
"""Peaks are at the clock of the data sheet, and times have a resolution."""


def find_most_bytes(device: torch.device) -> int:
    """Memory for the arrays of a test."""
    return 48 << 20 if device.type == "cpu" else min(8 << 30, find_free_bytes(device) // 2)


@pytest.mark.parametrize("name", DEVICES)
def test_the_clock_of_a_device_agrees_with_the_time_of_the_wall(name: str) -> None:
    device = torch.device(name)
    size = 512 if name == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    clock = create_clock(device)
    timing = measure_call(lambda: torch.mm(a, b), clock, QUICK)
    calls = 20
    clock.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        torch.mm(a, b)
    clock.synchronize()
    wall_s = (time.perf_counter() - started) / calls
    assert timing.wall_s is not None and 0 < timing.min_s <= timing.median_s <= timing.max_s
    if name == "cuda":  # other processes of a CPU change the times of both by any factor
        assert timing.median_s == pytest.approx(wall_s, rel=0.2)
        assert timing.median_s == pytest.approx(timing.wall_s, rel=0.2)
    # A wrong unit or an event of another stream is off by orders of magnitude.
    assert 0.02 < timing.median_s / wall_s < 50


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_product_is_right_and_not_faster_than_its_device(dtype: gemm.Dtype, name: str) -> None:
    device = torch.device(name)
    clock, most = create_clock(device), find_most_bytes(device)
    cache_bytes = find_cache_bytes(device, None)
    size = 256 if name == "cpu" else 8192
    found = gemm.run(MeasuredDevice(device, clock, QUICK, cache_bytes, most), size, dtype)
    assert (found.problem, found.wrong) == ("", 0) and 0 < found.value < math.inf
    if name == "cuda":
        # Products of fp32 may use tf32, if the user's settings of PyTorch say so; here they do not.
        peak = find_device_peaks(device, clock, num_threads=1, max_bytes=most).tflops.get(dtype)
        assert peak is None or found.value <= ABOVE_PEAK * peak
    [operands] = gemm.create_operands(device, gemm.GemmShape(96, 80, 64, False, True), dtype, 1)
    gemm.multiply_matrices(*operands)
    exact = operands.a.cpu().double() @ operands.b.cpu().double()
    # The result is rounded to half of eps; sums of 64 terms in fp32 differ by a few eps of it.
    tolerance = 8 * torch.finfo(operands.out.dtype).eps
    assert (operands.out.cpu().double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.parametrize("name", DEVICES)
def test_memory_is_right_and_not_faster_than_its_device(name: str) -> None:
    device = torch.device(name)
    clock, most = create_clock(device), find_most_bytes(device)
    cache_bytes = find_cache_bytes(device, None)
    found = list(memory.run(MeasuredDevice(device, clock, QUICK, cache_bytes, most)))
    assert [figure.test for figure in found] == [f"memory_{kernel}" for kernel in memory.KERNELS]
    assert not [figure for figure in found if figure.problem or not 0 < figure.value < math.inf]
    if name == "cuda":  # the small arrays of a CPU are in its cache
        peak = find_device_peaks(device, clock, num_threads=1, max_bytes=most).gb_per_s
        assert peak is None or max(figure.value for figure in found) <= ABOVE_PEAK * peak


@pytest.mark.parametrize("name", DEVICES)
def test_the_peak_memory_of_a_step_has_what_was_freed_before_its_end(name: str) -> None:
    read = torch_processes.read_peak_memory
    device = torch.device(name)
    before = read(device)
    held = torch.ones(1 << 26, device=device)  # 256 MiB
    del held
    assert 0 <= before <= read(device) < (1 << 50)
    if name == "cuda":  # the process may have had more before, on a CPU
        assert read(device) >= 1 << 28
        assert read(device) <= torch.cuda.get_device_properties(device).total_memory
    assert read(device) >= 1 << 26


def check_vitals(vitals: DeviceHealth) -> None:
    """A GPU that works has values in these ranges, whatever its model."""
    assert vitals.temperature_c is not None and 5 < vitals.temperature_c < 120
    assert vitals.power_w is not None and 5 < vitals.power_w < 2000
    assert vitals.clock_mhz is None or 50 <= vitals.clock_mhz < 4000
    assert vitals.memory_used_bytes is not None and 0 <= vitals.memory_used_bytes < 1 << 40


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_clocks_power_and_temperature_of_gpus_are_read_in_their_units(is_real: bool, tmp_path: Path) -> None:
    if is_real:
        facts, environ = probe(environ=os.environ), dict(os.environ)
    else:
        facts, metric = machine(), [{"gpu": gpu, **METRIC} for gpu in (0, 1)]
        environ = amd_smi(tmp_path, list=LISTED, metric={"gpu_data": metric})
    found = read_health(facts, environ).devices
    assert len(found) == len(facts.devices) >= 1
    for vitals in found:
        check_vitals(vitals)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
def test_two_devices_reduce_right_and_at_a_possible_rate(name: str, tmp_path: Path) -> None:
    if name == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one device has no collectives")
    words = ("--op", "all_reduce", "--min-bytes", "1M", "--max-bytes", "1M", "--iters", "5", "--warmup", "2")
    command = ("direct", "--nproc", "2", "--", "benchmark", "collectives", *words, "--device", name, "--json")
    done = cli.run(*command, cwd=tmp_path, timeout_s=240, XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [row for rank in json.loads(done.stdout)["result"]["ranks"] for row in rank["rows"]]
    assert rows and all((row["wrong"], row["problem"]) == (0, "") for row in rows)
    # NVLink of GB300 and xGMI of MI355X have less than 2 TB/s.
    assert all(0 < row["value"] < 2000 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", block_scaled.FORMATS)
def test_products_of_block_formats_are_right_where_the_device_has_them(dtype: str) -> None:
    device, shape = torch.device("cuda"), gemm.GemmShape(256, 384, 512, False, True)
    try:
        block_scaled.check_device(device, dtype, shape.k)
    except PrimusError as error:
        pytest.skip(error.problem)
    [operands] = gemm.create_operands(device, shape, dtype, 1)
    gemm.create_multiply(device, shape, dtype)(*operands)
    assert gemm.wrong_elements(operands) == 0
