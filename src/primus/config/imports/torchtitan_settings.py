"""Settings of primus for torchtitan's configuration tree, whatever the form in which it was written.

Names and defaults are those of `torchtitan/config/job_config.py` of v0.1.0 to v0.2.2 and of the Config classes of
v0.3.0, whose names are moved to the places of 0.2 (`profiler` to `profiling`, `validator` to `validation`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from primus.config.frameworks.torchtitan_names import COMMON_NAMES
from primus.config.imports.foreign_config import NUMBER, ForeignConfig, check_types
from primus.errors import UsageError, find_nearest

MODELS: dict[str, dict[str, str]] = {
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

_QWEN3_DEBUG: dict[str, Any] = {
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
DEBUG_MODELS: dict[tuple[str, str], dict[str, Any]] = {
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

RENAMED = COMMON_NAMES | {
    "training.batch_size": "micro_batch_size",
    "lr_scheduler.lr_min": "min_lr_ratio",
    "training.compile": "compile",
    "training.seed": "seed",
    "training.deterministic": "deterministic",
    "job.dump_folder": "workspace",
    "dump_folder": "workspace",
    "validation.steps": "eval_iters",
    "experimental.pipeline_parallel_degree": "pipeline_model_parallel_size",
    "experimental.context_parallel_degree": "context_parallel_size",
    "training.tensor_parallel_degree": "tensor_model_parallel_size",
}
"""Settings that mean the same here under another name."""

NUMBERS = dict.fromkeys(
    """
    training.global_batch_size lr_scheduler.decay_ratio lr_scheduler.decay_factor checkpoint.interval validation.freq
    parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree comm.train_timeout_seconds
    """.split(),
    NUMBER,
)
"""Further numbers."""

DEFAULTS: dict[str, Any] = {
    "train_iters": 10000,
    "micro_batch_size": 8,
    "seq_length": 2048,
    "clip_grad": 1.0,
    "lr": 8e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "lr_warmup_iters": 200,
    "log_interval": 10,
    "compile": False,
    "disable_tensorboard": True,
    "bf16": True,
}
"""What torchtitan does without the setting, where primus may do otherwise."""

DATASETS = {"c4": "c4", "c4_validation": "c4"}
"""Datasets of torchtitan that primus has, too."""

WITHOUT_EFFECT = frozenset(
    """
    job.description job.print_config job.save_config_file job.use_for_integration_test job.config_file
    model.print_after_conversion
    metrics.save_tb_folder metrics.disable_color_printing metrics.save_for_all_ranks metrics.rank_0_only
    profiling.save_traces_folder profiling.profile_freq profiling.save_memory_snapshot_folder profiling.profiler_active
    profiling.profiler_warmup checkpoint.folder checkpoint.last_save_in_hf checkpoint.export_dtype
    checkpoint.last_save_model_only checkpoint.last_save_model_weights_only checkpoint.model_weights_only
    training.gc_freq training.gc_debug comm.trace_buf_size comm.save_traces_folder comm.save_traces_file_prefix
    comm.init_timeout_seconds optimizer.implementation optimizer.fused compile.components compile.backend
    validation.dataset validation.local_batch_size validation.seq_len debug.print_config debug.save_config_file
    debug.enable_structured_logging debug.deterministic_warn_only checkpoint.create_seed_checkpoint
    """.split()
)
"""Settings of reports, files and speed that do not change what is trained."""

MODE = "activation_checkpoint.mode"
ENGINE_SECTIONS = frozenset({"parallelism", "activation_checkpoint", "compile", "training", "debug", "comm"})
"""Sections whose fields the backend takes where no key of primus sets them."""
MOVED_FIELDS = {"parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel"}
"""Fields of torchtitan 0.2 that have another place in 0.3."""

_OFF: tuple[Any, ...] = (None, False, "", [], {}, "none", "default", "disabled")


class TitanSettings:
    """The leaves of a configuration tree by dotted name, translated one after the other."""

    def __init__(self, tree: dict[str, Any], target: ForeignConfig, engine_keys: Collection[str]) -> None:
        self.values = dict(_flatten_tree(tree))
        check_types(self.values, RENAMED | NUMBERS, target.origin)
        self.target = target
        self.engine_keys = engine_keys

    def translate(self) -> None:
        """Set the keys of `target`, and report each setting without one."""
        for key, value in DEFAULTS.items():
            self.target.set_key(key, value)
        self.read_model()
        self.read_batch()
        self.read_schedule()
        self.read_data()
        self.read_layout()
        self.read_checkpoints()
        self.read_precision()
        self.read_reports()
        for name in list(self.values):
            self.translate_value(name, self.values.pop(name))

    def take(self, *names: str, default: Any = None) -> Any:
        """Value of the first of `names` that is set; all count as read."""
        found = [self.values.pop(name) for name in names if name in self.values]
        return found[0] if found else default

    def read_model(self) -> None:
        """The preset of `model.name` and `model.flavor`."""
        name = str(self.take("model.name", default="llama3"))
        flavor = str(self.take("model.flavor", default="debugmodel"))
        family = MODELS.get(name)
        if family is None:
            close = find_nearest(name, MODELS)
            hint = f"did you mean '{close}'?" if close else f"known: {', '.join(MODELS)}"
            raise UsageError(f"{self.target.origin}: model.name {name!r} has no preset", hint)
        plain = _strip_variant(flavor)
        by_case = {each.lower(): preset for each, preset in family.items()}
        if plain.lower() in by_case:
            self.target.settings["model"] = by_case[plain.lower()]
        elif (name, plain) in DEBUG_MODELS:
            self.target.model |= DEBUG_MODELS[name, plain]
        else:
            known = ", ".join(family)
            raise UsageError(
                f"{self.target.origin}: model.flavor {flavor!r} of {name} has no preset", f"known: {known}"
            )
        if name in ("deepseek_v3", "gpt_oss", "llama4") or "moe" in plain or "A" in plain:
            # torchtitan balances experts by their biases, without a term in the loss.
            self.target.set_key("moe_aux_loss_coeff", 0.0)
        if plain != flavor:
            self.target.add_other("model.flavor", flavor, "the attention backend is chosen by the backend")

    def read_batch(self) -> None:
        batch = self.take("training.global_batch_size", default=-1)
        if batch != -1:
            self.target.set_key("global_batch_size", batch)

    def read_schedule(self) -> None:
        """Warm-up, stable part and decay (torchtitan/components/lr_scheduler.py)."""
        kind = self.take("lr_scheduler.decay_type", default="linear")
        ratio = self.take("lr_scheduler.decay_ratio", "lr_scheduler.decay_factor")
        steps = self.values.get("training.steps", DEFAULTS["train_iters"])
        warmup = self.values.get("lr_scheduler.warmup_steps", DEFAULTS["lr_warmup_iters"])
        self.target.set_key("min_lr_ratio", 0.0)
        if warmup >= steps:  # torchtitan shortens a warm-up that is longer than the run; nothing is left to decay
            self.values["lr_scheduler.warmup_steps"] = steps
            self.target.set_key("lr_decay_style", "constant")
            return
        decay = steps - warmup if ratio is None else round(steps * ratio)
        if kind not in ("linear", "cosine"):
            self.target.add_other(
                "lr_scheduler.decay_type", kind, "primus decays linearly or by a cosine; linear is taken"
            )
            kind = "linear"
        if decay >= steps - warmup:
            self.target.set_key("lr_decay_style", kind)
            return
        self.target.set_key("lr_decay_style", "WSD")
        self.target.set_key("lr_wsd_decay_iters", decay)
        if kind == "cosine":
            self.target.add_other("lr_scheduler.decay_type", kind, "the decay after a stable part is linear in primus")

    def read_data(self) -> None:
        name = self.take("training.dataset", "dataloader.dataset", default="c4_test")
        path = self.take("training.dataset_path", "dataloader.dataset_path")
        if path not in _OFF:
            self.target.add_other("training.dataset_path", path, "prepare it by `data prepare` and set train_data_path")
        assets = self.take("model.hf_assets_path", "hf_assets_path", "model.tokenizer_path")
        if isinstance(name, str) and name in DATASETS and path in _OFF and assets:
            self.target.set_key("dataset", DATASETS[name])
        elif not isinstance(name, str) or path in _OFF:
            reason = "not a dataset of primus; prepare it by `data prepare` and set train_data_path"
            self.target.add_other("training.dataset", name, reason)
        if assets:
            self.target.set_key("tokenizer_model", assets)

    def read_layout(self) -> None:
        """Sharding over data-parallel devices; tensor parallelism includes sequence parallelism by default."""
        shard = self.take("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", default=-1)
        copies = self.take(
            "parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree", default=1
        )
        self.target.set_key("use_distributed_optimizer", shard != 1)
        if copies > 1 and shard != 1:
            self.target.add_other(
                "parallelism.data_parallel_replicate_degree", copies, "primus shards over all data-parallel devices"
            )
        tensor = self.values.get("parallelism.tensor_parallel_degree", 1)
        if tensor > 1 and "parallelism.enable_sequence_parallel" not in self.values:
            self.target.set_key("sequence_parallel", True)
        elif tensor == 1:
            self.take("parallelism.enable_sequence_parallel")
        mode = self.take("activation_checkpoint.mode", default="selective")
        self.take("activation_checkpoint.selective_ac_option")
        if mode == "full":
            self.target.set_key("recompute_activations", True)
        elif mode not in _OFF and MODE in self.engine_keys:
            self.set_field(MODE, mode)
        elif mode not in _OFF:
            self.target.add_other(MODE, mode, "primus recomputes whole layers or nothing")

    def read_checkpoints(self) -> None:
        is_enabled = self.take("checkpoint.enable", "checkpoint.enable_checkpoint", default=False)
        interval = self.take("checkpoint.interval", default=500)
        mode = self.take("checkpoint.async_mode", default="disabled")
        if is_enabled:
            self.target.set_key("save_interval", interval)
            self.target.set_key("async_save", mode != "disabled")
            self.target.set_key("auto_continue_train", True)  # torchtitan loads the newest checkpoint of its folder
        else:
            self.target.set_key("disable_last_saving", True)
            self.take("checkpoint.keep_latest_k")
        path = self.take("checkpoint.initial_load_path")
        is_model_only = self.take("checkpoint.initial_load_model_only", default=True)
        is_hub = self.take("checkpoint.initial_load_in_hf", default=False)
        if path:
            self.target.set_key("load", f"hf:{path}" if is_hub else path)
            self.target.set_key("finetune", bool(is_model_only))

    def read_precision(self) -> None:
        self.target.set_key("bf16", self.take("training.mixed_precision_param", default="bfloat16") == "bfloat16")
        if self.take("training.mixed_precision_reduce", default="float32") != "float32":
            self.target.add_other("training.mixed_precision_reduce", "bfloat16", "primus reduces gradients in fp32")
        if self.take("training.dtype", default="float32") != "float32":
            self.target.add_other("training.dtype", "bfloat16", "primus keeps master weights in fp32")
        converters = self.take("model.converters", default=[])
        if any("float8" in str(each) for each in converters):
            self.target.set_key("fp8", "e4m3")
        elif converters:
            self.target.add_other("model.converters", converters, "no key of primus")
        for name in [name for name in self.values if name.startswith(("quantize.", "float8.", "mx."))]:
            value = self.values.pop(name)
            has_effect = bool(converters) and value not in _OFF
            self.target.add_other(name, value, "details of fp8 are the backend's choice" if has_effect else "")

    def read_reports(self) -> None:
        self.target.set_key("disable_tensorboard", not self.take("metrics.enable_tensorboard", default=False))
        self.target.set_key("disable_wandb", not self.take("metrics.enable_wandb", default=False))
        if self.take("validation.enable", "validation.enabled", default=False):
            self.target.set_key("eval_interval", self.take("validation.freq", default=10))
            if self.values.get("validation.steps", -1) == -1:
                self.values.pop("validation.steps", None)
                self.target.add_other("validation.steps", -1, "the whole validation set; set eval_iters")
        else:
            for name in [name for name in self.values if name.startswith("validation.")]:
                self.target.add_other(name, self.values.pop(name))
        if self.take("profiling.enable_profiling", "profiling.enable", default=False):
            self.target.set_key("profile", True)
        timeout = self.take("comm.train_timeout_seconds")
        if timeout:
            self.target.set_key("distributed_timeout_minutes", math.ceil(timeout / 60))
        name = self.take("optimizer.name", default="AdamW")
        if name not in ("AdamW", "Adam"):
            self.target.add_other("optimizer.name", name, "primus trains with AdamW")

    def translate_value(self, name: str, value: Any) -> None:
        """Set the key of one setting, or report it."""
        field = MOVED_FIELDS.get(name, name)
        if name in RENAMED:
            if value is not None:
                self._set_renamed(RENAMED[name], value)
        elif name in WITHOUT_EFFECT or value in _OFF or (name.endswith("_degree") and value == 1):
            self.target.add_other(name, value)
        elif field in self.engine_keys and field.partition(".")[0] in ENGINE_SECTIONS:
            self.set_field(field, value)
        else:
            close = find_nearest(name, [*RENAMED, *WITHOUT_EFFECT])
            self.target.add_other(name, value, f"no key of primus{f'; did you mean {close}?' if close else ''}")

    def set_field(self, field: str, value: Any) -> None:
        """Set a field of torchtitan's own tree, which its backend takes."""
        self.target.settings.setdefault("backend_args", {})[field] = value

    def _set_renamed(self, key: str, value: Any) -> None:
        if key == "workspace":
            self.target.settings[key] = value
        else:
            self.target.set_key(key, value)


def _flatten_tree(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += _flatten_tree(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def _strip_variant(flavor: str) -> str:
    """`flavor` without the attention backend that variants name: ``8B_flex``."""
    for end in ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope"):
        flavor = flavor.removesuffix(end)
    return flavor
