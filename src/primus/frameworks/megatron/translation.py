"""Megatron-LM's arguments and Primus' own keys in experiment files: translated, kept for the engine, or refused.

Sources: megatron/training/arguments.py of Megatron-LM 0.12 to 0.19 (dests, defaults, `validate_args`);
primus/configs of AMD-AGI/Primus 26.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import UnionType
from typing import Any

import msgspec

from primus.config.convert import convert_value, find_conversion_problem, find_origin
from primus.config.schema import OWNERS
from primus.config.source import Leaf, Tree
from primus.config.translation.foreign_settings import (
    VARIABLE,
    ForeignSettings,
    LayerContext,
    TranslatedSettings,
    Translator,
    format_ignored_keys,
    format_listed_keys,
    rename_keys,
)
from primus.config.translation.known_keys import KnownKey
from primus.config.translation.pipeline_stages import place_layers
from primus.engine_keys import list_file_names
from primus.errors import UsageError
from primus.frameworks.megatron import model_translation as megatron_model
from primus.frameworks.megatron.known_keys import FOLDER, read_arguments, read_primus_keys

RENAMED = {"check_for_nan_in_loss": "check_for_nan_in_loss_and_grad"} | list_file_names(FOLDER)
"""Key of the schema, or newer argument, by an argument with the same meaning."""

HUB_TOKENIZERS = "DeepSeekV2 DeepSeekV3 DeepSeekV4 Grok1 KimiK2 Lfm2 Llama3 Llama4 Mixtral".split()
"""Tokenizers that Primus adds: each loads the model's tokenizer from the Hub
(primus/backends/megatron/training/tokenizer/tokenizer.py)."""

OTHER_TASKS = ("perform_rl_step", "vision_pretraining", "retro_add_retriever", "use_one_sent_docs", "sft")
"""Switches that choose another task than pre-training a language model."""

PRIMUS_FEATURES = {
    "enable_turbo_attention_float8": "attention in 8-bit floating point is Primus-Turbo's",
    "lora": "low-rank adaptation is Primus' own",
    "mlperf_mode": "the MLPerf mode is Primus' own",
    "moe_router_force_load_balancing_type": "only Primus' patch has kinds of forced load balancing",
    "weight_deosc": "weight de-oscillation is Primus' own",
}
"""Why a feature of Primus' patches that changes the training is refused."""


PRIMUS_VALUES = {
    ("fp4_recipe", "mxfp4"): "only Primus' patch of Transformer Engine has this recipe; Megatron-LM has nvfp4",
}
"""Why a value that Primus adds to an argument, or another task, is refused in pre-training."""


class MegatronTranslator(Translator):
    """Translation of `framework: megatron`."""

    framework = "megatron"

    def check_module(self, tree: Tree, module: Tree) -> None:
        super().check_module(tree, module)
        trainer = module.pop("trainer_class", None)
        if isinstance(trainer, Leaf) and trainer.value not in (None, "MegatronPretrainTrainer"):
            raise UsageError(
                f"{trainer.origin}: trainer_class: {trainer.value} is Primus' own",
                "engines here train language models; torchtitan's Flux reads other data: use Primus for image models",
            )

    def rename(self, settings: Tree) -> Tree:
        return rename_keys(settings, RENAMED)

    def complete_model(self, settings: Tree, model: Tree) -> Tree:
        if model and megatron_model.needs_other_code(settings, read_primus_keys()):
            return {**model, **megatron_model.drop_shape(settings, read_primus_keys())}
        return settings if "hf_name" not in model else {"hf_name": model["hf_name"], **settings}

    def is_fine_tuning(self, settings: Tree) -> bool:
        """`stage: sft`, by which Primus chooses its trainer."""
        return bool(ForeignSettings(settings).read("stage") == "sft")

    def list_known_keys(self) -> Iterable[str]:
        return (*read_arguments().keys, *read_primus_keys().keys)

    def translate(self, settings: Tree, context: LayerContext) -> TranslatedSettings:
        work = ForeignSettings(settings, context.typed)
        if not context.is_schema:
            _translate_data(work)
            _translate_training(work, context)
            _translate_layout(work)
            _translate_checkpoints(work)
            _translate_tuning(work, context)
            _translate_sinks(work)
            megatron_model.translate_model(work, context, read_primus_keys().tokenizers)
            place_layers(work)
            _drop_variables(work)
            work.drop_nulls()
        work.notes += _settle_rest(work, context)
        return work.finish()


