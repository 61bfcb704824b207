"""Settings of `backend_args`: arguments of Megatron-LM that are fields of megatron-core, checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from primus.engine_keys import format_yaml_value
from primus.errors import UsageError, did_you_mean

FOLDER = Path(__file__).parent
TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
}
TYPE_NAMES = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a text", "list": "a list"}


class MegatronSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """One setting of `settings.yaml`."""

    field: str
    """Target and field: ``transformer.moe_z_loss_coeff``."""
    type: Literal["bool", "int", "float", "str", "list"]
    note: str = ""

    def accepts(self, value: Any) -> bool:
        """Whether a value of YAML has the setting's type; null leaves the default."""
        if value is None:
            return True
        return isinstance(value, TYPES[self.type]) and (self.type == "bool" or not isinstance(value, bool))


@cache
def read_settings() -> dict[str, MegatronSetting]:
    """The settings by name."""
    import yaml  # as elsewhere in the control plane: not for commands that read no YAML

    text = (FOLDER / "settings.yaml").read_text(encoding="utf-8")
    values = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    return msgspec.convert(values, dict[str, MegatronSetting])


def check_settings(settings: Mapping[str, Any]) -> None:
    """Accept settings that megatron-core has.

    Raises:
        UsageError: A setting is unknown, or its value has another type.
    """
    known = read_settings()
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"backend_args: megatron has no setting '{name}'", did_you_mean(name, known))
        if not known[name].accepts(value):
            raise UsageError(
                f"backend_args: {name}: {format_yaml_value(value)}: must be {TYPE_NAMES[known[name].type]}",
                "docs/engine-megatron.md lists the settings",
            )


def group_settings(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields that `settings` set, for each target: ``transformer``, ``ddp``, ``optimizer``."""
    groups: dict[str, dict[str, Any]] = {"transformer": {}, "ddp": {}, "optimizer": {}}
    for name, value in settings.items():
        target, _, field = read_settings()[name].field.partition(".")
        if value is not None:
            groups[target][field] = value
    if "overlap_param_gather" in groups["ddp"]:  # both objects must agree
        groups["optimizer"]["overlap_param_gather"] = groups["ddp"]["overlap_param_gather"]
    return groups
