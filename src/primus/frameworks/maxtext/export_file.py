"""Write an experiment as a configuration of MaxText (`maxtext/configs/base.yml` of MaxText 0.2.5)."""

from __future__ import annotations

import math

from primus.config.exports.foreign_text import (
    ForeignText,
    LostSetting,
    comment_lost,
    find_head_width,
    is_number,
    list_lost,
)
from primus.config.load import Resolved
from primus.config.schedule import (
    count_wsd_decay_steps,
    find_decay_end,
    find_final_learning_rate,
    warmup_steps,
)
from primus.config.schema import DataConfig, Experiment, ModelSpec, OptimizerConfig, Trainer
from primus.config.source import ConfigValue, dump_yaml
from primus.engine_keys import check_writable, list_lost_keys, write_keys
from primus.frameworks.maxtext.names import FOLDER, MODELS, ROPE_TYPES, SCALING, UNDECAYED

TARGET = "maxtext"
FILE_NAME = "train.yml"

FIXED_ROPE = {
    "rotary_scaling_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of the rope scaling of Llama 3.1 (`LLaMARotaryEmbedding` in maxtext/layers/embeddings.py)."""


def format_file(resolved: Resolved, preset: str | None) -> ForeignText:
    """The YAML, and the settings that it cannot hold.

    Args:
        resolved: The experiment.
        preset: Name of the model preset of the experiment; MaxText's own name of the model is used if it has one.

    Raises:
        UsageError: MaxText cannot build the model.
    """
    experiment = resolved.experiment
    trainer = experiment.trainer
    known = {ours: theirs for theirs, ours in MODELS.items()}
    named = known.get(preset or "")
    values: dict[str, ConfigValue] = {"base_config": "base.yml", "run_name": experiment.exp_name}
    values["base_output_directory"] = experiment.workspace
    values |= {"model_name": named} if named else write_model_settings(trainer.model)
    values |= _write_training(trainer)
    values |= _write_data(trainer.data, trainer.model)
    values |= _write_layout(experiment)
    lost = list_lost(resolved, list_lost_keys(FOLDER, trainer), written={"ffn_activation"}) + _list_differences(trainer)
    lines = [
        f"# {experiment.exp_name}: pre-training with MaxText 0.2.5, exported by primus.",
        "#",
        "#   python -m maxtext.trainers.pre_train.train THIS_FILE",
        "#",
        "# MaxText warms up one step later than primus, and ends the decay one step earlier.",
        *comment_lost(lost),
        "",
    ]
    return ForeignText("\n".join(lines) + dump_yaml(values), lost)


def write_model_settings(model: ModelSpec) -> dict[str, ConfigValue]:
    """The shape of a model by the names of MaxText.

    Raises:
        UsageError: MaxText cannot build the model.
    """
    check_writable("MaxText", FOLDER, model, "export to another framework")
    values: dict[str, ConfigValue] = {
        "decoder_block": _choose_decoder(model),
        **write_keys(FOLDER, model, "hidden_size", "num_attention_heads"),
        "base_num_kv_heads": model.num_query_groups or model.num_attention_heads,
        **write_keys(FOLDER, model, "ffn_hidden_size", "num_layers"),
        "head_dim": find_head_width(model),
        **write_keys(FOLDER, model, "vocab_size"),
        "mlp_activations": ["silu" if model.ffn_activation == "silu" else "gelu", "linear"],
        **write_keys(FOLDER, model, "norm_epsilon"),
        "logits_via_embedding": not model.untie_embeddings_and_output_weights,
        "normalize_embedding_logits": False,
        "rope_max_timescale": int(model.rotary_base),
        "rope_type": {ours: theirs for theirs, ours in ROPE_TYPES.items()}[model.rope_type],
        **write_keys(FOLDER, model, "add_qkv_bias", "qk_layernorm"),
    }
    if model.rope_type == "yarn":
        values |= write_keys(FOLDER, model, *SCALING, "max_position_embeddings")
    if model.num_experts:
        values |= _write_experts(model)
    if model.multi_latent_attention:
        values |= {"attention_type": "mla", "q_lora_rank": model.q_lora_rank or 0}
        values |= write_keys(FOLDER, model, "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return values


def _choose_decoder(model: ModelSpec) -> str:
    """The decoder of MaxText with the parts of a model."""
    if model.multi_latent_attention:
        return "deepseek"
    if model.num_experts:
        return "qwen3_moe" if model.qk_layernorm else "mixtral"
    if model.qk_layernorm:
        return "qwen3"
    return "qwen2" if model.add_qkv_bias else "llama2"


def has_experts_only(model: ModelSpec) -> bool:
    """Whether no layer is dense: MaxText then refuses another width of dense layers (maxtext/configs/types.py)."""
    return bool(model.num_experts) and not model.first_k_dense_replace and not model.moe_parallel_dense


def find_expert_width(model: ModelSpec) -> int:
    """Inner width of one expert."""
    return model.moe_ffn_hidden_size or model.ffn_hidden_size


def _write_experts(model: ModelSpec) -> dict[str, ConfigValue]:
    width = find_expert_width(model)
    values: dict[str, ConfigValue] = {
        **write_keys(FOLDER, model, "num_experts", "moe_router_topk"),
        "base_moe_mlp_dim": width,
        **write_keys(FOLDER, model, "moe_router_norm_topk_prob", "moe_aux_loss_coeff", "first_k_dense_replace"),
        "shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        **write_keys(FOLDER, model, "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
    }
    if model.moe_router_score_function == "sigmoid":
        values["routed_score_func"] = "sigmoid"
    if has_experts_only(model):
        values["base_mlp_dim"] = width
    if model.moe_router_num_groups:
        values |= write_keys(FOLDER, model, "moe_router_num_groups", "moe_router_group_topk")
    return values


def _write_training(trainer: Trainer) -> dict[str, ConfigValue]:
    training, optimizer = trainer.training, trainer.optimizer
    interval = training.eval_interval if _can_evaluate(trainer.data) else None
    # MaxText counts the sequences of a pass for each device, primus for each group of tensor-parallel devices.
    batch = training.micro_batch_size / trainer.parallel.tensor_model_parallel_size
    return {
        **write_keys(FOLDER, training, "train_iters", "seq_length"),
        "per_device_batch_size": int(batch) if batch.is_integer() else batch,
        "dtype": "bfloat16" if training.bf16 else "float32",
        "weight_dtype": "float32",
        "remat_policy": "full" if training.recompute_activations else "minimal",
        "eval_interval": interval or -1,
        "eval_steps": training.eval_iters if interval else -1,
        "opt_type": "adamw",
        **write_keys(FOLDER, optimizer, "lr"),
        **_write_schedule(optimizer, training.train_iters),
        **write_keys(FOLDER, optimizer, "adam_beta1", "adam_beta2", "adam_eps", "weight_decay"),
        "adamw_mask": list(UNDECAYED),
        **write_keys(FOLDER, optimizer, "clip_grad"),
        **write_keys(FOLDER, training, "seed"),
        "init_weights_seed": training.seed,
        **write_keys(FOLDER, trainer.logging, "log_interval"),
    }


def _write_schedule(optimizer: OptimizerConfig, train_iters: int) -> dict[str, ConfigValue]:
    """The schedule; a linear decay is MaxText's WSD whose last phase follows the warm-up."""
    end, warmup = find_decay_end(optimizer, train_iters), warmup_steps(optimizer, train_iters)
    style = optimizer.lr_decay_style
    values: dict[str, ConfigValue] = {
        "learning_rate_schedule_steps": end,
        "warmup_steps_fraction": _share_of_steps(warmup, end),
        "learning_rate_final_fraction": find_final_learning_rate(optimizer) / optimizer.lr,
    }
    if style == "constant":
        return values | {"learning_rate_final_fraction": 1.0}
    if style in ("linear", "WSD"):
        decay = end - warmup if style == "linear" else count_wsd_decay_steps(optimizer, train_iters)
        values |= {"lr_schedule_type": "wsd", "wsd_decay_style": "linear"}
        values["wsd_decay_steps_fraction"] = _share_of_steps(decay, end)
    return values


def _share_of_steps(steps: int, end: int) -> float:
    """The share of which MaxText, which cuts off the rest of a step, makes `steps` again."""
    share = steps / end
    return share if int(end * share) == steps else math.nextafter(share, 1)


def _write_data(data: DataConfig, model: ModelSpec) -> dict[str, ConfigValue]:
    if data.mock_data or not data.train_data_path:
        return {"dataset_type": "synthetic", "vocab_size": model.vocab_size}
    values: dict[str, ConfigValue] = {"dataset_type": "grain", "grain_file_type": "mmap"}
    values["grain_train_files"] = _join_blend(data.train_data_path)
    if data.valid_data_path:
        values["grain_eval_files"] = _join_blend(data.valid_data_path)
    values |= {"tokenize_train_data": False, "packing": False, "grain_worker_count": data.num_workers}
    return values


def _join_blend(path: str | list[str | float]) -> str:
    """A blend as MaxText writes it: ``prefix,weight;prefix,weight``."""
    words = path.split() if isinstance(path, str) else path
    if not is_number(words[0]):
        return ";".join(str(word) for word in words)
    return ";".join(f"{prefix},{weight}" for weight, prefix in zip(words[::2], words[1::2], strict=True))


def _can_evaluate(data: DataConfig) -> bool:
    """Whether MaxText has data to evaluate on: it splits off none from files of tokens."""
    return data.mock_data or not data.train_data_path or bool(data.valid_data_path)


def _write_layout(experiment: Experiment) -> dict[str, ConfigValue]:
    parallel, checkpoint = experiment.trainer.parallel, experiment.trainer.checkpoint
    on_cpu = experiment.trainer.training.device == "cpu"
    is_saving = bool(checkpoint.save_interval) or not checkpoint.disable_last_saving
    values: dict[str, ConfigValue] = {
        # MaxText expects TPUs otherwise, and a coordinator of the processes on CPUs.
        **(
            {"hardware": "cpu", "skip_jax_distributed_system": True, "num_slices": 1} if on_cpu else {"hardware": "gpu"}
        ),
        **write_keys(
            FOLDER, parallel, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
        ),
        "ici_expert_parallelism": parallel.expert_model_parallel_size,
        "ici_fsdp_parallelism": -1 if parallel.use_distributed_optimizer else 1,
        "ici_data_parallelism": 1 if parallel.use_distributed_optimizer else -1,
        "enable_checkpointing": is_saving,
    }
    if is_saving:
        values["checkpoint_period"] = checkpoint.save_interval or experiment.trainer.training.train_iters
        values["async_checkpointing"] = checkpoint.async_save
    return values


def _list_differences(trainer: Trainer) -> list[LostSetting]:
    found = []
    if trainer.training.eval_interval and not _can_evaluate(trainer.data):
        reason = "MaxText splits off no data to evaluate on: set valid_data_path"
        found.append(LostSetting("eval_interval", trainer.training.eval_interval, reason))
    end = find_decay_end(trainer.optimizer, trainer.training.train_iters)
    if end < trainer.training.train_iters:
        found.append(LostSetting("lr_decay_iters", end, "MaxText sets the learning rate to 0 after these steps"))
    if trainer.model.rope_type == "llama3":
        for key, value in FIXED_ROPE.items():
            if getattr(trainer.model, key) != value:
                found.append(LostSetting(key, getattr(trainer.model, key), f"MaxText scales rope with {value:g}"))
    if not float(trainer.model.rotary_base).is_integer():
        found.append(LostSetting("rotary_base", trainer.model.rotary_base, "MaxText takes a whole number"))
    return found
