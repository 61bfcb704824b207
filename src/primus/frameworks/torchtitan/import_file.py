"""Read torchtitan's configuration tree as an experiment, whatever the form in which it was written.

Names of v0.3.0 are moved to the places of 0.2 (`profiler` to `profiling`, `validator` to `validation`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile
from primus.config.imports.framework_rules import import_settings
from primus.config.source import flatten_settings
from primus.errors import UsageError
from primus.frameworks.torchtitan.names import DATASETS, DEBUG_MODELS, DEFAULTS, MODELS, read_fields
from primus.frameworks.torchtitan.python_file import is_titan_python, read_titan_python
from primus.frameworks.torchtitan.releases import (
    convert_older_settings,
    convert_token_counts,
    fit_model_to_release,
)
from primus.frameworks.torchtitan.translation import MOVED_SECTIONS, TorchtitanTranslator

TOKENIZERS = ("model.hf_assets_path", "hf_assets_path", "model.tokenizer_path")


FORMATS = "a TOML or Python file of torchtitan"
_OPTION = re.compile(r"--(job\.config[-_]file|module|config)(?:=(.*))?")
_SECTIONS = {"model", "training", "optimizer", "parallelism", "lr_scheduler", "job", "checkpoint"}


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """The experiment of a TOML file or of a configuration in Python; None if the file is another one."""
    if file.suffix == ".toml" and file.values.keys() & _SECTIONS:
        target = ForeignConfig(origin=f"torchtitan TOML {file.shown}", name=file.name, framework="torchtitan")
        read_titan_settings(file.values, target, is_toml=True)
        return target
    if file.suffix != ".py" or not is_titan_python(file.text):
        return None
    name = file.function or file.name
    target = ForeignConfig(origin=f"torchtitan configuration {file.shown}", name=name, framework="torchtitan")
    read_titan_settings(read_titan_python(file.text, file.shown, file.function, target), target)
    return target


def find_arguments(words: Sequence[str]) -> None:
    """Refuse a command that starts torchtitan: what it trains is in a file.

    Raises:
        UsageError: It starts torchtitan; names the file.
    """
    named = {
        match[1].replace("-", "_"): match[2] or following
        for word, following in zip(words, (*words, "")[1:], strict=True)
        if (match := _OPTION.fullmatch(word))
    }
    source = named.get("job.config_file", "")
    if "job.config_file" in named and not source:
        raise UsageError("starts torchtitan with a file that a variable names", "config import FILE.toml")
    if not source and "torchtitan.train" in words and {"module", "config"} <= named.keys():
        source = f"torchtitan/models/{named['module']}/config_registry.py --function {named['config']}"
    if source:
        file = source.partition(" ")[0]
        raise UsageError(f"starts torchtitan with the settings of {file}", f"config import {source}")


def read_titan_settings(tree: dict[str, Any], target: ForeignConfig, is_toml: bool = False) -> None:
    """Set the keys of `target`, and list each setting without one.

    Args:
        tree: The settings, in the sections of 0.2.
        target: Result.
        is_toml: Whether they are of a TOML, the form of releases before 0.3.

    Raises:
        UsageError: A value has another type, or the model is not one of torchtitan.
    """
    known = read_fields().keys
    written = flatten_settings(tree)
    values = {_move_to_section(name): value for name, value in written.items()}
    if "training.dataset.dataset" in values:  # after 0.3, below the way in which samples are packed
        values["training.dataset"] = values.pop("training.dataset.dataset")
    if "model.name" not in values and "model.flavor" not in values:
        own = [name for name in values if name.startswith("model.") and name not in known]
        if own:
            problem = f"its [model] names no model of torchtitan, and has {', '.join(own[:4])}"
            raise UsageError(f"{target.origin}: {problem}", "import a file with model.name and model.flavor")
        target.add_other("model.flavor", None, "not in the file: torchtitan trains the debugmodel of llama3 then")
    family, flavor = str(values.pop("model.name", "llama3")), str(values.pop("model.flavor", "debugmodel"))
    _choose_model(family, flavor, target)
    fit_model_to_release(family, flavor, written, is_toml, target)
    convert_older_settings(values, target)
    convert_token_counts(values, target)
    for name in ("job.dump_folder", "dump_folder"):
        if name in values:
            target.settings["workspace"] = values.pop(name)
    _drop_other_data(values, target)
    if not any(values.get(name) for name in ("validation.enable", "validation.enabled")):
        for name in [name for name in values if name.startswith("validation.")]:
            target.add_other(name, values.pop(name))
    defaults = {name: known[name].default for name in DEFAULTS}
    kept = import_settings(values, defaults, TorchtitanTranslator(), target, known)
    if kept:
        target.settings["backend_args"] = kept


def _choose_model(name: str, flavor: str, target: ForeignConfig) -> None:
    """The preset of `model.name` and `model.flavor`, or a small shape; a line where there is neither."""
    family = MODELS.get(name, {})
    plain = _strip_variant(flavor)
    by_case = {each.lower(): preset for each, preset in family.items()}
    if plain.lower() in by_case:
        target.settings["model"] = by_case[plain.lower()]
    elif (name, plain) in DEBUG_MODELS:
        target.model |= DEBUG_MODELS[name, plain]
    elif family:
        target.add_other("model.flavor", flavor, f"no preset of {name}; known: {', '.join(family)}")
    else:
        target.add_other("model.name", name, f"has no preset; known: {', '.join(MODELS)}")
        target.add_other("model.flavor", flavor, "its shape is not known without a preset of its family")
    if name in ("deepseek_v3", "gpt_oss", "llama4") or "moe" in plain or "A" in plain:
        # torchtitan balances experts by their biases, without a term in the loss.
        target.set_key("moe_aux_loss_coeff", 0.0)
    if plain != flavor:
        target.add_other("model.flavor", flavor, "the attention backend is chosen by the backend")


def _drop_other_data(values: dict[str, Any], target: ForeignConfig) -> None:
    """List a dataset that is torchtitan's alone; a path is listed by the rules."""
    name = values.get("training.dataset", "c4_test")
    has_path, has_tokenizer = bool(values.get("training.dataset_path")), any(map(values.get, TOKENIZERS))
    if has_path or not has_tokenizer or name not in DATASETS:
        values.pop("training.dataset", None)
        if not has_path:
            reason = "not a dataset of primus; prepare it by `data prepare` and set train_data_path"
            target.add_other("training.dataset", name, reason)


def _move_to_section(name: str) -> str:
    for moved, place in MOVED_SECTIONS.items():
        if name.startswith(moved):
            return place + name.removeprefix(moved)
    return name


def _strip_variant(flavor: str) -> str:
    """`flavor` without the attention backend that variants name: ``8B_flex``."""
    for end in ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_irope"):
        flavor = flavor.removesuffix(end)
    return flavor
