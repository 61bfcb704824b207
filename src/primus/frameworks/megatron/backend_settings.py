"""Settings of `backend_args`: arguments of Megatron-LM that are fields of megatron-core, checked without it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from primus.config.source import format_yaml_value
from primus.config.translation.known_keys import KnownKey
from primus.errors import UsageError, did_you_mean
from primus.frameworks.megatron.known_keys import read_arguments, read_primus_keys

FOLDER = Path(__file__).parent
TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
}
TYPE_NAMES = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a text", "list": "a list"}

REPLACED = frozenset({"dataloader_type"})
"""Arguments about what primus does in the place of Megatron-LM: the order of the samples."""

FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_dropout": (0,),
    "attention_dropout": (0,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "swiglu": (True,),
}
"""Values that the models here have where Megatron-LM's default is another one, which would pass as not asked for."""


class MegatronSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """One setting of `settings.yaml`."""

    field: str
    """Target and field: ``transformer.moe_z_loss_coeff``."""
    type: Literal["bool", "int", "float", "str", "list"]
    needs: Literal["", "transformer_engine", "gpu"] = ""
    """What has the function that the setting chooses; megatron-core has a slower one, which computes the same."""
    values: list[str] = []
    """The values that need it; every value but false if there are none."""
    minimum: int | None = None
    note: str = ""

    def accepts(self, value: Any) -> bool:
        """Whether a value of YAML has the setting's type and is not too small; null leaves the default."""
        if value is None:
            return True
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and self.minimum is not None and value < self.minimum:
            return False
        return isinstance(value, TYPES[self.type]) and (self.type == "bool" or not isinstance(value, bool))

    def describe_type(self) -> str:
        """What a value must be."""
        return TYPE_NAMES[self.type] + (f" of at least {self.minimum}" if self.minimum is not None else "")

    def lacks(self, value: Any, available: Collection[str]) -> bool:
        """Whether a value has no effect with what is available of `needs`."""
        is_asked = value in self.values if self.values else value not in (None, False)
        return bool(self.needs) and is_asked and self.needs not in available


@cache
def read_settings() -> dict[str, MegatronSetting]:
    """The settings by name."""
    from primus.config.source import read_package_yaml  # imports yaml: not for commands that read none

    return read_package_yaml(FOLDER / "settings.yaml", dict[str, MegatronSetting])


def check_setting_names(settings: Mapping[str, Any]) -> None:
    """Accept settings of megatron-core and arguments of Megatron-LM.

    Raises:
        UsageError: A setting is unknown, or its value has another type.
    """
    known, arguments = read_settings(), _read_foreign_keys()
    for name, value in settings.items():
        if name in known:
            if not known[name].accepts(value):
                raise UsageError(
                    f"{_format_setting(name, value)}: must be {known[name].describe_type()}",
                    "docs/reference/engine-megatron.md lists the settings",
                )
        elif name not in arguments:
            raise UsageError(
                f"backend_args: megatron has no setting '{name}'", did_you_mean(name, {*known, *arguments})
            )


def check_setting_effects(settings: Mapping[str, Any]) -> None:
    """Accept settings that megatron-core applies, and those that do not change what is trained.

    Raises:
        UsageError: Only Megatron-LM itself has settings that change it; names all of them.
    """
    known, arguments = read_settings(), _read_foreign_keys()
    refused = [
        f"{name}: {format_yaml_value(value)}"
        for name, value in settings.items()
        if name not in known and name not in REPLACED and _changes_training(name, arguments[name], value)
    ]
    if refused:
        it = "it" if len(refused) == 1 else "them"
        raise UsageError(
            f"backend_args: {', '.join(refused)}: megatron-core does not have {it}; Megatron-LM's own training does",
            f"set {it} to null, or train in an image or a checkout of Megatron-LM",
        )


def list_unused_settings(settings: Mapping[str, Any], available: Collection[str]) -> list[str]:
    """Names of the settings that have no effect here.

    These are Megatron-LM's own about speed, reports, files and processes, and those that need what is not available.
    """
    known = read_settings()
    return [name for name, value in settings.items() if name not in known or known[name].lacks(value, available)]


def _read_foreign_keys() -> dict[str, KnownKey]:
    """Arguments of Megatron-LM, and keys of Primus' presets for it."""
    return {**read_primus_keys().keys, **read_arguments().keys}


def _changes_training(name: str, argument: KnownKey, value: Any) -> bool:
    """Whether a value asks for something: presets of Primus write out values that Megatron-LM then overrides."""
    if name in FIXED:
        return value is not None and value not in FIXED[name]
    is_asked = value is not None and value != argument.default and value not in argument.shipped
    return is_asked and argument.effect in ("numbers", "model")


def group_settings(settings: Mapping[str, Any], available: Collection[str]) -> dict[str, dict[str, object]]:
    """The fields that `settings` set, for each target: ``transformer``, ``ddp``, ``optimizer``, ``vocabulary``.

    Args:
        settings: Of the experiment.
        available: See `MegatronSetting.needs`.
    """
    groups: dict[str, dict[str, object]] = {"transformer": {}, "ddp": {}, "optimizer": {}, "vocabulary": {}}
    known = read_settings()
    for name, value in settings.items():
        if name in known and value is not None and not known[name].lacks(value, available):
            target, _, field = known[name].field.partition(".")
            groups[target][field] = value
    if "overlap_param_gather" in groups["ddp"]:  # both objects must agree
        groups["optimizer"]["overlap_param_gather"] = groups["ddp"]["overlap_param_gather"]
    return groups


def _format_setting(name: str, value: Any) -> str:
    return f"backend_args: {name}: {format_yaml_value(value)}"
