"""An experiment as the configuration tree of torchtitan's trainer, built from its own classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer as TitanTrainer

from primus.config.schedule import (
    count_wsd_decay_steps,
    find_decay_end,
    find_final_learning_rate,
    warmup_steps,
)
from primus.config.schema import OptimizerConfig, Trainer
from primus.frameworks.torchtitan.engine.apply_settings import apply_settings
from primus.frameworks.torchtitan.engine.components import (
    CheckedOptimizers,
    StepMetrics,
    StepRateSchedule,
    UnusedDataLoader,
    UnusedTokenizer,
)
from primus.frameworks.torchtitan.engine.float32_experts import use_float32_experts
from primus.frameworks.torchtitan.engine.layout import TitanLayout
from primus.frameworks.torchtitan.engine.model_config import build_model_spec

NEVER = 2**62
"""An interval in steps that no run reaches: primus decides when to save."""
LOGITS_BYTES = 2**28
"""Size of the logits above which the loss is computed in chunks, unless loss_chunk_size says otherwise."""
UNDECAYED = r"norm\.weight$|bias(_E.?)?$|\.sinks$"
"""Names of parameters without weight decay: norms, biases and attention sinks, as in Megatron-LM."""


def build_trainer_config(trainer: Trainer, layout: TitanLayout, *, folder: Path, on_cpu: bool) -> TitanTrainer.Config:
    """The configuration of one process.

    Args:
        trainer: An experiment's trainer that `support.check` accepts.
        layout: How the processes share the model and the batch.
        folder: Where torchtitan puts what it writes by itself.
        on_cpu: Whether it trains on the CPU.

    Raises:
        UsageError: A setting of `backend_args` does not fit.
    """
    training, data = trainer.training, trainer.data
    config = TitanTrainer.Config(
        model_spec=build_model_spec(trainer.model, on_cpu=on_cpu, masks_documents=data.reset_attention_mask),
        dump_folder=str(folder.absolute()),
        tokenizer=UnusedTokenizer.Config(),
        dataloader=UnusedDataLoader.Config(),
        optimizer=CheckedOptimizers.Config(param_groups=_group_parameters(trainer.optimizer)),
        lr_scheduler=_choose_schedule(trainer),
        loss=_choose_loss(trainer),
        training=TrainingConfig(
            local_batch_size=layout.local_batch_size,
            global_batch_size=layout.global_batch_size,
            seq_len=training.seq_length,
            steps=training.train_iters,
            # torchtitan scales gradients to the limit, so that 0 would erase them.
            max_norm=trainer.optimizer.clip_grad or math.inf,
            dtype="float32",
            mixed_precision_param="bfloat16" if training.bf16 else "float32",
            disable_cuda_graphs=True,
        ),
        parallelism=_describe_layout(trainer, layout),
        activation_checkpoint=FullAC.Config() if training.recompute_activations else None,
        compile=CompileConfig(enable=training.compile is True),
        # primus detects hangs; a shorter time-out after the first step would end slow checkpoints.
        comm=CommConfig(
            init_timeout_seconds=60 * trainer.parallel.distributed_timeout_minutes,
            train_timeout_seconds=60 * trainer.parallel.distributed_timeout_minutes,
            trace_buf_size=0,
        ),
        debug=DebugConfig(seed=training.seed, deterministic=training.deterministic, enable_structured_logging=False),
        metrics=StepMetrics.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=NEVER, keep_latest_k=0, initial_load_model_only=False, last_save_model_only=False
        ),
    )
    _convert_to_fp8(config, trainer)
    apply_settings(config, trainer.backend_args)
    # The compiler knows `torch._grouped_mm` in bfloat16 only.
    if config.training.mixed_precision_param == "float32" and not training.fp8 and not config.compile.enable:
        use_float32_experts(config.model_spec.model.layers)
    return config


def _group_parameters(optimizer: OptimizerConfig) -> list[ParamGroupConfig]:
    """AdamW with and without weight decay; the first pattern that a name matches decides."""
    shared = {"lr": optimizer.lr, "betas": (optimizer.adam_beta1, optimizer.adam_beta2), "eps": optimizer.adam_eps}
    return [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**shared, "weight_decay": decay})
        for pattern, decay in ((UNDECAYED, 0.0), (r".*", optimizer.weight_decay))
    ]


def _choose_schedule(trainer: Trainer) -> LRSchedulersContainer.Config:
    """The rate that primus gives to each step, or with `schedule: engine` the nearest schedule of torchtitan."""
    optimizer, steps = trainer.optimizer, trainer.training.train_iters
    if optimizer.schedule == "primus":
        return StepRateSchedule.Config()
    end, warmup, style = find_decay_end(optimizer, steps), warmup_steps(optimizer, steps), optimizer.lr_decay_style
    stable = {"constant": 0.0, "WSD": count_wsd_decay_steps(optimizer, steps) / end}
    return LRSchedulersContainer.Config(
        warmup_steps=warmup,
        total_steps=end,
        decay_ratio=stable.get(style),
        decay_type="cosine" if style == "cosine" else "linear",
        min_lr_factor=find_final_learning_rate(optimizer) / optimizer.lr,
    )


def _choose_loss(trainer: Trainer) -> Any:
    loss = CrossEntropyLoss.Config(global_vocab_size=trainer.model.vocab_size)
    chunks = _count_loss_chunks(trainer)
    return ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss) if chunks > 1 else loss


def _count_loss_chunks(trainer: Trainer) -> int:
    """Equal parts of the sequence for which logits are in memory one after the other."""
    training = trainer.training
    tokens = training.micro_batch_size * training.seq_length
    logits_bytes = 4 * trainer.model.vocab_size // trainer.parallel.tensor_model_parallel_size
    limit = training.loss_chunk_size or max(1, LOGITS_BYTES // logits_bytes)
    # The sequences of a micro batch are cut at the same places.
    divisors = (count for count in range(1, training.seq_length + 1) if training.seq_length % count == 0)
    return next((count for count in divisors if tokens // count <= limit), training.seq_length)


def _describe_layout(trainer: Trainer, layout: TitanLayout) -> ParallelismConfig:
    parallel = trainer.parallel
    is_sharded = parallel.use_distributed_optimizer
    return ParallelismConfig(
        data_parallel_shard_degree=layout.data_size if is_sharded else 1,
        data_parallel_replicate_degree=1 if is_sharded else layout.data_size,
        tensor_parallel_degree=parallel.tensor_model_parallel_size,
        enable_sequence_parallel=parallel.sequence_parallel,
        pipeline_parallel_degree=parallel.pipeline_model_parallel_size,
        pipeline_parallel_microbatch_size=trainer.training.micro_batch_size,
        # Layers are spread evenly, as the embedding and the head of a small model weigh little.
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
        context_parallel_degree=parallel.context_parallel_size,
        expert_parallel_degree=parallel.expert_model_parallel_size,
        spmd_backend=_choose_spmd_backend(),
    )


def _choose_spmd_backend() -> str:
    """torchtitan's default needs FSDP2 of torch 2.14, which shards parameters over a part of their mesh
    (torchtitan/distributed/full_dtensor.py, resolve_fsdp_mesh)."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return "partial_dtensor" if (major, minor) < (2, 14) else "spmd_types"


def _convert_to_fp8(config: TitanTrainer.Config, trainer: Trainer) -> None:
    """Linear layers in 8-bit floating point, by torchao; all but the output head."""
    if trainer.training.fp8 is None:
        return
    from torchtitan.components.quantization.float8 import Float8LinearConverter

    converter = Float8LinearConverter.Config(recipe_name="rowwise", filter_fqns=["lm_head"])
    model_spec = config.model_spec
    assert model_spec is not None
    model_spec.model = converter.build().convert(model_spec.model)
