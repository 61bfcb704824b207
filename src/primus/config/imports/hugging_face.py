"""Read the `config.json` of a Hugging Face model as a model preset.

Names and defaults are those of the configuration classes of transformers 5
(`transformers/models/*/configuration_*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from primus.config.imports.foreign_config import NUMBER, ForeignConfig, check_types
from primus.errors import UsageError, find_nearest

SHAPE = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
}
"""Keys that every family has, with ours."""

LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Keys of latent attention (DeepSeek)."""

NUMBERS = dict.fromkeys(
    """
    rope_theta partial_rotary_factor n_shared_experts moe_intermediate_size n_routed_experts num_experts
    num_local_experts num_experts_per_tok router_aux_loss_coef decoder_sparse_step n_group topk_group
    first_k_dense_replace sliding_window sliding_window_pattern routed_scaling_factor
    """.split(),
    NUMBER,
)
"""Further numbers."""

WITHOUT_EFFECT = frozenset(
    """
    architectures auto_map bos_token_id eos_token_id pad_token_id torch_dtype dtype transformers_version use_cache
    model_type _name_or_path _attn_implementation_autoset attn_implementation pretraining_tp output_router_logits
    unsloth_version quantization_config ep_size num_labels id2label label2id decoder_start_token_id sep_token_id
    is_encoder_decoder return_dict output_hidden_states output_attentions chunk_size_feed_forward problem_type
    cross_attention_hidden_size add_cross_attention tie_encoder_decoder is_decoder cache_implementation
    initial_context_length swiglu_limit experts_per_token max_window_layers rope_interleave seq_aux
    """.split()
)
"""Keys that do not change a model's shape or what it computes in training, or that repeat another key."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
}


class _ModelConfig:
    """The values of a config.json, each of which is read or reported."""

    def __init__(self, values: dict[str, Any], target: ForeignConfig, defaults: dict[str, Any]) -> None:
        self.values = defaults | {key: value for key, value in values.items() if value is not None}
        self.target = target
        self.unread = set(values)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which then counts as read; null means the default."""
        self.unread.discard(key)
        return self.values.get(key, default)

    def copy_keys(self, names: dict[str, str]) -> None:
        """Copy values under our names where the file has them."""
        for key, ours in names.items():
            value = self.take(key)
            if value is not None:
                self.target.set_key(ours, value)

    def set_keys(self, **values: Any) -> None:
        self.target.model |= values

    def report(self, key: str, reason: str) -> None:
        """Report a value without a key here."""
        self.unread.discard(key)
        self.target.add_other(key, self.values.get(key), reason)


def read_model_config(values: dict[str, Any], origin: str, name: str) -> ForeignConfig:
    """The model that a `config.json` describes.

    Raises:
        UsageError: The family is not known, or its rope cannot be expressed.
    """
    model_type = values.get("model_type")
    if "text_config" in values and isinstance(values["text_config"], dict):
        return _read_text_part(values, origin, name)
    target = ForeignConfig(origin=f"Hugging Face config.json of {origin}", name=name)
    family = FAMILIES.get(str(model_type))
    if family is None:
        close = find_nearest(str(model_type), FAMILIES)
        known = f"did you mean '{close}'?" if close else f"known: {', '.join(sorted(FAMILIES))}"
        raise UsageError(f"{origin}: model_type {model_type!r} is not a family of decoder that primus knows", known)
    check_types(values, SHAPE | LATENT | NUMBERS, origin)
    file = _ModelConfig(values, target, DEFAULTS | FAMILY_DEFAULTS.get(str(model_type), {}))
    file.copy_keys(SHAPE)
    _set_hub_name(file)
    file.set_keys(untie_embeddings_and_output_weights=not file.take("tie_word_embeddings"))
    _read_activation(file, default="gelu_pytorch_tanh" if str(model_type).startswith("gemma") else "silu")
    _read_rope(file)
    family(file)
    _check_dropout(file)
    _report_rest(file)
    return target


def _read_text_part(values: dict[str, Any], origin: str, name: str) -> ForeignConfig:
    """The language model of a file that describes other parts (vision, audio) too."""
    inherited = {key: values[key] for key in ("tie_word_embeddings", "_name_or_path") if key in values}
    target = read_model_config(inherited | values["text_config"], origin, name)
    for key in sorted(values.keys() - {"text_config"} - WITHOUT_EFFECT - inherited.keys()):
        target.add_other(key, values[key], "only the language model (text_config) is taken")
    return target


