"""MaxText's settings in experiment files: translated, kept for the engine, or refused.

Sources: maxtext/configs/base.yml of MaxText 0.2.5; primus/configs of AMD-AGI/Primus 26.5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from primus.config.schema import OWNERS
from primus.config.source import Leaf, Tree
from primus.config.translation.foreign_settings import (
    ForeignSettings,
    LayerContext,
    TranslatedSettings,
    Translator,
    rename_keys,
    settle_other_keys,
)
from primus.config.translation.known_keys import KnownKey
from primus.errors import did_you_mean
from primus.frameworks.maxtext.names import (
    DEFAULTS,
    EXPERTS,
    LATENT,
    MODELS,
    OBJECTIVES,
    RENAMED,
    ROPE_TYPES,
    SCALING,
    UNDECAYED,
    UNSET,
    read_settings,
)

DATASETS = {"allenai/c4": "c4"}
"""Named dataset here by its name on the Hugging Face Hub."""
DECODERS = ("llama2", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek")
"""Decoders whose parts the keys of a shape describe."""
REPLACING = {"min_lr_ratio": "min_lr", "lr_warmup_fraction": "lr_warmup_iters"}
"""Key of the schema that stands for another one with a default."""
ALL_DEVICES = -1
"""A size along one axis of the mesh: all devices that the others leave."""


KEPT_EFFECTS = ("numbers", "speed")
"""What a setting changes that the engine takes; primus does what those of reports, files and processes do."""


class MaxtextTranslator(Translator):
    """Translation of `framework: maxtext`."""

    framework = "maxtext"
    names: Mapping[str, str] = RENAMED
    numbers: Collection[str] = ("gradient_accumulation_steps", "shared_experts", "checkpoint_period")

    def rename(self, settings: Tree) -> Tree:
        kept: Tree = {}
        for key, item in settings.items():
            if key in UNSET and isinstance(item, Leaf) and item.value == UNSET[key]:
                continue
            if key == "hf_name" and "hf_path" in settings:
                continue  # the part of a data set; here it is a model's name on the Hub
            kept[key] = item
        return rename_keys(kept, RENAMED)

    def find_model_name(self, settings: Tree, name: str) -> str:
        named = ForeignSettings(settings).read("model_name", "default")
        return MODELS.get(str(named), name)

    def complete_model(self, settings: Tree, model: Tree) -> Tree:
        """The model that `model_name` names; without one, the settings describe it alone."""
        work = ForeignSettings(settings)
        named = str(work.read("model_name", "default"))
        if named == "default":
            return settings
        if named not in MODELS:
            raise work.refuse("model_name", f"no preset here is {named}", did_you_mean(named, list(MODELS)))
        return {**model, **settings}

    def list_known_keys(self) -> Iterable[str]:
        return read_settings().keys

    def translate(self, settings: Tree, context: LayerContext) -> TranslatedSettings:
        work = ForeignSettings(settings)
        if not context.is_schema:
            _restore_model(work, context)
            _drop_further_tokens(work, context)
            self.apply_rules(work)
        self.settle_rest(work, context)
        return work.finish()

    def apply_rules(self, work: ForeignSettings) -> None:
        for key, reason in OBJECTIVES.items():
            if work.read(key):
                work.reject(key, reason, "fine-tune by `train posttrain`, which docs/posttrain.md describes")
        _translate_model(work)
        _translate_data(work)
        _translate_training(work)
        _translate_layout(work)
        _translate_checkpoints(work)
        _translate_reports(work)
        for name in DEFAULTS:
            key = RENAMED[name]
            if key not in work.tree and REPLACING.get(key) not in work.tree:
                work.put(key, read_settings().keys[name].default, "MaxText's default")
        work.drop_nulls()
        _choose_init(work)

    def settle_rest(self, work: ForeignSettings, context: LayerContext) -> None:
        settle_other_keys(work, context, read_settings().keys, _keep_setting)


def create_translator() -> MaxtextTranslator:
    """The translation of the settings of one experiment file."""
    return MaxtextTranslator()


def _restore_model(work: ForeignSettings, context: LayerContext) -> None:
    """Put the model that `model_name` names over presets that copy base.yml.

    MaxText does so whether or not `override_model_config` is set, which is about the command line.
    """
    if not context.model or work.read("model_name", "default") == "default":
        return
    work.drop(*(key for key in work.tree if _is_of_model(key) and key not in context.written))
    work.tree |= {key: item for key, item in context.model.items() if key not in work.tree}


def _drop_further_tokens(work: ForeignSettings, context: LayerContext) -> None:
    """MaxText's models have no layers of multi-token prediction, as the preset may have."""
    if work.read("mtp_num_layers") and "mtp_num_layers" not in context.written:
        work.put("mtp_num_layers", 0, "MaxText's models")
        work.notes.append(
            "mtp_num_layers of the model preset is not applied: the layers of multi-token prediction are not trained"
        )


