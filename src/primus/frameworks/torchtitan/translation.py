"""torchtitan's configuration tree in experiment files: translated, moved to its place in 0.3, or refused.

Sources: torchtitan/config/job_config.py of v0.2.2, torchtitan/trainer.py of v0.3.0, torchtitan/components of both;
primus/configs of AMD-AGI/Primus 26.5.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from primus.config.source import Leaf, Tree
from primus.config.translation.foreign_settings import (
    ForeignSettings,
    LayerContext,
    TranslatedSettings,
    Translator,
    format_origin,
    is_set,
    rename_keys,
    settle_other_keys,
)
from primus.config.translation.known_keys import KnownKey
from primus.frameworks.torchtitan.names import DATASETS, NUMBERS, RENAMED, read_fields

SECTIONS = frozenset(
    """
    job model optimizer lr_scheduler training parallelism checkpoint activation_checkpoint compile quantize comm
    memory_estimation fault_tolerance experimental validation debug metrics profiling primus_turbo profiler validator
    dataloader override loss float8 mx
    """.split()
)
"""Sections of the tree in 0.2 and 0.3, and Primus' own."""

MOVED_SECTIONS = {
    "profiler.": "profiling.",
    "validator.": "validation.",
    "dataloader.": "training.",
    "float8.": "quantize.linear.float8.",
    "mx.": "quantize.linear.mx.",
}
"""Section of 0.2 with the same fields as one of 0.3 or 0.1."""

SAMPLE = "c4_test"
"""The sample of C4 in torchtitan's repository: here it is C4 itself."""

_SPEED_OPTIONS = ("quantize.",)
"""Sections that have no effect unless a converter or a mode chooses them."""


class TorchtitanTranslator(Translator):
    """Translation of `framework: torchtitan`."""

    framework = "torchtitan"
    names: Mapping[str, str] = RENAMED
    numbers: Collection[str] = NUMBERS

    def rename(self, settings: Tree) -> Tree:
        flat: Tree = {}
        for key, item in settings.items():
            if key in SECTIONS and not isinstance(item, Leaf):
                flat.update(_flatten_section(item, f"{key}."))
            else:
                flat[key] = item
        return rename_keys(flat, RENAMED)

    def complete_model(self, settings: Tree, model: Tree) -> Tree:
        named = ForeignSettings(settings)
        family, flavor = named.read("model.name"), named.read("model.flavor")
        if not model and is_set(settings, "model.flavor"):
            raise named.refuse("model.flavor", f"{flavor} of {family} has no preset of this name here", "name a preset")
        return {**model, **{key: item for key, item in settings.items() if key not in ("model.name", "model.flavor")}}

    def list_known_keys(self) -> Iterable[str]:
        return (*RENAMED, *read_fields().keys)

    def translate(self, settings: Tree, context: LayerContext) -> TranslatedSettings:
        work = ForeignSettings(settings, context.typed)
        if not context.is_schema:
            _fit_model(work, context)
            self.apply_rules(work)
        self.settle_rest(work, context)
        return work.finish()

    def apply_rules(self, work: ForeignSettings) -> None:
        _translate_precision(work)
        _translate_data(work)
        _translate_batch(work)
        _translate_schedule(work)
        _translate_layout(work)
        _translate_checkpoints(work)
        _translate_reports(work)
        work.drop_nulls()

    def settle_rest(self, work: ForeignSettings, context: LayerContext) -> None:
        settle_other_keys(work, context, read_fields().keys, _keep_field)


def create_translator() -> TorchtitanTranslator:
    """The translation of the settings of one experiment file."""
    return TorchtitanTranslator()


def _flatten_section(section: Tree, prefix: str) -> Tree:
    flat: Tree = {}
    for key, item in section.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            flat.update(_flatten_section(item, f"{name}."))
            continue
        for moved, place in MOVED_SECTIONS.items():
            if name.startswith(moved):
                item = Leaf(item.value, format_origin(item.origin, name), item.text, item.typed)
                name = place + name.removeprefix(moved)
        flat[name] = item
    return flat


def _fit_model(work: ForeignSettings, context: LayerContext) -> None:
    """Refuse to choose a model by its flavor, and apply what torchtitan's models have and lack to the preset."""
    for key in ("model.name", "model.flavor"):
        if key in context.written:
            raise work.refuse(key, "the model is a preset here", "write model: llama3.1_70B.yaml in the module")
        work.drop(key)
    # A value of the experiment itself stays, and is refused.
    if work.read("moe_aux_loss_coeff") and "moe_aux_loss_coeff" not in context.written:
        work.put("moe_aux_loss_coeff", 0.0, "torchtitan's models")
        work.put("moe_router_enable_expert_bias", True, "torchtitan's models")
        work.notes.append(
            "moe_aux_loss_coeff of the model preset is not applied: torchtitan balances the experts by their biases"
            " (moe_router_enable_expert_bias)"
        )
    if work.read("mtp_num_layers") and "mtp_num_layers" not in context.written:
        work.put("mtp_num_layers", 0, "torchtitan's models")
        work.notes.append(
            "mtp_num_layers of the model preset is not applied: the layers of multi-token prediction are not trained"
        )