def _set_hub_name(file: _ModelConfig) -> None:
    name = file.take("_name_or_path", "")
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        file.set_keys(hf_name=name)


def _read_activation(file: _ModelConfig, default: str) -> None:
    key = "hidden_activation" if "hidden_activation" in file.values else "hidden_act"
    written = file.take(key, default)
    file.unread -= {"hidden_act", "hidden_activation"}
    if written not in _ACTIVATIONS:
        raise UsageError(
            f"{file.target.origin}: {key} {written!r} is not supported", "primus has gated silu and gelu feed-forwards"
        )
    file.set_keys(ffn_activation=_ACTIVATIONS[written])


def _read_rope(file: _ModelConfig) -> None:
    """Rotary embedding in the form of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    key = "rope_parameters" if file.values.get("rope_parameters") else "rope_scaling"
    scaling = file.take(key, {})
    file.unread -= {"rope_scaling", "rope_parameters"}
    if not isinstance(scaling, dict):
        raise UsageError(f"{file.target.origin}: {key} is not a mapping")
    scaling = dict(_choose_layer_kind(file, key, scaling))
    file.set_keys(rotary_base=float(scaling.pop("rope_theta", None) or file.take("rope_theta")))
    file.unread.discard("rope_theta")
    share = scaling.pop("partial_rotary_factor", None) or file.take("partial_rotary_factor")
    if share is not None:
        file.set_keys(rotary_percent=float(share))
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind == "default":
        pass
    elif kind == "llama3":
        _read_scaling(file, kind, scaling, LLAMA3)
    elif kind == "yarn":
        _read_scaling(file, kind, scaling, YARN)
    else:
        file.target.add_other(
            f"{key}.rope_type", kind, "primus scales rope by llama3 or yarn; the frequencies stay unscaled"
        )
    for rest, value in scaling.items():
        file.target.add_other(f"{key}.{rest}", value, "" if value is None or kind == "default" else "no key of primus")


LLAMA3 = {
    "factor": "rotary_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""Keys of Llama 3's rope scaling."""
YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "yarn_correction_range_round_to_int",
}
"""Keys of yarn."""


