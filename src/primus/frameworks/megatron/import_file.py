"""Settings of primus for the arguments of Megatron-LM's `pretrain_gpt.py`.

Names, defaults and meanings are those of `megatron/training/arguments.py` of core_v0.16.1. An argument whose name is a
key of the schema means the same here, unless it is listed below; any other argument of Megatron-LM keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import PurePath
from typing import Any, get_args

from msgspec import structs

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.launch_line import FURTHER
from primus.config.layer_pattern import parse_layer_pattern
from primus.config.schema import OWNERS, DataConfig
from primus.config.schema_keys import list_switch_keys
from primus.config.source import parse_scalar
from primus.config.translation.known_keys import KnownKey
from primus.config.vocabulary import PUBLISHED_SIZES, find_vocabulary_size
from primus.engine_keys import list_file_names
from primus.errors import UsageError, find_nearest
from primus.frameworks.megatron import known_keys
from primus.frameworks.megatron.checkout_defaults import FILES, CheckoutDefaults, read_checkout_defaults
from primus.frameworks.megatron.defaults import IMPLIED, NEEDED, list_defaults

RENAMED = list_file_names(known_keys.FOLDER, with_older=True)
"""Arguments that have another name here; also of Megatron-DeepSpeed and of early Megatron-LM."""

NEGATED = {
    "disable_bias_linear": "add_bias_linear",
    "no_create_attention_mask_in_dataloader": "create_attention_mask_in_dataloader",
    "no_async_save": "async_save",
}
"""Flags that set a key to false."""

LENGTHS = ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
"""What is counted in steps (`_iters`), in samples, or, by Megatron-DeepSpeed, in tokens."""
EMBEDDING_SIZES = ("padded_vocab_size", "pad_vocab_size_to")
"""Rows of the embedding, in arguments of forks."""
GATES = {"swiglu": "silu", "geglu": "gelu"}
"""Activation by the value of `--glu-activation` of Megatron-DeepSpeed and Pai-Megatron-Patch."""

RECOMPUTED = ("activations_checkpoint_method", "activations_checkpoint_num_layers")

HYBRID = (
    *("is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio", "hybrid_override_pattern"),
    *("hybrid_layer_pattern", "mtp_hybrid_override_pattern", "experimental_attention_variant", "linear_attention_freq"),
)
"""Arguments of models with layers of other kinds, whose letters are not those of our `hybrid_layer_pattern`."""
GPT2_FILE = "gpt2-vocab.json"
"""Name of that file in Megatron-LM's README, which scripts keep."""
TOKENIZERS = get_args(next(field.type for field in structs.fields(DataConfig) if field.name == "tokenizer_type"))
"""Types of tokenizers that primus knows by the same name."""
NULL_TOKENIZERS = ("NullTokenizer", "MultimodalTokenizer", "NullMultimodalTokenizer")


FORMATS = "a script of Megatron-LM"
COMMANDS = "Megatron-LM"
_PROGRAM = re.compile(r"(.*/)?(pretrain|train|finetune|main)\w*\.py")
_DECODER = re.compile(
    r"(?i)(?!pretrain_)\w+\.py|pretrain_(gpt|llama|qwen|mi[sx]tral|deepseek|gemma|glm|kimi|moe|yi)\w*\.py"
)
"""Programs whose model is that of pretrain_gpt.py, as far as their name says."""
_OTHER_PROGRAM = re.compile(r"(.*/)?(pretrain_(bert|t5|ict|retro|vision\w*|vlm|mimo|samba)|posttrain_\w+)\.py")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_TELLING = {"--num-layers", "--hidden-size", "--micro-batch-size", "--seq-length", "--train-iters", "--lr"}
"""Arguments by which a command is recognized."""
FEWEST_TELLING = 2
ROLLOUT_FLAGS = (
    *("--advantage-estimator", "--n-samples-per-prompt", "--num-rollout", "--rm-type", "--rollout-batch-size"),
    "--rollout-function-path",
)
"""Arguments that slime (THUDM/slime) and its forks add for post-training."""
OTHER_PARTS = (
    *("--vision-model-type", "--language-model-type", "--freeze-LM", "--freeze-ViT", "--img-h", "--image-token-id"),
    *("--vision-encoder-checkpoint", "--language-model-checkpoint", "--model-provider", "--dataset-provider"),
)
"""Arguments of models that read images or sound, in `examples/multimodal` and `examples/mimo` of Megatron-LM."""
LAUNCHERS = re.compile(r"(--?)(nproc|nnodes|node[_-]rank|master|rdzv|standalone|local[_-]addr|tee|log[_-]dir|role)")
"""Options of torchrun that may stand among the arguments of a script without a program's name."""


