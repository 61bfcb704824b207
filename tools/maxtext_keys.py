"""Write what is known of MaxText's configuration, from an installation or a checkout of it.

    python tools/maxtext_keys.py FOLDER_OF_maxtext

Facts are names, defaults and their types in `maxtext/configs/base.yml`. The effects of settings without an equivalent
key are stated here, as are settings of Primus' files that this release does not have.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from megatron_arguments import make_plain, write_lines

TARGET = Path(__file__).parent.parent / "src/primus/frameworks/maxtext/known_keys.json"
VERSION = "0.2.5"
KINDS = {bool: "bool", int: "int", float: "float", str: "str"}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "base_config": {"default": "base.yml", "effect": "other", "kind": "str"},
    "expert_balance": {
        "default": False,
        "effect": "numbers",
        "kind": "bool",
        "gone": "MaxText 0.2.5 does not force an equal load of the experts",
    },
    "pure_nnx_decoder": {
        "default": False,
        "effect": "speed",
        "kind": "bool",
        "gone": "MaxText 0.2.5 has decoders of Flax NNX only",
    },
    "file_sink_level": {"default": "DEBUG", "effect": "report", "kind": "str"},
    "sink_level": {"default": None, "effect": "report"},
    "stderr_sink_level": {"default": "INFO", "effect": "report", "kind": "str"},
    "trainable": {"default": False, "effect": "other", "kind": "bool"},
}
"""Keys of Primus' files that base.yml does not have."""
EFFECTS = {
    "report": """
        *tensorboard* *goodput* *profil* *wandb* metrics_file gcs_* log_* mllog_file xprof_* run_name
        base_output_directory managed_mldiagnostics* prometheus_port dump_* report_* monitor_* vertex_* enable_mllog
        save_config_to_gcs hide_profiler_step_metric record_internal_nn_metrics upload_all_profiler_results
        enable_gcp_* heartbeat_* step_deviation_* write_estimator_result debug_sharding enable_checkpoint_cloud_logger
    """,
    "checkpoint": """
        *checkpoint* load_* save_* local_checkpoint* lora_* hf_lora_adapter_path *_tier_* max_num_checkpoints_to_keep
        enable_orbax_v1 enable_single_replica_ckpt_restoring source_checkpoint_layout
    """,
    "launch": """
        hardware num_slices *jax_distributed* elastic_* enable_single_controller jax_debug_log_modules
        subslice_shape enable_pathways_goodput
    """,
    "data": """
        dataset_* hf_path hf_name hf_data_dir hf_train_files hf_eval_files hf_eval_split hf_access_token grain_*
        tokenize_* tokenizer_* add_bos add_eos train_split eval_split *_data_columns *_image_column packing packing_*
        max_segments_per_seq max_corpus_chars enable_data_shuffling data_shuffle_seed blend_* mmap_* olmo_* colocated_*
        generate_padding_batch_* expansion_factor_real_data reuse_example_batch num_epoch use_truncation chat_template*
        use_chat_template eval_dataset_name use_untrainable_positional_embedding train_interleave_cycle_length
        train_shard_in_read eod_mask_loss reset_attention_mask warm_input_reshard_before_run_start
    """,
    "other": """
        *_for_vit *_for_audio *audio* *video* *image* vision_* *multimodal* *decode* *inference* *prefill* *vllm*
        distill_* *kvcache* kv_quant_* use_sft use_dpo sft_* *rollout* *prompt* *prefix_caching* generate_slice
        override_model_config standalone_checkpointer_* skip_step_* autoregressive_* return_* target_eval_loss
        freeze_* weight_sync_debug checkpoint_is_quantized
    """,
    "speed": """
        jax_cache_dir attention sa_* local_sa_* eval_sa_* eval_local_sa_* remat_policy* scan_* param_scan_axis *_offload
        use_iota_embed megablox sparse_matmul ici_* dcn_* sharding_tolerance shardy logical_axis_rules* mesh_axes
        *_tile_* wi_* wo_* allow_split_physical_axes custom_mesh* optimize_mesh_* compile* internal_compile*
        moe_dispatch_no_expert_sharding
        decoder_layer_input *_proj mlpwi* mlpwo moe_mlpw* context mla_q mla_kv attention_out engram
        num_vocab_tiling use_splash* use_tokamax* use_jax_splash shard_* block_state_* warmup_programs_in_init
        *_pipeline_* pipeline_* num_pipeline_* num_layers_per_pipeline_stage input_data_sharding_logical_axes
        data_sharding remove_size_one_mesh_axis_from_type
    """,
    "numbers": "*",
}


def main() -> None:
    base = yaml.safe_load((Path(sys.argv[1]) / "configs/base.yml").read_text(encoding="utf-8"))
    keys: dict[str, dict[str, Any]] = {}
    for name, default in base.items():
        found: dict[str, Any] = {"effect": find_effect(name)}
        if not isinstance(default, list | dict):
            found["default"] = make_plain(default)
        if type(default) in KINDS:
            found["kind"] = KINDS[type(default)]
        keys[name] = found
    write_lines(TARGET, {"versions": [VERSION]}, dict(sorted((keys | ELSEWHERE).items())))


def find_effect(name: str) -> str:
    """The first effect with a pattern that matches `name`; the longest pattern of all wins."""
    found = [
        (len(pattern), effect)
        for effect, patterns in EFFECTS.items()
        for pattern in patterns.split()
        if fnmatchcase(name, pattern)
    ]
    return max(found)[1]


if __name__ == "__main__":
    main()
