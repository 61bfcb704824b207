"""What a training engine does with each key of an experiment, read from the engine's `keys.yaml`.

A `keys.yaml` maps keys of the schema to rules; a key that it does not name has the rule of `frameworks/keys.yaml`:
that of an engine of dense models without options of its own.

    hidden_size: {field: base_emb_dim}                       # the engine's name of the setting
    min_lr_ratio: {session: true, files: [final_fraction]}   # its name in the framework's own files
    seed: {session: true}                                    # applied outside the engine, alike for all engines
    num_experts: {refused: mixture-of-experts layers}        # only the default is accepted
    rope_type: {field: rope.scaling, accepts: [default, llama3], refused: yarn rope scaling}
    post_layernorm: {refused: norms after layers, unwritable: true}   # `config export` refuses it, too
    clip_grad: {field: max_norm, differs: adds 1e-6 to the norm}
    moe_*: {refused: mixture-of-experts layers}              # all keys of this form that have no line of their own
    model.*: {field: config.json}                            # all keys of the group `model`
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from primus.config.schema import DEFAULTS, OWNERS, ConfigGroup, ModelSpec, Trainer
from primus.config.source import ConfigValue, format_yaml_value
from primus.errors import UsageError

FILE_NAME = "keys.yaml"
SHARED = Path(__file__).parent / "frameworks" / FILE_NAME
"""The rules of keys that an engine's own file does not name."""


class KeyRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine does with one key."""

    field: str = ""
    """The engine's own name of the setting, or of what it is converted to."""
    files: list[str] = msgspec.field(default_factory=list)
    """Its names in the framework's own files, where they mean the same; that of the newest release first."""
    older: list[str] = msgspec.field(default_factory=list)
    """Further names, of forks and early releases, that `config import` reads."""
    session: bool = False
    """Whether the key is applied outside the engine (data, schedule, reports, checkpoint folders)."""
    refused: str = ""
    """What the engine does not support: ``native does not support <refused>``."""
    accepts: list[Any] = msgspec.field(default_factory=list)
    """Values other than the default that a key with `refused` accepts."""
    differs: str = ""
    """How the result differs from that of native although the value is accepted."""
    lost: bool | str = False
    """What the framework does instead, or true, where its own files have no setting for it: `config export` says so."""
    unwritable: bool | str = False
    """What the framework's own files cannot ask for, or true for `refused`: ``MaxText has no <unwritable>``. `config
    export` refuses a model that has it."""
    note: str = ""
    """More about the conversion, for the documentation."""

    @property
    def is_complete(self) -> bool:
        return bool(self.field) or self.session or bool(self.refused)


KeyRules = Mapping[str, KeyRule]
"""Rules by key of the schema."""


class KeyDifference(Struct, frozen=True, kw_only=True):
    """A setting in which an engine cannot agree with native."""

    key: str
    value: Any
    reason: str
    is_refused: bool
    """Whether the engine refuses the value, or trains with a difference."""


@cache
def read_key_rules(folder: Path) -> KeyRules:
    """The rule of each key of the schema, of the `keys.yaml` in an engine's folder and of the shared one."""
    from primus.config.source import read_package_yaml  # imports yaml: not for commands that read none

    own, shared = (read_package_yaml(file, dict[str, KeyRule]) for file in (folder / FILE_NAME, SHARED))
    rules = _expand_patterns(shared) | _expand_patterns(own)
    return {key: rules[key] for key in (*OWNERS, *rules) if key in rules}


def _expand_patterns(rules: KeyRules) -> dict[str, KeyRule]:
    """`rules` with one for each key that a pattern stands for: its own line comes first, then the last pattern."""
    found = {
        key: rule
        for pattern, rule in rules.items()
        if pattern.endswith("*")
        for key, group in OWNERS.items()
        if key.startswith(pattern[:-1]) or f"{group}.{key}".startswith(pattern[:-1])
    }
    return found | {key: rule for key, rule in rules.items() if not key.endswith("*")}


