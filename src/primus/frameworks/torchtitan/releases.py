"""What files of other releases of torchtitan than 0.2 and 0.3 mean: older models, and batches counted in tokens.

Source: the history of pytorch/torchtitan, `torchtitan/config_manager.py`, `torchtitan/config/job_config.py`,
`torchtitan/models/*/__init__.py` (the flavors) and, for the newest release, `torchtitan/config/configs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.vocabulary import find_tokenizer_size

SCALED_ROPE_SINCE = "2025-10-08"
"""Llama 3 and 4 have scaled rotary embeddings since this day (pull request 1839)."""

OLDER_NAMES = frozenset(
    """
    checkpoint.enable_checkpoint checkpoint.initial_load_model_weights_only checkpoint.interval_type
    checkpoint.last_save_in_safetensors_format checkpoint.last_save_model_weights_only checkpoint.model_weights_only
    experimental.context_parallel_degree experimental.enable_async_tensor_parallel
    experimental.enable_compiled_autograd experimental.pipeline_parallel_degree
    experimental.pipeline_parallel_microbatches experimental.pipeline_parallel_schedule
    experimental.pipeline_parallel_split_points float8.emulate float8.enable_float8_linear
    float8.enable_fsdp_float8_all_gather float8.filter_fqns float8.force_recompute_fp8_weight_in_bwd
    float8.precompute_float8_dynamic_scale_for_fsdp float8.recipe_name job.use_for_integration_test lr_scheduler.lr_min
    memory_estimation.enabled metrics.enable_color_printing metrics.rank_0_only model.attn_mask_type model.norm_type
    model.tokenizer_path model.use_flex_attn mx.filter_fqns mx.recipe_name optimizer.fused
    parallelism.pipeline_parallel_microbatches training.batch_size training.compile
    training.data_parallel_degree training.data_parallel_replicate_degree training.data_parallel_shard_degree
    training.data_parallel_type training.disable_loss_parallel training.enable_float8_linear
    training.enable_loss_parallel training.fsdp_reshard_after_forward training.tensor_parallel_degree
    training.warmup_steps validation.enabled
    """.split()
)
"""Settings that were gone, or had another name, on that day."""

NEWER_NAMES = frozenset(
    """
    activation_checkpoint.determinism_check activation_checkpoint.memory_budget
    activation_checkpoint.preserve_rng_state checkpoint.initial_load_in_hf_quantized comm.mode debug.deterministic
    debug.moe_force_load_balance debug.seed job.print_config job.custom_config_module job.save_config_file
    lr_scheduler.total_steps parallelism.context_parallel_load_balancer profiling.profiler_active
    profiling.profiler_warmup training.dataloader.num_workers
    """.split()
)
"""Settings that came on that day or later."""

OLDER_WITHOUT_EFFECT = frozenset(
    """
    checkpoint.interval_type job.print_args job.use_for_integration_test metrics.enable_color_printing
    metrics.rank_0_only optimizer.fused training.enable_loss_parallel
    """.split()
)
"""Older settings that change only speed or reports."""

FORKED_FLAVORS = ("1B", "3B")
"""Flavors of Llama 3 that torchtitan has since 2026-03-24, when it read no TOML any more."""

LLAMA_TOKENIZER = "original/tokenizer.model"
"""Where the download of Llama 3 has its tokenizer, whose vocabulary is that of the presets."""

TOKENS_OF_PASS = "training.num_tokens_per_microbatch_per_dp_rank"  # noqa: S105
TOKENS_OF_STEP = "training.num_tokens_per_train_step"
LENGTH = "training.max_context_length"
PASSES = "parallelism.num_pp_microbatches"
TOKEN_COUNTS = {TOKENS_OF_PASS: 16384, TOKENS_OF_STEP: -1, LENGTH: 2048, PASSES: 1}
"""Settings of releases after 0.3 that replace the sequences of a batch, and their defaults."""


def convert_older_settings(values: dict[str, Any], target: ForeignConfig) -> None:
    """Replace settings that later releases write otherwise, and list those that change nothing."""
    for name in sorted(values.keys() & OLDER_WITHOUT_EFFECT):
        target.add_other(name, values.pop(name))
    tokenizer = str(values.get("model.tokenizer_path") or "")
    if tokenizer and not tokenizer.endswith(LLAMA_TOKENIZER):
        size = find_tokenizer_size(tokenizer)
        if size:
            target.model["vocab_size"] = size
        reason = f"its {size} tokens are the vocabulary" if size else "not read: vocab_size may have to be that of it"
        target.add_other("model.tokenizer_path", tokenizer, f"the model had the tokenizer's vocabulary; {reason}")
    if norm := str(values.pop("model.norm_type", "")):
        target.add_other("model.norm_type", norm, "" if "rmsnorm" in norm.lower() else "the model here has RMSNorm")
    for name in ("quantize.linear.float8.enable_float8_linear", "training.enable_float8_linear"):
        if values.get(name):
            values.setdefault("model.converters", ["float8"])
        elif name in values:
            target.unchanged.append(name)
        values.pop(name, None)


def convert_token_counts(values: dict[str, Any], target: ForeignConfig) -> None:
    """Replace a batch that is counted in tokens by sequences, as 0.3 counts it."""
    written = sorted(values.keys() & TOKEN_COUNTS)
    if not written:
        return
    counts = {name: values.pop(name, None) or default for name, default in TOKEN_COUNTS.items()}
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in counts.values()):
        for name in written:
            target.add_other(name, counts[name], "not a number of tokens; set micro_batch_size and seq_length")
        return
    length, tokens, step = counts[LENGTH], counts[TOKENS_OF_PASS], counts[TOKENS_OF_STEP]
    batch, rest = divmod(tokens, length)
    values["training.seq_len"], values["training.local_batch_size"] = length, max(batch, 1)
    target.add_other(
        written[0],
        counts[written[0]],
        f"written for a torchtitan after 0.3, which packs tokens: {tokens} tokens become {max(batch, 1)} x {length}",
    )
    if rest:
        target.add_other(TOKENS_OF_PASS, tokens, f"not a multiple of {length} tokens: the batch differs")
    if step != -1:
        values["training.global_batch_size"], rest = max(step // length, 1), step % length
        if rest:
            target.add_other(TOKENS_OF_STEP, step, f"not a multiple of {length} tokens: the batch differs")
    stages = values.get("parallelism.pipeline_parallel_degree", 1)
    if isinstance(stages, int) and stages > 1:
        values["parallelism.pipeline_parallel_microbatch_size"] = max(batch, 1)
        values["training.local_batch_size"] = max(batch, 1) * counts[PASSES]


def fit_model_to_release(name: str, flavor: str, written: Iterable[str], is_toml: bool, target: ForeignConfig) -> None:
    """Change the preset to the model that the flavor was in the release that the file was written for.

    Args:
        name: `model.name`.
        flavor: `model.flavor` as the file writes it.
        written: Names of all settings of the file.
        is_toml: Whether the file is a TOML, which torchtitan read until 2026-02-23.
        target: Gets the keys that differ, and a line for each difference.
    """
    if name == "llama4" and not flavor.endswith("_irope") and is_toml:
        target.model |= {"no_rope_freq": None, "attention_chunk_size": None}
        reason = "this flavor of torchtitan has neither chunked attention nor layers without rope, as the preset has"
        target.add_other("model.flavor", flavor, f"{reason}: both are off")
    is_scaled = name == "llama3" or (name == "llama4" and "128e" not in flavor)
    if not is_toml or not is_scaled:
        return
    if name == "llama3" and flavor in FORKED_FLAVORS:
        reason = "no TOML of torchtitan had this flavor, so it is your repository's own"
        target.add_other("model.flavor", flavor, f"{reason}; the shape here is that of Llama 3.2: compare the two")
    names = set(written)
    older, newer = sorted(names & OLDER_NAMES), names & NEWER_NAMES
    if older:
        if "debugmodel" in flavor:
            target.model.pop("rotary_scaling_factor", None)
            target.model["rope_type"] = "default"
        else:
            target.model |= {"rope_type": "default", "rotary_scaling_factor": 1.0}
        reason = f"{older[0]} is of a torchtitan before {SCALED_ROPE_SINCE}, which had no rope scaling: it is off"
        target.add_other("model.flavor", flavor, reason)
    elif not newer:
        reason = f"rope is scaled; a torchtitan before {SCALED_ROPE_SINCE} did not: then set rope_type: default"
        target.add_other("model.flavor", flavor, f"{reason} and rotary_scaling_factor: 1.0")
