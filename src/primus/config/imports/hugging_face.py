"""Read the `config.json` of a Hugging Face model as a model preset.

Names and defaults are those of the configuration classes of transformers 5
(`transformers/models/*/configuration_*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from primus.config.imports import hugging_face_families as dense
from primus.config.imports import hugging_face_hybrid as hybrid
from primus.config.imports import hugging_face_latent as latent
from primus.config.imports.foreign_config import NUMBER, ForeignConfig, check_types
from primus.config.imports.hugging_face_file import HuggingFaceFile, read_family_defaults
from primus.config.source import ConfigValue
from primus.errors import UsageError

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
    indexer_rope_interleave num_mtp_layers qkv_bias use_qk_norm expert_dtype
    _model_name_or_path is_llama_config transformers.js_config unk_token_id mask_token_id cls_token_id tokenizer_class
    prefix bad_words_ids begin_suppress_tokens suppress_tokens forced_bos_token_id forced_eos_token_id
    task_specific_params
    finetuning_task pruned_heads remove_invalid_values tf_legacy_loss torchscript use_bfloat16 typical_p
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_scores repetition_penalty return_dict_in_generate temperature top_k top_p max_new_tokens
    """.split()
)
"""Keys that do not change a model's shape or what it computes in training, or that repeat another key."""

FAMILIES: dict[str, Callable[[HuggingFaceFile], None]] = {
    "deepseek_v2": latent.read_deepseek_v2,
    "deepseek_v3": latent.read_deepseek_v3,
    "deepseek_v32": latent.read_sparse_attention,
    "deepseek_v4": latent.read_deepseek_v4,
    "gemma": hybrid.read_gemma,
    "gemma2": hybrid.read_gemma2,
    "gemma3_text": hybrid.read_gemma3,
    "gemma4_text": hybrid.read_gemma4,
    "glm4_moe": latent.read_glm4_moe,
    "glm_moe_dsa": latent.read_sparse_attention,
    "gpt_oss": dense.read_gpt_oss,
    "lfm2": hybrid.read_lfm2,
    "lfm2_moe": hybrid.read_lfm2,
    "llama": dense.read_llama,
    "llama4_text": hybrid.read_llama4,
    "minimax_m2": dense.read_minimax,
    "ministral3": dense.read_mistral,
    "mistral": dense.read_mistral,
    "mixtral": dense.read_mixtral,
    "olmo2": dense.read_olmo2,
    "phi3": dense.read_phi3,
    "qwen2": dense.read_qwen2,
    "qwen2_5_omni_text": dense.read_qwen2,
    "qwen2_5_vl_text": dense.read_qwen2,
    "qwen2_moe": dense.read_qwen2_moe,
    "qwen2_vl_text": dense.read_qwen2,
    "qwen3": dense.read_qwen3,
    "qwen3_5_moe_text": hybrid.read_qwen3_5,
    "qwen3_5_text": hybrid.read_qwen3_5,
    "qwen3_moe": dense.read_qwen3_moe,
    "qwen3_next": hybrid.read_qwen3_5,
    "qwen3_omni_moe_text": dense.read_qwen3_moe,
    "qwen3_vl_moe_text": dense.read_qwen3_moe,
    "qwen3_vl_text": dense.read_qwen3,
    "seed_oss": dense.read_seed_oss,
    "smollm3": dense.read_smollm3,
}
"""Reader of each `model_type`."""

