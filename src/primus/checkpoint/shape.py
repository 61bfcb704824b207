"""The settings that decide the names and sizes of a model's weights, to check that a checkpoint fits a model."""

from __future__ import annotations

from primus.config.schema import ModelSpec
from primus.errors import UsageError
from primus.models import counts

Shape = dict[str, int | bool | None]
"""Fields of a ModelSpec by name, with defaults resolved."""

FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "add_qkv_bias",
    "add_bias_linear",
    "qk_layernorm",
    "attention_sinks",
    "pre_layernorm",
    "post_layernorm",
    "qk_layernorm_across_heads",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "first_k_dense_replace",
    "moe_router_enable_expert_bias",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "mtp_num_layers",
)
"""Fields of a ModelSpec that change a weight's size or whether it exists."""


def build_shape(spec: ModelSpec) -> Shape:
    """The fields of `spec` that decide its weights; equal for two models that differ only in omitted defaults."""
    shape = {field: getattr(spec, field) for field in FIELDS}
    shape["num_query_groups"] = counts.num_query_groups(spec)
    shape["kv_channels"] = counts.head_dim(spec)
    if spec.num_experts:
        shape["moe_ffn_hidden_size"] = counts.expert_ffn_size(spec)
    return shape


def check_same_shape(saved: Shape, wanted: Shape, where: str) -> None:
    """Refuse a checkpoint of another model.

    Args:
        saved: Of the checkpoint.
        wanted: Of the experiment.
        where: The checkpoint, for the message.

    Raises:
        UsageError: The shapes differ; names every setting: ``hidden_size is 256 there and 512 here``.
    """
    differences = list_differences(saved, wanted)
    if differences:
        raise UsageError(
            f"load: {where} is of another model: {'; '.join(differences)}",
            "load one of this model, or set these keys to the checkpoint's values",
        )


def list_differences(saved: Shape, wanted: Shape) -> list[str]:
    """Every field in which two shapes differ, in words."""
    return [
        f"{field} is {saved[field]} there and {value} here"
        for field, value in wanted.items()
        if field in saved and saved[field] != value
    ]
