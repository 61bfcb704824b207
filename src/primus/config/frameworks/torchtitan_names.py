"""Settings of torchtitan that mean the same here under another name."""

COMMON_NAMES = {
    "training.steps": "train_iters",
    "training.local_batch_size": "micro_batch_size",
    "training.seq_len": "seq_length",
    "training.max_norm": "clip_grad",
    "training.dataloader.num_workers": "num_workers",
    "optimizer.lr": "lr",
    "optimizer.eps": "adam_eps",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.weight_decay": "weight_decay",
    "lr_scheduler.warmup_steps": "lr_warmup_iters",
    "lr_scheduler.total_steps": "lr_decay_iters",
    "lr_scheduler.min_lr_factor": "min_lr_ratio",
    "parallelism.tensor_parallel_degree": "tensor_model_parallel_size",
    "parallelism.pipeline_parallel_degree": "pipeline_model_parallel_size",
    "parallelism.context_parallel_degree": "context_parallel_size",
    "parallelism.expert_parallel_degree": "expert_model_parallel_size",
    "parallelism.enable_sequence_parallel": "sequence_parallel",
    "checkpoint.keep_latest_k": "keep_last_n",
    "metrics.log_freq": "log_interval",
    "compile.enable": "compile",
    "debug.seed": "seed",
    "debug.deterministic": "deterministic",
}
"""Key of the schema by the name in torchtitan 0.2 (job_config.py), which 0.3 has, too."""