def create_translator() -> MegatronTranslator:
    """The translation of the settings of one experiment file."""
    return MegatronTranslator()


def _translate_data(work: ForeignSettings) -> None:
    """`data_path` is a blend in Megatron-LM and a folder here: docs/decisions/0014-data-path-by-framework.md."""
    path = work.read("data_path")
    others = [key for key in ("dataset", "train_data_path", "mock_data") if work.read(key)]
    if path is not None and not others and not is_data_folder(path):
        origin = work.find_origin("data_path")
        work.drop("data_path")
        work.put("train_data_path", path, origin)
    elif isinstance(path, list):
        work.drop("data_path")
    kind = work.read("tokenizer_type")
    if isinstance(kind, str) and (kind.removesuffix("Tokenizer") in HUB_TOKENIZERS or kind.startswith("Null")):
        work.put("tokenizer_type", "HuggingFaceTokenizer", work.find_origin("tokenizer_type"))
    if work.read("create_attention_mask_in_dataloader"):  # a causal mask either way; ours is made on the device
        work.drop("create_attention_mask_in_dataloader")
    if "fim_data" in work.tree:
        origin, is_on = work.find_origin("fim_data"), work.take("fim_data")
        if not is_on or "fim_rate" not in work.tree:
            work.put("fim_rate", 0.5 if is_on else 0.0, origin)  # 0.5 is Megatron-LM's default


def _drop_variables(work: ForeignSettings) -> None:
    """Variables of the environment among the settings: Primus sets none of them."""
    known = {*OWNERS, *read_arguments().keys, *read_primus_keys().keys}
    names = [key for key in work.tree if VARIABLE.fullmatch(key) and key.lower() not in known]
    if names:
        work.notes.append(f"not set, as in Primus: {format_listed_keys(names)}; variables belong under env:")
        work.drop(*names)


def is_data_folder(path: Any) -> bool:
    """Whether a `data_path` is the folder of named datasets: `./data`, or an existing folder that is not a prefix."""
    from pathlib import Path

    if not isinstance(path, str) or len(path.split()) > 1:
        return False
    return path in ("./data", "data") or path.endswith("/") or Path(path).is_dir()