def _is_of_model(key: str) -> bool:
    return OWNERS.get(key) == "model" or key in ("logits_via_embedding", "shared_experts")


def _translate_model(work: ForeignSettings) -> None:
    item, name = work.tree.get("model_name"), work.take("model_name", "default")
    is_named = isinstance(item, Leaf) and name != "default"
    if is_named and isinstance(item, Leaf):
        work.backend_args["model_name"] = item
        work.drop("decoder_block", "mlp_activations", "attention_type")
    else:
        _translate_decoder(work)
    _drop_unused_defaults(work)
    if "logits_via_embedding" in work.tree or not (is_named or "untie_embeddings_and_output_weights" in work.tree):
        origin, is_tied = work.find_origin("logits_via_embedding"), work.take("logits_via_embedding", False)
        work.put("untie_embeddings_and_output_weights", not is_tied, origin)
    origin, rope = work.find_origin("rope_type"), work.read("rope_type", "default")
    if rope not in ROPE_TYPES and rope not in ROPE_TYPES.values():
        work.reject("rope_type", "not possible here", f"use {', '.join(ROPE_TYPES)}")
    elif origin != "default" or not is_named:
        work.put("rope_type", ROPE_TYPES.get(rope, rope), origin)
    origin, shared = work.find_origin("shared_experts"), work.read("shared_experts", 0)
    width = work.read("moe_ffn_hidden_size", -1)
    if shared and width > 0:
        work.drop("shared_experts")
        work.put("moe_shared_expert_intermediate_size", shared * width, origin)


def _translate_decoder(work: ForeignSettings) -> None:
    """The model that the keys of its shape describe."""
    if work.read("decoder_block", "llama2") not in DECODERS:
        work.reject("decoder_block", "needs the name of its model", "set model_name")
    work.drop("decoder_block")
    activations = work.read("mlp_activations", ["silu", "linear"])
    if activations not in (["silu", "linear"], ["gelu", "linear"]):
        work.reject("mlp_activations", "MaxText's Llama has silu", "write [silu, linear]")
    elif activations[0] == "gelu":
        work.put("ffn_activation", "gelu", work.find_origin("mlp_activations"))
    work.drop("mlp_activations")
    if work.take("attention_type", "global") == "mla":
        work.put("multi_latent_attention", True, "attention_type")
    if "max_position_embeddings" not in work.tree:  # a length that only yarn depends on
        work.put("max_position_embeddings", work.read("seq_length", 2048), work.find_origin("seq_length"))


def _drop_unused_defaults(work: ForeignSettings) -> None:
    """Drop what base.yml states for every model, where the model has no such layers."""
    if not work.read("multi_latent_attention"):
        work.drop_unused(*LATENT)
    if work.read("num_experts", 1) == 1:
        work.drop_unused("num_experts", *EXPERTS)
    if work.read("rope_type", "default") == "default":
        work.drop_unused(*SCALING)


def _decides(work: ForeignSettings, name: str, *keys: str) -> bool:
    """Whether a setting of MaxText, or its default, sets `keys` of the schema: a file may have these instead."""
    return name in work.tree or not any(key in work.tree for key in keys)


