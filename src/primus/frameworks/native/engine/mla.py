"""Multi-head latent attention: keys and values of all heads come from one latent (DeepSeek-V2, arXiv 2405.04434).

Shape suffixes: B batch, S sequence, D model width, H heads, L latent width, N channels of a head without rotation, R
with rotation, C = N + R, V channels of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine import ops, rope
from primus.frameworks.native.engine.cache import LayerCache
from primus.frameworks.native.engine.collectives import enter_tensor_region
from primus.frameworks.native.engine.layers import Linear, RMSNorm, RowLinear, attend
from primus.frameworks.native.engine.layout import Layout
from primus.frameworks.native.engine.placement import share
from primus.models.counts import head_dim, value_head_dim


class LatentAttention(nn.Module):
    """Causal latent attention; in weights, the two channels that rotate together are neighbors."""

    def __init__(self, spec: ModelSpec, layout: Layout, window: int | None = None) -> None:
        super().__init__()
        self.layout, self.window = layout, window
        assert spec.kv_lora_rank and spec.qk_head_dim and spec.qk_pos_emb_head_dim
        hidden, epsilon = spec.hidden_size, spec.norm_epsilon
        heads = share(spec.num_attention_heads, layout.tensor)
        self.heads, self.value_dim = heads, value_head_dim(spec)
        self.plain_dim, self.rotary_dim, self.latent_dim = spec.qk_head_dim, spec.qk_pos_emb_head_dim, spec.kv_lora_rank
        queries, width = spec.q_lora_rank, heads * head_dim(spec)
        self.query = None if queries else Linear(hidden, width, bias=False)
        self.query_down = Linear(hidden, queries, bias=False) if queries else None
        self.query_norm = RMSNorm(queries, epsilon) if queries else None
        self.query_up = Linear(queries, width, bias=False) if queries else None
        self.latent = Linear(hidden, self.latent_dim + self.rotary_dim, bias=False)
        self.latent_norm = RMSNorm(self.latent_dim, epsilon)
        self.key_value = Linear(self.latent_dim, heads * (self.plain_dim + self.value_dim), bias=False)
        self.output = RowLinear(spec.num_attention_heads * self.value_dim, hidden, bias=False, layout=layout)
        self.cache: LayerCache | None = None
        # Both sides of the scores are longer by m in a stretched context (DeepSeek-V3, modeling_deepseek_v3.py).
        self.query_scale = rope.compute_yarn_scale(spec, spec.mscale_all_dim) ** 2

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        # Each process of `layout.tensor` computes the latents of its heads again: they are small.
        x_BSD = enter_tensor_region(x_BSD, self.layout)
        latent_BSL, shared_BSR = self.latent(x_BSD).split((self.latent_dim, self.rotary_dim), -1)
        key_value = self.key_value(self.latent_norm(latent_BSL)).unflatten(-1, (self.heads, -1))
        k_BSHN, v_BSHV = key_value.split((self.plain_dim, self.value_dim), -1)
        q_BSHN, q_BSHR = self._project_queries(x_BSD).split((self.plain_dim, self.rotary_dim), -1)
        q_BSHR = ops.apply_rotary(_separate_pairs(q_BSHR), *rotation)
        k_BS1R = ops.apply_rotary(_separate_pairs(shared_BSR.unsqueeze(2)), *rotation)
        q_BSHC = torch.cat((q_BSHN, q_BSHR), -1) * self.query_scale
        k_BSHC = torch.cat((k_BSHN, k_BS1R.expand(-1, -1, self.heads, -1)), -1)
        # torch's fused kernels take values as wide as keys.
        padding = max(q_BSHC.shape[-1] - self.value_dim, 0)
        q, k, v = (each.transpose(1, 2) for each in (q_BSHC, k_BSHC, F.pad(v_BSHV, (0, padding))))
        mixed_BHSC = attend(q, k, v, mask, self.layout.context, cache=self.cache, window=self.window)
        return self.output(mixed_BHSC[..., : self.value_dim].transpose(1, 2).flatten(2))

    def _project_queries(self, x_BSD: Tensor) -> Tensor:
        if self.query is not None:
            return self.query(x_BSD).unflatten(-1, (self.heads, -1))
        assert self.query_down is not None and self.query_norm is not None and self.query_up is not None
        return self.query_up(self.query_norm(self.query_down(x_BSD))).unflatten(-1, (self.heads, -1))


def _separate_pairs(x: Tensor) -> Tensor:
    """Neighbors (2i, 2i + 1) to (i, i + R / 2), alike for queries and keys, so that their products are the same."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
