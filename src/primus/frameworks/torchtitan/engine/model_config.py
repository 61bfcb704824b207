"""The model of an experiment as a torchtitan model, built from its parts: any shape works, no flavor is needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model, DeepSeekV3TransformerBlock
from torchtitan.models.gpt_oss.model import Attention as SinkAttention
from torchtitan.models.gpt_oss.model import GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec as TitanModelSpec

from primus.config.schema import ModelSpec
from primus.frameworks.torchtitan.engine.llama4_parts import InputScaledExperts, NoRoPE
from primus.frameworks.torchtitan.families import Family, find_family
from primus.models.counts import expert_ffn_size, head_dim, num_query_groups
from primus.models.layers import LayerKind, list_layers

Initializers = dict[str, Callable[..., Any]]

LOAD_BALANCE_RATE = 1e-3
"""Change of an expert's bias in a step (DeepSeek-V3, arXiv:2412.19437, section 4.2; torchtitan make_moe_config)."""
STD = 0.02
"""Standard deviation of torchtitan's own initial matrices (torchtitan/models/llama3/__init__.py)."""


def build_model_spec(spec: ModelSpec, *, on_cpu: bool, masks_documents: bool) -> TitanModelSpec:
    """The torchtitan model of `spec`.

    Args:
        spec: A shape that `support.check_model` accepts.
        on_cpu: FSDP2 reduces gradients by plain sums, the only reduction of gloo.
        masks_documents: Attention stays within documents, whose positions start at 0.
    """
    family = find_family(spec)
    parts = _FAMILIES[family]
    return TitanModelSpec(
        name="primus",
        flavor=family,
        model=_build_model(spec, parts, FlexAttention.Config if masks_documents else ScaledDotProductAttention.Config),
        parallelize_fn=_reduce_by_sums(parts.shard) if on_cpu else parts.shard,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if spec.num_experts else None,
        # Weights come by hub names from primus; torchtitan neither reads nor writes such files.
        state_dict_adapter=None,
    )


def _reduce_by_sums(shard: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`shard`, with FSDP2 set to sums (FSDPModule.set_force_sum_reduction_for_comms in the documentation of torch)."""

    def parallelize(model: nn.Module, **options: Any) -> nn.Module:
        sharded = shard(model, **options)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return sharded

    return parallelize


class _FamilyParts(NamedTuple):
    """What distinguishes a family of torchtitan's models."""

    model: type[Any]
    block: type[Any]
    attend: Callable[[ModelSpec, int, LayerKind, Callable[[], Any]], Any]
    """(model, layer, kind of layer, inner attention) -> attention of the layer."""
    shard: Callable[..., nn.Module]


def _build_model(spec: ModelSpec, parts: _FamilyParts, inner: Callable[[], Any]) -> Any:
    layers = [
        parts.block.Config(
            attention_norm=_build_norm(spec, spec.hidden_size),
            ffn_norm=_build_norm(spec, spec.hidden_size),
            attention=parts.attend(spec, index, kind, inner),
            **_build_feed_forward_or_experts(spec, index, kind),
        )
        for index, kind in enumerate(list_layers(spec))
    ]
    further: dict[str, object] = {"mtp_layers": []} if parts.model is DeepSeekV3Model else {}
    return parts.model.Config(layers=layers, **further, **_build_decoder(spec))


def _attend_by_neighbors(spec: ModelSpec, index: int, kind: LayerKind, inner: Callable[[], Any]) -> Any:
    """Llama, and Llama 4, which torchtitan had until 0.2: some layers are without rotary embedding."""
    has_rope = not spec.no_rope_freq or (index + 1) % spec.no_rope_freq
    return _build_grouped_attention(spec, index, inner(), ComplexRoPE if has_rope else NoRoPE)


def _attend_by_halves(spec: ModelSpec, index: int, kind: LayerKind, inner: Callable[[], Any]) -> Any:
    """Qwen2.5, Qwen3, Qwen3-MoE and Mixtral: optional biases, and norms of queries and keys."""
    return _build_grouped_attention(spec, index, inner(), CosSinRoPE)


_FAMILIES: dict[Family, _FamilyParts] = {
    "llama": _FamilyParts(Llama3Model, Llama3TransformerBlock, _attend_by_neighbors, llama3.parallelize_llama),
    "qwen": _FamilyParts(Qwen3Model, Qwen3TransformerBlock, _attend_by_halves, qwen3.parallelize_qwen3),
    "deepseek": _FamilyParts(
        DeepSeekV3Model,
        DeepSeekV3TransformerBlock,
        lambda spec, index, _, inner: _build_latent_attention(spec, index, inner()),
        deepseek_v3.parallelize_deepseekv3,
    ),
    # Sinks need the normalizer of the attention, which only FlexAttention and varlen attention return.
    "gpt_oss": _FamilyParts(
        GptOssModel,
        GptOssTransformerBlock,
        lambda spec, index, kind, _: _build_sink_attention(spec, index, kind.window),
        gpt_oss.parallelize_gptoss,
    ),
    "llama4": _FamilyParts(Qwen3Model, Qwen3TransformerBlock, _attend_by_neighbors, qwen3.parallelize_qwen3),
}


def _build_decoder(spec: ModelSpec) -> dict[str, object]:
    """What every decoder has: embedding, last norm and output head."""
    width, vocabulary = spec.hidden_size, spec.vocab_size
    is_tied = not spec.untie_embeddings_and_output_weights
    head_std = width**-0.5
    # A tied embedding is the head's weight, which the head initializes.
    embedding = {"weight": skip_param_init if is_tied else partial(nn.init.normal_, std=1.0)}
    head = {"weight": partial(nn.init.trunc_normal_, std=head_std, a=-3 * head_std, b=3 * head_std)}
    return {
        "dim": width,
        "vocab_size": vocabulary,
        "enable_weight_tying": is_tied,
        "tok_embeddings": Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=embedding),
        "norm": _build_norm(spec, width),
        "lm_head": Linear.Config(in_features=width, out_features=vocabulary, param_init=head),
    }