def _translate_precision(work: ForeignSettings) -> None:
    converters = work.read("model.converters", [])
    names = [str(each) for each in converters] if isinstance(converters, list) else [str(converters)]
    if any("float8" in name for name in names):
        work.put("fp8", "e4m3", work.find_origin("model.converters"))
    if any("float8" not in name and name != "primus_turbo" for name in names):
        work.reject("model.converters", "not supported", "remove it, or use fp8")
    if not converters:
        work.drop_unchanged("model.converters")
    work.drop("model.converters")
    name = "training.mixed_precision_param"
    origin, kind = work.find_origin(name), work.take(name)
    if kind is not None:
        work.put("bf16", kind == "bfloat16", origin)


def _translate_data(work: ForeignSettings) -> None:
    origin, assets = work.find_origin("model.hf_assets_path"), work.take("model.hf_assets_path")
    if assets and not work.read("tokenizer_model"):
        work.put("tokenizer_model", assets, origin)
    origin, name = work.find_origin("training.dataset"), work.take("training.dataset")
    has_data = any(work.read(key) for key in ("dataset", "train_data_path", "mock_data"))
    if work.read("training.dataset_path") and not has_data:
        hint = "prepare it by `data prepare`, then set train_data_path"
        work.reject("training.dataset_path", "torchtitan's loader reads it, not ours", hint)
    work.drop("training.dataset_path")
    if name is not None and not has_data:
        work.put("dataset", DATASETS.get("c4" if name == SAMPLE else str(name), name), origin)
        if not work.read("tokenizer_model") and work.read("hf_name"):
            work.put("tokenizer_model", work.read("hf_name"), work.find_origin("hf_name"))


def _translate_batch(work: ForeignSettings) -> None:
    """-1 is one pass of all devices; a pipeline splits the local batch into micro batches."""
    origin, size = work.find_origin("training.global_batch_size"), work.take("training.global_batch_size", -1)
    if size != -1:
        work.put("global_batch_size", size, origin)
    name = "parallelism.pipeline_parallel_microbatch_size"
    origin, micro = work.find_origin(name), work.read(name)
    stages = work.read("pipeline_model_parallel_size", 1)
    if isinstance(stages, int) and stages > 1 and micro is not None:
        if size == -1:
            problem = "the local batch is split over the pipeline, so its global size depends on the devices"
            work.reject(name, problem, "set training.global_batch_size")
        work.put("micro_batch_size", micro, origin)
    work.drop(name)


def _translate_schedule(work: ForeignSettings) -> None:
    """Warm-up, stable part and decay (torchtitan/components/lr_scheduler.py)."""
    if work.read("lr_scheduler.decay_type", "linear") not in ("linear", "cosine"):
        work.reject("lr_scheduler.decay_type", "is not possible", "use linear or cosine")
        work.put("lr_decay_style", "linear", "torchtitan's default")
    kind_origin, kind = work.find_origin("lr_scheduler.decay_type"), work.take("lr_scheduler.decay_type")
    origin, ratio = work.find_origin("lr_scheduler.decay_ratio"), work.take_number("lr_scheduler.decay_ratio")
    steps, warmup = work.read("train_iters"), work.read("lr_warmup_iters", 0)
    if isinstance(steps, int) and isinstance(warmup, int) and warmup >= steps:
        # torchtitan shortens it as well; a decay of no step is a constant rate
        work.put("lr_warmup_iters", steps, work.find_origin("lr_warmup_iters"))
        work.put("lr_decay_style", "constant", "the warm-up is as long as the run")
        if warmup == steps:
            return
        work.notes.append(f"lr_warmup_iters {warmup}: shortened to the {steps} steps of the run, as torchtitan does")
        return
    if kind is None and ratio is None:
        return
    decay = round(steps * ratio) if ratio is not None and isinstance(steps, int) else None
    if decay is None or decay >= steps - warmup:
        if ratio is not None or kind is not None:
            work.put("lr_decay_style", kind or "linear", kind_origin)
        return
    if kind == "cosine":
        work.warn("lr_scheduler.decay_type", kind, "the decay after a stable part is linear here")
    work.put("lr_decay_style", "WSD", origin)
    work.put("lr_wsd_decay_iters", decay, origin)


