"""What arguments of Megatron-LM and keys of Primus mean here; `tools/megatron_arguments.py` writes them into the data.

Effects: `numbers` changes what is trained; `speed` changes speed or memory; `report` changes logs, metrics and
profiles; `checkpoint` changes how checkpoints are written and read; `launch` changes how processes are supervised;
`data` changes in which order data are read, which is the same for all engines here; `other` belongs to tasks other
than the training of a language model, or to optimizers other than Adam; `model` describes a shape that a preset of the
same name has here.

Sources: megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of Megatron-LM;
primus/configs and primus/backends/megatron of AMD-AGI/Primus.
"""

from __future__ import annotations

GROUP_EFFECTS = {
    "transformer configuration": "numbers",
    "network size": "numbers",
    "regularization": "numbers",
    "learning rate and weight decay": "numbers",
    "training": "numbers",
    "rerun engine": "launch",
    "profiling": "report",
    "distributed": "speed",
    "distributed init": "speed",
    "logging": "report",
    "one logger": "report",
    "RNG and initialization": "numbers",
    "checkpointing": "checkpoint",
    "msc": "checkpoint",
    "mixed precision": "numbers",
    "Transformer-Engine": "numbers",
    "kitchen": "numbers",
    "validation": "report",
    "data and dataloader": "numbers",
    "tokenizer": "numbers",
    "moe": "numbers",
    "mla": "numbers",
    "heterogeneous architecture": "numbers",
    "experimental": "numbers",
    "experimental_attention_variant": "numbers",
    "autoresume": "launch",
    "straggler": "launch",
    "workload inspector": "launch",
    "ft_package": "launch",
    "In-process restart": "launch",
    "fault injector": "launch",
    "biencoder": "other",
    "vision": "other",
    "retro": "other",
    "rl": "other",
    "inference": "other",
    "sft": "numbers",
    "Logits Distillation": "numbers",
}
"""Effect of the arguments in each group of Megatron-LM's parser; a group that is missing here stops the tool."""

ARGUMENT_EFFECTS = {
    "speed": """
        account_for_* activation_offload_fraction async_tensor_model_parallel_allreduce attention_backend
        clone_scatter_output_in_embedding cpu_offloading_* cross_entropy_fusion_impl cross_entropy_loss_fusion
        cuda_graph_* defer_embedding_wgrad_compute delay_* delta_offload_* distribute_saved_activations
        dsa_kernel_backend enable_cuda_graph ep_overlap_* expert_tensor_parallel_* external_cuda_graph fine_grained_*
        flash_attention_version fused_residual_rmsnorm hierarchical_context_parallel_sizes high_priority_*
        hybrid_context_parallel init_model_with_meta_device max_seqlen_per_dp_cp_rank
        microbatch_group_size_per_vp_stage min_offloaded_tensor_size mlp_chunks_* moe_deepep_* moe_enable_deepep
        moe_extended_tp moe_flex_* moe_grouped_gemm moe_hybridep_* moe_layer_recompute moe_ncclep_*
        moe_pad_experts_* moe_paged_* moe_permute_* moe_router_fusion moe_router_padding_* moe_shared_expert_overlap
        moe_single_* moe_token_dispatcher_type moe_use_legacy_grouped_gemm nccl_all_reduce_* offload_modules overlap_*
        pipeline_model_parallel_comm_backend recompute_granularity recompute_method recompute_modules
        recompute_num_layers symmetric_ar_type tensor_parallel_num_weight_shards tp_comm_* transformer_impl
        use_cpu_initialization use_fused_* use_grouped_gemm_* use_mamba_mem_eff_path disable_mamba_mem_eff_path
        use_ring_exchange_p2p use_te_activation_func use_transformer_engine_op_fuser wgrad_deferral_limit
        apply_rope_fusion bias_*_fusion empty_unused_memory_level gradient_accumulation_fusion manual_gc*
        masked_softmax_fusion no_persist_layer_norm optimizer_cpu_offload optimizer_cuda_graph
        optimizer_offload_fraction pin_cpu_* train_sync_interval use_flash_attn use_torch_optimizer_for_cpu_offload
        checkpoint_activations te_rng_tracker inference_rng_tracker data_cache_path dataloader_defer_* dataloader_fast_*
        mmap_bin_files num_dataset_builder_threads object_storage_cache_path s3_cache_path per_dataset_sequences_path
        enable_experimental fsdp_db_* megatron_fsdp_max_* megatron_fsdp_enable_* mla_down_proj_fusion
        reuse_grad_buf_for_mxfp8_param_ag use_legacy_models deprecated_use_mcore_models onnx_safe
        perform_initialization rotary_interleaved_fusion
    """,
    "numbers": """
        data_parallel_sharding_strategy_numbers skip_train decoder_seq_length encoder_seq_length
        ddp_reduce_scatter_with_fp32_accumulation ddp_param_name_patterns_* ddp_average_in_collective
    """,
    "report": """
        check_weight_hash_* config_logger_dir dump_param_* log_* moe_per_layer_logging moe_routing_trace_*
        result_rejected_tracker_filename
    """,
    "launch": """
        check_for_large_grads check_for_spiky_loss exit_* gpu_sniff_test_interval distributed_timeout_*
        flight_recorder_* fake_process_group local_rank lazy_mpu_init
    """,
    "checkpoint": "use_checkpoint_opt_param_scheduler override_opt_param_scheduler",
    "other": """
        bert_binary_head flash_decode inference_* cache_mla_latents mask_prob sample_rate short_seq_prob
        retriever_seq_length yaml_cfg decoder_num_layers mamba_inference_* encoder_num_layers
        relative_attention_* perform_rl_step
        muon_* sgd_momentum lion_beta*
    """,
}
"""Arguments with another effect than their group's, by patterns; the first match of a longer pattern counts."""

