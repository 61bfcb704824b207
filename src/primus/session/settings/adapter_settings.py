"""Settings of the adapters (LoRA, DoRA) that an engine trains with a model, by the same keys on every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from primus.errors import UsageError, did_you_mean

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Matrices of a layer that get adapters (megatron/bridge/peft/lora.py)."""


class AdapterSettings(Struct, frozen=True, kw_only=True):
    """Which adapters are trained."""

    peft: Literal["none", "lora", "dora"] = "none"
    """Train adapters and keep the weights of the model; none trains all weights."""
    peft_dim: Annotated[int, Meta(ge=1)] = 32
    """Rank of the adapters."""
    peft_alpha: Annotated[int, Meta(ge=1)] = 32
    """Scale of the adapters, divided by peft_dim."""
    peft_rslora: bool = False
    """Divide peft_alpha by the square root of peft_dim (rsLoRA, arXiv 2312.03732)."""
    peft_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the inputs of adapters that is dropped."""
    peft_target_modules: tuple[str, ...] = TARGETS
    """Matrices that get adapters; patterns with * choose layers."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.peft_alpha / (math.sqrt(self.peft_dim) if self.peft_rslora else self.peft_dim)


S = TypeVar("S", bound=Struct)


def read_settings(backend_args: Mapping[str, Any], kind: type[S], page: str = "docs/posttrain.md") -> S:
    """The settings of `kind` in `backend_args`; others there are the engine's. `page` documents them.

    Raises:
        UsageError: A value is not valid; names the key.
    """
    names = kind.__struct_fields__
    own = {key: value for key, value in backend_args.items() if key in names and value is not None}
    for key, value in own.items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise UsageError(f"{key}: {value}: {reason}", f"{page} lists the settings") from None
    return msgspec.convert(own, kind)


def check_targets(settings: AdapterSettings, *, allows_other_names: bool = False) -> None:
    """Check that each of `peft_target_modules` names matrices.

    Raises:
        UsageError: One does not; names the nearest.
    """
    for target in settings.peft_target_modules:
        last = target.rpartition(".")[2]
        if "*" not in last and last not in TARGETS and not allows_other_names:
            raise UsageError(f"peft_target_modules: no matrix is named '{target}'", did_you_mean(target, list(TARGETS)))
        if not any(fnmatch(name, last) for name in TARGETS) and "*" in last:
            raise UsageError(f"peft_target_modules: '{target}' matches no matrix", f"matrices: {', '.join(TARGETS)}")
