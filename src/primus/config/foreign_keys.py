"""Settings of other frameworks: those with an equivalent key here, and those that only one engine has.

Sources: TrainingArguments and model configurations of Hugging Face transformers; the JobConfig of torchtitan 0.2;
arguments.py of Megatron-LM 0.16; config.py of nanoGPT; base.yml of MaxText; the DeepSpeed configuration; the recipes
of NeMo, Axolotl and LLaMA-Factory; the experiment files of AMD-AGI/Primus.
"""

from __future__ import annotations

_STEPS = "train_iters (the length is counted in optimizer steps)"
_ACCUMULATION = "global_batch_size (micro_batch_size x devices x accumulation steps)"
_PRECISION = "bf16 (true or false)"
_SAMPLES = "global_batch_size and train_iters (lengths are counted in steps, not in samples)"
_TIED = "untie_embeddings_and_output_weights (the opposite)"
_BETAS = "adam_beta1 and adam_beta2"

SYNONYMS: dict[str, str] = {
    # length
    "max_steps": "train_iters",
    "max_iters": "train_iters",
    "max_train_steps": "train_iters",
    "num_steps": "train_iters",
    "num_iters": "train_iters",
    "num_iterations": "train_iters",
    "iterations": "train_iters",
    "iters": "train_iters",
    "steps": "train_iters",
    "train_steps": "train_iters",
    "training_steps": "train_iters",
    "total_steps": "train_iters",
    "max_training_steps": "train_iters",
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "max_epochs": _STEPS,
    "train_samples": _SAMPLES,
    "lr_warmup_samples": "lr_warmup_iters",
    "lr_decay_samples": "lr_decay_iters",
    # batch and sequence
    "batch_size": "micro_batch_size (one device, one pass) or global_batch_size (one optimizer step)",
    "bs": "micro_batch_size (one device, one pass) or global_batch_size (one optimizer step)",
    "mbs": "micro_batch_size",
    "microbatch_size": "micro_batch_size",
    "local_batch_size": "micro_batch_size",
    "per_device_batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "device_batch_size": "micro_batch_size",
    "gbs": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "total_batch_size": "global_batch_size",
    "gradient_accumulation_steps": _ACCUMULATION,
    "grad_accum_steps": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "seq_len": "seq_length",
    "sequence_length": "seq_length",
    "sequence_len": "seq_length",
    "max_seq_len": "seq_length",
    "max_seq_length": "seq_length",
    "max_length": "seq_length",
    "max_target_length": "seq_length",
    "block_size": "seq_length",
    "context_length": "seq_length",
    "context_len": "seq_length",
    "ctx_len": "seq_length",
    "cutoff_len": "seq_length",
    # optimizer
    "learning_rate": "lr",
    "max_lr": "lr",
    "peak_lr": "lr",
    "base_lr": "lr",
    "optimizer.lr": "lr",
    "min_learning_rate": "min_lr",
    "final_lr": "min_lr",
    "min_lr_factor": "min_lr_ratio",
    "min_lr_rate": "min_lr_ratio",
    "cosine_learning_rate_final_fraction": "min_lr_ratio",
    "learning_rate_final_fraction": "min_lr_ratio",
    "warmup": "lr_warmup_iters",
    "warmup_steps": "lr_warmup_iters",
    "warmup_iters": "lr_warmup_iters",
    "num_warmup_steps": "lr_warmup_iters",
    "lr_warmup_steps": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "warmup_fraction": "lr_warmup_fraction",
    "warmup_steps_fraction": "lr_warmup_fraction",
    "lr_scheduler": "lr_decay_style",
    "lr_scheduler_type": "lr_decay_style",
    "lr_schedule": "lr_decay_style",
    "scheduler": "lr_decay_style",
    "decay_type": "lr_decay_style",
    "decay_ratio": "lr_wsd_decay_iters (a number of steps)",
    "decay_steps": "lr_decay_iters",
    "lr_decay_steps": "lr_decay_iters",
    "learning_rate_schedule_steps": "lr_decay_iters",
    "wd": "weight_decay",
    "adam_weight_decay": "weight_decay",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "adam_b1": "adam_beta1",
    "adam_b2": "adam_beta2",
    "betas": _BETAS,
    "adam_betas": _BETAS,
    "eps": "adam_eps",
    "adam_epsilon": "adam_eps",
    "optim": "optimizer",
    "optimizer_type": "optimizer",
    "opt_type": "optimizer",
    "optimizer.name": "optimizer",
    "max_norm": "clip_grad",
    "max_grad_norm": "clip_grad",
    "grad_clip": "clip_grad",
    "gradient_clip": "clip_grad",
    "gradient_clipping": "clip_grad",
    "gradient_clip_val": "clip_grad",
    "gradient_clipping_threshold": "clip_grad",
    # precision, memory, speed
    "precision": _PRECISION,
    "mixed_precision": _PRECISION,
    "mixed_precision_param": _PRECISION,
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "param_dtype": _PRECISION,
    "bfloat16": "bf16",
    "fp32": "bf16 (false computes in fp32)",
    "gradient_checkpointing": "recompute_activations",
    "activation_checkpointing": "recompute_activations",
    "activation_checkpoint.mode": "recompute_activations",
    "activations_checkpoint_granularity": "recompute_activations",
    "torch_compile": "compile",
    "compile.enable": "compile",
    "use_compile": "compile",
    "deterministic_mode": "deterministic",
    "full_determinism": "deterministic",
    "random_seed": "seed",
    "manual_seed": "seed",
    # layout
    **dict.fromkeys(
        ("tp", "tp_size", "tp_degree", "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree"),
        "tensor_model_parallel_size",
    ),
    "model_parallel_size": "tensor_model_parallel_size",
    "ici_tensor_parallelism": "tensor_model_parallel_size",
    **dict.fromkeys(
        ("pp", "pp_size", "pp_degree", "pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree"),
        "pipeline_model_parallel_size",
    ),
    **dict.fromkeys(
        ("cp", "cp_size", "cp_degree", "context_parallel", "context_parallel_degree", "context_model_parallel_size"),
        "context_parallel_size",
    ),
    **dict.fromkeys(
        ("ep", "ep_size", "ep_degree", "expert_parallel", "expert_parallel_size", "expert_parallel_degree"),
        "expert_model_parallel_size",
    ),
    "sp": "sequence_parallel",
    "enable_sequence_parallel": "sequence_parallel",
    **dict.fromkeys(
        ("fsdp", "use_fsdp", "use_fsdp2", "use_torch_fsdp2", "zero_stage", "zero1", "use_zero1"),
        "use_distributed_optimizer",
    ),
    **dict.fromkeys(
        ("dp", "dp_size", "data_parallel_size", "data_parallel_shard_degree", "data_parallel_replicate_degree"),
        "nothing: the remaining processes are data-parallel",
    ),
    "num_gpus": "--nproc, before the task: direct --nproc N -- train ...",
    # data
    "train_path": "train_data_path",
    "train_data": "train_data_path",
    "training_data": "train_data_path",
    "data_paths": "train_data_path",
    "val_data_path": "valid_data_path",
    "validation_data_path": "valid_data_path",
    "eval_data_path": "valid_data_path",
    "data_dir": "data_path",
    "dataset_path": "train_data_path (token files) or data_path (the folder of named datasets)",
    "dataset_name": "dataset",
    "training.dataset": "dataset",
    "tokenizer": "tokenizer_model",
    "tokenizer_path": "tokenizer_model",
    "tokenizer_name": "tokenizer_model",
    "tokenizer_name_or_path": "tokenizer_model",
    "hf_assets_path": "tokenizer_model",
    "mock": "mock_data",
    "mock_dataset": "mock_data",
    "synthetic_data": "mock_data",
    "use_mock_data": "mock_data",
    "dataloader_num_workers": "num_workers",
    # evaluation, checkpoints, reports
    "eval_steps": "eval_interval (steps between evaluations) or eval_iters (batches in one)",
    "eval_freq": "eval_interval",
    "val_check_interval": "eval_interval",
    "validation.freq": "eval_interval",
    "limit_val_batches": "eval_iters",
    "validation.steps": "eval_iters",
    "save_steps": "save_interval",
    "save_every": "save_interval",
    "save_freq": "save_interval",
    "ckpt_interval": "save_interval",
    "checkpoint_interval": "save_interval",
    "checkpoint_period": "save_interval",
    "checkpoint.interval": "save_interval",
    "save_total_limit": "keep_last_n",
    "keep_latest_k": "keep_last_n",
    "save_dir": "save",
    "save_path": "save",
    "checkpoint_dir": "save",
    "ckpt_dir": "save",
    "checkpoint_path": "load",
    "load_checkpoint": "load",
    "load_path": "load",
    "init_from": "load",
    "initial_load_path": "load",
    "resume_from_checkpoint": "load",
    "resume_from": "load",
    "resume": "auto_continue_train",
    "auto_resume": "auto_continue_train",
    "async_mode": "async_save",
    "async_checkpointing": "async_save",
    "output_dir": "workspace (the folder of all run folders)",
    "out_dir": "workspace (the folder of all run folders)",
    "base_output_directory": "workspace (the folder of all run folders)",
    "dump_folder": "workspace (the folder of all run folders)",
    "run_name": "exp_name",
    "experiment_name": "exp_name",
    "logging_steps": "log_interval",
    "log_steps": "log_interval",
    "log_freq": "log_interval",
    "log_every": "log_interval",
    "log_period": "log_interval",
    "log_every_n_steps": "log_interval",
    "report_to": "disable_tensorboard, disable_wandb and disable_mlflow",
    "wandb": "disable_wandb (the opposite)",
    "use_wandb": "disable_wandb (the opposite)",
    "wandb_log": "disable_wandb (the opposite)",
    "enable_wandb": "disable_wandb (the opposite)",
    "enable_tensorboard": "disable_tensorboard (the opposite)",
    "wandb_name": "wandb_exp_name",
    "wandb_run_name": "wandb_exp_name",
    # model
    "model_name": "model (a preset of config init)",
    "model_name_or_path": "model (a preset of config init)",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "num_hidden_layers": "num_layers",
    "depth": "num_layers",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "dim": "hidden_size",
    "embed_dim": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "ffn_dim": "ffn_hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_kv_head": "num_query_groups",
    "n_kv_heads": "num_query_groups",
    "num_kv_heads": "num_query_groups",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "norm_epsilon",
    "norm_eps": "norm_epsilon",
    "layernorm_epsilon": "norm_epsilon",
    "layer_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": _TIED,
    "tie_embeddings": _TIED,
    "weight_tying": _TIED,
    "enable_weight_tying": _TIED,
    "attention_bias": "add_qkv_bias",
    "qk_norm": "qk_layernorm",
    "use_qk_norm": "qk_layernorm",
    "max_position_embedding": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "sliding_window": "window_size",
    "num_moe_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_nextn_predict_layers": "mtp_num_layers",
    "load_balance_coeff": "moe_aux_loss_coeff",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
}
"""Key of primus by another framework's key in lower case; dotted if the last part alone is ambiguous."""

