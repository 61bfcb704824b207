"""Published weights in 8 and 4 bits, read as the bfloat16 weights that they stand for.

DeepSeek's fp8: a tensor of float8_e4m3 with `NAME_scale_inv` [rows / 128, columns / 128], float32, by which blocks are
multiplied (deepseek-ai/DeepSeek-V3, README_WEIGHTS.md, inference/fp8_cast_bf16.py). gpt-oss' MXFP4: `NAME_blocks`
[experts, rows, blocks, 16], two 4-bit values a byte, the low one first, with `NAME_scales` [experts, rows, blocks],
exponents with a bias of 127; NAME is the transpose of each expert (openai/gpt-oss, gpt_oss/torch/weights.py; OCP
Microscaling Formats 1.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from primus.checkpoint.weights import TensorInfo, WeightReader, get_bounds
from primus.errors import PrimusError

FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
BLOCKS_SUFFIX = "_blocks"
SCALES_SUFFIX = "_scales"
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit float E2M1; the highest bit is the sign."""
EXPONENT_BIAS = 127
VALUES_PER_BLOCK = 32


class DequantizedWeights:
    """A source whose quantized tensors read as bfloat16; others are passed on.

    Raises:
        PrimusError: A quantized tensor lacks its scales, or these have another shape.
    """

    def __init__(self, weights: WeightReader) -> None:
        self._weights = weights
        self._stored = dict(weights.list_tensors())
        self._tensors = {
            name: info
            for name, info in self._stored.items()
            if not (name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self._stored)
        }
        for name in list(self._tensors):
            if name + SCALE_SUFFIX in self._stored:
                self._tensors[name] = self._describe_fp8(name)
            elif self._tensors[name].dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise PrimusError(f"{name} is fp8 without its scales {name}{SCALE_SUFFIX}")
        for name in [name for name in self._tensors if name.endswith(BLOCKS_SUFFIX)]:
            whole = name.removesuffix(BLOCKS_SUFFIX)
            self._tensors[whole] = self._describe_mxfp4(whole)
            del self._tensors[name], self._tensors[whole + SCALES_SUFFIX]

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        if name + SCALE_SUFFIX in self._stored:
            return self._read_fp8(name, rows)
        if name + BLOCKS_SUFFIX in self._stored:
            return self._read_mxfp4(name, rows)
        return self._weights.read(name, rows)

    def _describe_fp8(self, name: str) -> TensorInfo:
        shape, scales = self._stored[name].shape, self._stored[name + SCALE_SUFFIX].shape
        expected = tuple(-(-width // FP8_BLOCK) for width in shape)
        if scales != expected:
            raise PrimusError(f"{name}{SCALE_SUFFIX} has shape {list(scales)} instead of {list(expected)}")
        return TensorInfo(shape, torch.bfloat16)

    def _read_fp8(self, name: str, rows: slice | None) -> Tensor:
        num_rows, num_columns = self._stored[name].shape
        start, stop = get_bounds(rows, num_rows)
        first_block = start // FP8_BLOCK
        scales = self._weights.read(name + SCALE_SUFFIX, slice(first_block, -(-stop // FP8_BLOCK))).float()
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[start - first_block * FP8_BLOCK :][: stop - start]
        scales = scales.repeat_interleave(FP8_BLOCK, 1)[:, :num_columns]
        return (self._weights.read(name, slice(start, stop)).float() * scales).bfloat16()

    def _describe_mxfp4(self, name: str) -> TensorInfo:
        blocks = self._stored[name + BLOCKS_SUFFIX].shape
        scales = self._stored.get(name + SCALES_SUFFIX)
        if len(blocks) != 4 or blocks[3] != VALUES_PER_BLOCK // 2 or scales is None or scales.shape != blocks[:3]:
            raise PrimusError(f"{name}{BLOCKS_SUFFIX} of shape {list(blocks)} does not fit {name}{SCALES_SUFFIX}")
        return TensorInfo((blocks[0], blocks[2] * VALUES_PER_BLOCK, blocks[1]), torch.bfloat16)

    def _read_mxfp4(self, name: str, rows: slice | None) -> Tensor:
        start, stop = get_bounds(rows, self._stored[name + BLOCKS_SUFFIX].shape[0])
        experts = []
        # One expert at a time: unpacking takes several times its size.
        for expert in range(start, stop):
            one = slice(expert, expert + 1)
            blocks = self._weights.read(name + BLOCKS_SUFFIX, one)[0]
            scales = self._weights.read(name + SCALES_SUFFIX, one)[0]
            experts.append(decode_mxfp4(blocks, scales).T)
        shape = self._tensors[name].shape
        return torch.stack(experts) if experts else torch.empty((0, *shape[1:]), dtype=torch.bfloat16)


def decode_mxfp4(blocks_RGN: Tensor, scales_RG: Tensor) -> Tensor:
    """Values [R, G x 32], bfloat16, of R rows with G blocks of N = 16 bytes, and an exponent for each block."""
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], dtype=torch.bfloat16)
    low, high = (blocks_RGN & 15).int(), (blocks_RGN >> 4).int()
    decoded = torch.stack([values[low], values[high]], -1).flatten(-2)
    # By exponent, not by a product: powers of two are exact.
    return torch.ldexp(decoded, (scales_RG.int() - EXPONENT_BIAS).unsqueeze(-1)).flatten(-2)
