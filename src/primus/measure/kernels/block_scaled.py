"""Products of numbers that share scales in blocks, MXFP8, MXFP4 and NVFP4: operands, the call, and their values.

The scales are 1, because a rate does not depend on them. `torch._scaled_mm` takes them in an order of its own, padded
to 128 rows and 4 columns (ATen/native/cuda/ScaledBlas.cpp, is_blockwise_1x32_scaling and is_blockwise_1x16_scaling).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from primus.errors import PrimusError
from primus.machine.block_formats import find_format_problem
from primus.machine.profile import find_profile_by_name

ROW_TILE, COLUMN_TILE = 128, 4
"""Multiples of the rows and columns of scales."""
DEPTH_MULTIPLE = 32
"""Multiple of the length of the sums: the longest block, and the 16 bytes of a row that the libraries ask for."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three lower bits of a 4-bit number; the fourth is the sign (OCP Microscaling Formats, 5.3.3)."""
ONE_IN_E8M0 = 127
"""The byte of a scale 2**0 (OCP Microscaling Formats, 5.4.1)."""


class BlockFormat(NamedTuple):
    """A number format with scales."""

    element: torch.dtype
    scale: torch.dtype
    block: int
    """Elements with one scale."""
    peak: str
    """Key of the peak of its products in a profile."""

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two elements."""
        return self.element == torch.float4_e2m1fn_x2

    @property
    def element_bytes(self) -> float:
        """Bytes of an element with its share of a scale."""
        return (0.5 if self.is_packed else 1.0) + 1 / self.block


FORMATS = {
    "mxfp8": BlockFormat(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32, "fp8"),
    "mxfp4": BlockFormat(torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32, "fp4"),
    "nvfp4": BlockFormat(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16, "fp4"),
}


def check_device(device: torch.device, dtype: str, depth: int) -> None:
    """Check that a device multiplies a block format; torch judges a GPU whose model is not known.

    Raises:
        PrimusError: It does not, or the sums have another length than whole blocks.
    """
    if device.type != "cuda":
        raise PrimusError(f"{dtype}: not offered by {device}: only matrix units of GPUs have scales of blocks")
    profile = find_profile_by_name(torch.cuda.get_device_name(device))
    problem = find_format_problem(dtype, profile) if profile else ""
    if problem:
        raise PrimusError(f"{dtype}: {problem}")
    if depth % DEPTH_MULTIPLE:
        raise PrimusError(f"{dtype}: K={depth} is not a multiple of {DEPTH_MULTIPLE}")


def cast_rows(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """`rows` of fp32 in a block format whose scales are 1; two columns in a byte if it is packed."""
    chosen = FORMATS[dtype]
    if not chosen.is_packed:
        return rows.to(chosen.element)
    values = torch.tensor(E2M1_VALUES, device=rows.device)
    codes = torch.bucketize(rows.abs(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    codes |= (rows < 0).to(torch.uint8) << 3
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(chosen.element)


def read_packed(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """The values of 4-bit numbers, packed along `dim` in bytes, in fp64."""
    values = torch.tensor(E2M1_VALUES, device=codes.device, dtype=torch.float64)
    table = torch.cat([values, -values])
    return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim + 1).flatten(dim, dim + 1)


def make_scales(rows: int, depth: int, dtype: str, device: torch.device) -> torch.Tensor:
    """Scales of 1 for a matrix of `rows` sums of length `depth`."""
    chosen = FORMATS[dtype]
    columns = math.ceil(depth / chosen.block / COLUMN_TILE) * COLUMN_TILE
    count = math.ceil(rows / ROW_TILE) * ROW_TILE * columns
    if chosen.scale == torch.float8_e8m0fnu:
        return torch.full((count,), ONE_IN_E8M0, dtype=torch.uint8, device=device).view(chosen.scale)
    return torch.ones(count, device=device).to(chosen.scale)
