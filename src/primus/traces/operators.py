"""Operators by the shapes of their inputs: time, achieved FLOP/s, and their place under the roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from primus.machine.profile import Dtype, find_peak_tflops, find_profile_by_name
from primus.traces.breakdown import find_launching_operators, find_own_times
from primus.traces.categories import find_category
from primus.traces.trace import OperatorShape, Trace

TYPE_BYTES = {
    "float": 4, "double": 8, "int": 4, "long int": 8, "short int": 2, "bool": 1, "unsigned char": 1, "signed char": 1,
    "c10::BFloat16": 2, "c10::Half": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2": 1,
    "c10::Float8_e5m2fnuz": 1,
}  # fmt: skip
"""Size of an element by the name that Kineto gives its type."""
PEAK_TYPES: dict[str, Dtype] = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
"""Precision of the peak by type; of 8-bit types the name begins alike."""
BACKWARD_FACTOR = 2.5
"""FLOPs of the backward pass of attention, of those of its forward pass (arXiv 2307.08691, section 4.1)."""


class OperatorTime(Struct, frozen=True, kw_only=True):
    """An operator with inputs of certain shapes."""

    name: str
    shape: str
    dtype: str
    category: str
    count: int
    time_us: float
    """Of all calls: kernels on a device, or the operator's own time on a host."""
    share: float
    """Of the time of all operators."""
    tflops: float | None
    """Achieved TFLOP/s; None if the FLOPs of the operator are not known."""
    gb_per_s: float | None
    """Achieved rate of its inputs and outputs, each counted once."""
    flops_per_byte: float | None
    bound: str
    """``compute`` or ``memory``: what limits it at best; empty if the peaks of the device are not known."""
    roofline_share: float | None
    """Achieved share of what the device can do at best at this intensity."""


def list_operators(trace: Trace, limit: int | None = None) -> list[OperatorTime]:
    """Operators with shapes, those with the longest time first."""
    operators = trace.operators
    if len(operators) == 0:
        return []
    times = np.zeros(len(operators))
    if trace.is_on_device:
        owners = find_launching_operators(trace)
        np.add.at(times, owners[owners >= 0], trace.device.duration[owners >= 0])
    else:
        starts, ends, owned = find_own_times(operators)
        np.add.at(times, owned, ends - starts)
    worked = np.flatnonzero(times > 0)
    keys = np.stack((operators.name[worked], operators.extra["shape"][worked]), axis=1)
    unique, places = np.unique(keys, axis=0, return_inverse=True)
    places = places.reshape(-1)
    sums, counts = np.bincount(places, times[worked]), np.bincount(places)
    total = float(sums.sum()) or 1.0
    order = np.argsort(-sums)[:limit]
    return [
        _describe_operator(trace, int(unique[i, 0]), int(unique[i, 1]), int(counts[i]), float(sums[i]), total)
        for i in order
    ]


def _describe_operator(trace: Trace, name: int, shape: int, count: int, time_us: float, total: float) -> OperatorTime:
    known = trace.shapes[shape] if shape >= 0 else OperatorShape((), ())
    dtype = next((each for each in known.types if each in TYPE_BYTES), "")
    flops = count_flops(trace.names[name], known)
    moved = count_bytes(trace.names[name], known) if flops else None
    seconds = time_us / 1e6
    tflops = flops * count / seconds / 1e12 if flops else None
    bound, share = _place_under_roofline(trace.device_name, dtype, flops, moved, tflops)
    return OperatorTime(
        name=trace.names[name],
        shape=str(known),
        dtype=dtype.removeprefix("c10::"),
        category=find_category(trace.names[name]),
        count=count,
        time_us=time_us,
        share=time_us / total,
        tflops=tflops,
        gb_per_s=moved * count / seconds / 1e9 if moved else None,
        flops_per_byte=flops / moved if flops and moved else None,
        bound=bound,
        roofline_share=share,
    )


