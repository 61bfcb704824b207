"""Write what was read from a foreign file as an experiment or a model preset."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from primus import registry
from primus.config.extended_files import load_model
from primus.config.imports.foreign_config import ForeignConfig, drop_defaults, format_value, make_model
from primus.config.schema import OWNERS, ModelSpec
from primus.config.source import ConfigValue, dump_yaml
from primus.errors import UsageError, did_you_mean, find_nearest

_COMMENT: Any = {"initial_indent": "# ", "subsequent_indent": "#   ", "break_on_hyphens": False}
_GROUP_TITLES = {
    "model": "model",
    "training": "length, batch and precision",
    "data": "data",
    "optimizer": "optimizer and learning rate",
    "parallel": "layout over devices",
    "checkpoint": "checkpoints",
    "logging": "reports",
}


def format_result(config: ForeignConfig) -> str:
    """The experiment or model preset as YAML, with a comment for each value that has no key here.

    Raises:
        UsageError: The model is incomplete or impossible.
    """
    return _format_model(config) if config.framework is None else _format_experiment(config)


def _format_model(config: ForeignConfig) -> str:
    make_model(config)
    lines = [f"# {config.name}, imported from {config.origin}", *_comment_others(config)]
    return "\n".join(lines) + "\n" + dump_yaml(drop_defaults(config.model))


class ExperimentParts(Struct, frozen=True):
    """An experiment in the form of its file."""

    name: str
    workspace: str
    preset: str | None
    """Model preset; None if the shape is given by keys."""
    model: dict[str, ConfigValue]
    """Keys of the model that differ from the preset."""
    settings: dict[str, ConfigValue]
    """All other overrides."""


def build_experiment(config: ForeignConfig) -> ExperimentParts:
    """The experiment that was read, complete and in the form that primus checks.

    Raises:
        UsageError: The model is incomplete or impossible.
    """
    settings = dict(config.settings)
    named = settings.pop("model", None)
    preset, model = _choose_preset(config, str(named) if named else None)
    name = settings.pop("exp_name", None) or config.name
    workspace = settings.pop("workspace", None) or "./output"
    _fill_data(config, settings)
    _fit_settings(config, settings)
    return ExperimentParts(str(name), str(workspace), preset, model, settings)


def _format_experiment(config: ForeignConfig) -> str:
    parts = build_experiment(config)
    settings = parts.settings
    lines = [
        f"# {parts.name}, imported from {config.origin}",
        *_comment_others(config),
        "",
        "work_group: ${PRIMUS_TEAM:primus}",
        "user_name: ${USER:user}",
        _format_line("exp_name", parts.name),
        _format_line("workspace", parts.workspace),
        "",
        "modules:",
        f"  {config.stage}:",
        f"    framework: {config.framework}",
        f"    model: {parts.preset}.yaml" if parts.preset else "    model: null  # its shape is below",
        "    overrides:",
    ]
    for group, title in _GROUP_TITLES.items():
        values = parts.model if group == "model" else {k: v for k, v in settings.items() if OWNERS.get(k) == group}
        lines += _format_section(title, values)
    lines += _format_section(f"settings of {config.framework}", {k: v for k, v in settings.items() if k not in OWNERS})
    return "\n".join(lines) + "\n"


def _format_section(title: str, values: dict[str, ConfigValue]) -> Iterable[str]:
    if not values:
        return []
    return ["", f"      # {title}", *(f"      {_format_line(key, value)}" for key, value in values.items())]


def _format_line(key: str, value: Any) -> str:
    """`key: value` on one line; a mapping in braces."""
    text = dump_yaml({key: value}).rstrip("\n")
    if "\n" not in text:
        return text
    return f"{key}: {msgspec.json.encode(value).decode()}"


def _comment_others(config: ForeignConfig) -> list[str]:
    """Comments: first what affects training, then what does not, and defaults of the framework."""
    found = config.others
    lines: list[str] = []
    affecting = [f"#   {format_value(each)}: {each.reason}" for each in found if each.reason]
    if affecting:
        lines += ["#", "# Without a key of primus, and with an effect on training:", *affecting]
    rest = [f"#   {format_value(each)}" for each in found if not each.reason]
    if rest:
        lines += ["#", "# Without a key of primus, and without an effect on training:", *rest]
    if config.defaults:
        listed = ", ".join(f"{key} {value}" for key, value in config.defaults.items())
        lines += [
            "#",
            *textwrap.wrap(f"Not in the file; defaults of {_name_source(config)}: {listed}", 118, **_COMMENT),
        ]
    if config.unchanged:
        listed = ", ".join(config.unchanged)
        lines += ["#", *textwrap.wrap(f"As {config.framework} has it by default: {listed}", 118, **_COMMENT)]
    return [_escape_line(line) for line in lines]


def _name_source(config: ForeignConfig) -> str:
    is_theirs = config.framework is None or config.stage != "pre_trainer"
    return "transformers" if is_theirs else str(config.framework)


def _escape_line(line: str) -> str:
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


def _choose_preset(config: ForeignConfig, named: str | None) -> tuple[str | None, dict[str, ConfigValue]]:
    """The model preset, and the keys of the model that differ from it.

    The reader may have named one; else it is the preset with the same shape, whose name on the Hub then applies too.
    """
    if named:
        spec = msgspec.to_builtins(load_model(named))
        return named, {key: value for key, value in config.model.items() if spec[key] != value}
    _fill_vocabulary(config)
    spec = make_model(config)
    preset = _find_equal_preset(spec)
    if preset is None:
        return None, drop_defaults(config.model)
    equal = msgspec.to_builtins(load_model(preset))
    # The longest sequence and the initial deviation do not make another model.
    different = {key: getattr(spec, key) for key in _FREE_KEYS if equal[key] != getattr(spec, key)}
    return preset, different


_FREE_KEYS = ("max_position_embeddings", "init_method_std", "moe_aux_loss_coeff")


def _find_equal_preset(spec: ModelSpec) -> str | None:
    wanted = _strip_free_keys(spec)
    found = (name for name in registry.list_plug_ins("models") if _strip_free_keys(load_model(name)) == wanted)
    # Variants for other precisions have the same shape; the plainest name is the model itself.
    return min(found, key=len, default=None)


def _strip_free_keys(model: ModelSpec) -> dict[str, ConfigValue]:
    values = drop_defaults(msgspec.to_builtins(model))
    return {key: value for key, value in values.items() if key not in ("hf_name", *_FREE_KEYS)}


def _fill_vocabulary(config: ForeignConfig) -> None:
    """Size of the vocabulary from the tokenizer, where the file gives only that."""
    if "vocab_size" in config.model:
        return
    tokenizer = config.settings.get("tokenizer_model") or config.settings.get("vocab_file")
    by_shape = _find_size_by_shape(config.model)
    size = _find_tokenizer_size(str(tokenizer)) if tokenizer else by_shape
    if size is not None:
        config.model["vocab_size"] = size
        if not tokenizer:
            config.add_other("vocab_size", None, f"not stated; {size} is that of the published model with this shape")
    elif tokenizer and "num_layers" in config.model:  # else the whole shape is missing, which says so
        known = f"; the published model with this shape has {by_shape}" if by_shape else ""
        raise UsageError(
            f"{config.origin}: the file states no vocab_size, and the tokenizer {tokenizer} is not on this machine",
            f"add --vocab_size N{known}",
        )


def _find_tokenizer_size(tokenizer: str) -> int | None:
    """Size of a tokenizer on this machine, or of a preset's with the same name."""
    from primus.config.vocabulary import PUBLISHED_SIZES, find_tokenizer_size  # not for files that give the size

    models = map(load_model, registry.list_plug_ins("models"))
    sizes = {_strip_model_name(model.hf_name): model.vocab_size for model in models if model.hf_name}
    return find_tokenizer_size(tokenizer) or (PUBLISHED_SIZES | sizes).get(_strip_model_name(tokenizer))


