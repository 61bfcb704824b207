"""Compare the model of an experiment with the published one that it names or whose weights it loads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from primus import registry
from primus.config.load import Resolved, load_model
from primus.config.schema import ModelSpec
from primus.config.source import format_yaml_value
from primus.errors import PrimusError, UsageError
from primus.model import expert_ffn_size, head_dim, num_moe_layers, num_query_groups

HUB_PREFIX = "hf:"
FREE_KEYS = frozenset(
    "hf_name num_layers vocab_size max_position_embeddings init_method_std moe_aux_loss_coeff mtp_num_layers".split()
)
"""Keys that a smaller or differently trained variant of a model changes; loaded weights check the sizes among them."""
ROPE_KEYS = (
    "rotary_scaling_factor rope_low_freq_factor rope_high_freq_factor original_max_position_embeddings beta_fast"
    " beta_slow mscale mscale_all_dim yarn_correction_range_round_to_int".split()
)
"""Keys without effect, or with another one, where `rope_type` is another."""


class ModelDifference(Struct, frozen=True):
    """A key with another value than in the published model."""

    key: str
    value: Any
    published: Any


def check_published_model(resolved: Resolved) -> tuple[str, ...]:
    """A note if the model differs from the published one that it names.

    Raises:
        UsageError: It loads the weights of a published model with a setting of another; the message names it. A setting
            that is given on the command line is meant to differ.
    """
    load = resolved.experiment.trainer.checkpoint.load or ""
    for each in _list_differences(resolved, _find_loaded_model(load)):
        value, published = format_yaml_value(each.value), format_yaml_value(each.published)
        raise UsageError(
            f"{resolved.origins[each.key]}: {each.key}: {value}, but the model of load: {load} has {published}",
            f"set {each.key}: {published}; to train with {value}, give it on the command line: --{each.key} {value}",
        )
    name = resolved.experiment.trainer.model.hf_name
    listed = [
        f"{each.key} {format_yaml_value(each.value)} (there {format_yaml_value(each.published)})"
        for each in _list_differences(resolved, find_published_model(name))
    ]
    return (f"the model differs from {name}: {', '.join(listed)}",) if listed else ()


def _list_differences(resolved: Resolved, published: ModelSpec | None) -> list[ModelDifference]:
    """Those that the command line does not ask for."""
    found = list_model_differences(resolved.experiment.trainer.model, published) if published else ()
    return [each for each in found if not resolved.origins[each.key].startswith("--")]


def find_published_model(name: str) -> ModelSpec | None:
    """The preset with the shape of the model `name` of the Hugging Face Hub."""
    line = re.compile(rf"^hf_name: {re.escape(name)}$", re.MULTILINE)
    for file in sorted((registry.PACKAGE / "presets/models").glob("[!_]*.yaml")) if name else ():
        if line.search(file.read_text(encoding="utf-8")):
            return load_model(file.stem)
    return None


def list_model_differences(spec: ModelSpec, published: ModelSpec) -> Iterator[ModelDifference]:
    """The settings of a model that change its results and are not those of a published one."""
    unused = {*FREE_KEYS, *(ROPE_KEYS if spec.rope_type != published.rope_type else ())}
    one, other = _resolve_defaults(spec), _resolve_defaults(published)
    for key in ModelSpec.__struct_fields__:
        if key not in unused and getattr(one, key) != getattr(other, key):
            yield ModelDifference(key, getattr(one, key), getattr(other, key))


def _resolve_defaults(spec: ModelSpec) -> ModelSpec:
    """`spec` with one form of what can be written in several, and without sizes that nothing has."""
    changes: dict[str, Any] = {"num_query_groups": None, "kv_channels": None}  # latent attention has its own
    if not spec.multi_latent_attention:
        changes = {"num_query_groups": num_query_groups(spec), "kv_channels": head_dim(spec)}
    if spec.num_experts is not None:
        changes["moe_ffn_hidden_size"] = expert_ffn_size(spec)
        if num_moe_layers(spec) == spec.num_layers:
            changes["ffn_hidden_size"] = expert_ffn_size(spec)
        if spec.moe_router_score_function == "softmax" and not spec.moe_router_pre_softmax:
            # Softmax over the chosen experts is softmax over all, renormalized over the chosen ones.
            changes |= {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True}
    return structs.replace(spec, **changes)


def _find_loaded_model(load: str) -> ModelSpec | None:
    """The model whose weights `load` names, where its config.json or a preset says it."""
    if not load.startswith(HUB_PREFIX):
        return None
    name = load.removeprefix(HUB_PREFIX)
    file = Path(os.path.expanduser(name)) / "config.json"
    if not file.is_file():
        return find_published_model(name.partition("@")[0])
    from primus.config.imports.foreign_config import make_model  # not for experiments that load no weights
    from primus.config.imports.read_file import read_foreign_file

    try:
        return make_model(read_foreign_file(file, {}))
    except PrimusError:  # the backend's check says what is wrong with the file
        return None
