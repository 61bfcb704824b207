"""Latent attention and yarn: scales of published models, widths of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.frameworks.native.engine import rope
from primus.frameworks.native.engine.layout import ALONE
from primus.frameworks.native.engine.mla import LatentAttention
from primus.models.counts import head_dim


@pytest.mark.parametrize(("preset", "scale"), [("deepseek_v3", 0.382499), ("deepseek_v2_lite", 0.324481)])
def test_scores_have_the_published_scale(preset: str, scale: float) -> None:
    """At 24 channels; transformers, `DeepseekV3Attention.scaling` with the published config.json."""
    spec = load_model(preset)
    assert rope.compute_yarn_scale(spec, spec.mscale_all_dim) ** 2 * 24**-0.5 == pytest.approx(scale, abs=1e-6)
    assert rope.compute_table_scale(spec) == pytest.approx(1.0)


def test_tables_of_gpt_oss_have_its_scale() -> None:
    assert rope.compute_table_scale(load_model("gpt_oss_20B")) == pytest.approx(1.3466, abs=1e-4)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    spec = load_model("deepseek_v3")
    scaled = rope.compute_frequencies(spec, 64)
    plain = rope.compute_frequencies(replace(spec, rope_type="default", rotary_scaling_factor=1.0), 64)
    assert torch.equal(scaled[:10], plain[:10])
    torch.testing.assert_close(scaled[24:], plain[24:] / 40)
    assert (scaled[:-1] > scaled[1:]).all()


@pytest.mark.parametrize("widths", [{"v_head_dim": 24}, {"v_head_dim": 16}, {"v_head_dim": 40, "q_lora_rank": 12}])
def test_values_may_be_narrower_or_wider_than_keys(widths: dict[str, Any]) -> None:
    spec = ModelSpec(
        num_layers=1, hidden_size=32, ffn_hidden_size=32, num_attention_heads=3, vocab_size=64,
        multi_latent_attention=True, kv_lora_rank=20, qk_head_dim=16, qk_pos_emb_head_dim=8, **widths,
    )  # fmt: skip
    layer = LatentAttention(spec, ALONE).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rotation = rope.compute_tables(rope.compute_frequencies(spec, 8).double(), 9, torch.float64)
    torch.testing.assert_close(layer(x, rotation), attend_plainly(layer, spec, x), rtol=1e-10, atol=1e-12)


def attend_plainly(layer: LatentAttention, spec: ModelSpec, x: torch.Tensor) -> torch.Tensor:
    """Head by head, with complex rotations of neighbors."""
    angles = torch.outer(torch.arange(x.shape[1]).double(), rope.compute_frequencies(spec, 8).double())
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(part: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    down = x if layer.query_down is None else layer.query_norm(layer.query_down(x))
    queries = (layer.query or layer.query_up)(down).chunk(3, -1)
    latent, shared = layer.latent(x).split((20, 8), -1)
    pairs = layer.key_value(layer.latent_norm(latent)).chunk(3, -1)
    mixed = []
    for query, pair in zip(queries, pairs, strict=True):
        key, value = pair.split((16, spec.v_head_dim), -1)
        scores = query[..., :16] @ key.mT + rotate(query[..., 16:]) @ rotate(shared).mT
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed.append((scores / head_dim(spec) ** 0.5).masked_fill(future, -torch.inf).softmax(-1) @ value)
    return layer.output(torch.cat(mixed, -1))
