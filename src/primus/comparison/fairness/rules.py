"""The rules of `rules.yaml`: what a difference between settings means, and which settings are the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from primus.config.schema import OWNERS
from primus.config.source import format_yaml_value

FILE = Path(__file__).with_name("rules.yaml")

RuleKind = Literal["same", "tuned", "irrelevant"]
Settings = Mapping[str, Any]


class SettingRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What another value of some settings means."""

    kind: RuleKind
    reason: str
    required: bool = False
    """Whether a pair is fair only if both sides state the setting."""
    required_if_on: bool = False
    """Whether both sides must state it where one states that it is on: a side that does not know it may do the same."""
    inherent_to: list[str] = []
    """Frameworks that have one value of it only."""
    differs_by_engine: bool = False
    """Whether two engines that were not asked for a value may differ: what an engine is made of is what is compared."""
    keys: list[str] = []
    groups: list[str] = []
    """Groups of the schema; their settings that no rule names."""


class SettingAlias(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting under a framework's name."""

    key: str
    values: dict[str, Any] = {}
    """The value that each of the framework's values means."""


class OwnLoopFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What frameworks do in their own training loops, whatever their settings."""

    frameworks: list[str]
    reason: str
    source: str
    facts: dict[str, Any] = {}
    """Settings that the loop implies."""
    add: dict[str, int] = {}
    """The number that is added to a setting for the same effect as in other frameworks."""
    printed_rate_lag: int = 0
    """Steps by which a printed learning rate is ahead of the applied one."""


class FairnessRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `rules.yaml`."""

    settings: list[SettingRule]
    names: dict[str, dict[str, str | SettingAlias]]
    values: dict[str, dict[str, str]]
    own_loops: list[OwnLoopFacts]

    def find_rule(self, key: str) -> SettingRule | None:
        """The rule of a setting; None if it is not classified."""
        return _index_rules().get(key)

    def list_required_keys(self) -> list[str]:
        """The settings that both sides must state."""
        return [key for rule in self.settings if rule.required for key in rule.keys]

    def find_own_loop(self, framework: str) -> OwnLoopFacts | None:
        """What the framework's own training loop does; None if nothing is known about it."""
        return next((each for each in self.own_loops if framework in each.frameworks), None)


@functools.cache
def read_fairness_rules() -> FairnessRules:
    """The rules of this version."""
    from primus.config.source import read_package_yaml  # imports yaml: not for commands that read none

    return msgspec.convert(_spell_keys(read_package_yaml(FILE, dict[str, Any])), FairnessRules)


def translate_settings(settings: Settings, framework: str, *, is_own_loop: bool) -> dict[str, Any]:
    """Settings by the names and values of the schema, with what follows from them.

    Args:
        settings: As the engine had them.
        framework: Name of the engine.
        is_own_loop: Whether the framework trained in its own loop, not in the session of primus.
    """
    rules = read_fairness_rules()
    aliases = {**rules.names["any"], **(rules.names.get(framework, {}) if is_own_loop else {})}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        alias = aliases.get(name, name)
        key, values = (alias, {}) if isinstance(alias, str) else (alias.key, alias.values)
        meant = values.get(format_yaml_value(value), value)
        if key == name or key not in settings:
            found[key] = translate_value(key, meant)
    loop = rules.find_own_loop(framework) if is_own_loop else None
    if loop is not None:
        found = {**loop.facts, **found}
        for key, number in loop.add.items():
            if isinstance(found.get(key), int):
                found[key] += number
    return _resolve_settings(found, is_own_loop=is_own_loop)


def translate_key(name: str) -> str:
    """The name of a setting in force by that of the schema."""
    alias = read_fairness_rules().names["any"].get(name, name)
    return alias if isinstance(alias, str) else alias.key


def translate_value(key: str, value: Any) -> Any:
    """A value of the setting `key` in the schema's words."""
    return read_fairness_rules().values.get(key, {}).get(format_yaml_value(value), value)


def _resolve_settings(found: dict[str, Any], *, is_own_loop: bool) -> dict[str, Any]:
    """Replace settings that are stated in terms of others by what they come to."""
    _resolve_precision(found)
    if (ratio := found.pop("min_lr_ratio", None)) is not None and "lr" in found:
        found["min_lr"] = ratio * found["lr"]
    if (share := found.pop("lr_warmup_fraction", None)) is not None and "train_iters" in found:
        found["lr_warmup_iters"] = round(share * (found.get("lr_decay_iters") or found["train_iters"]))
    for key, default in (
        ("lr_decay_iters", "train_iters"),
        ("num_query_groups", "num_attention_heads"),
        ("moe_ffn_hidden_size", "ffn_hidden_size" if found.get("num_experts") else ""),
    ):
        if key in found and found[key] is None and default in found:
            found[key] = found[default]
    if found.get("kv_channels", 0) is None and found.get("hidden_size") and found.get("num_attention_heads"):
        found["kv_channels"] = found["hidden_size"] // found["num_attention_heads"]
    sizes = [found.get(key) for key in ("micro_batch_size", "data_parallel_size", "gradient_accumulation_steps")]
    if found.get("global_batch_size") is None and all(isinstance(size, int) for size in sizes):
        found["global_batch_size"] = math.prod(size for size in sizes if size is not None)
    _resolve_engine_settings(found)
    step = found.pop("make_vocab_size_divisible_by", None)
    if "vocab_size" in found and "padded_vocab_size" not in found:
        # The session keeps padding out of the softmax.
        unit = step * (found.get("tensor_model_parallel_size") or 1) if step and is_own_loop else 1
        found["padded_vocab_size"] = math.ceil(found["vocab_size"] / unit) * unit
    return found


def _resolve_engine_settings(found: dict[str, Any]) -> None:
    """State what was read from model and optimizer (primus.session.settings.settings_in_force) as settings."""
    if "compiled" in found:
        found.pop("compile", None)
    decayed = found.pop("decayed_parameters", None)
    if decayed and "undecayed_parameters" in found:
        found["weight_decay_norms"] = found["undecayed_parameters"] == 0
    sizes = [found.get(key) for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size")]
    if any(size not in (None, 1) for size in sizes):  # the count of one process
        found.pop("undecayed_parameters", None)


def _resolve_precision(found: dict[str, Any]) -> None:
    """State `bf16`, `fp16` and `fp8` as one setting."""
    flags = {name: found.pop(name) for name in ("bf16", "fp16", "fp8") if name in found}
    if "precision" in found or not flags:
        return
    if flags.get("fp8"):
        found["precision"] = f"fp8 {flags['fp8']}"
    else:
        found["precision"] = next((name for name in ("bf16", "fp16") if flags.get(name)), "fp32")


@functools.cache
def _index_rules() -> dict[str, SettingRule]:
    """The rule of each setting: the one that names it, else that of its group."""
    rules = read_fairness_rules().settings
    groups = {group: rule for rule in rules for group in rule.groups}
    by_group = {key: groups[group] for key, group in OWNERS.items() if group in groups}
    return by_group | {key: rule for rule in rules for key in rule.keys}


def _spell_keys(tree: Any) -> Any:
    """Keys of mappings as text: YAML reads `true`, `false` and `null` as values."""
    if isinstance(tree, dict):
        return {format_yaml_value(key): _spell_keys(value) for key, value in tree.items()}
    return [_spell_keys(each) for each in tree] if isinstance(tree, list) else tree