def find_arguments(words: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Values by argument of a command that trains with Megatron-LM or a fork; None if it is another one.

    Raises:
        UsageError: It trains another kind of model, or after pre-training.
    """
    if other := next((word for word in words if _OTHER_PROGRAM.fullmatch(word)), None):
        raise UsageError(f"{PurePath(other).name} pre-trains no decoder that primus has", "import another script")
    program = next((index for index, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    arguments = words if program is None else words[program + 1 :]
    named = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if program is not None and "--yaml-cfg" in named:
        file = (*_group_arguments(arguments)["--yaml-cfg"], "a file")[0]
        raise UsageError(f"has its settings in {file} (--yaml-cfg), which is not read", "write them as arguments")
    if len(named & _TELLING) < FEWEST_TELLING:
        return None
    parts = [name for name in OTHER_PARTS if name in named]
    if len(parts) >= FEWEST_TELLING:
        raise UsageError(
            f"trains a model of images or sound, by {' and '.join(parts[:3])}", "only scripts of text are imported"
        )
    found = _group_arguments(arguments)
    rollout = [name for name in ROLLOUT_FLAGS if name in found]
    if len(rollout) >= FEWEST_TELLING:
        raise UsageError(
            f"starts post-training of slime or a fork of it, by {' and '.join(rollout[:3])}",
            "only scripts of pre-training are imported",
        )
    name = PurePath(words[program]).name if program is not None else ""
    return found if not name or _DECODER.fullmatch(name) else {name: (), **found}


def _group_arguments(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Values of each argument."""
    arguments: dict[str, tuple[str, ...]] = {}
    last: str | None = None
    for word in words:
        # an array's entry such as "--fp8-format hybrid" may hold the argument and its value
        for part in word.split() if word.startswith("--") and " " in word else [word]:
            flag, is_assigned, value = part.partition("=")
            if _FLAG.fullmatch(flag) and not LAUNCHERS.match(flag):
                last = flag
                arguments[last] = (_strip_quotes(value),) if is_assigned else ()
            elif part.startswith("--"):
                last = None
            else:
                name = FURTHER if last is None else last
                arguments[name] = (*arguments.get(name, ()), part if last is None else _strip_quotes(part))
    return arguments


def _strip_quotes(text: str) -> str:
    """`text` without quotes that a script wrote inside other quotes: ``"--split '99,1,0'"``."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def read_arguments(arguments: Mapping[str, Sequence[str]], target: ForeignConfig) -> None:
    """Set the keys of `target` from the arguments of a command, and list each argument without a key."""
    for program in [name for name in arguments if not name.startswith("--")]:
        target.add_other(program, None, "not a known program; read as pretrain_gpt.py, from which its model may differ")
    MegatronFlags({name: each for name, each in arguments.items() if name.startswith("--")}, target).translate()


class MegatronFlags:
    """Arguments by name with their values, translated one after the other."""

    def __init__(self, flags: Mapping[str, Sequence[str]], target: ForeignConfig) -> None:
        self.flags = {
            name.removeprefix("--").replace("-", "_"): _parse_values(values) for name, values in flags.items()
        }
        self.target = target

    def translate(self) -> None:
        """Set the keys of `target`, and report each argument without one."""
        self.drop_empty()
        own = self.read_own_defaults()
        for name, value in list_defaults(self.flags, own.keys):
            self.target.set_key(name, value)
        self.target.settings |= own.arguments
        self.read_model(own)
        self.read_schedule()
        self.read_data()
        if "activations_checkpoint_method" in self.flags:  # of 2021 and 2022, when layers were recomputed whole
            self.flags |= {
                name.replace("activations_checkpoint", "recompute"): self.take(name, 1) for name in RECOMPUTED
            }
            self.flags["recompute_granularity"] = "full"
        for name in list(self.flags):
            self.translate_flag(name, self.flags.pop(name))
        if "num_experts" not in self.target.model:
            for name in [name for name in self.target.model if name.startswith("moe_")]:
                del self.target.model[name]

    def take(self, name: str, default: Any = None) -> Any:
        return self.flags.pop(name, default)

    def add_other(self, name: str, value: Any, reason: str = "") -> None:
        self.target.add_other(f"--{name.replace('_', '-')}", value, reason)

    def drop_empty(self) -> None:
        """Report arguments that need a value and have none, such as one of an unset variable."""
        for name in [name for name, value in self.flags.items() if value is True and _needs_value(name)]:
            self.flags.pop(name)
            self.add_other(name, None, "has no value in the script")

    def read_own_defaults(self) -> CheckoutDefaults:
        """The defaults of the script's checkout, and what is not known of them."""
        known = known_keys.read_arguments().keys
        own = read_checkout_defaults(self.target.folders, self.flags.keys(), RENAMED, known)
        if own is None:
            if self.target.folders:
                reason = "not here: what the script leaves out is that of core_v0.16.1, from which it may differ"
                self.target.add_other(FILES[0], None, reason)
            return CheckoutDefaults("", {}, {}, {}, {})
        for name in [name for name in own.arguments if name in NEEDED]:
            if (value := own.arguments.pop(name)) in IMPLIED[name]:
                own.others[name] = value
        listed = ", ".join(f"{name} {value}" for name, value in own.others.items())
        if listed:
            self.target.add_other(own.file, f"its defaults: {listed}")
        if unknown := [f"{name} {value}" for name, value in own.unknown.items() if name not in IMPLIED]:
            self.target.add_other(own.file, None, f"has defaults of its own: {', '.join(unknown)}")
        return own

    def read_model(self, own: CheckoutDefaults) -> None:
        """Arguments that together say one thing about the model."""
        said = {"swiglu": self.read_gate(), "position_embedding_type": self.flags.get("use_rotary_position_embeddings")}
        for name, problem in NEEDED.items():
            if name not in self.flags and not said.get(name) and name not in own.others:
                self.add_other(f"{name} (absent)", None, problem)
        heads = self.flags.get("num_attention_heads")
        groups = self.take("num_query_groups")
        # Megatron-DeepSpeed and BigCode have grouped attention without a switch
        number = 1 if self.flags.get("attention_head_type") == "multiquery" else self.take("num_key_value_heads")
        if number is not None:
            self.take("attention_head_type")
            self.target.set_key("num_query_groups", number)
        elif self.take("group_query_attention") and groups is not None:
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
        for name in [name for name in HYBRID if self.flags.get(name)]:
            self.add_other(name, self.take(name), "layers of other kinds; the result has attention in each layer")

    def read_gate(self) -> bool:
        """Whether the feed-forward is gated by other means than `--swiglu`: of forks, or of gpt-oss, with a clamp."""
        kind = self.flags.get("glu_activation")
        if kind in GATES:
            self.target.set_key("ffn_activation", GATES[self.take("glu_activation")])
            return True
        names = ("quick_geglu", "glu_linear_offset")
        if [self.flags.get(name) for name in names] == [True, 1] and "activation_func_clamp_value" in self.flags:
            for name in names:
                self.add_other(name, self.take(name))
            return True
        return False

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
        self.read_deepspeed_experts()
        if "num_experts" in self.flags and "moe_ffn_hidden_size" not in self.flags and "ffn_hidden_size" in self.flags:
            self.target.set_key("moe_ffn_hidden_size", self.flags["ffn_hidden_size"])
        if self.flags.get("first_k_dense_replace") == -1:  # of MindSpeed: no dense layer
            self.add_other("first_k_dense_replace", self.take("first_k_dense_replace"))
            self.flags["moe_layer_freq"] = abs(self.flags.get("moe_layer_freq", 1))
        freq = self.take("moe_layer_freq")
        pattern = parse_layer_pattern(freq)
        if freq == 1:
            pass
        elif isinstance(pattern, list) and pattern == sorted(pattern):
            self.target.set_key("first_k_dense_replace", pattern.count(0))
        elif freq is not None:
            self.add_other("moe_layer_freq", freq, "primus has dense layers only at the start, or each n-th")
        if self.flags.get("moe_router_score_function") == "sigmoid":
            self.target.set_key("moe_router_norm_topk_prob", True)  # Megatron-LM always renormalizes these
        if self.flags.get("window_attn_skip_freq") == 2:  # full attention in every second layer
            self.target.set_key("window_layer_period", self.take("window_attn_skip_freq"))
        if self.flags.get("softmax_type") == "learnable":
            self.target.set_key("attention_sinks", bool(self.take("softmax_type")))
        kind = str(self.flags.get("moe_router_load_balancing_type", "aux_loss"))
        if kind not in ("aux_loss", "seq_aux_loss") and "moe_aux_loss_coeff" in self.flags:
            reason = "" if kind in ("none", "sinkhorn") else f"primus cannot tell its effect with load balancing {kind}"
            self.add_other("moe_aux_loss_coeff", self.take("moe_aux_loss_coeff"), reason)

    def read_deepspeed_experts(self) -> None:
        """Experts of Megatron-DeepSpeed: a number for each layer that has them, and every n-th has them."""
        if isinstance(numbers := self.flags.get("num_experts"), list):
            self.flags["num_experts"] = max(numbers)
            if len({*numbers}) > 1:
                reason = f"differs among layers; here each has {max(numbers)}, and num_experts is one number"
                self.add_other("num_experts", numbers, reason)
        if "num_experts" in self.flags and "deepspeed" in self.flags:
            self.flags.setdefault("topk", 1)
            reason = "Megatron-DeepSpeed has experts in each n-th layer, not in the first, and 2 where it is absent"
            self.add_other("expert_interval", self.take("expert_interval"), f"{reason}; set moe_layer_freq")

    def read_schedule(self) -> None:
        """Lengths in samples as steps; a warm-up share replaces a number of steps."""
        if "warmup" in self.flags:  # until 2020, a share of all steps
            self.flags.setdefault("lr_warmup_fraction", self.take("warmup"))
        for name in LENGTHS:
            self.read_length(name)
        for name in ("rampup_batch_size", "step_batch_size_schedule"):
            if name in self.flags:
                reason = (
                    "the script begins with smaller batches; primus trains with global_batch_size from the first step"
                )
                self.add_other(name, self.take(name), reason)
        number = self.flags.get("eval_iters")
        if isinstance(number, int) and number < 0:
            self.target.set_key("eval_iters", 0)
            reason = "Megatron-LM evaluates nothing then, some forks the whole set; set eval_iters"
            self.add_other("eval_iters", self.take("eval_iters"), reason)
        style = self.flags.get("lr_wsd_decay_style")
        if self.flags.get("lr_decay_style") == "WSD" and style != "linear":
            self.take("lr_wsd_decay_style")
            self.add_other("lr_wsd_decay_style", style or "exponential", "primus decays WSD linearly")

    def read_length(self, name: str) -> None:
        """A length in samples or tokens as steps. The shortest one ends the training; elsewhere tokens go first."""
        lengths = [self.take(f"{name}_iters")]
        for unit, divisors in (("samples", ["global_batch_size"]), ("tokens", ["global_batch_size", "seq_length"])):
            count = self.take(f"{name}_{unit}")
            sizes = [size for size in map(self.flags.get, divisors) if isinstance(size, int) and size > 0]
            if isinstance(count, int) and len(sizes) == len(divisors):
                lengths.append(count // prod(sizes) or min(count, 1))
                if 0 < count < prod(sizes):
                    self.add_other(f"{name}_{unit}", count, "less than a step, which it becomes")
            elif count is not None:
                needed = " and ".join(divisors)
                self.add_other(f"{name}_{unit}", count, f"needs {needed} to be steps")
        steps = [each for each in lengths if each is not None]
        if steps:
            self.target.set_key(f"{name}_iters", min(steps) if name == "train" else steps[-1])

    def read_data(self) -> None:
        """Megatron-LM's data_path is the blend of token files; here that name means a folder of datasets."""
        blend = self.take("data_path")
        if blend is not None:
            self.target.set_key("train_data_path", blend if isinstance(blend, list) else str(blend))
        if reader := self.take("dataset"):  # of Pai-Megatron-Patch; here that name is a data set
            reason = "" if reader == "MMAP" else "reads examples of another task; fine-tune by `train posttrain`"
            self.add_other("dataset", reader, reason)
        kind = self.flags.get("tokenizer_type")
        for name in EMBEDDING_SIZES:
            if "vocab_size" not in self.flags and name in self.flags:
                self.flags["vocab_size"] = self.take(name)
                self.add_other(name, self.flags["vocab_size"], "taken as vocab_size; the tokenizer may have fewer")
        if "vocab_file" in self.flags and kind in (None, "GPT2BPETokenizer") and "vocab_size" not in self.flags:
            self.read_vocabulary(str(self.flags["vocab_file"]))
        if kind in NULL_TOKENIZERS:
            self.read_null_tokenizer(str(self.take("tokenizer_type")))
        elif kind is not None and kind not in TOKENIZERS:
            self.read_other_tokenizer(str(self.take("tokenizer_type")))
        if "fim_rate" in self.flags and not self.flags.get("fim_data"):
            self.add_other("fim_rate", self.take("fim_rate"))
        if self.flags.get("fim_data"):
            self.add_other("fim_data", self.take("fim_data"))

    def read_vocabulary(self, file: str) -> None:
        """Size of the vocabulary from GPT-2's kind of file; any tokenizer of this kind may stand in it."""
        size = find_vocabulary_size(file)
        if size is None and PurePath(file).name == GPT2_FILE:
            size = PUBLISHED_SIZES["gpt2"]
            self.add_other("vocab_file", file, f"vocab_size {size} is that of GPT-2, by the name of the file")
        if size is None:
            self.add_other("vocab_file", file, "states the vocab_size, and is not on this machine")
        else:
            self.target.set_key("vocab_size", size)

    def read_other_tokenizer(self, kind: str) -> None:
        """Kinds of forks: the first two are tokenizers of transformers, and most of the others are."""
        model = self.flags.get("tokenizer_model") or self.flags.get("tokenizer_name_or_path")
        if kind == "TokenizerFromFile" and not model:
            model = self.take("tokenizer_file") or self.take("vocab_file")
            self.target.set_key("tokenizer_model", model)
        reason = "not a tokenizer of Megatron-LM; set tokenizer_type and tokenizer_model"
        if model:
            self.target.set_key("tokenizer_type", "HuggingFaceTokenizer")
            is_same = kind in ("PretrainedFromHF", "TokenizerFromFile")
            reason = "" if is_same else "not a tokenizer of Megatron-LM, and read as HuggingFaceTokenizer"
        self.add_other("tokenizer_type", kind, reason)

    def read_null_tokenizer(self, kind: str) -> None:
        """Megatron-LM's null tokenizer adds a token, and the embedding is padded to a multiple."""
        size = self.flags.get("vocab_size")
        if self.flags.get("make_vocab_size_divisible_by") == 1 and isinstance(size, int):
            self.target.set_key("vocab_size", size + 1)
            del self.flags["vocab_size"]
            self.add_other("tokenizer_type", kind)
            return
        self.target.add_other(
            "--tokenizer-type", kind, "Megatron-LM adds a token and pads the embedding; vocab_size stays as written"
        )

    def translate_flag(self, name: str, value: Any) -> None:
        """Set the key of one argument, or report it."""
        if name in NEGATED and value is True:
            self.target.set_key(NEGATED[name], False)
            return
        if name == "recompute_activations":  # validate_args: selective, where the key here means whole layers
            self.target.settings["recompute_granularity"] = "selective"
            return
        if name == "zero_stage" and value in (1, 2, 3):
            self.target.set_key("use_distributed_optimizer", True)
            shards = {1: "", 2: "shards gradients too", 3: "shards gradients and weights too"}[value]
            self.add_other(name, value, shards and f"{shards}; use_distributed_optimizer only the optimizer's state")
            return
        key = RENAMED.get(name, name)
        if key in OWNERS:
            self.target.set_key(key, _convert_value(key, value))
        elif name in IMPLIED and any(_is_equal(value, known) for known in IMPLIED[name]):
            self.add_other(name, value)
        elif name.startswith("no_") and name[3:] in list_switch_keys() and value is True:
            self.target.set_key(name[3:], False)
        elif name in NEEDED:
            self.add_other(name, value, NEEDED[name])
        elif name in list_arguments() and list_arguments()[name][1].effect == "other":
            self.add_other(name, value, "of another task or optimizer: the result pre-trains with AdamW")
        elif name in list_arguments():
            self.set_argument(name, value, *list_arguments()[name])
        else:
            self.add_other(name, value, self.describe_unknown(name))

    def set_argument(self, name: str, value: Any, dest: str, argument: KnownKey) -> None:
        """Set an argument of Megatron-LM under its own name."""
        if argument.kind == "switch" and value is True:
            value = argument.stores
        elif argument.nargs is not None and not isinstance(value, list):
            value = [value]
        elif argument.nargs is None and isinstance(value, list):
            if argument.kind not in ("str", "text"):
                self.add_other(name, value, f"takes one value, and has {len(value)}")
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
        for dest, argument in known_keys.read_arguments().keys.items()
        for flag in argument.flags
    }


def _needs_value(name: str) -> bool:
    """Whether an argument, of Megatron-LM or one that is read as a key, is not a switch."""
    if name in list_arguments():
        return list_arguments()[name][1].kind not in ("switch", "bool")
    key = RENAMED.get(name, name)
    return key in OWNERS and key not in list_switch_keys()


def _is_equal(value: Any, known: Any) -> bool:
    """Whether values are the same; Megatron-DeepSpeed writes names in small letters."""
    return value == known or (isinstance(value, str) and isinstance(known, str) and value.lower() == known.lower())


def _parse_values(values: Sequence[str]) -> Any:
    """The value of an argument: true without one, a list of several."""
    if not values:
        return True
    # Braces are part of a path that was not filled in, and no mapping of YAML.
    parsed = [value if value.startswith("{") else parse_scalar(value) for value in values]
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