def _build_norm(spec: ModelSpec, width: int) -> RMSNorm.Config:
    # Without an epsilon torch takes that of the dtype, 1.2e-7.
    return RMSNorm.Config(normalized_shape=width, eps=spec.norm_epsilon, param_init={"weight": nn.init.ones_})


def _build_rope(spec: ModelSpec, width: int, kind: type[Any]) -> Any:
    """Rotary embedding of `width` channels; the softmax scale of yarn belongs to the attention."""
    scaling = {"default": "none", "llama3": "llama", "yarn": "yarn"}[spec.rope_type]
    return kind.Config(
        dim=width,
        max_seq_len=spec.max_position_embeddings,
        theta=spec.rotary_base,
        scaling=scaling,
        scaling_factor=spec.rotary_scaling_factor,
        low_freq_factor=spec.rope_low_freq_factor,
        high_freq_factor=spec.rope_high_freq_factor,
        original_max_position_embeddings=spec.original_max_position_embeddings,
        rope_factor=spec.rotary_scaling_factor,
        original_seq_len=spec.original_max_position_embeddings,
        beta_fast=spec.beta_fast,
        beta_slow=spec.beta_slow,
        truncate=spec.yarn_correction_range_round_to_int,
    )


def _build_grouped_attention(spec: ModelSpec, index: int, inner: Any, rope: type[Any]) -> Any:
    width = head_dim(spec)
    attention = make_gqa_config(
        dim=spec.hidden_size,
        n_heads=spec.num_attention_heads,
        n_kv_heads=num_query_groups(spec),
        head_dim=width,
        wqkv_param_init=_build_plain_init(),
        wo_param_init=_build_depth_init(index),
        inner_attention=inner,
        fuse_qkv=True,
        rope=_build_rope(spec, width, rope),
        qk_norm=_build_norm(spec, width) if spec.qk_layernorm else None,
    )
    attention.qkv_linear.wqkv.bias = spec.add_qkv_bias
    return attention


def _build_latent_attention(spec: ModelSpec, index: int, inner: Any) -> Any:
    heads, hidden = spec.num_attention_heads, spec.hidden_size
    rope_width = spec.qk_pos_emb_head_dim or 0
    query, key_value, value = spec.q_lora_rank or 0, spec.kv_lora_rank or 0, spec.v_head_dim or 0
    plain = _build_plain_init()
    return LatentAttention.Config(
        dim=hidden,
        n_heads=heads,
        q_lora_rank=query,
        kv_lora_rank=key_value,
        qk_nope_head_dim=spec.qk_head_dim or 0,
        qk_rope_head_dim=rope_width,
        v_head_dim=value,
        # torchtitan scales the softmax by the square of 0.1 mscale ln(factor) + 1, as transformers with mscale_all_dim.
        mscale=spec.mscale_all_dim,
        wq=None if query else _build_linear(hidden, heads * head_dim(spec), plain),
        wq_a=_build_linear(hidden, query, plain) if query else None,
        wq_b=_build_linear(query, heads * head_dim(spec), plain) if query else None,
        q_norm=_build_norm(spec, query or 1),  # required; not built without a latent
        wkv_a=_build_linear(hidden, key_value + rope_width, plain),
        kv_norm=_build_norm(spec, key_value),
        wkv_b=_build_linear(key_value, heads * ((spec.qk_head_dim or 0) + value), plain),
        wo=_build_linear(heads * value, hidden, _build_depth_init(index)),
        inner_attention=inner,
        rope=_build_rope(spec, rope_width, ComplexRoPE),
    )


