"""Read the `config.json` of a Hugging Face model as a model preset.

Names and defaults are those of the configuration classes of transformers 5
(`transformers/models/*/configuration_*.py`).
"""

from __future__ import annotations

import re
from typing import Any

from primus.config.imports.foreign_config import NUMBER, ForeignConfig, check_types
from primus.config.imports.hugging_face_families import DEFAULTS, FAMILIES, FAMILY_DEFAULTS, LATENT
from primus.config.imports.hugging_face_file import HuggingFaceFile
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
    file = HuggingFaceFile(values, target, DEFAULTS | FAMILY_DEFAULTS.get(str(model_type), {}))
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


def _set_hub_name(file: HuggingFaceFile) -> None:
    name = file.take("_name_or_path", "")
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        file.set_keys(hf_name=name)


def _read_activation(file: HuggingFaceFile, default: str) -> None:
    key = "hidden_activation" if "hidden_activation" in file.values else "hidden_act"
    written = file.take(key, default)
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


def _choose_layer_kind(file: HuggingFaceFile, key: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Rope of the layers with full attention, where it differs between kinds of layers (Gemma 3)."""
    kinds = {kind: part for kind, part in scaling.items() if isinstance(part, dict)}
    if not kinds:
        return scaling
    chosen = "full_attention" if "full_attention" in kinds else next(iter(kinds))
    for kind, part in kinds.items():
        if kind != chosen and part != kinds[chosen]:
            file.target.add_other(f"{key}.{kind}", part, "primus has one rope for all layers")
    return kinds[chosen]


def _read_scaling(file: HuggingFaceFile, kind: str, scaling: dict[str, Any], names: dict[str, str]) -> None:
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
        has_effect = key not in WITHOUT_EFFECT and value not in (None, False)
        file.target.add_other(key, value, "no key of primus" if has_effect else "")
