"""Write the model of an experiment as the `config.json` of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from msgspec import structs

from primus.config.exports.foreign_text import ForeignText, LostSetting, find_head_width
from primus.config.imports import hugging_face as imports
from primus.config.imports.hugging_face_families import MIXTRAL_EXPERTS, QWEN_EXPERTS
from primus.config.imports.hugging_face_latent import DEEPSEEK_EXPERTS
from primus.config.imports.hugging_face_latent import LATENT as LATENT_ATTENTION
from primus.config.schema import ModelSpec
from primus.errors import UsageError

SHAPE = frozenset(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
    max_position_embeddings untie_embeddings_and_output_weights norm_epsilon init_method_std rotary_base rope_type
    rotary_scaling_factor rope_low_freq_factor rope_high_freq_factor original_max_position_embeddings beta_fast
    beta_slow mscale mscale_all_dim yarn_correction_range_round_to_int hf_name
    """.split()
)
"""Keys that every family has."""
EXPERTS = frozenset({"num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_aux_loss_coeff"})
GEMMA = frozenset(
    """
    zero_centered_norms scale_embeddings post_layernorm ffn_activation query_pre_attn_scalar attn_logit_softcapping
    final_logit_softcapping hybrid_layer_pattern window_size window_layer_period
    """.split()
)
ROUTING = frozenset({"moe_router_pre_softmax", "moe_router_norm_topk_prob"})
LATENT = EXPERTS | frozenset(
    """
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim first_k_dense_replace
    moe_shared_expert_intermediate_size moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
    moe_router_norm_topk_prob moe_router_score_function moe_router_enable_expert_bias mtp_num_layers
    """.split()
)


def format_model_config(model: ModelSpec) -> ForeignText:
    """The `config.json` of a model.

    Raises:
        UsageError: No family of transformers has this model; names the keys.
    """
    problems = []
    for family, (is_family, keys, write) in FAMILIES.items():
        if not is_family(model):
            continue
        others = _list_other_keys(model, SHAPE | keys)
        if not others:
            values = {"architectures": [ARCHITECTURES[family]], "model_type": family, **_write_shape(model)}
            values |= write(model)
            return ForeignText(json.dumps(values, indent=2) + "\n", _list_lost(model, family))
        problems.append(f"{family} has no {', '.join(others)}")
    raise UsageError(
        f"no model of transformers that primus writes has this shape: {'; '.join(problems) or 'unknown family'}",
        "families: " + ", ".join(FAMILIES),
    )


def _list_other_keys(model: ModelSpec, known: frozenset[str]) -> list[str]:
    """Keys with another value than their default that a family does not have."""
    return [
        field.name
        for field in structs.fields(ModelSpec)
        if not field.required and field.name not in known and getattr(model, field.name) != field.default
    ]


def _list_lost(model: ModelSpec, family: str) -> list[LostSetting]:
    if family == "deepseek_v2" and model.moe_router_norm_topk_prob:
        return [LostSetting("moe_router_norm_topk_prob", True, "transformers does not renormalize in deepseek_v2")]
    return []


def _write_shape(model: ModelSpec) -> dict[str, object]:
    scaling = _write_scaling(model)
    return _write_keys(model, {theirs: ours for theirs, ours in imports.SHAPE.items() if theirs != "head_dim"}) | {
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "hidden_act": "silu",
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        # Both forms of rope: transformers 4 reads rope_theta and rope_scaling, 5 reads rope_parameters.
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rotary_base, **(scaling or {"rope_type": "default"})},
    }


def _write_scaling(model: ModelSpec) -> dict[str, object] | None:
    if model.rope_type == "default":
        return None
    names = imports.SCALINGS[model.rope_type]
    skipped = () if model.multi_latent_attention else ("mscale", "mscale_all_dim")
    kept = {theirs: ours for theirs, ours in names.items() if theirs not in skipped}
    return {"rope_type": model.rope_type, **_write_keys(model, kept)}