def _translate_data(work: ForeignSettings) -> None:
    """Synthetic data are random tokens here; a loader of MaxText is replaced by ours."""
    origin, kind = work.find_origin("dataset_type"), work.read("dataset_type", "tfds")
    hub, files = work.take("hf_path"), work.take("grain_train_files")
    work.drop("hf_access_token")
    if work.tree.get("tokenizer_type") is not None:
        work.put("tokenizer_type", "HuggingFaceTokenizer", work.find_origin("tokenizer_type"))
    if work.take("eod_mask_loss", False):
        work.put("eod_mask_loss", True, origin)
    if any(work.read(key) for key in ("dataset", "train_data_path", "mock_data")):
        pass
    elif kind == "synthetic":
        work.put("mock_data", True, origin)
    elif kind == "grain" and files and str(work.read("grain_file_type", "")).startswith("mmap"):
        work.put("train_data_path", _split_blend(files), origin)
        if work.read("grain_eval_files"):
            work.put("valid_data_path", _split_blend(work.take("grain_eval_files")), origin)
    elif kind in ("hf", "huggingface") and hub in DATASETS:
        work.put("dataset", DATASETS[hub], origin)
    else:
        if "dataset_type" not in work.tree:
            work.put("dataset_type", kind, "MaxText's default")
        problem = f"MaxText's loader reads {hub or 'it'}, not ours"
        work.reject("dataset_type", problem, "prepare the data by `data prepare`, then set train_data_path")
    work.drop("dataset_type")


def _split_blend(files: str) -> str | list[str | float]:
    """The blend of ``prefix,weight;prefix,weight``; other text as it is."""
    parts = [part.rpartition(",") for part in str(files).split(";")]
    if not all(prefix for prefix, _, _ in parts):
        return files if len(parts) == 1 else [part for _, _, part in parts]
    try:
        return [each for prefix, _, weight in parts for each in (float(weight), prefix)]
    except ValueError:
        return files


def _translate_training(work: ForeignSettings) -> None:
    if work.read("dtype", "bfloat16") not in ("bfloat16", "float32"):
        work.reject("dtype", "not possible", "use bfloat16 or float32")
    origin, kind = work.find_origin("dtype"), work.take("dtype", "bfloat16")
    if origin != "default" or "bf16" not in work.tree:
        work.put("bf16", kind == "bfloat16", origin)
    steps = work.read("gradient_accumulation_steps", 1)
    if steps != 1:
        hint = f"set global_batch_size to per_device_batch_size x devices x {steps}"
        work.reject("gradient_accumulation_steps", "the global batch is a number of sequences here", hint)
    work.drop("gradient_accumulation_steps")
    policy = work.read("remat_policy", "full")
    if _decides(work, "remat_policy", "recompute_activations"):
        work.put("recompute_activations", policy == "full", work.find_origin("remat_policy"))
    if policy == "full":
        work.drop("remat_policy")
    if work.read("opt_type", "adamw") != "adamw":
        work.reject("opt_type", "only AdamW is supported", "set opt_type: adamw")
    work.drop("opt_type")
    _translate_schedule(work)
    if work.read("adamw_mask") == list(UNDECAYED):
        work.drop("adamw_mask")
    seed, origin = work.take("init_weights_seed"), work.find_origin("init_weights_seed")
    if seed is not None and "seed" not in work.tree:
        work.put("seed", seed, origin)


def _translate_schedule(work: ForeignSettings) -> None:
    """The cosine, or WSD, whose last phase is a linear decay if it follows the warm-up."""
    origin, style = work.find_origin("lr_schedule_type"), work.read("lr_schedule_type", "cosine")
    if style not in ("cosine", "wsd"):
        work.reject("lr_schedule_type", "not a schedule of MaxText", "use cosine or wsd")
    if style == "wsd" and work.read("wsd_decay_style", "linear") != "linear":
        work.reject("wsd_decay_style", "the last phase of WSD is linear", "set wsd_decay_style: linear")
    share = work.take_number("wsd_decay_steps_fraction", 0.1) or 0.0
    work.drop("lr_schedule_type", "wsd_decay_style")
    if style != "wsd":
        if "lr_decay_style" not in work.tree:
            work.put("lr_decay_style", "cosine", origin)
        return
    end = _read_number(work, "lr_decay_iters", -1)
    if end < 0:
        end = _read_number(work, "train_iters", 150_001)
    decay, warmup = int(end * share), int(end * _read_number(work, "lr_warmup_fraction", 0.1))
    if decay + warmup >= end:
        work.put("lr_decay_style", "linear", origin)
        return
    work.put("lr_decay_style", "WSD", origin)
    work.put("lr_wsd_decay_iters", decay, origin)


