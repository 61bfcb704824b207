"""Read a configuration of MaxText as an experiment."""

from __future__ import annotations

from typing import Any

from primus.config.translation.known_keys import read_maxtext_keys
from primus.frameworks.maxtext.translation import MaxtextTranslator
from primus.frameworks.maxtext.names import HEAD_WIDTH, MODELS, RENAMED, SHAPE
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.framework_rules import import_settings
from primus.config.schema import OWNERS

BASE = "base.yml"
_TELLING = (*RENAMED, "model_name", "dcn_data_parallelism", "ici_fsdp_parallelism", "remat_policy", "dataset_type")
FEWEST_TELLING = 3


def is_maxtext(values: dict[str, Any]) -> bool:
    """Whether a YAML file is a configuration of MaxText."""
    return "base_config" in values or sum(key in values for key in _TELLING) >= FEWEST_TELLING


def read_maxtext(values: dict[str, Any], origin: str, name: str) -> ForeignConfig:
    """The experiment of a MaxText configuration."""
    target = ForeignConfig(origin=f"MaxText configuration {origin}", name=name, framework="maxtext")
    rest = {key: value for key, value in values.items() if value is not None}
    base = str(rest.pop("base_config", BASE))
    if base.rpartition("/")[2] != BASE:
        target.add_other("base_config", base, "its settings are not read: write them into the file that is imported")
    for theirs, ours in {"run_name": "exp_name", "base_output_directory": "workspace"}.items():
        if value := rest.pop(theirs, ""):
            target.settings[ours] = value
    model = rest.get("model_name", "default")
    known = read_maxtext_keys().keys
    defaults: dict[str, Any] = {}
    if model == "default":
        defaults = {key: known[key].default for key in SHAPE}
        if rest.get("attention_type") != "mla":
            defaults["head_dim"] = HEAD_WIDTH
    elif model in MODELS:
        target.settings["model"] = MODELS[model]
        if not rest.get("override_model_config"):
            _drop_model_keys(rest, str(model), target)
    else:
        target.add_other("model_name", model, "no preset has this name")
        rest.pop("model_name")
    # With the keys of the schema: the settings mean the same there.
    target.settings |= import_settings(rest, defaults, MaxtextTranslator(), target, known)
    return target


def _drop_model_keys(rest: dict[str, Any], model: str, target: ForeignConfig) -> None:
    """Drop sizes beside the name of a model: in MaxText those of the model replace the file's."""
    for key in [key for key in rest if OWNERS.get(RENAMED.get(key, "")) == "model"]:
        target.add_other(key, rest.pop(key), f"that of {model} is taken, as MaxText does without override_model_config")
