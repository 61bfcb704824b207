"""The model in Megatron-LM's arguments, as keys of the model schema.

Sources: megatron/training/arguments.py (`validate_args`, `core_transformer_config_from_args`) and
megatron/core/transformer/transformer_config.py of Megatron-LM 0.16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.config.convert import find_origin
from primus.config.layer_pattern import parse_layer_pattern
from primus.config.schema import OWNERS
from primus.config.source import Leaf, Tree
from primus.config.translation.foreign_settings import ForeignSettings, LayerContext
from primus.config.translation.known_keys import KnownKeys
from primus.errors import UsageError

if TYPE_CHECKING:
    pass

OTHER_MODELS = ("hybrid_override_pattern", "hybrid_layer_pattern", "experimental_attention_variant", "lfm_layer_types")
"""Arguments of models whose layers are of several kinds."""

SHAPE_ARGUMENTS = """
    model_type spec swiglu squared_relu quick_geglu openai_gelu normalization position_embedding_type
    add_position_embedding use_rotary_position_embeddings group_query_attention use_rope_scaling rope_scaling_factor
    rotary_seq_len_interpolation_factor rotary_interleaved is_hybrid_model hybrid_attention_ratio hybrid_mlp_ratio
    hybrid_override_pattern experimental_attention_variant linear_attention_freq mamba_num_heads qk_l2_norm
    apply_layernorm_1p softmax_type window_attn_skip_freq mtp_hybrid_override_pattern
""".split()
"""Foreign keys of a model preset that describe the shape; a preset of ours of the same name replaces them."""

LATENT_WIDTHS = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Defaults of the MLA arguments."""


def needs_other_code(settings: Tree, primus_keys: KnownKeys) -> bool:
    """Whether a model preset describes a model that Megatron-LM's arguments cannot express.

    Such a model is built by code of Primus; only a preset of the same name here describes it.
    """

    def is_set(key: str, item: Leaf | Tree) -> bool:
        if not (key in OTHER_MODELS or _is_of_model(key, primus_keys)):
            return False
        known = primus_keys.keys.get(key)
        return not isinstance(item, Leaf) or item.value not in (None, known.default if known else None)

    kind = settings.get("model_type")
    is_other = isinstance(kind, Leaf) and kind.value not in (None, "gpt")
    return is_other or any(is_set(key, item) for key, item in settings.items())


def drop_shape(settings: Tree, primus_keys: KnownKeys) -> Tree:
    """A model preset without the keys that describe the shape of its model."""
    return {
        key: item
        for key, item in settings.items()
        if OWNERS.get(key) != "model" and key not in SHAPE_ARGUMENTS and not _is_of_model(key, primus_keys)
    }


def _is_of_model(key: str, primus_keys: KnownKeys) -> bool:
    known = primus_keys.keys.get(key)
    return known is not None and known.effect == "model"


def translate_model(work: ForeignSettings, context: LayerContext, tokenizers: dict[str, int]) -> None:
    """Replace the arguments of the model's shape by keys of the schema.

    Raises:
        UsageError: The model is one that no engine here has; the message names the line.
    """
    _set_vocabulary(work, context, tokenizers)
    _check_kind(work)
    _translate_layers(work)
    _translate_attention(work)
    _translate_rope(work)
    _translate_experts(work)


def _set_vocabulary(work: ForeignSettings, context: LayerContext, tokenizers: dict[str, int]) -> None:
    """The rows of the embedding, which Megatron-LM takes from the tokenizer where vocab_size is not set."""
    if work.read("vocab_size"):
        return
    name, size = work.read("tokenizer_model"), None
    if isinstance(name, str):
        from primus.config.vocabulary import find_tokenizer_size  # not for experiments that state it

        size = tokenizers.get(name) or find_tokenizer_size(name)
    if size:
        work.put("vocab_size", size, work.find_origin("tokenizer_model"))
    elif "vocab_size" in context.model:
        work.tree["vocab_size"] = context.model["vocab_size"]


