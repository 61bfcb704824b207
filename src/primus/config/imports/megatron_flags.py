"""Settings of primus for the arguments of Megatron-LM's `pretrain_gpt.py`.

Names, defaults and meanings are those of `megatron/training/arguments.py` of core_v0.16.1. An argument whose name is a
key of the schema means the same here, unless it is listed below; any other argument of Megatron-LM keeps its name.
"""

from __future__ import annotations

from functools import cache
from pathlib import PurePath
from typing import Any

from primus.config.frameworks.known_keys import KnownKey, read_megatron_arguments
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.layer_pattern import parse_layer_pattern
from primus.config.schema import OWNERS
from primus.config.schema_keys import list_switch_keys
from primus.config.source import parse_scalar
from primus.config.vocabulary import find_vocabulary_size
from primus.errors import find_nearest

RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "rope_scaling_factor": "rotary_scaling_factor",
    "activation_func_clamp_value": "activation_clamp",
    "fp8_format": "fp8",
}
"""Arguments that have another name here."""

NEGATED = {
    "disable_bias_linear": "add_bias_linear",
    "no_create_attention_mask_in_dataloader": "create_attention_mask_in_dataloader",
    "no_async_save": "async_save",
}
"""Flags that set a key to false."""

DEFAULTS: dict[str, Any] = {
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "norm_epsilon": 1e-5,
    "init_method_std": 0.02,
    "rotary_base": 10000.0,
    "bf16": False,
    "seed": 1234,
    "lr_decay_style": "linear",
    "min_lr": 0.0,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "use_distributed_optimizer": False,
    "distributed_timeout_minutes": 10,
    "async_save": False,
    "log_interval": 100,
    "eval_interval": 1000,
    "eval_iters": 100,
    "split": "969, 30, 1",
    "num_workers": 2,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_pre_softmax": False,
    "moe_router_norm_topk_prob": False,
}
"""What Megatron-LM does without the argument, where primus may do otherwise."""

IMPLIED = {
    "use_mcore_models": (True,),
    "swiglu": (True,),
    "group_query_attention": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope", "yarn"),
    "use_rotary_position_embeddings": (True,),
    "no_position_embedding": (True,),
    "hidden_dropout": (0, 0.0),
    "attention_dropout": (0, 0.0),
    "rotary_interleaved": (False,),
    "save_retain_interval": (None,),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss"),
    "ckpt_format": ("torch_dist", "torch"),
    "make_vocab_size_divisible_by": (1, 128),
    "dataloader_type": ("single",),
    "mmap_bin_files": (True,),
    "no_mmap_bin_files": (True,),
    "check_for_nan_in_loss_and_grad": (True,),
}
"""Arguments whose values state what primus always does."""

NEEDED = {
    "swiglu": "the feed-forward is gated (SwiGLU) in primus; this script's is not",
    "normalization": "the norm is RMSNorm in primus; Megatron-LM's default is LayerNorm",
    "position_embedding_type": "positions are rotary in primus; Megatron-LM's default is learned_absolute",
    "hidden_dropout": "primus trains without dropout; Megatron-LM's default is 0.1",
    "attention_dropout": "primus trains without dropout; Megatron-LM's default is 0.1",
}
"""What Megatron-LM does otherwise where an argument is absent."""

SAMPLES = {"train_samples": "train_iters", "lr_decay_samples": "lr_decay_iters", "lr_warmup_samples": "lr_warmup_iters"}
"""Lengths in samples, which are steps times the global batch size."""

GPT2_VOCABULARY = 50257
"""Tokens of GPT-2's vocab.json (huggingface.co/openai-community/gpt2)."""
GPT2_FILE = "gpt2-vocab.json"
"""Name of that file in Megatron-LM's README, which scripts keep."""
_TOKENIZERS = ("NullTokenizer", "MultimodalTokenizer", "NullMultimodalTokenizer")