def _build_sink_attention(spec: ModelSpec, index: int, window: int | None) -> Any:
    heads, width = spec.num_attention_heads, head_dim(spec)
    grouped = _build_grouped_attention(spec, index, FlexAttention.Config(), CosSinRoPE)
    grouped.qkv_linear.wqkv.bias = True
    return SinkAttention.Config(
        n_heads=heads,
        n_kv_heads=num_query_groups(spec),
        head_dim=width,
        dim=spec.hidden_size,
        qkv_linear=grouped.qkv_linear,
        wo=ScaledBiasRowwiseLinear.Config(
            in_features=heads * width, out_features=spec.hidden_size, bias=True, param_init=_build_depth_init(index)
        ),
        sliding_window_size=window,
        inner_attention=grouped.inner_attention,
        param_init={"sinks": _build_depth_init(index)["weight"]},
        rope=grouped.rope,
    )


def _build_sink_experts(spec: ModelSpec, index: int) -> Any:
    experts, width = spec.num_experts or 1, expert_ffn_size(spec)
    scaled = _build_depth_init(index)["weight"]
    routed = _build_routed_experts(spec, index, width)
    routed.inner_experts = GptOssGroupedExperts.Config(
        dim=spec.hidden_size,
        hidden_dim=width,
        num_experts=experts,
        swiglu_limit=spec.activation_clamp,
        param_init=dict.fromkeys(("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"), scaled),
    )
    return GptOssMoE.Config(
        num_experts=experts,
        load_balance_coeff=_load_balance_rate(spec),
        router=_build_router(spec, index, bias=True),
        routed_experts=routed,
    )


def _build_feed_forward_or_experts(spec: ModelSpec, index: int, kind: LayerKind) -> dict[str, object]:
    if spec.attention_sinks:
        return {"moe": _build_sink_experts(spec, index)}
    if not kind.moe:
        return {"feed_forward": _build_feed_forward(spec, index, spec.ffn_hidden_size)}
    shared = spec.moe_shared_expert_intermediate_size
    moe = make_moe_config(
        num_experts=spec.num_experts or 1,
        router=_build_router(spec, index, bias=False),
        routed_experts=_build_routed_experts(spec, index, expert_ffn_size(spec)),
        shared_experts=_build_feed_forward(spec, index, shared) if shared else None,
        load_balance_coeff=_load_balance_rate(spec),
    )
    return {"moe": moe}


def _build_router(spec: ModelSpec, index: int, bias: bool) -> Any:
    return make_router_config(
        dim=spec.hidden_size,
        num_experts=spec.num_experts or 1,
        gate_param_init=_build_depth_init(index),
        top_k=spec.moe_router_topk,
        score_func="sigmoid" if spec.moe_router_score_function == "sigmoid" else "softmax",
        # Softmax over the chosen experts alone is softmax over all, renormalized.
        route_norm=spec.moe_router_norm_topk_prob or not spec.moe_router_pre_softmax,
        route_scale=spec.moe_router_topk_scaling_factor,
        num_expert_groups=spec.moe_router_num_groups,
        num_limited_groups=spec.moe_router_group_topk,
        bias=bias,
    )


def _build_routed_experts(spec: ModelSpec, index: int, width: int) -> Any:
    plain, scaled = _build_plain_init()["weight"], _build_depth_init(index)["weight"]
    routed = make_routed_experts_config(
        dim=spec.hidden_size,
        hidden_dim=width,
        num_experts=spec.num_experts or 1,
        top_k=spec.moe_router_topk,
        param_init={"w1_EFD": plain, "w2_EDF": scaled, "w3_EFD": scaled},
        comm_backend="standard",
    )
    if spec.moe_apply_probs_on_input:
        return InputScaledExperts.Config(inner_experts=routed.inner_experts, token_dispatcher=routed.token_dispatcher)
    return routed


def _load_balance_rate(spec: ModelSpec) -> float | None:
    return LOAD_BALANCE_RATE if spec.moe_router_enable_expert_bias else None


def _build_feed_forward(spec: ModelSpec, index: int, width: int) -> Any:
    return make_ffn_config(
        dim=spec.hidden_size,
        hidden_dim=width,
        w1_param_init=_build_plain_init(),
        w2w3_param_init=_build_depth_init(index),
    )


def _build_linear(rows: int, columns: int, init: Initializers) -> Linear.Config:
    return Linear.Config(in_features=rows, out_features=columns, param_init=init)


def _build_plain_init() -> Initializers:
    return {"weight": partial(nn.init.trunc_normal_, std=STD), "bias": nn.init.zeros_}


def _build_depth_init(index: int) -> Initializers:
    """torchtitan's own initial values of the matrices whose deviation falls with the depth of their layer."""
    return {"weight": partial(nn.init.trunc_normal_, std=depth_scaled_std(STD, index)), "bias": nn.init.zeros_}
