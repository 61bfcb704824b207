"""Read a configuration of MaxText as an experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primus.config.extended_files import load_model
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.foreign_file import ForeignFile
from primus.config.imports.framework_rules import import_settings
from primus.config.schema import OWNERS
from primus.config.source import ConfigValue, parse_scalar, read_yaml, strip_origins
from primus.config.translation.foreign_settings import format_listed_keys
from primus.errors import UsageError
from primus.frameworks.maxtext.names import (
    HEAD_WIDTH,
    MODELS,
    OLDER,
    OLDER_WITHOUT_EFFECT,
    RENAMED,
    SHAPE,
    read_settings,
)
from primus.frameworks.maxtext.translation import MaxtextTranslator

BASE = "base.yml"
_TELLING = (*RENAMED, "model_name", "dcn_data_parallelism", "ici_fsdp_parallelism", "remat_policy", "dataset_type")
FEWEST_TELLING = 3
LARGEST_BASE = 2000
"""Settings of files that are based on each other; base.yml has about 800."""
FORMATS = "a script or YAML file of MaxText"
COMMANDS = "MaxText"
BASE_CONFIG = "base_config"
"""Argument of a command that names its file of settings."""
_PROGRAM = re.compile(r"(?i).*maxtext.*[./]\w*train\w*(\.py)?|(.*/)?train\.py")
"""A program that trains; those that decode, convert or check take the same settings."""
_FINE_TUNING = re.compile(r"(?i)(.*[./])?\w*(sft|dpo|grpo|distill)\w*(\.(py|ya?ml)|[./]\w*train\w*(\.py)?)?")
"""A program, or a file of settings, of fine-tuning or distillation."""
_SETTING = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


def read_file(file: ForeignFile) -> ForeignConfig | None:
    """The experiment of a configuration of MaxText; None if the file is another one."""
    values = file.values
    if file.suffix == ".toml" or not (
        BASE_CONFIG in values or sum(map(values.__contains__, _TELLING)) >= FEWEST_TELLING
    ):
        return None
    target = ForeignConfig(origin=f"MaxText configuration {file.shown}", name=file.name, framework="maxtext")
    if file.path.name != str(values.get(BASE_CONFIG)).rpartition("/")[2]:
        target.folders = (file.path.parent,)
    _read_values(values, target)
    return target


def find_arguments(words: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """The settings of a command that trains with MaxText; None if it is another one.

    Raises:
        UsageError: It trains after pre-training.
    """
    if inner := next((word for word in words if word.startswith("--COMMAND=")), ""):  # of its multihost_runner.py
        return find_arguments(inner.removeprefix("--COMMAND=").split())
    file = next((at for at, word in enumerate(words) if word.endswith((".yml", ".yaml"))), None)
    if file is None or not any(_PROGRAM.fullmatch(word) for word in words[:file]):
        return None
    program = next(word for word in words[:file] if _PROGRAM.fullmatch(word))
    if other := next((word for word in (program, words[file]) if _FINE_TUNING.fullmatch(word)), ""):
        raise UsageError(f"starts fine-tuning or distillation of MaxText ({other})", "import a script of pre-training")
    settings = [word.partition("=") for word in words[file + 1 :] if _SETTING.fullmatch(word)]
    if not settings and not any("maxtext" in word.lower() for word in words[:file]):
        return None
    return {BASE_CONFIG: (words[file],), **{name: (value,) for name, _, value in settings}}


def read_arguments(arguments: Mapping[str, Sequence[str]], target: ForeignConfig) -> None:
    """Set the keys of `target` from the settings of a command line, whose file is `BASE_CONFIG`."""
    base = arguments.get(BASE_CONFIG, ("",))[0]
    if base.rpartition("/")[2] == BASE and not _find_base(base, target.folders):
        reason = "not here: what the command leaves out is that of MaxText 0.2.5, from which it may differ"
        target.add_other(BASE_CONFIG, base, reason)
    _read_values({key: parse_scalar(" ".join(words)) for key, words in arguments.items()}, target)


def _read_values(values: Mapping[str, Any], target: ForeignConfig) -> None:
    rest = _name_heads({OLDER.get(key, key): value for key, value in values.items() if value is not None})
    for name in [name for name in OLDER_WITHOUT_EFFECT if name in rest]:
        target.add_other(name, rest.pop(name))
    if (scale := rest.pop("scale", None)) is not None:
        reason = "of MaxText of 2023: multiplies the sizes of the model, which stay as written; write the products"
        target.add_other("scale", scale, "" if scale == 1 else reason)
    base = str(rest.pop(BASE_CONFIG, BASE))
    if found := _find_base(base, target.folders):
        rest |= _read_base(found, rest, target)
    elif base.rpartition("/")[2] != BASE:
        target.add_other(BASE_CONFIG, base, "its settings are not read: write them into the file that is imported")
    for theirs, ours in {"run_name": "exp_name", "base_output_directory": "workspace"}.items():
        if value := rest.pop(theirs, ""):
            target.settings[ours] = value
    model = rest.get("model_name", "default")
    known = read_settings().keys
    defaults: dict[str, ConfigValue] = {}
    if model == "default":
        defaults = {key: known[key].default for key in SHAPE}
        if rest.get("attention_type") != "mla":
            defaults["head_dim"] = HEAD_WIDTH
        _scale_sizes(rest, {key: known[key].default for key in SHAPE}, target)
    elif model in MODELS:
        target.settings["model"] = MODELS[model]
        _drop_further_tokens(rest, MODELS[model], target)
        if not rest.get("override_model_config"):
            _drop_model_keys(rest, str(model), target)
    else:
        target.add_other("model_name", model, "no preset has this name")
        rest.pop("model_name")
    # With the keys of the schema: the settings mean the same there.
    target.settings |= import_settings(rest, defaults, MaxtextTranslator(), target, known)


def _name_heads(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the names of heads since there is grouped attention."""
    heads = values.pop("base_num_heads", None)
    return {"base_num_query_heads": heads, "base_num_kv_heads": heads} | values if heads else values