def _write_keys(model: ModelSpec, names: Mapping[str, str]) -> dict[str, object]:
    """Values of the model by the names of Hugging Face that `names` has for ours."""
    return {theirs: getattr(model, ours) for theirs, ours in names.items()}


def _write_llama(model: ModelSpec) -> dict[str, object]:
    return {"head_dim": find_head_width(model), "attention_bias": False, "mlp_bias": False}


def _write_mistral(model: ModelSpec) -> dict[str, object]:
    return {"head_dim": find_head_width(model), "sliding_window": model.window_size}


def _write_qwen2(model: ModelSpec) -> dict[str, object]:
    _check_head_width(model, "qwen2")
    return {"use_sliding_window": False}


def _write_qwen3(model: ModelSpec) -> dict[str, object]:
    return {"head_dim": find_head_width(model), "attention_bias": False, "use_sliding_window": False}


def _write_gemma2(model: ModelSpec) -> dict[str, object]:
    width = find_head_width(model)
    return {
        "head_dim": width,
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.query_pre_attn_scalar or width,
        "layer_types": _list_layer_types(model),
        "sliding_window": model.window_size,
        **{key: getattr(model, key) for key in ("attn_logit_softcapping", "final_logit_softcapping")},
    }


def _write_gemma3(model: ModelSpec) -> dict[str, object]:
    windowed = {"rope_type": "default", "rope_theta": model.window_rotary_base or model.rotary_base}
    full = {"rope_theta": model.rotary_base, **(_write_scaling(model) or {"rope_type": "default"})}
    return _write_gemma2(model) | {
        "rope_local_base_freq": windowed["rope_theta"],
        "rope_parameters": {"full_attention": full, "sliding_attention": windowed},
    }


def _write_olmo2(model: ModelSpec) -> dict[str, object]:
    _check_head_width(model, "olmo2")
    return {"attention_bias": False}


def _write_phi3(model: ModelSpec) -> dict[str, object]:
    _check_head_width(model, "phi3")
    # The class pads with token 32000 unless it is told otherwise, which a smaller vocabulary lacks.
    return {"sliding_window": model.window_size, "pad_token_id": None}


def _check_head_width(model: ModelSpec, family: str) -> None:
    if find_head_width(model) * model.num_attention_heads != model.hidden_size:
        problem = f"kv_channels: {family} has heads of hidden_size / num_attention_heads"
        raise UsageError(problem, "set kv_channels: null")


def _write_qwen3_moe(model: ModelSpec) -> dict[str, object]:
    return (
        _write_qwen3(model)
        | _write_keys(model, QWEN_EXPERTS)
        | {
            "moe_intermediate_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
            "mlp_only_layers": list(range(model.first_k_dense_replace)),
        }
    )


def _write_mixtral(model: ModelSpec) -> dict[str, object]:
    if model.moe_ffn_hidden_size not in (None, model.ffn_hidden_size):
        raise UsageError("moe_ffn_hidden_size: mixtral has experts of ffn_hidden_size", "set both to the same width")
    return _write_mistral(model) | _write_keys(model, MIXTRAL_EXPERTS)


def _write_latent(model: ModelSpec) -> dict[str, object]:
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    shared = model.moe_shared_expert_intermediate_size or 0
    if shared % width:
        raise UsageError(
            f"moe_shared_expert_intermediate_size: {shared} is not a multiple of the experts' width {width}"
        )
    values = _write_keys(model, LATENT_ATTENTION | DEEPSEEK_EXPERTS) | {
        "head_dim": model.qk_pos_emb_head_dim,
        "moe_layer_freq": 1,
        "n_shared_experts": shared // width,
        "moe_intermediate_size": width,
        "norm_topk_prob": model.moe_router_norm_topk_prob,
        "attention_bias": False,
    }
    if model.num_experts is None:
        values |= {"first_k_dense_replace": model.num_layers, "n_routed_experts": 1}
    return values


def _write_deepseek_v2(model: ModelSpec) -> dict[str, object]:
    groups = {"n_group": model.moe_router_num_groups, "topk_group": model.moe_router_group_topk}
    method = "group_limited_greedy" if model.moe_router_num_groups else "greedy"
    return _write_latent(model) | groups | {"scoring_func": "softmax", "topk_method": method}