def _read_number(work: ForeignSettings, key: str, default: float) -> float:
    """The value of `key`; the default for text, which the schema refuses later."""
    value = work.read(key, default)
    return value if isinstance(value, int | float) else default


def _translate_layout(work: ForeignSettings) -> None:
    """Sizes along the axes of the mesh stay MaxText's, but for those that have a key here."""
    tensor = work.read("tensor_model_parallel_size", 1)
    if not isinstance(tensor, int) or tensor < 1:
        raise work.refuse("tensor_model_parallel_size", f"{tensor}: must be a number of devices", "write the number")
    origin, experts = work.find_origin("ici_expert_parallelism"), work.read("ici_expert_parallelism", 1)
    if origin != "default" and experts != ALL_DEVICES:
        work.drop("ici_expert_parallelism")
        work.put("expert_model_parallel_size", experts, origin)
    # MaxText counts the sequences of a pass for each device, primus for each group of tensor-parallel devices.
    origin, batch = work.find_origin("micro_batch_size"), work.read("micro_batch_size", 12)
    if origin != "default" and not origin.removesuffix(")").endswith("per_device_batch_size"):
        return
    size = batch * tensor if isinstance(batch, (int, float)) else 0
    if size < 1 or size != int(size):
        problem = "per_device_batch_size is less than a sequence for each data-parallel device"
        work.reject("micro_batch_size", problem, "set a whole number, and share the sequence by tensor parallelism")
    work.put("micro_batch_size", int(size) or 1, origin)


def _translate_checkpoints(work: ForeignSettings) -> None:
    for key in ("load_parameters_path", "load_full_state_path"):
        if work.read(key):
            hint = "convert it by maxtext.checkpoint_conversion.to_huggingface, then load: hf:FOLDER and finetune: true"
            work.reject(key, "a checkpoint of MaxText's own format cannot be loaded", hint)
        work.drop(key)
    if not _decides(work, "enable_checkpointing", "save_interval", "disable_last_saving"):
        work.drop("checkpoint_period")
        return
    origin, is_on = work.find_origin("enable_checkpointing"), work.take("enable_checkpointing", True)
    interval_origin, interval = work.find_origin("checkpoint_period"), work.take("checkpoint_period", 10_000)
    if is_on:
        work.put("save_interval", interval, interval_origin)
        work.put("auto_continue_train", True, origin)
    else:
        work.put("disable_last_saving", True, origin)


def _translate_reports(work: ForeignSettings) -> None:
    origin, profiler = work.find_origin("profiler"), work.read("profiler")
    if not profiler:
        work.drop_unused("skip_first_n_steps_for_profiler", "profiler_steps")
        work.drop_unchanged("profiler")
        return
    first, steps = work.take("skip_first_n_steps_for_profiler", 1), work.take("profiler_steps", 5)
    work.drop("profiler")
    if profiler == "xplane" and isinstance(first, int) and isinstance(steps, int):
        work.put("profile", True, origin)
        work.put("profile_step_start", first, origin)
        work.put("profile_step_end", first + steps, origin)
    else:
        work.warn("profiler", profiler, "not started; `profile: true` profiles by jax.profiler")


def _choose_init(work: ForeignSettings) -> None:
    """Weights of models with experts or latent attention are drawn by MaxText."""
    is_other = any(work.read(key) for key in ("num_experts", "multi_latent_attention", "post_layernorm"))
    if is_other and "init" not in work.tree:
        work.put("init", "engine", "MaxText's models with experts")
        work.notes.append("init: engine: MaxText draws the initial weights of this model")


def _keep_setting(work: ForeignSettings, key: str, known: KnownKey, item: Leaf) -> bool:
    """Give the engine a setting; not those of reports, checkpoints and processes, which are the same for all."""
    is_kept = not known.gone and known.effect in KEPT_EFFECTS
    if is_kept:
        work.backend_args[key] = item
    return is_kept