def _check_kind(work: ForeignSettings) -> None:
    """Refuse a model without the norms, positions and gates of the decoders here."""
    is_hybrid = bool(work.read("hybrid_layer_pattern"))
    kind = work.read("model_type", "gpt")
    if kind not in ("gpt", "mamba") and not is_hybrid and not _is_described(work):
        raise work.refuse(
            "model_type", f"no engine here has models of type '{kind}'", "choose a preset of `config init`"
        )
    wrong = {
        "normalization": (work.read("normalization", "RMSNorm") != "RMSNorm", "RMSNorm"),
        "position_embedding_type": (
            work.read("position_embedding_type", "rope") not in ("rope", "yarn", "none"),
            "rotary embedding (rope)",
        ),
        "swiglu": (work.read("swiglu") is False, "gated feed-forward layers (swiglu: true)"),
        "squared_relu": (bool(work.read("squared_relu")), "gated feed-forward layers (swiglu: true)"),
    }
    for key, (is_wrong, has) in wrong.items():
        if is_wrong and not is_hybrid:
            raise work.refuse(key, f"{work.read(key)}: models here have {has}", f"use {has}, or another model")
    if work.read("quick_geglu") or work.read("openai_gelu"):
        work.put("ffn_activation", "gelu", work.find_origin("quick_geglu", "openai_gelu"))
    shown = ("model_type", "normalization", "position_embedding_type", "swiglu", "squared_relu")
    work.drop(*shown, "quick_geglu", "openai_gelu", "add_position_embedding", "use_rotary_position_embeddings")
    if work.read("activation_func") in ("swiglu", "silu"):
        work.drop("activation_func")
    for key in ("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio", "spec"):
        if is_hybrid:
            work.drop(key)


def _is_described(work: ForeignSettings) -> bool:
    """Whether a preset here described the model, so that its type is only the name of Primus' code."""
    return all(work.read(key) for key in ("num_layers", "hidden_size", "vocab_size"))


def _translate_layers(work: ForeignSettings) -> None:
    if work.read("ffn_hidden_size") is None and isinstance(work.read("hidden_size"), int):
        # validate_args: two thirds of four times the width, in multiples of 64, for gated layers
        work.put("ffn_hidden_size", int((4 * work.read("hidden_size") * 2 / 3) / 64) * 64, "Megatron-LM's default")
    for key in ("hidden_dropout", "attention_dropout"):
        if work.read(key, 0) == 0:
            work.drop(key)
    if work.read("mtp_num_layers", 0) == 0:
        work.drop("mtp_num_layers", "mtp_loss_scaling_factor")


def _translate_attention(work: ForeignSettings) -> None:
    if work.take("group_query_attention") is False:
        work.drop("num_query_groups")
    softmax, origin = work.read("softmax_type", "vanilla"), work.find_origin("softmax_type")
    if softmax in ("vanilla", "learnable"):
        work.drop("softmax_type")
    if softmax == "learnable":
        work.put("attention_sinks", True, origin)
    _translate_window(work)
    if work.read("multi_latent_attention"):
        for key, default in LATENT_WIDTHS.items():
            if work.read(key) is None:
                work.put(key, default, "Megatron-LM's default")
        # Latent attention always norms its latents; heads have the width of the latent parts.
        work.drop("qk_layernorm", "num_query_groups", "kv_channels")
    elif not work.read("o_lora_rank"):
        work.drop(*LATENT_WIDTHS, "q_lora_rank")


def _translate_window(work: ForeignSettings) -> None:
    """A window is a pair (keys before, keys after) in Megatron-LM, a number of tokens here."""
    window = work.read("window_size")
    if isinstance(window, str):
        import ast  # not for files without such a text

        try:
            window = ast.literal_eval(window)
        except (ValueError, SyntaxError):
            raise work.refuse("window_size", f"{window!r} is not a pair of numbers", "write (127, 0)") from None
    if isinstance(window, list | tuple):
        if not window or not all(type(each) is int for each in window):
            raise work.refuse("window_size", f"{window!r} is not a pair of numbers", "write (127, 0)")
        work.put("window_size", window[0] + 1, work.find_origin("window_size"))
    origin, skipped = work.find_origin("window_attn_skip_freq"), work.read("window_attn_skip_freq")
    if skipped is None or not work.read("window_size"):
        work.drop("window_attn_skip_freq")
        return
    # `is_layer_window_attention`: a number N leaves every N-th layer without the window, a list has 1 for a window.
    pattern = [1, 0] if skipped == 2 else skipped
    length = len(pattern) if isinstance(pattern, list) else 0
    periods = [p for p in range(1, length + 1) if pattern == [int(layer % p == 0) for layer in range(length)]]
    if not periods:
        raise work.refuse(
            "window_attn_skip_freq", f"{skipped}: every n-th layer is windowed here, starting with the first", "use 2"
        )
    work.drop("window_attn_skip_freq")
    work.put("window_layer_period", periods[0], origin)


