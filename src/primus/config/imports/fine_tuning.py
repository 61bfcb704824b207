"""Values of a fine-tuning file of a trainer on top of Hugging Face's: each is translated or named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from primus import registry
from primus.config.extended_files import load_model
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.source import ConfigValue
from primus.errors import UsageError

MATRICES = {
    "linear_qkv": {"q_proj", "k_proj", "v_proj"},
    "linear_proj": {"o_proj"},
    "linear_fc1": {"gate_proj", "up_proj"},
    "linear_fc2": {"down_proj"},
}
"""Matrices of Hugging Face's Llama that are one matrix here."""
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    "muon": "muon",
    "sgd": "sgd",
}
"""Ours by the names of transformers' `optim`."""
DECAYS = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
PREFERENCES = {"sigmoid": "dpo", "dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
DEFAULTS: dict[str, ConfigValue] = {
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
}
"""Defaults of transformers' TrainingArguments that differ from ours or are worth seeing."""
SHARED = {
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "adam_epsilon": "adam_eps",
    "max_grad_norm": "clip_grad",
    "learning_rate": "lr",
    "seed": "seed",
    "max_steps": "train_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "warmup_steps": "lr_warmup_iters",
    "logging_steps": "log_interval",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "save_total_limit": "keep_last_n",
    "output_dir": "workspace",
}
"""Ours by the names of transformers' TrainingArguments, which these trainers take over."""
NUMBERS = ("learning_rate", "weight_decay", "adam_epsilon", "warmup_ratio")
"""Values that YAML reads as text where they have no dot: 1e-4."""
WITHOUT_EFFECT = (
    *("model_type", "tokenizer_type", "trust_remote_code", "hub_model_id", "hub_strategy", "tf32", "ddp_timeout"),
    *("attn_implementation", "flash_attention", "xformers_attention", "sdp_attention", "flash_attn", "plot_loss"),
    *("dataset_prepared_path", "dataset_processes", "dataloader_num_workers", "preprocessing_num_workers"),
    *("overwrite_output_dir", "overwrite_cache", "do_train", "do_eval", "pad_to_sequence_len", "group_by_length"),
    *("wandb_entity", "wandb_watch", "wandb_log_model", "report_to", "save_safetensors", "strict", "debug"),
    *("eval_sample_packing", "eval_batch_size", "per_device_eval_batch_size", "eval_strategy", "save_strategy"),
    *("gradient_checkpointing_kwargs", "include_tokens_per_second", "low_cpu_mem_usage", "lora_on_cpu", "cache_dir"),
)
"""Settings that say where and how fast, not what is learned."""
STEPS = "the number of rows is not known: set train_iters to rows x epochs / global_batch_size (1000 until then)"


class FineTuningFile:
    """The values of a file, each of which is read or reported.

    Args:
        values: Of the file; null stands for the default.
        target: Result, an experiment of native.
    """

    def __init__(self, values: Mapping[str, Any], target: ForeignConfig) -> None:
        self.rest = {key: value for key, value in values.items() if value is not None}
        self.target = target
        target.stage = "post_trainer"

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which then counts as read."""
        return self.rest.pop(key, default)

    def report(self, key: str, reason: str) -> None:
        """Name a value that the file has and that is not translated; nothing where it has none, or false."""
        value = self.rest.pop(key, None)
        if value is not None and value is not False:
            self.target.add_other(key, value, reason)

    def set(self, **settings: Any) -> None:
        """Set keys of ours."""
        for key, value in settings.items():
            self.target.set_key(key, value)

    def set_model(self, key: str) -> None:
        """The model by its name on the hub, its weights and its tokenizer."""
        name = str(self.take(key, ""))
        self.target.hint = f"give --model PRESET for {name or 'the model'}, or import its config.json"
        if not name:
            return
        self.set(load=f"hf:{name}", finetune=True, tokenizer_model=name)
        wanted = _simplify(name)
        presets = {_simplify(load_model(each).hf_name or ""): each for each in registry.list_plug_ins("models")}
        if wanted in presets:
            self.target.settings["model"] = presets[wanted]
        else:
            self.target.add_other(key, name, "no preset has this name")

    def set_batch(self, micro: str, default: int) -> None:
        """Batch of a device, accumulation, and its precision."""
        size, steps = int(self.take(micro, default)), self.take("gradient_accumulation_steps", 1)
        self.set(micro_batch_size=size)
        if isinstance(steps, int):
            self.set(global_batch_size=size * steps)
            reason = "global_batch_size is that of one GPU: multiply it by the number of GPUs"
            self.target.add_other("gradient_accumulation_steps", steps, reason)
        else:
            self.target.add_other("gradient_accumulation_steps", steps, "set global_batch_size")
        self.set(bf16=self.take("bf16", False) in (True, "auto", "full"))
        self.report("fp16", "set fp16: true")
        self.set(recompute_activations=bool(self.take("gradient_checkpointing", False)))

    def set_shared(self, decay: str, epochs: str) -> None:
        """What transformers' TrainingArguments name.

        Args:
            decay: The schedule where the file names none.
            epochs: Key of the duration.
        """
        for theirs, ours in SHARED.items():
            value = self.take(theirs)
            if value is None and theirs in DEFAULTS:
                value = self.target.defaults[ours] = DEFAULTS[theirs]
            if value is not None:
                self.set(**{ours: float(value) if theirs in NUMBERS else value})
        if isinstance(self.target.settings.get("lr_warmup_iters"), float):  # a share, as of transformers 5
            self.set(lr_warmup_fraction=self.target.settings.pop("lr_warmup_iters"))
        if self.target.settings.get("train_iters", 0) in (0, -1):
            self.set(train_iters=1000)
            self.rest.setdefault(epochs, "default")
            self.report(epochs, STEPS)
        self.take(epochs)
        for key in ("eval_interval", "save_interval", "log_interval"):
            value = self.target.settings.get(key)
            if isinstance(value, float) and value < 1:
                self.target.settings.pop(key)
                self.target.add_other(key, value, "a share of all steps: set it to a number of steps")
        name = str(self.take("lr_scheduler", None) or self.take("lr_scheduler_type", decay))
        if name in DECAYS:
            self.set(lr_decay_style=DECAYS[name])
        else:
            self.target.add_other("lr_scheduler", name, "no such schedule; lr_decay_style is cosine")
        optimizer = str(self.take("optimizer", None) or self.take("optim", "adamw_torch"))
        if optimizer in OPTIMIZERS:
            self.set(optimizer=OPTIMIZERS[optimizer])
        else:
            self.target.add_other("optimizer", optimizer, "no such optimizer; it is AdamW")

    def set_adapter(self, kind: str, alpha: Any, targets: Iterable[str]) -> None:
        """Adapters by the names of peft's settings."""
        rank = int(self.take("lora_r", None) or self.take("lora_rank", 8))
        is_dora = bool(self.take("peft_use_dora", False) or self.take("use_dora", False))
        is_root = bool(self.take("peft_use_rslora", False) or self.take("use_rslora", False))
        self.set(peft="dora" if is_dora else "lora", peft_dim=rank, peft_alpha=int(alpha or 2 * rank))
        self.set(peft_dropout=float(self.take("lora_dropout", 0.0)), peft_rslora=is_root)
        if kind == "qlora":
            self.target.add_other("adapter", kind, "the model is not quantized: LoRA in bfloat16")
        named = set(targets)
        if named:
            chosen = [ours for ours, theirs in MATRICES.items() if theirs & named]
            self.set(peft_target_modules=chosen or list(MATRICES))
            wanted = set().union(*(MATRICES[each] for each in chosen))
            if wanted != named:
                reason = "adapters are for query, key and value together, and for gate and up: more or fewer than named"
                self.target.add_other("lora_target_modules", ", ".join(sorted(named)), reason)

    def finish(self) -> None:
        """Report all that was not read: what has no effect, and what may have one."""
        for key in [key for key in WITHOUT_EFFECT if key in self.rest]:
            self.target.add_other(key, self.rest.pop(key))
        if self.take("wandb_project") is not None:
            self.target.add_other("wandb_project", None, "set disable_wandb: false and wandb_project to log there")
        for key in ("deepspeed", "fsdp", "fsdp_config", "fsdp_version"):
            self.report(key, "optimizer state, gradients and weights are sharded by use_distributed_optimizer: true")
        for key in list(self.rest):
            self.report(key, "no key for it here")

    @staticmethod
    def check_kind(values: Mapping[str, Any], key: str, refused: Mapping[str, str], shown: str) -> None:
        """Raise UsageError for a training that primus does not have."""
        if (value := str(values.get(key))) in refused:
            raise UsageError(f"{shown}: {key}: {value}: {refused[value]}", "import a file of SFT, LoRA or DPO")


def _simplify(name: str) -> str:
    """The name of a published model without its owner; tuned variants have the same shape."""
    short = name.rpartition("/")[2].lower().removeprefix("meta-")
    for ending in ("-hf", "-instruct-2507", "-base", "-instruct", "-it"):
        short = short.removesuffix(ending)
    return short
