"""What Megatron-LM does where an argument is absent, and primus may do otherwise: the one table of such defaults.

Defaults of the parser are those of `frameworks/megatron/arguments.json`, which `tools/megatron_arguments.py` reads from
the parser itself. What is listed here is what the parser does not know; sources are functions of core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from msgspec import structs

from primus.config.schema import GROUPS, OWNERS
from primus.config.source import ConfigValue
from primus.frameworks.megatron.known_keys import read_arguments

LATER: dict[str, ConfigValue] = {
    "split": "969, 30, 1",  # validate_args in megatron/training/arguments.py
    "eval_interval": 1000,  # TrainingConfig in megatron/training/config.py; from 0.17 on, none
}
"""Defaults that Megatron-LM sets after it has parsed its arguments, and of the release that the framework is for."""

DEPENDENT: dict[str, tuple[str, ...]] = {
    "multi_latent_attention": ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mscale_all_dim"),
    "use_rope_scaling": ("rotary_scaling_factor",),
    "fim_data": ("fim_rate",),
    "experimental_attention_variant": (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    ),
}
"""Keys whose defaults hold only with an argument."""

EQUIVALENT: dict[str, str] = {
    "num_query_groups": "counts only with --group-query-attention",
    "create_attention_mask_in_dataloader": "the mask is causal either way",
    "optimizer": "adam is AdamW",
    "profile_ranks": "counts only with --profile",
}
"""Keys whose other default trains the same, and why."""

IMPLIED = {
    "use_mcore_models": (True,),
    "swiglu": (True,),
    "group_query_attention": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope", "yarn", "rotary"),
    "use_rotary_position_embeddings": (True,),
    "no_position_embedding": (True,),
    "hidden_dropout": (0, 0.0),
    "attention_dropout": (0, 0.0),
    "rotary_interleaved": (False,),
    "save_retain_interval": (None,),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss"),
    "ckpt_format": ("torch_dist", "torch"),
    "make_vocab_size_divisible_by": (128,),
    "dataloader_type": ("single",),
    "data_impl": ("mmap", "infer"),
    "mmap_bin_files": (True,),
    "no_mmap_bin_files": (True,),
    "check_for_nan_in_loss_and_grad": (True,),
    "zero_stage": (0,),
    "deepspeed_activation_checkpointing": (True,),
}
"""Arguments, also of Megatron-DeepSpeed, whose values state what primus always does."""

NEEDED = {
    "swiglu": "the feed-forward is gated (SwiGLU) in primus; this script's is not",
    "normalization": "the norm is RMSNorm in primus; Megatron-LM's default is LayerNorm",
    "position_embedding_type": "positions are rotary in primus; Megatron-LM's default is learned_absolute",
    "hidden_dropout": "primus trains without dropout; Megatron-LM's default is 0.1",
    "attention_dropout": "primus trains without dropout; Megatron-LM's default is 0.1",
}
"""What Megatron-LM does otherwise where an argument is absent that primus has no key for."""


def list_defaults(given: Container[str], own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys that a script leaves to Megatron-LM, with its defaults, where they differ from ours.

    Args:
        given: Names of the arguments that the script gives.
        own: Defaults of its checkout by key, which replace those of our release.
    """
    absent = {key for argument, keys in DEPENDENT.items() if argument not in given for key in keys}
    arguments = read_arguments().keys
    for key, group in OWNERS.items():
        argument = arguments.get(key)
        released = LATER.get(key, argument.default if argument else None)
        value = own.get(key, released)
        if value is None or key in absent or (key in EQUIVALENT and value == released):
            continue
        default = next(field.default for field in structs.fields(GROUPS[group]) if field.name == key)
        if value != default:
            yield key, value