PRIMUS_EFFECTS = {
    "speed": """
        enable_primus_turbo use_turbo_* turbo_* use_fla_* moe_use_fused_router_with_aux_score patch_moe_overlap
        pp_warmup recompute_layer_ids no_fp8_weight_transpose_cache keep_fp8_transpose_cache_* enable_odc odc_*
        patch_primus_pipeline pp_algorithm communication_method offload offload_* pp_max_mem pp_cost_*
        patch_zero_bubble enable_zb_runtime pre_communication_optimization zero_bubble_* enable_zero_bubble
        enable_optimizer_post_validation enable_exactly_numeric_match enable_1f1b_v allow_padding_num_layers
        interleave_group_size auto_offload_time num_seq_splits cpu_offload decoder_pipeline_manual_split_list
        dataloader_mp_context prefetch_factor fsdp_prefetch_depth overlap_grad_norm optimizer_foreach
        empty_cache_interval use_triton_ops use_cpp_fp8_quantize fp8_precompute_data_cache use_fused_ce
        enable_fused_linear_ce use_v4_compiled_sinkhorn use_v4_*attention_backend fla_cache_dir fused_*
        use_kimi_k3_attention_backend kda_backend fla_mla_attn replace_qk_rmsnorm disable_primus_topk_router
        use_deprecated_20241209_moe_layer microbatch_group_size_per_virtual_pipeline_stage use_custom_fsdp
        data_parallel_replicate_degree standalone_embedding_stage disable_inductor_cudagraphs compile_optimizer
        use_fsdp2_fp32_param_optimizer use_fsdp2_fp8_all_gather dump_pp_data disable_compile_dependencies
        virtual_pipeline_model_parallel_size disable_delayed_scaling_patches use_rocm_mem_info use_rocm_mem_info_iters
    """,
    "report": """
        trainable sink_level file_sink_level stderr_sink_level log_* wall_clock_step_timer mlflow_*
        generate_tracelens_report torch_profiler_* disable_profiler_activity_cpu use_nsys_profiler debug_scheduler_table
        profile_memory_iter warmup_train_steps
    """,
    "checkpoint": "fully_parallel_save",
    "data": "use_fla_data",
    "other": """
        retro_* inference_* grpo_* rl_* mock_dataset retriever_seq_length vae_* timestep_sampling_strategy
        cfg_dropout_prob guidance_* adaln_* fused_ln_modulate encoder_* cuda_graph_capture_*
    """,
    "numbers": """
        moe_router_force_load_balancing_type weight_deosc* mxfp4_* mlperf_* target_val_loss sft_* stage lora
        enable_packed_sequences use_packed_attention enable_odc_lb_mini lb_mini_* per_step_rng_reseed
        emulate_precision_casts nemo_* use_dual_fp8_output_projection use_fsdp2_bf16_master_weight_optimizer
        fp8_all_gather_stochastic_rounding fp4_use_native_te_autocast
        turbo_mega_moe_precision hf_path max_samples_per_sequence
        enable_turbo_attention_float8
    """,
    "model": """
        lfm_layer_types conv_L_cache conv_bias hc_* compress_* o_lora_rank o_groups attn_res_* swiglu_limit
        index_* mtp_use_separate_hc_head attn_sink* hybrid_attention_enabled kda_* activation_situ_*
        attn_sliding_window latent_moe_* mla_use_* moe_router_bias_update_rule mtp_layer_type num_hash_layers
        routed_expert_hidden_size quantile_* use_v4_fp8_indexer v4_* use_short_conv router_logit_softcapping
        attn_logit_softcapping
    """,
}
"""Effect of Primus' own keys; `model` describes a shape that the preset of the same name has here."""

PRIMUS_DEFAULTS = {
    "activation_func": None,
    "file_sink_level": "DEBUG",
    "sink_level": None,
    "stderr_sink_level": "INFO",
    "trainable": False,
    "check_for_nan_in_loss": True,
    "compile_optimizer": False,
    "disable_delayed_scaling_patches": False,
    "empty_cache_interval": 0,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "fp8_reduce_amax": True,
    "fused_single_qkv_rope": False,
    "hf_path": None,
    "layernorm_epsilon": 1e-5,
    "log_interval_throughput": None,
    "max_samples_per_sequence": None,
    "moe_router_topk_limited_devices": None,
    "moe_token_dropping": False,
    "optimizer_foreach": None,
    "params_dtype": None,
    "sft_answer_only_loss": True,
    "stage": None,
    "target_val_loss": None,
    "use_fla_fused_norm_gated": False,
    "use_fla_kda_in_kernel_gate": False,
    "use_fla_triton_kda": False,
    "use_kimi_k3_attention_backend": None,
    "use_nsys_profiler": False,
    "use_turbo_grouped_mlp": False,
    "use_turbo_permute_padding": False,
}
"""Keys that Primus' experiment files use and its presets do not have: fields of Megatron's TransformerConfig without
an argument (megatron/core/transformer/transformer_config.py), and settings that Primus' patches read."""