def _find_base(base: str, folders: Sequence[Path]) -> Path | None:
    """The file that `base_config` names, as seen from a folder of the checkout."""
    return next((each for each in (folder / base for folder in folders) if base and each.is_file()), None)


def _read_base(file: Path, given: Mapping[str, Any], target: ForeignConfig) -> dict[str, Any]:
    """What a file that settings are based on says of the training, where MaxText 0.2.5 says otherwise by default."""
    known = read_settings().keys
    values: dict[str, Any] = {}
    above: Path | None = file
    while above and len(values) < LARGEST_BASE:
        own = {OLDER.get(key, key): item for key, item in strip_origins(read_yaml(above, None, str(above))).items()}
        base = str(own.pop(BASE_CONFIG, ""))
        own = _name_heads(own)
        values = own | values
        above = _find_base(base, (above.parent,)) if base and base != above.name else None
    is_named = {**values, **given}.get("model_name", "default") != "default"
    names = known.keys() | RENAMED.keys()
    unknown = [key for key in values if key not in (*names, *given, *OLDER_WITHOUT_EFFECT)]
    if unknown:
        reason = f"MaxText 0.2.5 has no setting {format_listed_keys(unknown)} of it"
        target.add_other(BASE_CONFIG, str(file), reason)
    return {
        key: item
        for key, item in values.items()
        if key in names
        and key not in given
        and item not in (None, "", known[key].default if key in known else None)
        and (key in RENAMED or known[key].effect == "numbers" or key in ("remat_policy", "enable_checkpointing"))
        and not (is_named and OWNERS.get(RENAMED.get(key, "")) == "model")
    }


def _scale_sizes(rest: dict[str, ConfigValue], defaults: Mapping[str, Any], target: ForeignConfig) -> None:
    """Multiply the sizes of a model by `global_parameter_scale`, as get_individual_scales of MaxText's pyconfig.py."""
    scale = rest.pop("global_parameter_scale", 1)
    if not isinstance(scale, int) or scale < 1 or scale.bit_length() != (scale - 1).bit_length() + 1:
        target.add_other("global_parameter_scale", scale, "not a power of 2, as MaxText needs: the sizes stay")
        return
    depth, rounds = divmod(scale.bit_length() - 1, 3)
    doublings = {"base_num_decoder_layers": depth, "base_emb_dim": depth + (rounds > 1)}
    doublings |= dict.fromkeys(("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim"), depth + (rounds > 0))
    for name, count in doublings.items() if scale > 1 else ():
        rest[name] = rest.get(name, defaults[name]) << count


def _drop_further_tokens(rest: dict[str, Any], preset: str, target: ForeignConfig) -> None:
    """Say that no layers of multi-token prediction are trained; models of MaxText have none unless a file asks."""
    if number := rest.pop("mtp_num_layers", 0):
        target.add_other("mtp_num_layers", number, "no multi-token prediction is trained with MaxText here")
    if load_model(preset).mtp_num_layers:
        target.model["mtp_num_layers"] = target.defaults["mtp_num_layers"] = 0


def _drop_model_keys(rest: dict[str, ConfigValue], model: str, target: ForeignConfig) -> None:
    """Drop sizes beside the name of a model: in MaxText those of the model replace the file's."""
    for key in [key for key in rest if OWNERS.get(RENAMED.get(key, "")) == "model"]:
        target.add_other(key, rest.pop(key), f"that of {model} is taken, as MaxText does without override_model_config")
