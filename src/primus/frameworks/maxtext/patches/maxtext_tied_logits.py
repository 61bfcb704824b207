"""Logits of a tied embedding in float32 where MaxText computes in float32.

MaxText rounds the embedding to bfloat16 for the logits, whatever its `dtype` is: losses then differ from those of
other engines by 1e-4 within 20 steps, and CPUs compute the product several times slower.
"""

from __future__ import annotations

import os
from datetime import date
from typing import Any

from primus.patch import Patch

PATCH = Patch(
    target="maxtext",
    versions=">=0.2,<0.3",
    reason="the logits of tied embeddings are computed from weights in bfloat16 also in float32 training",
    link="https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/layers/embeddings.py",
    expires=date(2027, 6, 30),
    backend="maxtext",
)


def apply() -> None:
    """Replace `attend_on_embedding`, where it is defined and where it is used."""
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # before the first import of maxtext, as in its backend
    import jax.numpy as jnp
    from maxtext.layers import embeddings, nnx_decoders

    rounded = embeddings.attend_on_embedding

    def attend_on_embedding(query: Any, table: Any, kind: Any, config: Any, out_sharding: Any = None) -> Any:
        if config.dtype != jnp.float32 or config.shard_mode == embeddings.ShardMode.EXPLICIT:
            return rounded(query, table, kind, config, out_sharding)
        return jnp.dot(query, jnp.asarray(table, jnp.float32).T, preferred_element_type=kind)

    for module in (embeddings, nnx_decoders):
        module.attend_on_embedding = attend_on_embedding
