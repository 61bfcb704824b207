"""Rates of a device from results of `benchmark`, in place of those of its profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import structs

from primus.benchmark import BenchmarkResult, BenchmarkRow
from primus.errors import UsageError
from primus.prediction.device_rates import DeviceRates
from primus.runs.files import read_json

PRODUCT_BENCHMARKS = ("gemm", "gemm_dense", "gemm-dense")


def replace_rates(rates: DeviceRates, files: Sequence[str]) -> DeviceRates:
    """`rates` with the best product by precision and the bandwidths that the files have.

    Raises:
        UsageError: A file is no result of a benchmark, or has nothing that the prediction uses.
    """
    for file in files:
        result = read_json(Path(file), BenchmarkResult)
        rows = [row for row in result.rows if row.value and not row.problem]
        if result.benchmark in PRODUCT_BENCHMARKS:
            rates = _replace_products(rates, rows, file)
        elif result.benchmark == "collectives":
            rates = _replace_links(rates, rows, file, result.world_size)
        else:
            raise UsageError(
                f"{file}: results of benchmark {result.benchmark} are not used", "give those of gemm or collectives"
            )
    return rates


def _replace_products(rates: DeviceRates, rows: Sequence[BenchmarkRow], file: str) -> DeviceRates:
    best: dict[str, float] = {}
    for row in rows:
        dtype = str(row.case.get("dtype", ""))
        if row.unit == "TFLOP/s" and dtype in rates.tflops and row.value:
            best[dtype] = max(best.get(dtype, 0.0), row.value)
    _refuse_nothing(best, file, "TFLOP/s of bf16, fp8 or fp32")
    return structs.replace(rates, tflops=rates.tflops | best, sources=rates.sources | {"products": f"measured: {file}"})


def _replace_links(rates: DeviceRates, rows: Sequence[BenchmarkRow], file: str, world_size: int) -> DeviceRates:
    found = list(_list_bus_bandwidths(rows))
    _refuse_nothing(found, file, "bus bandwidths")
    sources = rates.sources
    if world_size > rates.domain:
        # Every member of a node has a ring through its own NIC.
        per_device = max(found) / rates.domain
        sources = sources | {"network": f"measured: {file}"}
        return structs.replace(rates, network_gb_per_s=per_device, sources=sources)
    return structs.replace(rates, link_gb_per_s=max(found), sources=sources | {"links": f"measured: {file}"})


def _list_bus_bandwidths(rows: Sequence[BenchmarkRow]) -> Iterator[float]:
    for row in rows:
        for name, value in row.figures.items():
            if name == "busbw_gb_per_s":
                yield value
        if row.unit == "GB/s" and "busbw_gb_per_s" not in row.figures and row.value:
            yield row.value


def _refuse_nothing(found: object, file: str, wanted: str) -> None:
    if not found:
        raise UsageError(f"{file}: no {wanted} in it", "give the file of a benchmark that succeeded")
