"""Write an experiment as a bash script that calls `pretrain_gpt.py` of Megatron-LM.

Names of arguments are those of `megatron/training/arguments.py` of core_v0.16.1. Every argument whose default differs
from ours is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from primus.config.exports.foreign_text import ForeignText, LostSetting, comment_lost, list_lost
from primus.config.load import Resolved
from primus.config.schedule import count_wsd_decay_steps, find_decay_end, find_final_learning_rate, warmup_steps
from primus.config.schema import ConfigGroup, DataConfig, Experiment, ModelSpec, Trainer
from primus.config.translation.known_keys import KnownKey
from primus.engine_keys import check_writable, list_lost_keys, read_key_rules
from primus.errors import UsageError
from primus.frameworks.megatron.known_keys import CHECKOUT_KEYS, FOLDER, read_arguments

TARGET = "megatron-lm"
FILE_NAME = "train.sh"

_HUB = "hf:"
"""Prefix of weights in the format of Hugging Face, which Megatron-LM does not read."""
_FIXED_ROPE: dict[str, dict[str, float]] = {
    "llama3": {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
}
"""Values of rope scaling without an argument: `_apply_scaling` of core/models/common/embeddings/rotary_pos_embedding.py
and `MLATransformerConfig` of core/transformer/transformer_config.py."""


def format_file(resolved: Resolved, preset: str | None) -> ForeignText:
    """The script, and the settings that it cannot hold.

    Raises:
        UsageError: `pretrain_gpt.py` cannot build the model.
    """
    experiment = resolved.experiment
    _check_model(experiment.trainer.model)
    arguments = list_arguments(experiment)
    written = CHECKOUT_KEYS | {f"backend_args.{key}" for key in _own_arguments(experiment.trainer)}
    lost = list_lost(resolved, list_lost_keys(FOLDER, experiment.trainer), written)
    lost += _list_differences(experiment.trainer)
    lines = [
        "#!/bin/bash",
        f"# {experiment.exp_name}: pre-training with Megatron-LM (arguments of core_v0.16.1), exported by primus.",
        "#",
        "#   MEGATRON_PATH=/path/to/Megatron-LM bash THIS_FILE",
        "#",
        "# Megatron-LM applies the learning rate of a step one step later than primus.",
        *comment_lost(lost),
        "",
        "set -euo pipefail",
        "export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}",
        "",
        "DISTRIBUTED_ARGS=(",
        "    --nproc_per_node ${GPUS_PER_NODE:-8}",
        "    --nnodes ${NNODES:-1}",
        "    --node_rank ${NODE_RANK:-0}",
        "    --master_addr ${MASTER_ADDR:-localhost}",
        "    --master_port ${MASTER_PORT:-29500}",
        ")",
        "",
        "TRAINING_ARGS=(",
        *(f"    {line}" for line in _format_lines(arguments)),
        ")",
        "",
        'torchrun "${DISTRIBUTED_ARGS[@]}" "${MEGATRON_PATH:-.}/pretrain_gpt.py" "${TRAINING_ARGS[@]}" "$@"',
    ]
    return ForeignText("\n".join(lines) + "\n", lost)


def list_arguments(experiment: Experiment) -> list[tuple[str, ...]]:
    """Arguments of `pretrain_gpt.py`: the flag and its values."""
    trainer = experiment.trainer
    return [
        *_list_model(trainer.model),
        *_list_rope(trainer.model),
        *_list_experts(trainer.model),
        *_list_training(trainer),
        *_list_schedule(trainer),
        *_list_data(trainer.data),
        *_list_vocabulary(trainer),
        *_list_layout(trainer),
        *_list_checkpoints(experiment),
        *_list_engine_arguments(trainer),
    ]


def _check_model(model: ModelSpec) -> None:
    check_writable("pretrain_gpt.py of Megatron-LM", FOLDER, model)
    if model.rope_type == "yarn" and not model.multi_latent_attention:
        raise UsageError(
            "rope_type: yarn: pretrain_gpt.py of Megatron-LM has yarn only with latent attention",
            "export to torchtitan or huggingface, or set rope_type",
        )
    if model.window_size and model.window_layer_period not in (1, 2):
        raise UsageError(
            f"window_layer_period: {model.window_layer_period}: Megatron-LM places windowed layers differently"
        )


def _flag(name: str, *values: Any) -> tuple[str, ...]:
    return (f"--{name.replace('_', '-')}", *(_format_number(value) for value in values))


def _write(group: ConfigGroup, keys: str) -> Iterator[tuple[str, ...]]:
    """The arguments for keys that mean the same in Megatron-LM, by their names in `keys.yaml`; none for unset keys."""
    rules, known = read_key_rules(FOLDER), read_arguments().keys
    for key in keys.split():
        name, value = next(name for name in (key, *rules[key].files) if name in known), getattr(group, key)
        if value or known[name].default is not None:
            yield from _write_argument(known[name], value)


def _write_argument(argument: KnownKey, value: Any) -> Iterator[tuple[str, ...]]:
    """The argument that gives `value`; none for null, and for a switch whose absence gives it."""
    if argument.kind == "switch":
        if value == argument.stores:
            yield (argument.flags[0],)
    elif value is not None:
        yield (argument.flags[0], *map(_format_number, value if isinstance(value, list) else [value]))


def _format_number(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _list_model(model: ModelSpec) -> Iterator[tuple[str, ...]]:
    yield _flag("use_mcore_models")
    yield from _write(model, "num_layers hidden_size ffn_hidden_size num_attention_heads")
    if model.num_query_groups not in (None, model.num_attention_heads) and not model.multi_latent_attention:
        yield _flag("group_query_attention")
        yield from _write(model, "num_query_groups")
    yield from _write(model, "kv_channels max_position_embeddings")
    yield from (
        ("--normalization", "RMSNorm"),
        ("--swiglu",),
        ("--attention-dropout", "0.0"),
        ("--hidden-dropout", "0.0"),
    )
    yield from _write(model, "norm_epsilon init_method_std untie_embeddings_and_output_weights add_qkv_bias")
    yield from _write(model, "qk_layernorm add_bias_linear mtp_num_layers")
    yield from _list_attention(model)


def _list_attention(model: ModelSpec) -> Iterator[tuple[str, ...]]:
    """Windows, sinks and latent attention."""
    if model.window_size:
        yield _flag("window_size", f"({model.window_size - 1},0)")
        if model.window_layer_period == 2:
            yield _flag("window_attn_skip_freq", 2)
    if model.attention_sinks:
        yield _flag("softmax_type", "learnable")
    yield from _write(model, "activation_clamp multi_latent_attention")
    if model.multi_latent_attention:
        yield from _write(model, "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim")


def _list_rope(model: ModelSpec) -> Iterator[tuple[str, ...]]:
    yield _flag("position_embedding_type", "rope")
    yield _flag("rotary_base", int(model.rotary_base))
    if model.rotary_percent != 1.0:
        yield _flag("rotary_percent", model.rotary_percent)
    if model.rope_type == "llama3":
        yield _flag("use_rope_scaling")
        yield _flag("rope_scaling_factor", model.rotary_scaling_factor)
    if model.multi_latent_attention:
        yield _flag("rope_type", "yarn" if model.rope_type == "yarn" else "rope")
        yield from _write(model, "rotary_scaling_factor mscale mscale_all_dim")


def _list_experts(model: ModelSpec) -> Iterator[tuple[str, ...]]:
    if model.num_experts is None:
        return
    yield from _write(model, "num_experts moe_router_topk")
    yield _flag("moe_ffn_hidden_size", model.moe_ffn_hidden_size or model.ffn_hidden_size)
    if model.first_k_dense_replace or model.moe_layer_freq > 1:
        yield _flag("moe_layer_freq", _format_expert_layers(model))
    yield from _write(model, "moe_shared_expert_intermediate_size moe_router_score_function")
    # A softmax over all experts that is renormalized over the chosen ones is a softmax over the chosen ones.
    if model.moe_router_score_function == "softmax" and not _is_renormalized(model):
        yield _flag("moe_router_pre_softmax")
    yield from _write(model, "moe_router_enable_expert_bias moe_apply_probs_on_input")
    if model.moe_router_num_groups:
        yield from _write(model, "moe_router_num_groups moe_router_group_topk")
    if model.moe_router_topk_scaling_factor != 1.0:
        yield _flag("moe_router_topk_scaling_factor", model.moe_router_topk_scaling_factor)
    yield _flag("moe_router_load_balancing_type", "aux_loss" if model.moe_aux_loss_coeff else "none")
    yield from _write(model, "moe_aux_loss_coeff")


def _format_expert_layers(model: ModelSpec) -> str:
    """1 for each layer with experts, 0 for the others; Megatron-LM starts an interval with layer 1, primus ends it."""
    dense, interval = model.first_k_dense_replace, model.moe_layer_freq
    if interval == 1:
        return f"([0]*{dense}+[1]*{model.num_layers - dense})"
    layers = range(1, model.num_layers + 1)
    return str([int(layer > dense and layer % interval == 0) for layer in layers]).replace(" ", "")


def _is_renormalized(model: ModelSpec) -> bool:
    return model.moe_router_norm_topk_prob or not model.moe_router_pre_softmax


def _list_training(trainer: Trainer) -> Iterator[tuple[str, ...]]:
    training, optimizer = trainer.training, trainer.optimizer
    yield from _write(training, "train_iters micro_batch_size seq_length seed global_batch_size bf16 fp8 deterministic")
    if training.recompute_activations:
        yield from (
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", "1"),
        )
    # Megatron-LM evaluates every 1000 steps by default; eval_iters 0 means never.
    yield _flag("eval_interval", training.eval_interval or training.train_iters)
    yield _flag("eval_iters", training.eval_iters if training.eval_interval else 0)
    yield _flag("optimizer", "adam")
    yield from _write(optimizer, "weight_decay adam_beta1 adam_beta2 adam_eps clip_grad")
    yield from _write(trainer.logging, "log_interval")


def _list_schedule(trainer: Trainer) -> Iterator[tuple[str, ...]]:
    optimizer = trainer.optimizer
    yield _flag("lr", optimizer.lr)
    yield _flag("min_lr", find_final_learning_rate(optimizer))
    yield _flag("lr_decay_style", optimizer.lr_decay_style)
    train_iters = trainer.training.train_iters
    yield _flag("lr_decay_iters", find_decay_end(optimizer, train_iters))
    # Not --lr-warmup-fraction, of which Megatron-LM makes a part of a step.
    yield _flag("lr_warmup_iters", warmup_steps(optimizer, train_iters))
    if optimizer.lr_decay_style == "WSD":
        yield _flag("lr_wsd_decay_style", "linear")
        yield _flag("lr_wsd_decay_iters", count_wsd_decay_steps(optimizer, train_iters))


def _list_data(data: DataConfig) -> Iterator[tuple[str, ...]]:
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.mock_data or not any(paths):
        yield _flag("mock_data")
    elif not data.valid_data_path and not data.test_data_path:
        yield _flag("data_path", *_list_words(data.train_data_path))
    else:
        for key in ("train_data_path", "valid_data_path", "test_data_path"):
            if getattr(data, key):
                yield _flag(key, *_list_words(getattr(data, key)))
    if data.mock_data or not (data.valid_data_path or data.test_data_path):
        yield _flag("split", data.split)
    yield from _write(data, "num_workers")
    yield from _write(data, "eod_mask_loss reset_position_ids reset_attention_mask")
    yield from (("--no-create-attention-mask-in-dataloader",), ("--dataloader-type", "single"))


def _list_vocabulary(trainer: Trainer) -> Iterator[tuple[str, ...]]:
    """The tokenizer, and the size of the embedding: without padding, whose logits are in the softmax of Megatron-LM."""
    data, vocab_size = trainer.data, trainer.model.vocab_size
    if data.tokenizer_model and data.tokenizer_type != "ByteLevelBPE" and not data.mock_data:
        yield _flag("tokenizer_type", data.tokenizer_type)
        yield _flag("tokenizer_model", data.tokenizer_model)
        yield _flag("vocab_size", vocab_size)
        # Megatron-LM takes the size from the tokenizer, which is often smaller than the model's, and rounds it up to
        # a multiple of this and of the tensor-parallel size.
        divisor = -(-vocab_size // trainer.parallel.tensor_model_parallel_size)
    else:
        # The tokens are made already; the null tokenizer adds one end-of-document token to its size.
        yield _flag("tokenizer_type", "NullTokenizer")
        yield _flag("vocab_size", vocab_size - 1)
        divisor = 1
    if "make_vocab_size_divisible_by" not in _own_arguments(trainer):
        yield _flag("make_vocab_size_divisible_by", divisor)


def _list_words(blend: str | list[str | float] | None) -> list[str]:
    if blend is None:
        return []
    return blend.split() if isinstance(blend, str) else [str(word) for word in blend]


def _list_layout(trainer: Trainer) -> Iterator[tuple[str, ...]]:
    parallel = trainer.parallel
    yield from _write(parallel, "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size")
    if parallel.expert_model_parallel_size > 1:
        yield _flag("expert_model_parallel_size", parallel.expert_model_parallel_size)
    # Megatron-LM asks for sequence parallelism where experts meet tensor parallelism.
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        yield _flag("sequence_parallel")
    yield from _write(parallel, "use_distributed_optimizer distributed_timeout_minutes")


def _list_checkpoints(experiment: Experiment) -> Iterator[tuple[str, ...]]:
    checkpoint = experiment.trainer.checkpoint
    folder = checkpoint.save or f"{experiment.workspace}/{experiment.exp_name}/megatron"
    if checkpoint.save_interval or not checkpoint.disable_last_saving:
        yield _flag("save", folder)
        yield _flag("save_interval", checkpoint.save_interval or experiment.trainer.training.train_iters)
        yield _flag("ckpt_format", "torch_dist")
        if checkpoint.async_save:
            yield _flag("async_save")
    if checkpoint.load and not checkpoint.load.startswith(_HUB):
        yield _flag("load", checkpoint.load)
    elif checkpoint.auto_continue_train:
        yield _flag("load", folder)
    if checkpoint.finetune:
        yield _flag("finetune")
    if not experiment.trainer.logging.disable_tensorboard:
        yield _flag("tensorboard_dir", f"{experiment.workspace}/{experiment.exp_name}/tensorboard")
    if not experiment.trainer.logging.disable_wandb:
        yield _flag("wandb_project", experiment.trainer.logging.wandb_project or experiment.exp_name)
        yield _flag("wandb_exp_name", experiment.trainer.logging.wandb_exp_name or experiment.exp_name)


def _list_engine_arguments(trainer: Trainer) -> Iterator[tuple[str, ...]]:
    """Settings of Megatron-LM itself, where the experiment has its framework."""
    for key in _own_arguments(trainer):
        yield from _write_argument(read_arguments().keys[key], trainer.backend_args[key])


def _own_arguments(trainer: Trainer) -> list[str]:
    known = read_arguments().keys
    return [key for key in trainer.backend_args if trainer.framework == "megatron" and key in known]


def _list_differences(trainer: Trainer) -> Iterator[LostSetting]:
    """Values that Megatron-LM fixes otherwise."""
    model, data = trainer.model, trainer.data
    for key, value in _FIXED_ROPE.get(model.rope_type, {}).items():
        if getattr(model, key) != value:
            yield LostSetting(key, getattr(model, key), f"Megatron-LM scales rope with {value}")
    if not float(model.rotary_base).is_integer():
        yield LostSetting("rotary_base", model.rotary_base, "Megatron-LM takes a whole number")
    if not data.mock_data and not any((data.train_data_path, data.valid_data_path, data.test_data_path)):
        yield LostSetting("dataset", data.dataset, "mock data stands in: prepare it and pass its prefix as --data-path")

    size = trainer.parallel.tensor_model_parallel_size
    if model.vocab_size % size:
        yield LostSetting("vocab_size", model.vocab_size, f"Megatron-LM rounds it up to a multiple of {size}")
    load = trainer.checkpoint.load
    if load and load.startswith(_HUB):
        reason = "`checkpoint convert` it with --to megatron, and pass the result as --load"
        yield LostSetting("load", load, reason)


_PLAIN = re.compile(r"[A-Za-z0-9_./:=,+-]+")


def _format_lines(arguments: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for words in arguments:
        yield " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)