MEGATRON, PRIMUS, TITAN, MAXTEXT = "Megatron-LM", "Primus", "torchtitan", "MaxText"

ENGINE_KEYS: dict[str, frozenset[str]] = {
    MEGATRON: frozenset(
        """
        accumulate_allreduce_grads_in_fp32 activation_func activation_func_clamp_value add_position_embedding
        align_param_gather apply_layernorm_1p apply_query_key_layer_scaling apply_residual_connection_post_layernorm
        apply_rope_fusion async_tensor_model_parallel_allreduce attention_backend attention_dropout
        attention_softmax_in_fp32 auto_detect_ckpt_format barrier_with_L1_time bias_dropout_fusion bias_gelu_fusion
        bias_swiglu_fusion calculate_per_token_loss check_for_large_grads check_for_nan_in_loss
        check_for_nan_in_loss_and_grad check_for_spiky_loss check_weight_hash_across_dp_replicas_interval
        ckpt_assume_constant_structure ckpt_format ckpt_fully_parallel_load ckpt_fully_parallel_save
        clone_scatter_output_in_embedding config_logger_dir cp_comm_type cross_entropy_fusion_impl
        cross_entropy_loss_fusion cuda_graph_scope data_cache_path data_parallel_random_init
        data_parallel_sharding_strategy dataloader_type ddp_average_in_collective ddp_bucket_size ddp_num_buckets
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers decoder_pipeline_manual_split_list
        decoupled_lr decoupled_min_lr defer_embedding_wgrad_compute disable_bias_linear dist_ckpt_format
        dist_ckpt_strictness distribute_saved_activations distributed_backend empty_unused_memory_level
        enable_cuda_graph enable_experimental end_weight_decay exit_duration_in_mins exit_interval
        exit_on_missing_checkpoint exit_signal_handler exp_avg_dtype exp_avg_sq_dtype expert_tensor_parallel_size
        first_last_layers_bf16 fp16 fp16_lm_cross_entropy fp32_residual_connection fp4 fp4_recipe
        fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_format fp8_interval fp8_margin
        fp8_multi_head_attention fp8_param_gather fp8_recipe fp8_reduce_amax fp8_wgrad fsdp_double_buffer
        global_vocab_size grad_reduce_in_bf16 gradient_accumulation_fusion gradient_reduce_div_fusion
        group_query_attention hidden_dropout hierarchical_context_parallel_sizes hysteresis
        init_method_xavier_uniform initial_loss_scale inprocess_restart legacy_tokenizer load_main_params_from_ckpt
        log_batch_size_to_tensorboard log_interval_throughput log_learning_rate_to_tensorboard
        log_loss_scale_to_tensorboard log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm log_progress
        log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
        log_world_size_to_tensorboard logging_level loss_scale loss_scale_window lr_warmup_init lr_wsd_decay_samples
        lr_wsd_decay_style main_grads_dtype main_params_dtype make_vocab_size_divisible_by manual_gc manual_gc_eval
        manual_gc_interval masked_softmax_fusion merge_file microbatch_group_size_per_virtual_pipeline_stage
        min_loss_scale mmap_bin_files moe_apply_probs_on_input moe_deepep_num_sms moe_enable_deepep
        moe_expert_capacity_factor moe_extended_tp moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms
        moe_input_jitter_eps moe_layer_recompute moe_pad_expert_input_to_capacity
        moe_per_layer_logging moe_permute_fusion moe_router_bias_update_rate moe_router_dtype
        moe_router_force_load_balancing moe_router_fusion moe_router_load_balancing_type moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_router_topk_limited_devices
        moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
        moe_upcycling_granularity moe_use_legacy_grouped_gemm moe_z_loss_coeff nccl_communicator_config_path nccl_ub
        no_load_optim no_load_rng no_mmap_bin_files no_persist_layer_norm no_rope_fusion no_save_optim no_save_rng
        non_persistent_ckpt_type non_persistent_save_interval normalization num_dataset_builder_threads
        num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank onnx_safe optimizer_cpu_offload optimizer_offload_fraction
        overlap_grad_reduce overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_param_gather
        overlap_param_gather_with_optimizer_step override_opt_param_scheduler params_dtype per_split_data_args_path
        pipeline_dtype pipeline_model_parallel_comm_backend pipeline_model_parallel_layout
        pipeline_model_parallel_split_rank position_embedding_type pretrained_checkpoint rampup_batch_size
        recompute_granularity recompute_method
        recompute_modules recompute_num_layers record_memory_history rotary_interleaved
        rotary_seq_len_interpolation_factor s3_cache_path save_retain_interval sequence_parallel_size sgd_momentum
        softmax_type spec squared_relu start_weight_decay straggler_ctrlr_port swiglu te_rng_tracker tensorboard_dir
        tensorboard_log_interval tensorboard_queue_size tensorboard_save_dir tiktoken_num_special_tokens
        tiktoken_pattern tiktoken_special_tokens timing_log_level timing_log_option
        torch_fsdp2_reshard_after_forward tp_comm_overlap tp_comm_overlap_cfg train_sync_interval transformer_impl
        use_checkpoint_args use_checkpoint_opt_param_scheduler use_cpu_initialization use_dist_ckpt use_flash_attn
        use_fused_weighted_squared_relu use_mcore_models use_megatron_fsdp use_nccl_ub use_precision_aware_optimizer
        use_pytorch_profiler use_ring_exchange_p2p use_rope_scaling use_rotary_position_embeddings
        use_tp_pp_dp_mapping virtual_pipeline_model_parallel_size vocab_extra_ids vocab_file wandb_entity
        wandb_save_dir weight_decay_incr_style window_attn_skip_freq
        """.split()
    ),
    PRIMUS: frozenset(
        """
        disable_profiler_activity_cpu dump_pp_data enable_primus_turbo enable_turbo_attention_float8 file_sink_level
        log_avg_reset_interval log_avg_skip_iterations moe_use_fused_router_with_aux_score
        no_fp8_weight_transpose_cache patch_moe_overlap patch_zero_bubble pp_warmup primus_turbo recompute_layer_ids
        sink_level stderr_sink_level
        trainable turbo_deepep_num_cu turbo_deepep_use_comm_stream turbo_sync_free_moe_stage wall_clock_step_timer
        """.split()
    ),
    TITAN: frozenset(
        """
        activation_checkpoint comm debug experimental fault_tolerance job lr_scheduler memory_estimation metrics
        parallelism profiling quantize validation
        """.split()
    ),
    MAXTEXT: frozenset(
        """
        capacity_factor dataset_type enable_checkpointing hf_access_token megablox param_scan_axis profiler
        quantization remat_policy scan_layers sparse_matmul use_iota_embed
        """.split()
    ),
}
"""Settings that only one engine has, as its configuration names them."""

_LOW_RANK = "framework: megatron_bridge trains adapters (peft: lora, peft_dim, peft_alpha)"

UNSUPPORTED_FEATURES = {"lora": _LOW_RANK, "qlora": _LOW_RANK, "dora": _LOW_RANK, "peft": _LOW_RANK}
"""Why a key is unknown, by the key or its first word."""

ENGINE_PREFIXES = {
    "use_turbo_": PRIMUS,
    "turbo_": PRIMUS,
    "sft_": PRIMUS,
    "odc_": PRIMUS,
    "use_fla_": PRIMUS,
    "dcn_": MAXTEXT,
    "ici_": MAXTEXT,
    "retro_": MEGATRON,
    "inference_": MEGATRON,
    "rl_": MEGATRON,
    "fp8_": MEGATRON,
    "fp4_": MEGATRON,
    "vision_": MEGATRON,
    "heterogeneous_": MEGATRON,
}
"""Engine of all keys that begin so."""