def _strip_model_name(hub_name: str) -> str:
    """The name of a published model without its owner; tuned variants have the same tokenizer."""
    name = hub_name.rpartition("/")[2].lower().removeprefix("meta-")
    return name.removesuffix("-instruct").removesuffix("-base").removesuffix("-hf")


def _find_size_by_shape(shape: dict[str, ConfigValue]) -> int | None:
    """Size of the vocabulary of the published models with the same numbers of layers, heads and experts, and widths."""
    wanted = _list_sizes(shape)
    models = [load_model(name) for name in registry.list_plug_ins("models")]
    sizes = {model.vocab_size for model in models if _list_sizes(msgspec.to_builtins(model)) == wanted}
    return sizes.pop() if len(sizes) == 1 else None


def _list_sizes(model: dict[str, ConfigValue]) -> tuple[Any, ...]:
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "kv_lora_rank")
    groups = model.get("num_query_groups") or model.get("num_attention_heads")
    # OLMo 2 has the widths of Llama 2, and its norms in other places.
    return (*(model.get(name) for name in names), groups, model.get("pre_layernorm", True))


def _fill_data(config: ForeignConfig, settings: dict[str, ConfigValue]) -> None:
    """Random tokens where the file names no data that primus can find."""
    if any(settings.get(key) for key in ("dataset", "train_data_path", "sft_data_path", "mock_data")):
        return
    if settings.get("valid_data_path") or settings.get("test_data_path"):
        for key in ("valid_data_path", "test_data_path"):
            settings.pop(key, None)
    settings["mock_data"] = True
    config.add_other(
        "training data", None, "none that primus can find; mock_data trains on random tokens until it is set"
    )


def _fit_settings(config: ForeignConfig, settings: dict[str, ConfigValue]) -> None:
    """Combinations that other frameworks accept, in the form that primus checks."""
    if settings.get("load") and settings.get("load") == settings.get("save"):
        # Megatron-LM resumes from `load` if it exists, and starts from scratch otherwise.
        del settings["load"]
        settings["auto_continue_train"] = True
    if settings.get("sequence_parallel") and settings.get("tensor_model_parallel_size", 1) == 1:
        settings["sequence_parallel"] = False
        config.add_other("sequence_parallel", True, "has no effect without tensor parallelism")
    if settings.get("lr_warmup_fraction") is not None:
        settings.pop("lr_warmup_iters", None)
    if settings.get("min_lr_ratio") is not None:
        settings.pop("min_lr", None)


def replace_values(config: ForeignConfig, values: dict[str, ConfigValue]) -> None:
    """Apply values of the command line, which replace what the file says or lacks.

    Raises:
        UsageError: A key is not known.
    """
    for key, value in values.items():
        if key not in OWNERS and key not in ("exp_name", "workspace", "model"):
            hint = did_you_mean(key, OWNERS)
            if config.folders and not find_nearest(key, OWNERS):
                hint = f"an argument of the script: config import 'bash FILE --{key}={value}'"
            raise UsageError(f"--{key}: unknown key", hint)
        if key in OWNERS:
            config.set_key(key, value)
        else:
            config.settings[key] = value
