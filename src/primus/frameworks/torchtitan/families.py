"""The torchtitan model that an experiment's model becomes; needs no tensor library."""

from __future__ import annotations

from typing import Literal

from primus.config.schema import ModelSpec

Family = Literal["llama", "qwen", "deepseek", "gpt_oss", "llama4"]


def find_family(spec: ModelSpec) -> Family:
    """The torchtitan model with the parts that `spec` has.

    `llama` and `llama4` rotate neighboring channels, as in torchtitan's checkpoints of Llama; `qwen` and `gpt_oss`
    rotate halves.
    """
    if spec.no_rope_freq is not None:
        return "llama4"
    if spec.attention_sinks:
        return "gpt_oss"
    if spec.multi_latent_attention:
        return "deepseek"
    if spec.add_qkv_bias or spec.qk_layernorm or spec.num_experts:
        return "qwen"
    return "llama"
