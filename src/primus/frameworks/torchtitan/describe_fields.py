"""Write the fields of torchtitan's configuration as data: `python -m primus.frameworks.torchtitan.describe_fields`.

Runs where torchtitan is installed; the result is `fields.yaml`, by which settings are checked where it is not.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, TypedDict


class FieldDescription(TypedDict, total=False):
    """A field in the form of `backend_settings.FieldType`."""

    type: str
    choices: list[object]
    nullable: bool


def list_fields() -> dict[str, FieldDescription]:
    """Type of each field by its path in the tree, in the form of `backend_settings.FieldType`."""
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
    from torchtitan.trainer import Trainer

    found = dict(_walk_fields(Trainer.Config, ""))
    for kind in (FullAC, MemoryBudgetAC, SelectiveAC):
        found |= dict(_walk_fields(kind.Config, "activation_checkpoint."))
    found |= dict(_walk_fields(ChunkedLossWrapper.Config, "loss."))
    return dict(sorted(found.items()))


def _walk_fields(kind: type, prefix: str) -> Iterator[tuple[str, FieldDescription]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.name.startswith("_"):
            continue
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _walk_fields(hint, f"{prefix}{field.name}.")
        elif described := _describe_type(hint):
            yield prefix + field.name, described


def _describe_type(hint: Any) -> FieldDescription:
    """A type as data; empty for what YAML cannot write."""
    if hint in (bool, int, float, str):
        return {"type": hint.__name__}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": "str", "choices": list(arguments)}
    if origin is list:
        return {} if dataclasses.is_dataclass(arguments[0]) else {"type": "list"}
    options = [_describe_type(each) for each in arguments if each is not type(None)]
    if not options or not all(options):
        return {}
    wide = next((each for each in options if each["type"] == "float"), options[0])
    return wide | ({"nullable": True} if type(None) in arguments else {})


if __name__ == "__main__":
    import yaml

    print(
        "# Fields of torchtitan.trainer.Trainer.Config 0.3.0, written by primus.frameworks.torchtitan.describe_fields."
    )
    for path, described in list_fields().items():
        print(f"{path}: {yaml.safe_dump(described, default_flow_style=True, width=1000, sort_keys=False).strip()}")