def _translate_training(work: ForeignSettings, context: LayerContext) -> None:
    for key in ("train_samples", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"):
        if work.read(key, 0):
            raise work.refuse(key, "lengths are counted in steps here", f"use {key.replace('samples', 'iters')}")
        work.drop(key)
    for key in ("rampup_batch_size", "step_batch_size_schedule"):
        if work.read(key) is not None:
            raise work.refuse(key, "the global batch size is constant here", "remove it")
        work.drop(key)
    for (key, value), reason in PRIMUS_VALUES.items():
        if work.read(key) == value and context.stage == "pre_trainer":
            raise work.refuse(key, f"{value}: {reason}", "remove it")
    for key in OTHER_TASKS:
        if work.read(key):
            raise work.refuse(key, "no engine here does this task", "remove it")
    if work.read("stage") in ("pretrain", "mlperf_pretrain", "sft"):
        work.drop("stage")  # the module says it; `stage: sft` in a pre_trainer has made it a post_trainer
    work.drop("use_pytorch_profiler")  # every profile here is of torch.profiler
    compilation = work.tree.get("torch_compile")
    if isinstance(compilation, dict):
        enable = compilation.get("enable")
        if isinstance(enable, Leaf) and enable.value:
            work.put("compile", True, work.find_origin("torch_compile"))
        work.drop("torch_compile")


def _translate_layout(work: ForeignSettings) -> None:
    # Megatron-LM's validate_args disables it as well: without tensor parallelism there is nothing to shard.
    is_alone = work.read("tensor_model_parallel_size", 1) in (1, "1")
    if is_alone and work.read("sequence_parallel"):
        work.put("sequence_parallel", False, work.find_origin("sequence_parallel"))


def _translate_checkpoints(work: ForeignSettings) -> None:
    """`pretrained_checkpoint` and `hf_path` are weights to start from."""
    for key, prefix in (("pretrained_checkpoint", ""), ("hf_path", "hf:")):
        origin, path = work.find_origin(key), work.take(key)
        if path and not work.read("load"):
            work.put("load", f"{prefix}{path}", origin)
            work.put("finetune", True, origin)


def _translate_tuning(work: ForeignSettings, context: LayerContext) -> None:
    """A module of another stage than pre-training: its data are conversations."""
    if context.stage == "pre_trainer":
        return
    name, origin = work.read("sft_dataset_name"), work.find_origin("sft_dataset_name")
    if name and not any(work.read(key) for key in ("dataset", "train_data_path", "sft_data_path", "mock_data")):
        work.put("sft_data_path", f"hf:{name}", origin)
    if work.read("enable_packed_sequences"):
        work.put("packed_sequence", True, work.find_origin("enable_packed_sequences"))


def _translate_sinks(work: ForeignSettings) -> None:
    """Sink attention of Primus-Turbo, which gpt-oss uses (primus/configs/modules/megatron/primus_turbo.yaml)."""
    keys = ("use_sink_attention", "sink_sliding_window", "sink_window_even_layers_only")
    origin = work.find_origin(*keys)
    is_on, window, is_even = work.take(keys[0]), work.take(keys[1], 0), work.take(keys[2], True)
    if not is_on:
        return
    work.put("attention_sinks", True, origin)
    if window:
        work.put("window_size", window, origin)
        work.put("window_layer_period", 2 if is_even else 1, origin)


def _settle_rest(work: ForeignSettings, context: LayerContext) -> list[str]:
    """Check and keep arguments that have no equivalent key; gives the notes.

    Raises:
        UsageError: Values are invalid, or ask for a feature of Primus' patches; all invalid values are listed.
    """
    problems: list[str] = []
    ignored: dict[str, list[str]] = {}
    for key in [key for key in work.tree if key not in OWNERS and key != "backend_args"]:
        argument, extension = read_arguments().keys.get(key), read_primus_keys().keys.get(key)
        known = argument or extension
        if known is None:
            continue  # reported with the nearest name when the settings are complete
        item = work.tree.pop(key)
        try:
            value = _convert_argument(item, known)
        except msgspec.ValidationError as error:
            problems.append(f"{find_origin(item)}: {key}: {error}")
            continue
        is_default = value is None or value == known.default
        if argument is not None and known.effect != "other":
            if not is_default or (key in context.written and value is not None):
                work.backend_args[key] = _keep_value(item, value)
        elif not is_default:
            _settle_extension(work, key, item, known, context)
            if key in context.written:
                ignored.setdefault(known.effect, []).append(key)
    if problems:
        raise UsageError("\n".join(problems))
    return format_ignored_keys(ignored, "no effect outside of Primus")


def _settle_extension(
    work: ForeignSettings, key: str, item: Leaf | Tree, known: KnownKey, context: LayerContext
) -> None:
    """Keep or refuse a key of Primus with another value than its default."""
    if known.effect not in ("numbers", "model"):
        return
    if isinstance(item, Leaf) and item.value in known.shipped:
        return
    is_tuning = context.stage != "pre_trainer"
    if is_tuning:
        work.backend_args[key] = item
        return
    if isinstance(item, dict) and not _is_enabled(item):
        return
    reason = PRIMUS_FEATURES.get(key, "it is a feature of Primus' patches that changes the training")
    if key.startswith("sft_") or key in ("stage", "enable_packed_sequences", "use_packed_attention"):
        reason = "it is a setting of fine-tuning, which is a module post_trainer"
    raise UsageError(f"{find_origin(item)}: {key}: {reason}", "remove it")


def _is_enabled(item: Tree) -> bool:
    switch = item.get("enabled", item.get("enable"))
    return not isinstance(switch, Leaf) or bool(switch.value)


def _convert_argument(item: Leaf | Tree, known: KnownKey) -> Any:
    """The value in the type of the argument.

    Raises:
        ValidationError: It is of another type, or none of the choices.
    """
    if not isinstance(item, Leaf):
        return {key: value.value if isinstance(value, Leaf) else value for key, value in item.items()}
    if item.value is None or known.nargs is not None or known.kind == "text":
        return item.value
    kinds: dict[str, type | UnionType] = {
        "int": int,
        "float": float,
        "bool": bool,
        "switch": bool,
        "str": str | int | float | list,
    }
    try:
        value = convert_value(item, kinds[known.kind])
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(find_conversion_problem(item, kinds[known.kind], error)) from None
    if known.choices and value not in known.choices:
        raise msgspec.ValidationError(f"{value!r} is not possible; valid: {', '.join(map(str, known.choices))}")
    return value


def _keep_value(item: Leaf | Tree, value: Any) -> Leaf | Tree:
    return Leaf(value, item.origin, item.text, item.typed) if isinstance(item, Leaf) else item