def _write_deepseek_v3(model: ModelSpec) -> dict[str, object]:
    return _write_latent(model) | {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": model.mtp_num_layers,
    }


def _write_gpt_oss(model: ModelSpec) -> dict[str, object]:
    if model.moe_ffn_hidden_size not in (None, model.ffn_hidden_size):
        raise UsageError("moe_ffn_hidden_size: gpt_oss has experts of ffn_hidden_size", "set both to the same width")
    return _write_mistral(model) | {
        **_write_keys(model, MIXTRAL_EXPERTS),
        "layer_types": _list_layer_types(model),
        "swiglu_limit": model.activation_clamp,
        "attention_bias": True,
    }


def _list_layer_types(model: ModelSpec) -> list[str]:
    pattern = model.hybrid_layer_pattern or "W" + "*" * (model.window_layer_period - 1)
    kinds = [pattern[index % len(pattern)] for index in range(model.num_layers)]
    return ["sliding_attention" if kind == "W" and model.window_size else "full_attention" for kind in kinds]


_Family = tuple[Callable[[ModelSpec], bool], frozenset[str], Callable[[ModelSpec], dict[str, object]]]

FAMILIES: dict[str, _Family] = {
    "gpt_oss": (
        lambda m: m.attention_sinks,
        EXPERTS
        | {"moe_router_pre_softmax", "attention_sinks", "add_qkv_bias", "add_bias_linear", "window_size"}
        | {"window_layer_period", "activation_clamp"},
        _write_gpt_oss,
    ),
    "deepseek_v3": (
        lambda m: m.multi_latent_attention and m.moe_router_score_function == "sigmoid",
        LATENT,
        _write_deepseek_v3,
    ),
    "deepseek_v2": (
        lambda m: m.multi_latent_attention and m.moe_router_score_function == "softmax",
        LATENT - {"moe_router_enable_expert_bias", "mtp_num_layers", "moe_router_score_function"},
        _write_deepseek_v2,
    ),
    "qwen3_moe": (
        lambda m: m.num_experts is not None and m.qk_layernorm,
        EXPERTS | {"qk_layernorm", "moe_router_norm_topk_prob", "moe_layer_freq", "first_k_dense_replace"},
        _write_qwen3_moe,
    ),
    "mixtral": (
        # softmax over the chosen experts; the same as renormalizing after a softmax over all
        lambda m: m.num_experts is not None and (not m.moe_router_pre_softmax or m.moe_router_norm_topk_prob),
        EXPERTS | ROUTING | {"window_size"},
        _write_mixtral,
    ),
    "gemma3_text": (
        lambda m: m.zero_centered_norms and m.qk_layernorm,
        GEMMA | {"qk_layernorm", "window_rotary_base"},
        _write_gemma3,
    ),
    "gemma2": (lambda m: m.zero_centered_norms and m.post_layernorm, GEMMA, _write_gemma2),
    "olmo2": (
        lambda m: not m.pre_layernorm,
        frozenset({"pre_layernorm", "post_layernorm", "qk_layernorm", "qk_layernorm_across_heads"}),
        _write_olmo2,
    ),
    "phi3": (lambda m: m.packed_projections, frozenset({"packed_projections", "window_size"}), _write_phi3),
    "qwen3": (lambda m: m.qk_layernorm and m.num_experts is None, frozenset({"qk_layernorm"}), _write_qwen3),
    "qwen2": (lambda m: m.add_qkv_bias and m.num_experts is None, frozenset({"add_qkv_bias"}), _write_qwen2),
    "mistral": (
        lambda m: m.window_size is not None and m.num_experts is None,
        frozenset({"window_size"}),
        _write_mistral,
    ),
    "llama": (lambda m: m.num_experts is None, frozenset(), _write_llama),
}
"""Condition, further keys and writer of each family, the most special first."""

ARCHITECTURES = {
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "llama": "LlamaForCausalLM",
}
