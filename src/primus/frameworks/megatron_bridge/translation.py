"""Settings of Megatron-Bridge in experiment files of Primus: translated, kept for the engine, or refused.

Sources: primus/configs and examples/megatron_bridge of AMD-AGI/Primus 26.5; megatron/bridge/recipes/common.py and
training/config.py of Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from primus.config.schema import OWNERS
from primus.config.source import Leaf, Tree, read_package_yaml
from primus.config.translation.foreign_settings import (
    ForeignSettings,
    LayerContext,
    TranslatedSettings,
    Translator,
    format_ignored_keys,
    rename_keys,
)
from primus.engine_keys import list_file_names
from primus.errors import UsageError
from primus.frameworks.megatron.known_keys import read_arguments

KEYS_FILE = Path(__file__).with_name("primus_keys.yaml")
RENAMED = list_file_names(Path(__file__).parent)
"""Key of the schema by the setting with the same meaning."""
ADAPTER_SETTINGS = {
    "dim": "peft_dim",
    "alpha": "peft_alpha",
    "dropout": "peft_dropout",
    "target_modules": "peft_target_modules",
}
"""Setting by its name in the block `peft:` next to `modules:`."""
PRECISIONS = {"bf16_mixed": True, "bf16-mixed": True, "fp32": False, "32": False}
"""`bf16` by `precision_config`."""
ADAPTER_LR = 1e-4
"""Learning rate of adapters where the file has none (recipes/common.py)."""
DATASET = "rajpurkar/squad"
"""What the recipes of Megatron-Bridge train on where a file names no data."""
DATA_KEYS = ("dataset", "train_data_path", "sft_data_path", "mock_data")
OWN_KEYS = ("peft", *ADAPTER_SETTINGS.values(), "recipe", "flavor")


class BridgeKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that no key of primus replaces."""

    effect: str = ""
    refused: str = ""


class MegatronBridgeTranslator(Translator):
    """Translation of `framework: megatron_bridge`."""

    framework = "megatron_bridge"

    def check_module(self, tree: Tree, module: Tree) -> None:
        """Move the blocks `peft:` and `model:` next to `modules:`, which Primus merges last, into the module."""
        super().check_module(tree, module)
        settings = dict(_get_tree(module.get("overrides")))
        for key, item in _get_tree(tree.pop("peft", None)).items():
            if key not in ADAPTER_SETTINGS:
                raise UsageError(
                    f"{_find_origin(item)}: peft: unknown setting '{key}'", f"settings: {', '.join(ADAPTER_SETTINGS)}"
                )
            settings[ADAPTER_SETTINGS[key]] = item
        settings |= _get_tree(tree.pop("model", None))
        module["overrides"] = settings

    def rename(self, settings: Tree) -> Tree:
        return rename_keys(settings, RENAMED)

    def complete_model(self, settings: Tree, model: Tree) -> Tree:
        """A preset of Primus names a recipe and weights; the shape is that of the preset of the same name here."""
        recipe = str(ForeignSettings(settings).read("recipe", ""))
        if not model:
            raise UsageError(
                f"model: no preset here describes the model of the recipe {recipe or '(none)'}",
                "list the models: docs/models.md; a model file of yours may extend one",
            )
        # A model that transformers has needs no recipe.
        needs_recipe = ForeignSettings(model).read("hybrid_layer_pattern") is not None
        return {**model, **{key: item for key, item in settings.items() if needs_recipe or key not in RECIPE}}

    def list_known_keys(self) -> Iterable[str]:
        return (*read_bridge_keys(), *RENAMED, "hf_path", "dataset_name", "precision_config", "skip_save")

    def translate(self, settings: Tree, context: LayerContext) -> TranslatedSettings:
        work = ForeignSettings(settings, context.typed)
        if not context.is_schema:
            _translate_weights(work, context)
            _translate_data(work, context)
            _translate_training(work, context)
            if work.read("recipe") is None and work.read("flavor") is not None:
                work.notes.append(f"flavor: {work.take('flavor')}: no effect, the preset describes the model")
            work.drop_nulls()
        _settle_others(work, context)
        return work.finish()


def create_translator() -> MegatronBridgeTranslator:
    """The translation of the settings of one experiment file."""
    return MegatronBridgeTranslator()


RECIPE = ("recipe", "flavor")