class MegatronFlags:
    """Arguments by name with their values, translated one after the other."""

    def __init__(self, flags: dict[str, list[str]], target: ForeignConfig) -> None:
        self.flags = {name.replace("-", "_"): _parse_values(values) for name, values in flags.items()}
        self.target = target

    def translate(self) -> None:
        """Set the keys of `target`, and report each argument without one."""
        for name, value in DEFAULTS.items():
            self.target.set_key(name, value)
        self.read_model()
        self.read_schedule()
        self.read_data()
        for name in list(self.flags):
            self.translate_flag(name, self.flags.pop(name))
        if "num_experts" not in self.target.model:
            for name in [name for name in self.target.model if name.startswith("moe_")]:
                del self.target.model[name]

    def take(self, name: str, default: Any = None) -> Any:
        return self.flags.pop(name, default)

    def read_model(self) -> None:
        """Arguments that together say one thing about the model."""
        for name, problem in NEEDED.items():
            value = self.flags.get(name)
            if value is None and not (name == "position_embedding_type" and self._has_rope()):
                self.target.add_other(f"--{name.replace('_', '-')} (absent)", None, problem)
        heads = self.flags.get("num_attention_heads")
        groups = self.take("num_query_groups")
        if self.take("group_query_attention") and groups is not None:
            self.target.set_key("num_query_groups", groups)
        elif heads is not None and not self.flags.get("multi_latent_attention"):
            self.target.set_key("num_query_groups", heads)
        hidden = self.flags.get("hidden_size")
        if hidden and "ffn_hidden_size" not in self.flags:
            # arguments.py: 4 h, and two thirds of it in multiples of 64 with SwiGLU
            width = int(4 * hidden * 2 / 3 / 64) * 64 if self.flags.get("swiglu") else 4 * hidden
            self.target.set_key("ffn_hidden_size", width)
        self.read_rope()
        self.read_experts()

    def _has_rope(self) -> bool:
        return bool(self.flags.get("use_rotary_position_embeddings"))

    def read_rope(self) -> None:
        """Llama 3's scaling, whose other constants are fixed in Megatron-LM, or yarn."""
        if self.take("use_rope_scaling"):
            self.target.set_key("rope_type", "llama3")
            self.target.set_key("rotary_scaling_factor", float(self.take("rope_scaling_factor", 8.0)))
            return
        kind = self.take("rope_type", "yarn" if self.flags.get("multi_latent_attention") else "rope")
        if self.flags.get("position_embedding_type") == "yarn" or kind == "yarn":
            self.target.set_key("rope_type", "yarn")
            if self.flags.get("multi_latent_attention"):
                # Defaults of the class MLATransformerConfig in megatron/core/transformer/transformer_config.py.
                self.target.model |= {"rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096}

    def read_experts(self) -> None:
        """Which layers have experts, and how they are balanced."""
        if "num_experts" in self.flags and "moe_ffn_hidden_size" not in self.flags and "ffn_hidden_size" in self.flags:
            self.target.set_key("moe_ffn_hidden_size", self.flags["ffn_hidden_size"])
        freq = self.take("moe_layer_freq")
        pattern = parse_layer_pattern(freq)
        if freq == 1:
            pass
        elif isinstance(pattern, list) and pattern == sorted(pattern):
            self.target.set_key("first_k_dense_replace", pattern.count(0))
        elif freq is not None:
            self.target.add_other("--moe-layer-freq", freq, "primus has dense layers only at the start, or each n-th")
        if self.flags.get("moe_router_score_function") == "sigmoid":
            self.target.set_key("moe_router_norm_topk_prob", True)  # Megatron-LM always renormalizes these
        if self.flags.get("window_attn_skip_freq") == 2:  # full attention in every second layer
            self.target.set_key("window_layer_period", self.take("window_attn_skip_freq"))
        if self.flags.get("softmax_type") == "learnable":
            self.target.set_key("attention_sinks", bool(self.take("softmax_type")))
        is_balanced = str(self.flags.get("moe_router_load_balancing_type", "aux_loss")) in ("aux_loss", "seq_aux_loss")
        if not is_balanced and "moe_aux_loss_coeff" in self.flags:
            self.take("moe_aux_loss_coeff")

    def read_schedule(self) -> None:
        """Lengths in samples as steps; a warm-up share replaces a number of steps."""
        batch = self.flags.get("global_batch_size")
        for name, key in SAMPLES.items():
            samples = self.take(name)
            if samples is None:
                continue
            if isinstance(samples, int) and isinstance(batch, int) and batch > 0:
                self.target.set_key(key, samples // batch)
            else:
                self.target.add_other(f"--{name.replace('_', '-')}", samples, "needs --global-batch-size to be steps")
        style = self.flags.get("lr_wsd_decay_style")
        if self.flags.get("lr_decay_style") == "WSD" and style != "linear":
            self.take("lr_wsd_decay_style")
            self.target.add_other("--lr-wsd-decay-style", style or "exponential", "primus decays WSD linearly")

    def read_data(self) -> None:
        """Megatron-LM's data_path is the blend of token files; here that name means a folder of datasets."""
        blend = self.take("data_path")
        if blend is not None:
            self.target.set_key("train_data_path", blend if isinstance(blend, list) else str(blend))
        kind = self.flags.get("tokenizer_type")
        if "vocab_file" in self.flags and kind in (None, "GPT2BPETokenizer") and "vocab_size" not in self.flags:
            self.read_vocabulary(str(self.flags["vocab_file"]))
        if kind in _TOKENIZERS:
            self.read_null_tokenizer(str(self.take("tokenizer_type")))

    def read_vocabulary(self, file: str) -> None:
        """Size of the vocabulary from GPT-2's kind of file; any tokenizer of this kind may stand in it."""
        size = find_vocabulary_size(file)
        if size is None and PurePath(file).name == GPT2_FILE:
            size = GPT2_VOCABULARY
            self.target.add_other("--vocab-file", file, f"vocab_size {size} is that of GPT-2, by the name of the file")
        if size is None:
            self.target.add_other("--vocab-file", file, "states the vocab_size, and is not on this machine")
        else:
            self.target.set_key("vocab_size", size)

    def read_null_tokenizer(self, kind: str) -> None:
        """Megatron-LM's null tokenizer adds a token, and the embedding is padded to a multiple."""
        size = self.flags.get("vocab_size")
        if self.flags.get("make_vocab_size_divisible_by") == 1 and isinstance(size, int):
            self.target.set_key("vocab_size", size + 1)
            del self.flags["vocab_size"]
            self.target.add_other("--tokenizer-type", kind)
            return
        self.target.add_other(
            "--tokenizer-type", kind, "Megatron-LM adds a token and pads the embedding; vocab_size stays as written"
        )

    def translate_flag(self, name: str, value: Any) -> None:
        """Set the key of one argument, or report it."""
        shown = f"--{name.replace('_', '-')}"
        if name in NEGATED and value is True:
            self.target.set_key(NEGATED[name], False)
            return
        key = RENAMED.get(name, name)
        if key in OWNERS and value is True and key not in list_switch_keys():
            self.target.add_other(shown, None, "has no value in the script")
        elif key in OWNERS:
            self.target.set_key(key, _convert_value(key, value))
        elif name in IMPLIED and any(value == known for known in IMPLIED[name]):
            self.target.add_other(shown, value)
        elif name.startswith("no_") and name[3:] in list_switch_keys() and value is True:
            self.target.set_key(name[3:], False)
        elif name in NEEDED:
            self.target.add_other(shown, value, NEEDED[name])
        elif name in list_arguments():
            self.set_argument(shown, value, *list_arguments()[name])
        else:
            self.target.add_other(shown, value, self.describe_unknown(name))

    def set_argument(self, shown: str, value: Any, dest: str, argument: KnownKey) -> None:
        """Set an argument of Megatron-LM under its own name."""
        if argument.kind == "switch" and value is True:
            value = argument.stores
        elif value is True and argument.kind != "bool":
            self.target.add_other(shown, None, "has no value in the script")
            return
        elif argument.nargs is not None and not isinstance(value, list):
            value = [value]
        elif argument.nargs is None and isinstance(value, list):
            if argument.kind not in ("str", "text"):
                self.target.add_other(shown, value, f"takes one value, and has {len(value)}")
                return
            value = " ".join(map(str, value))  # a path with a blank, which is not quoted in the script
        self.target.settings[dest] = value

    def describe_unknown(self, name: str) -> str:
        from primus.config.key_hints import find_synonym_hint  # not for scripts that primus knows whole

        hint = find_synonym_hint(name)
        if hint:
            return hint
        close = find_nearest(name, [*OWNERS, *list_arguments()])
        return f"not a known argument of Megatron-LM{f'; did you mean --{close}?' if close else ''}".replace("_", "-")


@cache
def list_arguments() -> dict[str, tuple[str, KnownKey]]:
    """Key and kind of each argument of Megatron-LM, by its flag with underscores."""
    return {
        flag.removeprefix("--").replace("-", "_"): (dest, argument)
        for dest, argument in read_megatron_arguments().keys.items()
        for flag in argument.flags
    }


def _parse_values(values: list[str]) -> Any:
    """The value of an argument: true without one, a list of several."""
    if not values:
        return True
    parsed = [parse_scalar(value) for value in values]
    return parsed[0] if len(parsed) == 1 else parsed


def _convert_value(key: str, value: Any) -> Any:
    if key == "window_size" and isinstance(value, (str, list)):
        text = "".join(map(str, value)) if isinstance(value, list) else value
        parts = [part for part in text.strip("()[] ").split(",") if part.strip()]
        return int(parts[0]) + 1 if parts and parts[0].strip().isdigit() else value  # tokens to the left, and itself
    if key in ("train_data_path", "valid_data_path", "test_data_path"):
        return value
    if key in ("split", "exp_name", "wandb_project", "wandb_exp_name", "tokenizer_model", "load", "save"):
        separator = "," if key == "split" else " "
        return separator.join(map(str, value)) if isinstance(value, list) else str(value)
    return value
