"""Published fp8 and MXFP4 weights read as the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch

from primus.checkpoint.quantized import DequantizedWeights
from primus.checkpoint.weights import TensorDict, TensorInfo
from primus.errors import PrimusError


def test_fp8_blocks_are_multiplied_by_their_scales() -> None:
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    reader = DequantizedWeights(TensorDict({"a.weight": weight, "a.weight_scale_inv": scales, "b": torch.ones(2)}))
    assert reader.list_tensors() == {
        "a.weight": TensorInfo((300, 200), torch.bfloat16),
        "b": TensorInfo((2,), torch.float32),
    }
    expected = weight.float()
    for row in range(300):
        for block in range(2):
            columns = slice(block * 128, (block + 1) * 128)
            expected[row, columns] *= scales[row // 128, block]
    assert torch.equal(reader.read("a.weight"), expected.bfloat16())
    assert torch.equal(reader.read("a.weight", slice(100, 290)), expected[100:290].bfloat16())


def test_mxfp4_values_are_those_of_the_format_of_each_expert_transposed() -> None:
    experts, rows, blocks = 2, 3, 2
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(256, (experts, rows, blocks, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 135, (experts, rows, blocks), dtype=torch.uint8, generator=generator)
    reader = DequantizedWeights(TensorDict({"up_blocks": packed, "up_scales": scales}))
    assert reader.list_tensors()["up"].shape == (experts, blocks * 32, rows)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    found = reader.read("up", slice(1, 2))[0]
    for row in range(rows):
        for column in range(blocks * 32):
            block, place = divmod(column, 32)
            byte = int(packed[1, row, block, place // 2])
            nibble = byte >> 4 if place % 2 else byte & 15
            value = magnitudes[nibble & 7] * (-1 if nibble & 8 else 1) * 2.0 ** (int(scales[1, row, block]) - 127)
            assert float(found[column, row]) == value


def test_fp8_without_scales_is_refused() -> None:
    with pytest.raises(PrimusError, match="a is fp8 without its scales"):
        DequantizedWeights(TensorDict({"a": torch.ones(4, 4).to(torch.float8_e4m3fn)}))


def test_scales_of_another_shape_are_refused() -> None:
    tensors = {"a": torch.ones(130, 4).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(1, 1)}
    with pytest.raises(PrimusError, match=r"a_scale_inv has shape \[1, 1\] instead of \[2, 1\]"):
        DequantizedWeights(TensorDict(tensors))