def _choose_layer_kind(file: _ModelConfig, key: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Rope of the layers with full attention, where it differs between kinds of layers (Gemma 3)."""
    kinds = {kind: part for kind, part in scaling.items() if isinstance(part, dict)}
    if not kinds:
        return scaling
    chosen = "full_attention" if "full_attention" in kinds else next(iter(kinds))
    for kind, part in kinds.items():
        if kind != chosen and part != kinds[chosen]:
            file.target.add_other(f"{key}.{kind}", part, "primus has one rope for all layers")
    return kinds[chosen]


def _read_scaling(file: _ModelConfig, kind: str, scaling: dict[str, Any], names: dict[str, str]) -> None:
    file.set_keys(rope_type=kind)
    if kind == "yarn" and "original_max_position_embeddings" not in scaling:
        # transformers takes the maximum length of the model here
        file.set_keys(original_max_position_embeddings=file.target.model.get("max_position_embeddings", 4096))
    for key, ours in names.items():
        value = scaling.pop(key, None)
        if value is not None:
            file.set_keys(**{ours: value})


def _check_dropout(file: _ModelConfig) -> None:
    for key in [key for key in file.unread if key.endswith(("_dropout", "_pdrop"))]:
        value = file.take(key, 0.0)
        file.target.add_other(key, value, "primus trains without dropout" if value else "")


def _report_rest(file: _ModelConfig) -> None:
    for key in sorted(file.unread):
        value = file.values.get(key)
        has_effect = key not in WITHOUT_EFFECT and value not in (None, False)
        file.target.add_other(key, value, "no key of primus" if has_effect else "")


# Families


def _read_llama(file: _ModelConfig) -> None:
    if file.take("attention_bias", False):
        file.set_keys(add_qkv_bias=True)
        file.report("attention_bias", "taken for query, key and value; the bias on the attention's output is not")
    if file.take("mlp_bias", False):
        file.report("mlp_bias", "primus has no bias on the feed-forward alone")


def _read_mistral(file: _ModelConfig) -> None:
    window = file.take("sliding_window")
    if window is not None:
        file.set_keys(window_size=window)


def _read_qwen2(file: _ModelConfig) -> None:
    file.set_keys(add_qkv_bias=True)
    _read_optional_window(file)


def _read_qwen3(file: _ModelConfig) -> None:
    file.set_keys(qk_layernorm=True)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of a model with query and key norms")
    _read_optional_window(file)


def _read_optional_window(file: _ModelConfig) -> None:
    """Qwen's window, which `use_sliding_window` enables for the layers from `max_window_layers` on."""
    is_used = file.take("use_sliding_window", False)
    window = file.take("sliding_window")
    layers = file.take("max_window_layers")
    kinds = file.take("layer_types")
    if is_used and window and (kinds is None or "sliding_attention" in kinds):
        file.target.add_other("sliding_window", window, f"a window from layer {layers} on has no key of primus")


def _read_mixtral(file: _ModelConfig) -> None:
    file.copy_keys(
        {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
        }
    )
    file.set_keys(moe_router_pre_softmax=False)
    _read_mistral(file)
    if file.take("router_jitter_noise", 0.0):
        file.report("router_jitter_noise", "primus adds no noise to the router")


def _read_qwen3_moe(file: _ModelConfig) -> None:
    _read_qwen3(file)
    _read_experts(file)


def _read_qwen2_moe(file: _ModelConfig) -> None:
    _read_qwen2(file)
    _read_experts(file)
    file.copy_keys({"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"})
    file.set_keys(moe_shared_expert_gate=True)


def _read_experts(file: _ModelConfig) -> None:
    """Experts of the Qwen families, which every layer has unless the file names layers without."""
    # transformers 5 writes num_local_experts for what published files call num_experts
    file.copy_keys(
        {
            "num_local_experts": "num_experts",
            "num_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "norm_topk_prob": "moe_router_norm_topk_prob",
            "router_aux_loss_coef": "moe_aux_loss_coeff",
            "decoder_sparse_step": "moe_layer_freq",
        }
    )
    dense = sorted(file.take("mlp_only_layers", []))
    if dense == list(range(len(dense))):
        file.set_keys(first_k_dense_replace=len(dense))
    else:
        file.report("mlp_only_layers", "primus has dense layers only at the start (first_k_dense_replace)")


def _read_deepseek_v2(file: _ModelConfig) -> None:
    _read_latent_attention(file)
    groups, limited = file.take("n_group"), file.take("topk_group")
    if file.take("topk_method", "greedy") == "group_limited_greedy" and groups:
        file.set_keys(moe_router_num_groups=groups, moe_router_group_topk=limited)
    if file.take("scoring_func", "softmax") != "softmax":
        file.report("scoring_func", "DeepSeek-V2 scores by softmax")
    # DeepSeek-V2 reads norm_topk_prob, but transformers does not apply it in this family; false in published files.
    file.set_keys(moe_router_norm_topk_prob=bool(file.take("norm_topk_prob", False)))


def _read_deepseek_v3(file: _ModelConfig) -> None:
    _read_latent_attention(file)
    file.copy_keys({"n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk"})
    file.set_keys(
        moe_router_score_function=file.take("scoring_func", "sigmoid"),
        moe_router_enable_expert_bias=file.take("topk_method", "noaux_tc") == "noaux_tc",
        moe_router_norm_topk_prob=bool(file.take("norm_topk_prob", True)),
    )
    # The multi-token prediction layers of published files; transformers itself does not build them.
    file.copy_keys({"num_nextn_predict_layers": "mtp_num_layers"})


def _read_latent_attention(file: _ModelConfig) -> None:
    """Attention and experts that DeepSeek V2 and V3 share."""
    file.copy_keys(LATENT)
    file.set_keys(multi_latent_attention=True)
    for key in ("num_query_groups", "kv_channels"):  # both follow from the latent sizes
        file.target.model.pop(key, None)
    if file.take("n_routed_experts"):
        width = file.take("moe_intermediate_size", 0)
        file.copy_keys(
            {
                "n_routed_experts": "num_experts",
                "num_experts_per_tok": "moe_router_topk",
                "moe_intermediate_size": "moe_ffn_hidden_size",
                "routed_scaling_factor": "moe_router_topk_scaling_factor",
                "first_k_dense_replace": "first_k_dense_replace",
                "aux_loss_alpha": "moe_aux_loss_coeff",
            }
        )
        if file.take("moe_layer_freq", 1) != 1:
            file.report("moe_layer_freq", "primus has experts in every layer after the dense ones (DeepSeek)")
        shared = file.take("n_shared_experts", 0)
        if shared:
            file.set_keys(moe_shared_expert_intermediate_size=shared * width)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias in latent attention")


def _read_gpt_oss(file: _ModelConfig) -> None:
    file.copy_keys(
        {
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "moe_router_topk",
            "sliding_window": "window_size",
        }
    )
    kinds = file.take("layer_types") or ["sliding_attention", "full_attention"]
    period = _find_window_period(kinds)
    if period is None:
        file.report("layer_types", "primus has a window on every n-th layer, starting with the first")
    if not file.take("attention_bias", True):
        file.report("attention_bias", "gpt-oss has a bias on every projection")
    file.set_keys(
        window_layer_period=period or 1,
        add_qkv_bias=True,
        add_bias_linear=True,
        attention_sinks=True,
        activation_clamp=file.take("swiglu_limit", 7.0),
        moe_router_pre_softmax=False,
    )
    if file.take("router_aux_loss_coef"):
        file.report("router_aux_loss_coef", "set moe_aux_loss_coeff; transformers adds it with output_router_logits")


def _find_window_period(kinds: list[str]) -> int | None:
    """Distance between layers with a window, the first of which is layer 0; None if they are placed otherwise."""
    layers = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    for period in range(1, len(kinds) + 1):
        if layers == list(range(0, len(kinds), period)):
            return period
    return None


def _read_gemma(file: _ModelConfig) -> None:
    file.target.add_other(
        "model_type",
        file.values["model_type"],
        "embeddings scaled by sqrt(hidden_size) and norms of 1 + weight have no key; the backend must know the family",
    )
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of this family")


def _read_gemma2(file: _ModelConfig) -> None:
    _read_gemma(file)
    file.copy_keys({"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "window_size"})
    file.set_keys(post_layernorm=True)
    _read_layer_kinds(file, default=2)
    for key in ("attn_logit_softcapping", "query_pre_attn_scalar"):
        if file.take(key) is not None:
            file.report(key, "no key of primus")


def _read_gemma3(file: _ModelConfig) -> None:
    _read_gemma2(file)
    file.set_keys(qk_layernorm=True)
    local = file.take("rope_local_base_freq")
    if local is not None:
        file.report("rope_local_base_freq", "primus has one rope for all layers")


def _read_layer_kinds(file: _ModelConfig, default: int) -> None:
    """Layers with a window and with full attention, as a pattern that is repeated (Gemma 2 and 3)."""
    kinds = file.take("layer_types")
    every = file.take("sliding_window_pattern") or file.take("_sliding_window_pattern") or default
    file.unread -= {"sliding_window_pattern", "_sliding_window_pattern"}
    if kinds:
        text = "".join("W" if kind == "sliding_attention" else "*" for kind in kinds)
        file.set_keys(hybrid_layer_pattern=_shorten_pattern(text))
    else:
        file.set_keys(hybrid_layer_pattern="W" * (every - 1) + "*")


def _shorten_pattern(text: str) -> str:
    """The shortest pattern whose repetition gives `text`."""
    for length in range(1, len(text) + 1):
        if (text[:length] * len(text))[: len(text)] == text:
            return text[:length]
    return text


DEFAULTS: dict[str, Any] = {
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Values that most families take for keys that a file leaves out."""
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen2_moe": {"num_key_value_heads": 16, "max_position_embeddings": 32768, "router_aux_loss_coef": 0.001},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v2": {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128},
    "deepseek_v3": {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "max_position_embeddings": 4096, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    "gpt_oss": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000.0, "head_dim": 64}
    | {"num_key_value_heads": 8, "sliding_window": 128, "num_experts_per_tok": 4},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA
    | {"num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 131072, "rope_theta": 1e6},
}
"""Values that a family takes for keys that a file leaves out, where they differ from DEFAULTS."""

FAMILIES: dict[str, Callable[[_ModelConfig], None]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen2": _read_qwen2,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "deepseek_v2": _read_deepseek_v2,
    "deepseek_v3": _read_deepseek_v3,
    "gpt_oss": _read_gpt_oss,
    "gemma": _read_gemma,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3,
}
"""Reader of each `model_type`."""