def _translate_layout(work: ForeignSettings) -> None:
    origin = work.find_origin("parallelism.data_parallel_shard_degree")
    shard = work.take("parallelism.data_parallel_shard_degree")
    if shard is not None:
        work.put("use_distributed_optimizer", shard != 1, origin)
    if work.read("parallelism.data_parallel_replicate_degree", 1) == 1:
        work.drop_unchanged("parallelism.data_parallel_replicate_degree")
    tensor = work.read("tensor_model_parallel_size", 1)
    if tensor == 1:
        work.drop("sequence_parallel")
    elif "sequence_parallel" not in work.tree:
        work.put("sequence_parallel", True, "torchtitan's default")
    origin, mode = work.find_origin("activation_checkpoint.mode"), work.take("activation_checkpoint.mode")
    if mode in ("none", "full"):
        work.put("recompute_activations", mode == "full", origin)
    if mode in ("none", "full", None):
        work.drop_unused(*[key for key in work.tree if key.startswith("activation_checkpoint.")])
    else:
        work.backend_args["activation_checkpoint"] = {"mode": Leaf(mode, origin, str(mode))}


def _translate_checkpoints(work: ForeignSettings) -> None:
    if "checkpoint.enable" not in work.tree:
        return
    origin, is_enabled = work.find_origin("checkpoint.enable"), work.take("checkpoint.enable")
    if is_enabled:
        interval_origin, interval = work.find_origin("checkpoint.interval"), work.take("checkpoint.interval", 500)
        mode_origin, mode = work.find_origin("checkpoint.async_mode"), work.take("checkpoint.async_mode")
        work.put("save_interval", interval, interval_origin)
        work.put("auto_continue_train", True, origin)  # torchtitan loads the newest checkpoint of its folder
        if mode is not None:
            work.put("async_save", mode != "disabled", mode_origin)
    else:
        work.put("disable_last_saving", True, origin)
        work.drop_unused("checkpoint.interval", "checkpoint.async_mode", "keep_last_n")
    if not is_enabled:  # CheckpointManager.load of torchtitan reads nothing then
        work.drop_unused(*[key for key in work.tree if key.startswith("checkpoint.initial_load_")])
        return
    origin, path = work.find_origin("checkpoint.initial_load_path"), work.take("checkpoint.initial_load_path")
    is_model = work.take("checkpoint.initial_load_model_only", True)
    hub_origin, is_hub = work.find_origin("checkpoint.initial_load_in_hf"), work.take("checkpoint.initial_load_in_hf")
    if is_hub and not path:  # the weights beside the tokenizer
        origin, path = hub_origin, work.read("tokenizer_model")
    if path:
        work.put("load", f"hf:{path}" if is_hub else path, origin)
        work.put("finetune", bool(is_model), origin)


def _translate_reports(work: ForeignSettings) -> None:
    for field, key in {"enable_tensorboard": "disable_tensorboard", "enable_wandb": "disable_wandb"}.items():
        origin, is_on = work.find_origin(f"metrics.{field}"), work.take(f"metrics.{field}")
        if is_on is not None:
            work.put(key, not is_on, origin)
    origin = work.find_origin("validation.freq", "validation.enable")
    is_on, frequency = work.take("validation.enable"), work.take("validation.freq", 10)
    steps_origin, steps = work.find_origin("validation.steps"), work.take("validation.steps", -1)
    if is_on:
        work.put("eval_interval", frequency, origin)
        if steps != -1:
            work.put("eval_iters", steps, steps_origin)
        else:
            work.warn("validation.steps", -1, "eval_iters batches are evaluated, not the whole validation data")
    name = "profiling.enable_profiling"
    if not work.read(name):
        work.drop_unchanged(name)
    elif not work.read("profile"):
        work.put("profile", True, work.find_origin(name))
    work.drop(name)
    name = "comm.train_timeout_seconds"
    origin, timeout = work.find_origin(name), work.take_number(name, 100)
    # 100 is torchtitan's default, which is shorter than a checkpoint of a large model takes.
    if timeout is not None and timeout != 100:
        minutes = math.ceil(timeout / 60)
        work.put("distributed_timeout_minutes", minutes, origin)
        if timeout % 60:
            work.warn(name, timeout, f"rounded up to {minutes} minutes (distributed_timeout_minutes)")
    if str(work.read("optimizer.name", "AdamW")).lower() != "adamw":
        work.reject("optimizer.name", "only AdamW is supported", "set optimizer.name: AdamW")
    work.drop_unchanged("optimizer.name")


def _keep_field(work: ForeignSettings, key: str, known: KnownKey, item: Leaf) -> bool:
    """Give the engine a field by its name in 0.3; not those of reports, checkpoints and processes."""
    is_kept = not known.gone and known.effect in ("numbers", "speed") and not key.startswith(_SPEED_OPTIONS)
    if is_kept:
        _put_nested(work.backend_args, known.now or key, item)
    return is_kept


def _put_nested(tree: Tree, path: str, item: Leaf) -> None:
    section, _, name = path.rpartition(".")
    for part in section.split("."):
        below: Any = tree.setdefault(part, {})
        tree = below
    tree[name] = item