@cache
def read_bridge_keys() -> dict[str, BridgeKey]:
    """The settings of Megatron-Bridge and Primus that have no equivalent key."""
    return read_package_yaml(KEYS_FILE, dict[str, BridgeKey])


def _get_tree(item: Leaf | Tree | None) -> Tree:
    return item if isinstance(item, dict) else {}


def _find_origin(item: Leaf | Tree) -> str:
    return item.origin if isinstance(item, Leaf) else "peft"


def _translate_weights(work: ForeignSettings, context: LayerContext) -> None:
    """Fine-tuning begins with the published weights of the model, unless the file names others."""
    name, origin = work.take("hf_path") or work.read("hf_name"), work.find_origin("hf_name")
    given, given_origin = work.take("pretrained_checkpoint"), work.find_origin("pretrained_checkpoint")
    if context.stage == "pre_trainer":
        return
    if given:
        work.put("load", given, given_origin)
        work.put("finetune", True, given_origin)
    elif name and "load" not in work.tree and not _uses_mock_data(work):
        work.put("load", f"hf:{name}", origin)
        work.put("finetune", True, origin)
    if name and work.read("tokenizer_model") is None:
        work.put("tokenizer_model", name, origin)


def _uses_mock_data(work: ForeignSettings) -> bool:
    described = work.tree.get("dataset")
    return bool(work.read("mock_data")) or (isinstance(described, dict) and "mock" in described)


def _translate_data(work: ForeignSettings, context: LayerContext) -> None:
    """The block `dataset:` of a model preset, and names of instruction data on the hub."""
    described = work.tree.get("dataset")
    origin, name = work.find_origin("dataset_name"), work.take("dataset_name")
    if isinstance(described, dict):
        work.drop("dataset")
        inner = ForeignSettings(described)
        if inner.read("mock") and not any(work.read(key) for key in DATA_KEYS):
            work.put("mock_data", True, "dataset.mock")
        name = name or inner.read("dataset_name")
        origin = "dataset.dataset_name" if origin == "default" else origin
    if context.stage != "pre_trainer" and not any(work.read(key) for key in DATA_KEYS):
        work.put("sft_data_path", f"hf:{name or DATASET}", origin)
    if context.stage != "pre_trainer" and work.read("init") is None and not work.read("load"):
        work.notes.append("load: no weights are named: training begins with random ones")


def _translate_training(work: ForeignSettings, context: LayerContext) -> None:
    if work.read("precision_config") is not None:
        value = str(work.read("precision_config"))
        if value not in PRECISIONS:
            raise work.refuse("precision_config", f"{value} is not supported", f"use {', '.join(PRECISIONS)}")
        work.put("bf16", PRECISIONS[value], work.find_origin("precision_config"))
    work.drop("precision_config")
    if work.take("skip_save", False):
        work.drop("save_interval")
        work.put("disable_last_saving", True, "skip_save")
    if work.read("peft", "none") != "none" and "lr" not in context.written:
        work.put("lr", ADAPTER_LR, "recipes of Megatron-Bridge for adapters")
    end, warmup = work.read("lr_decay_iters") or work.read("train_iters"), work.read("lr_warmup_iters")
    if isinstance(end, int) and isinstance(warmup, int) and warmup >= end > 0:
        origin = work.find_origin("lr_warmup_iters")
        work.put("lr_warmup_iters", end - 1, origin)
        work.notes.append(f"lr_warmup_iters: {warmup} is capped at {end - 1}, below the end of the schedule")


def _settle_others(work: ForeignSettings, context: LayerContext) -> None:
    """Take keys out of the tree that no key of the schema replaces; settings of Megatron go to the engine."""
    ignored: dict[str, list[str]] = {}
    for key in [key for key in work.tree if key not in OWNERS and key not in OWN_KEYS and key != "backend_args"]:
        item, known = work.tree[key], read_bridge_keys().get(key)
        value: Any = item.value if isinstance(item, Leaf) else item
        if known is None:
            if key in read_arguments().keys and value is not None:
                work.backend_args[key] = item
                work.drop(key)
            elif value is None:
                work.drop(key)
            continue
        if known.refused and value not in (None, False):
            raise work.refuse(key, known.refused, "remove it")
        work.drop(key)
        if known.effect and key in context.written and value not in (None, False):
            ignored.setdefault(known.effect, []).append(key)
    work.notes += format_ignored_keys(ignored, "no effect here")
