"""Formats with scales of blocks are accepted where the device has them, and refused with the reason elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from primus.config.number_formats import find_block_format
from primus.config.schema import ModelSpec, Trainer, TrainingConfig
from primus.errors import UsageError
from primus.session.settings.number_formats import check_number_format

MXFP8 = {"fp8_recipe": "mxfp8"}
NVFP4 = {"fp4": "e2m1"}


def build_trainer(fp8: Any, **settings: Any) -> Trainer:
    spec = ModelSpec(num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=8)
    training = TrainingConfig(fp8=fp8)
    return Trainer(framework="megatron", model=spec, training=training, backend_args=settings)


@pytest.mark.parametrize(
    ("fp8", "settings", "found"),
    [
        ("e4m3", MXFP8, "mxfp8"),
        (None, MXFP8, ""),
        ("hybrid", {"fp8_recipe": "tensorwise"}, ""),
        ("hybrid", {}, ""),
        (None, NVFP4, "nvfp4"),
        (None, {**NVFP4, "fp4_recipe": "mxfp4"}, "mxfp4"),
        (None, {"fp4": None, "fp4_recipe": "nvfp4"}, ""),
    ],
)
def test_the_format_is_that_of_the_recipe_that_is_in_use(fp8: str | None, settings: dict[str, Any], found: str) -> None:
    assert find_block_format(build_trainer(fp8, **settings)) == found


@pytest.mark.parametrize(
    ("device", "fp8", "settings"),
    [
        ("AMD Instinct MI355X", "e4m3", MXFP8),
        ("NVIDIA B200", "e4m3", MXFP8),
        ("NVIDIA GB300", None, NVFP4),
        ("AMD Instinct MI300X", "hybrid", {}),
        ("A GPU of tomorrow", None, NVFP4),
    ],
)
def test_a_device_that_has_the_format_or_is_not_known_trains(
    device: str, fp8: str | None, settings: dict[str, Any]
) -> None:
    check_number_format(build_trainer(fp8, **settings), device)


@pytest.mark.parametrize(
    ("device", "fp8", "settings", "problem"),
    [
        (
            "AMD Instinct MI300X",
            "e4m3",
            MXFP8,
            "fp8_recipe: mxfp8: the matrix units of MI300X have no scales of blocks",
        ),
        ("NVIDIA H100 80GB HBM3", "e4m3", MXFP8, "fp8_recipe: mxfp8: the matrix units of H100"),
        ("NVIDIA H200", None, NVFP4, "fp4_recipe: nvfp4: the matrix units of H200"),
        ("AMD Instinct MI355X", None, NVFP4, "fp4_recipe: nvfp4: a format of NVIDIA; MI355X has mxfp8 and mxfp4"),
    ],
)
def test_a_device_without_the_format_is_refused_with_the_reason(
    device: str, fp8: str | None, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        check_number_format(build_trainer(fp8, **settings), device)
    assert caught.value.hint
