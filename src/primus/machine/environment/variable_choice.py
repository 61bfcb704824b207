"""The value chosen for an environment variable, with its layer, reason and the values that it overrides."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct, structs

AMD_ONLY = ("HSA_", "HIP_", "RCCL_", "NVTE_CK_", "NVTE_ROCM_")
"""Prefixes of variables that have no effect on other vendors' machines and are not set there."""
DETERMINISTIC = "PRIMUS_DETERMINISTIC"


class Assignment(Protocol):
    """A value and its source, such as `plan.Variable`."""

    @property
    def value(self) -> str: ...
    @property
    def source(self) -> str: ...


class OverriddenVariable(Struct, frozen=True):
    """A value that was overridden."""

    layer: str
    value: str | None
    reason: str


class VariableChoice(Struct, frozen=True, kw_only=True):
    """The value chosen for a variable."""

    name: str
    value: str | None
    """None leaves it unset."""
    layer: str
    """``base``, ``amd``, ``gfx942``, ``mi300x``, ``backend:megatron``, ``nic:broadcom``, ``network``,
    ``deterministic``, ``tuned``, ``hook``, ``patch``, ``experiment``, ``user`` (the shell) or ``--env``."""
    reason: str
    source: str
    overrode: tuple[OverriddenVariable, ...] = ()
    """Different values of lower layers, the nearest first."""


def merge_choice(chosen: dict[str, VariableChoice], choice: VariableChoice) -> None:
    """Let `choice` override the current choice."""
    lost = chosen.get(choice.name)
    if lost and lost.value == choice.value:
        chosen[choice.name] = structs.replace(choice, overrode=lost.overrode)
    elif lost:
        overrode = (OverriddenVariable(lost.layer, lost.value, lost.reason), *lost.overrode)
        chosen[choice.name] = structs.replace(choice, overrode=overrode)
    else:
        chosen[choice.name] = choice