def count_flops(name: str, shape: OperatorShape) -> float | None:
    """FLOPs of one call, a multiply and an add counted as two; None for operators that are not matrix products.

    Attention counts 4 B H Sq Sk D, half of it if it is causal.
    """
    dims: Sequence[Any] = shape.dims
    short = name.rpartition("::")[2]
    if short in ("mm", "_scaled_mm") and _have_ranks(dims, 2, 2):
        return 2.0 * _multiply(dims[0]) * float(dims[1][1])
    if short == "addmm" and len(dims) > 2 and _have_ranks(dims[1:], 2, 2):
        return 2.0 * _multiply(dims[1]) * float(dims[2][1])
    if short == "bmm" and _have_ranks(dims, 3, 3):
        return 2.0 * _multiply(dims[0]) * float(dims[1][2])
    if short == "baddbmm" and len(dims) > 2 and _have_ranks(dims[1:], 3, 3):
        return 2.0 * _multiply(dims[1]) * float(dims[2][2])
    if short in ("_linear_pointwise", "mkldnn_linear", "_mkl_linear") and len(dims) > 1 and len(dims[1]) == 2:
        return 2.0 * _multiply(dims[0]) * float(dims[1][0])
    return _count_attention_flops(short, shape)


def _count_attention_flops(short: str, shape: OperatorShape) -> float | None:
    if "scaled_dot_product" in short:
        sequence = -2  # [B, H, S, D]
    elif short.startswith(("_flash_attention", "_efficient_attention", "_flash_attn")):
        sequence = -3  # [B, S, H, D]
    else:
        return None
    is_backward = "backward" in short
    operands = [dims for dims in shape.dims if len(dims) == 4][is_backward:]  # the gradient of the output is first
    if len(operands) < 3:
        return None
    flops = 4.0 * _multiply(operands[0]) * float(operands[1][sequence])
    return flops * (BACKWARD_FACTOR if is_backward else 1.0) * (0.5 if shape.is_causal else 1.0)


def count_bytes(name: str, shape: OperatorShape) -> float:
    """Bytes of the inputs and of the output of a matrix product or of attention, each counted once."""
    sizes = [
        math.prod(dims) * TYPE_BYTES.get(kind, 0)
        for dims, kind in zip(shape.dims, shape.types, strict=False)
        if dims and all(isinstance(each, int) for each in dims)
    ]
    width = next((TYPE_BYTES[kind] for kind in shape.types if kind in TYPE_BYTES), 0)
    matrices = [dims for dims in shape.dims if len(dims) > 1]
    if len(matrices) < 2:
        return float(sum(sizes))
    is_product = "mm" in name.rpartition("::")[2]
    a, b = matrices[-2:] if is_product else matrices[:2]
    output = math.prod(a[:-1]) * b[-1] if is_product else math.prod(a)
    return float(sum(sizes) + output * width)


def _place_under_roofline(
    device_name: str, dtype: str, flops: float | None, moved: float | None, tflops: float | None
) -> tuple[str, float | None]:
    """What limits an operator at best, and the achieved share of that."""
    precision: Dtype | None = "fp8" if dtype.startswith("c10::Float8") else PEAK_TYPES.get(dtype)
    profile = find_profile_by_name(device_name) if device_name else None
    peak = find_peak_tflops(device_name, precision) if profile and precision else None
    if not (flops and moved and tflops and peak and profile and profile.memory_gb_per_s):
        return "", None
    bandwidth = profile.memory_gb_per_s / profile.devices_per_gpu
    by_memory = flops / moved * bandwidth / 1000
    return ("memory" if by_memory < peak else "compute"), tflops / min(peak, by_memory)


def _multiply(sizes: Sequence[int]) -> float:
    return float(math.prod(sizes))


def _have_ranks(dims: Sequence[Any], *ranks: int) -> bool:
    return len(dims) >= len(ranks) and all(len(dims[i]) == rank for i, rank in enumerate(ranks))