def list_file_names(folder: Path, *, with_older: bool = False) -> dict[str, str]:
    """Key of the schema by each name that means the same in the framework's own files."""
    rules = read_key_rules(folder).items()
    return {name: key for key, rule in rules for name in (*rule.files, *(rule.older if with_older else ()))}


def list_lost_keys(folder: Path, trainer: Trainer) -> dict[str, str]:
    """What the framework does about each key that its own files do not hold.

    Those are the keys whose rules say so, and parts of the model that its engine refuses.
    """
    found = {}
    for key, rule in read_key_rules(folder).items():
        value = getattr(getattr(trainer, OWNERS[key]), key)
        is_refused = rule.refused and OWNERS[key] == "model" and not rule.files
        if rule.lost or (is_refused and value not in (DEFAULTS.get(key), *rule.accepts)):
            found[key] = rule.lost if isinstance(rule.lost, str) else "no setting of this framework"
    return found


def list_unwritable_keys(folder: Path, model: ModelSpec) -> dict[str, str]:
    """What the framework's own files cannot ask for, by each key with which a model has it."""
    return {
        key: rule.unwritable if isinstance(rule.unwritable, str) else rule.refused
        for key, rule in read_key_rules(folder).items()
        if rule.unwritable and getattr(model, key) not in (DEFAULTS.get(key), *rule.accepts)
    }


def check_writable(framework: str, folder: Path, model: ModelSpec, hint: str = "") -> None:
    """Accept a model that the framework's own files can ask for.

    Raises:
        UsageError: They cannot; the message names the first such key.
    """
    for key, what in list_unwritable_keys(folder, model).items():
        raise UsageError(f"{key}: {getattr(model, key)}: {framework} has no {what}", hint)


def write_keys(folder: Path, group: ConfigGroup, *keys: str) -> dict[str, ConfigValue]:
    """Values of keys of `group` by the newest of their names in the framework's own files, without its sections."""
    rules = read_key_rules(folder)
    return {rules[key].files[0].rpartition(".")[2]: getattr(group, key) for key in keys}


def list_key_differences(rules: KeyRules, trainer: Trainer) -> list[KeyDifference]:
    """The settings of `trainer` that the engine refuses, then those in which it differs from native."""
    found = []
    for key, rule in rules.items():
        value = getattr(getattr(trainer, OWNERS[key]), key)
        if rule.refused and value not in (DEFAULTS.get(key), *rule.accepts):
            found.append(KeyDifference(key=key, value=value, reason=rule.refused, is_refused=True))
        elif rule.differs and _is_on(value):
            found.append(KeyDifference(key=key, value=value, reason=rule.differs, is_refused=False))
    return sorted(found, key=lambda difference: not difference.is_refused)


def check_key_rules(engine: str, rules: KeyRules, trainer: Trainer) -> None:
    """Accept an experiment whose values the engine supports.

    Raises:
        UsageError: A value is refused; the message names the first such key.
    """
    for difference in list_key_differences(rules, trainer):
        if difference.is_refused:
            value = format_yaml_value(difference.value)
            problem = f"{difference.key}: {value}: {engine} does not support {difference.reason}"
            raise UsageError(problem, _format_remedy(rules, difference.key))


def _is_on(value: Any) -> bool:
    """Whether a setting takes effect: one that is off cannot differ."""
    return value not in (None, False, 0)


def _format_remedy(rules: KeyRules, key: str) -> str:
    """What to do about a refused value; another value of a model's key is another model."""
    if OWNERS[key] == "model":
        return f"choose another framework ({key} is part of the model: another value is another model)"
    return f"{_format_accepted_values(rules, key)}, or choose another framework"


def _format_accepted_values(rules: KeyRules, key: str) -> str:
    values = " or ".join(format_yaml_value(value) for value in [DEFAULTS.get(key), *rules[key].accepts])
    return f"set {key}: {values}"