SAME_FAMILY = {"kimi_k2": "deepseek_v3", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Family of further names; files of Qwen2-VL and Qwen2.5-VL have the language model's keys at the top."""

ARCHITECTURES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Family of an architecture, for files whose `model_type` is their own."""

_CLASS = re.compile(
    r"(\w+?)(ForCausalLM|LMHeadModel|Model|For(Sequence|Token)Classification|ForQuestionAnswering|ForConditional\w+)"
)
"""A class of transformers: the name of its family, and what it is for."""

PRESETS = {
    "kimi_linear": "kimi_k3",
    "kimi_k3": "kimi_k3",
    "mamba2": "mamba_130M",
    "Grok1ForCausalLM": "grok2",
    "Grok1ModelForCausalLM": "grok1",
}
"""Preset for a `model_type` or architecture whose files are not read."""

MISSING = {
    "olmo3": "its layers have norms only after attention and feed-forward, and windows",
    "granite": "its embeddings, residuals, attention and logits are multiplied by constants",
    "cohere": "attention and feed-forward of a layer read the same norm",
    "cohere2": "attention and feed-forward of a layer read the same norm",
    "stablelm": "it has LayerNorm",
    "phimoe": "it has LayerNorm, and a router of its own (sparsemixer)",
    "dbrx": "it has LayerNorm, and clips queries, keys and values",
    "nemotron_h": "its layers have one part each, and a feed-forward without a gate",
    "nemotron-nas": "each of its layers has its own shape",
    "starcoder2": "it has LayerNorm, and a feed-forward without a gate",
    "gpt_neox": "it has LayerNorm, and a feed-forward without a gate beside attention",
    "phi": "it has LayerNorm, and a feed-forward without a gate beside attention",
    "falcon": "it has LayerNorm, and a feed-forward without a gate",
    "nemotron": "it has LayerNorm, and a feed-forward without a gate",
    "opt": "it has learned positions, LayerNorm, and a feed-forward without a gate",
    "gpt2": "it has learned positions, LayerNorm, and a feed-forward without a gate",
    "gpt_bigcode": "it has learned positions, LayerNorm, and a feed-forward without a gate",
    "bloom": "it has ALiBi, LayerNorm, and a feed-forward without a gate",
    "mpt": "it has ALiBi, LayerNorm, and a feed-forward without a gate",
}
"""What no key of primus says of a `model_type` that is not read (transformers 5, `models/*/modeling_*.py`)."""

_EXPERTS = {"num_local_experts": "num_experts"}  # transformers 5 writes what published files call num_experts
RENAMED = {
    "lfm2": {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"},
    "llama4_text": {"intermediate_size": "moe_intermediate_size", "intermediate_size_mlp": "intermediate_size"},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen3_omni_moe_text": _EXPERTS,
    "qwen3_vl_moe_text": _EXPERTS,
}
"""Name of a key in other families, by its name in a family."""

PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which files of models with several parts have their language model."""

_PART_CONFIG = re.compile(r"(vision|audio|talker|token2wav|code2wav)_config")
"""Keys of the other parts."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
}


def read_model_config(values: dict[str, ConfigValue], origin: str, name: str) -> ForeignConfig:
    """The model that a `config.json` describes.

    Raises:
        UsageError: The family is not known, or its rope cannot be expressed.
    """
    for part in PARTS:
        text = values.get(part)
        if isinstance(text, dict):
            return _read_text_part(values, part, text, origin, name)
    target = ForeignConfig(origin=f"Hugging Face config.json of {origin}", name=name)
    family = _find_family(values, target)
    renamed = RENAMED.get(family, {})
    values = {renamed.get(key, key): value for key, value in values.items()}
    defaults = {renamed.get(key, key): value for key, value in read_family_defaults().families[family].items()}
    check_types(values, SHAPE | latent.LATENT | NUMBERS, origin)
    file = HuggingFaceFile(values, target, defaults)
    _report_own_class(file, family)
    file.copy_keys(SHAPE)
    _set_hub_name(file)
    file.set_keys(untie_embeddings_and_output_weights=not file.take("tie_word_embeddings"))
    _read_activation(file)
    _read_rope(file)
    FAMILIES[family](file)
    _check_dropout(file)
    _report_rest(file)
    return target


def _find_family(values: dict[str, ConfigValue], target: ForeignConfig) -> str:
    """The family whose class transformers builds for a file.

    Raises:
        UsageError: No family that is read here; names the preset of such a model if there is one.
    """
    model_type = str(values.get("model_type"))
    family = SAME_FAMILY.get(model_type, model_type)
    if family in FAMILIES:
        return family
    architectures = _list_architectures(values)
    for architecture in architectures:
        if architecture in ARCHITECTURES:
            reason = f"read as {ARCHITECTURES[architecture]}, the family of its architecture {architecture}"
            target.add_other("model_type", model_type, reason)
            return ARCHITECTURES[architecture]
    preset = next((PRESETS[each] for each in (model_type, *architectures) if each in PRESETS), None)
    hint = f"families: {', '.join(sorted(FAMILIES))}"
    if preset:
        hint = f"use the preset of such a model: model: {preset}.yaml"
    origin = target.origin.partition(" of ")[2]
    if model_type in MISSING:
        raise UsageError(f"{origin}: model_type {model_type!r} has no keys in primus: {MISSING[model_type]}", hint)
    raise UsageError(f"{origin}: model_type {model_type!r} is not a family of decoder that primus reads", hint)


def _list_architectures(values: dict[str, ConfigValue]) -> list[str]:
    """The classes that a file names."""
    names = values.get("architectures")
    return [str(each) for each in names] if isinstance(names, list) else []


def _report_own_class(file: HuggingFaceFile, family: str) -> None:
    """Report an architecture that is no class of the family: that of a draft model, or of a fork."""
    for name in _list_architectures(file.values):
        match = _CLASS.fullmatch(name)
        if match and match[2].startswith("ForConditional"):
            continue  # the whole of a multimodal model
        if not match or match[1].lower().replace("_", "") != family.removesuffix("_text").replace("_", ""):
            file.target.add_other(
                "architectures", name, f"not a class of {family}, as which it is read by its model_type: it may differ"
            )


def _read_text_part(
    values: dict[str, ConfigValue], part: str, text: dict[str, ConfigValue], origin: str, name: str
) -> ForeignConfig:
    """The language model of a file that describes other parts (vision, audio) too."""
    inherited = {key: values[key] for key in ("tie_word_embeddings", "_name_or_path", "architectures") if key in values}
    own_type = {"model_type": f"{values.get('model_type')}_text"} if part == "text_config" else {}
    target = read_model_config(own_type | inherited | text, origin, name)
    whole, own = (each.get("tie_word_embeddings") for each in (values, text))
    if whole is not None and own is not None and whole != own:
        target.add_other("tie_word_embeddings", whole, f"{part} has {own}, which is taken; they contradict each other")
    for key in sorted(values.keys() - {part} - WITHOUT_EFFECT - inherited.keys()):
        is_plain = values[key] in (None, {}, [], text.get(key)) or key.endswith(_TOKENS)
        target.add_other(key, values[key], "" if is_plain else f"only the language model ({part}) is taken")
    return target


_TOKENS = ("_token_id", "_token_index", "ignore_index", "_placeholder")
"""Ends of keys that name tokens, which only other parts need."""


def _set_hub_name(file: HuggingFaceFile) -> None:
    name = file.take("_name_or_path", "") or file.take("_model_name_or_path", "")
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        file.set_keys(hf_name=name)
    elif name:
        file.target.add_other("_name_or_path", name)


def _read_activation(file: HuggingFaceFile) -> None:
    key = "hidden_activation" if file.values.get("hidden_activation") else "hidden_act"
    written = file.take(key, "silu")
    file.unread -= {"hidden_act", "hidden_activation"}
    if written not in _ACTIVATIONS:
        raise UsageError(
            f"{file.target.origin}: {key} {written!r} is not supported", "primus has gated silu and gelu feed-forwards"
        )
    file.set_keys(ffn_activation=_ACTIVATIONS[written])


def _read_rope(file: HuggingFaceFile) -> None:
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
    if kind in _PLAIN_ROPES:
        pass
    elif kind in SCALINGS:
        _read_scaling(file, kind, scaling, SCALINGS[kind])
    else:
        file.target.add_other(
            f"{key}.rope_type", kind, "primus scales rope by linear, llama3 or yarn; the frequencies stay unscaled"
        )
    for rest, value in scaling.items():
        file.target.add_other(
            f"{key}.{rest}", value, "" if value is None or kind in _PLAIN_ROPES else "no key of primus"
        )


_PLAIN_ROPES = ("default", "mrope")
"""Types of rope that scale nothing; the sections of the second one are positions of images."""
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
SCALINGS = {"linear": {"factor": "rotary_scaling_factor"}, "llama3": LLAMA3, "yarn": YARN}
"""Keys of each kind of rope scaling."""


def _choose_layer_kind(file: HuggingFaceFile, key: str, scaling: dict[str, ConfigValue]) -> dict[str, ConfigValue]:
    """Rope of the layers with full attention, where it differs between kinds of layers (Gemma 3)."""
    kinds = {kind: part for kind, part in scaling.items() if isinstance(part, dict)}
    if not kinds:
        return scaling
    chosen = "full_attention" if "full_attention" in kinds else next(iter(kinds))
    for kind, part in kinds.items():
        theta = part.get("rope_theta")
        if (
            kind == "sliding_attention"
            and part.get("rope_type", "default") == "default"
            and isinstance(theta, float | int)
        ):
            file.set_keys(window_rotary_base=float(theta))
        elif kind != chosen and part != kinds[chosen]:
            file.target.add_other(f"{key}.{kind}", part, "primus has one rope for all layers")
    return kinds[chosen]


def _read_scaling(file: HuggingFaceFile, kind: str, scaling: dict[str, ConfigValue], names: dict[str, str]) -> None:
    file.set_keys(rope_type=kind)
    if kind == "yarn" and "original_max_position_embeddings" not in scaling:
        # transformers takes the maximum length of the model here
        file.set_keys(original_max_position_embeddings=file.target.model.get("max_position_embeddings", 4096))
    for key, ours in names.items():
        value = scaling.pop(key, None)
        if value is not None:
            file.set_keys(**{ours: value})


def _check_dropout(file: HuggingFaceFile) -> None:
    for key in [key for key in file.unread if key.endswith(("_dropout", "_pdrop"))]:
        value = file.take(key, 0.0)
        file.target.add_other(key, value, "primus trains without dropout" if value else "")


def _report_rest(file: HuggingFaceFile) -> None:
    for key in sorted(file.unread):
        value = file.values.get(key)
        has_effect = key not in WITHOUT_EFFECT and value not in (None, False, {}, [], "") and not key.endswith(_TOKENS)
        reason = "only the language model is taken" if _PART_CONFIG.fullmatch(key) else "no key of primus"
        file.target.add_other(key, value, reason if has_effect else "")