def _translate_rope(work: ForeignSettings) -> None:
    """Scaling as Megatron-LM has it: `use_rope_scaling` is Llama 3's, latent attention uses yarn."""
    origin = work.find_origin("use_rope_scaling", "rope_type", "multi_latent_attention")
    is_scaled, factor = work.take("use_rope_scaling"), work.take("rope_scaling_factor", 8.0)
    kind = work.read("rope_type")
    if kind not in (None, "rope", "yarn"):
        return  # already a value of the schema
    latent = bool(work.read("multi_latent_attention"))
    yarn_factor = work.read("rotary_scaling_factor", 1.0)
    if is_scaled:
        work.put("rope_type", "llama3", origin)
        work.put("rotary_scaling_factor", factor, origin)
    elif (kind == "yarn" or (kind is None and latent)) and yarn_factor != 1.0:
        work.put("rope_type", "yarn", origin)
        if work.read("original_max_position_embeddings") is None:
            work.put("original_max_position_embeddings", 4096, "Megatron-LM's default")
    else:
        work.put("rope_type", "default", origin)
        work.drop("rotary_scaling_factor")
    if work.read("rope_type") != "yarn":
        work.drop("mscale", "mscale_all_dim")
    if work.read("rotary_seq_len_interpolation_factor", 1) == 1:
        work.drop("rotary_seq_len_interpolation_factor")


def _translate_experts(work: ForeignSettings) -> None:
    if not work.read("num_experts"):
        work.drop("num_experts", "moe_layer_freq")
        for key in [key for key in work.tree if key.startswith("moe_")]:
            work.drop(key)
        return
    _translate_expert_layers(work)
    kind = work.read("moe_router_load_balancing_type")
    if kind == "none":
        work.put("moe_aux_loss_coeff", 0.0, work.find_origin("moe_router_load_balancing_type"))
    if work.read("moe_router_score_function") in ("sigmoid", "sqrtsoftplus"):
        # Scores of the chosen experts are divided by their sum (`topk_routing_with_score_function`), unless one is
        # chosen.
        work.put("moe_router_norm_topk_prob", work.read("moe_router_topk", 2) != 1, "Megatron-LM's router")
        work.drop("moe_router_pre_softmax")
    elif "moe_router_pre_softmax" not in work.tree:
        work.put("moe_router_pre_softmax", False, "Megatron-LM's default")
    if not work.read("moe_shared_expert_intermediate_size"):
        work.drop("moe_shared_expert_intermediate_size", "moe_shared_expert_gate")


def _translate_expert_layers(work: ForeignSettings) -> None:
    """`moe_layer_freq` is an interval or a list with 1 for each layer with experts: `([0]*3+[1]*58)`."""
    item = work.tree.get("moe_layer_freq")
    frequency = work.read("moe_layer_freq", 1)
    if not isinstance(item, Leaf) or frequency in (1, "1"):
        work.drop("moe_layer_freq")
        return
    origin = work.find_origin("moe_layer_freq")
    pattern = parse_layer_pattern(frequency)
    if pattern is None:
        raise UsageError(
            f"{find_origin(item)}: moe_layer_freq: {frequency!r} is not a pattern of layers", "write ([0]*3+[1]*58)"
        )
    if isinstance(pattern, int):
        if isinstance(frequency, str):
            work.put("moe_layer_freq", pattern, origin)
        work.notes.append(
            f"moe_layer_freq {pattern}: one layer in {pattern} has experts, starting with layer {pattern} as in "
            f"published models; Megatron-LM starts with layer 1"
        )
        return
    if len(pattern) != work.read("num_layers", len(pattern)):
        problem = f"{frequency} is a pattern of {len(pattern)} layers, the model has {work.read('num_layers')}"
        raise work.refuse("moe_layer_freq", problem, "write one number for each layer")
    work.drop("moe_layer_freq")
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if all(pattern[dense:]):
        if dense:
            work.put("first_k_dense_replace", dense, origin)
        return
    period = dense + 1
    if pattern == [int(layer % period == dense) for layer in range(len(pattern))] and dense:
        work.put("moe_layer_freq", period, origin)
        return
    raise UsageError(
        f"{find_origin(item)}: moe_layer_freq: {frequency}: layers with experts must follow the dense ones, "
        "or be every n-th one, starting with layer n",
        "write a pattern such as ([0]*3+[1]*58) or ([0,1]*24)",
    )
