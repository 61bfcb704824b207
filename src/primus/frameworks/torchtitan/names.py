"""Models of torchtitan, and settings that mean the same here under another name.

Sources: `torchtitan/config/job_config.py` of v0.1.0 to v0.2.2 and the Config classes of v0.3.0.
"""

from __future__ import annotations

from pathlib import Path

from primus.config.source import ConfigValue
from primus.config.translation.known_keys import KnownKeys, read_known_keys
from primus.engine_keys import list_file_names

FOLDER = Path(__file__).parent

MOVED = {
    "hf_assets_path": "model.hf_assets_path",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "lr_scheduler.decay_factor": "lr_scheduler.decay_ratio",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "model.tokenizer_path": "model.hf_assets_path",
    "validation.enabled": "validation.enable",
    "profiling.enable": "profiling.enable_profiling",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule_csv": "parallelism.pipeline_parallel_schedule_csv",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.last_save_in_safetensors_format": "checkpoint.last_save_in_hf",
    "memory_estimation.enabled": "memory_estimation.enable",
}
"""Newer field by the name in torchtitan 0.1 and early 0.2."""
RENAMED = MOVED | list_file_names(FOLDER)
"""Key of the schema, or newer field, by the name in torchtitan 0.1 to 0.3."""

NUMBERS = (
    *("training.global_batch_size", "lr_scheduler.decay_ratio", "lr_scheduler.decay_factor", "checkpoint.interval"),
    *("validation.freq", "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"),
    "comm.train_timeout_seconds",
)
"""Further settings whose values are numbers."""

DATASETS = {"c4": "c4", "c4_validation": "c4"}
"""Named dataset here by torchtitan's."""

DEFAULTS = (
    *("training.steps", "training.local_batch_size", "training.seq_len", "training.max_norm", "compile.enable"),
    *("training.mixed_precision_param", "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
    *("optimizer.weight_decay", "lr_scheduler.warmup_steps", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"),
    *("parallelism.data_parallel_shard_degree", "activation_checkpoint.mode", "checkpoint.enable"),
    *("checkpoint.async_mode", "metrics.log_freq", "metrics.enable_tensorboard", "metrics.enable_wandb"),
)
"""Fields that mean torchtitan's default where they are not set, because primus may do otherwise."""

MODELS: dict[str, dict[str, str]] = {
    "llama2": {"7B": "llama2_7B", "13B": "llama2_13B", "70B": "llama2_70B"},
    "llama3": {
        "1B": "llama3.2_1B",
        "3B": "llama3.2_3B",
        "8B": "llama3.1_8B",
        "70B": "llama3.1_70B",
        "405B": "llama3.1_405B",
    },
    "llama4": {"17bx16e": "llama4_17B16E", "17bx128e": "llama4_17B128E"},
    "qwen3": {
        "0.6B": "qwen3_0.6B",
        "1.7B": "qwen3_1.7B",
        "4B": "qwen3_4B",
        "8B": "qwen3_8B",
        "14B": "qwen3_14B",
        "32B": "qwen3_32B",
        "30B-A3B": "qwen3_30B_A3B",
        "235B-A22B": "qwen3_235B_A22B",
    },
    "deepseek_v3": {"16B": "deepseek_v3_16B", "236B": "deepseek_v3_236B", "671B": "deepseek_v3_671B"},
    "gpt_oss": {"20b": "gpt_oss_20B", "120b": "gpt_oss_120B"},
}
"""Model preset of each flavor."""

_QWEN3_DEBUG: dict[str, ConfigValue] = {
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "untie_embeddings_and_output_weights": False,
    "qk_layernorm": True,
    "norm_epsilon": 1e-6,
    "rotary_base": 1000000.0,
}
DEBUG_MODELS: dict[tuple[str, str], dict[str, ConfigValue]] = {
    ("llama3", "debugmodel"): {
        "num_layers": 6,
        "hidden_size": 256,
        "ffn_hidden_size": 768,
        "num_attention_heads": 16,
        "vocab_size": 2048,
        "max_position_embeddings": 131072,
        "rotary_base": 500000.0,
        "rope_type": "llama3",
        "rotary_scaling_factor": 8.0,
    },
    ("qwen3", "debugmodel"): _QWEN3_DEBUG,
    ("qwen3", "debugmodel_moe"): _QWEN3_DEBUG
    | {
        "untie_embeddings_and_output_weights": True,
        "num_experts": 64,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
        "moe_router_norm_topk_prob": True,
    },
    ("deepseek_v3", "debugmodel"): {
        "num_layers": 6,
        "hidden_size": 256,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 16,
        "vocab_size": 2048,
        "max_position_embeddings": 16384,
        "multi_latent_attention": True,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "rope_type": "yarn",
        "rotary_scaling_factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,  # torchtitan has one, which scales the softmax
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 256,
        "moe_shared_expert_intermediate_size": 512,
    },
}
"""Shapes of small flavors (torchtitan/models/*/__init__.py)."""


def read_fields() -> KnownKeys:
    """The fields of torchtitan's configuration by dotted name, of 0.2 and 0.3, and those of Primus' extensions."""
    return read_known_keys(Path(__file__).with_name("known_keys.json"))
