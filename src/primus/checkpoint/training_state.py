"""What a run continues with besides its weights: the state of AdamW in hub names, and its position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from primus.checkpoint.weights import WeightReader
from primus.config.schema import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Moments of AdamW in torch, each of its weight's shape (torch/optim/adamw.py)."""
DEFAULTS = OptimizerConfig()


class AdamSettings(NamedTuple):
    """Settings that engines save with the state. Engines of primus use those of the experiment."""

    lr: float = DEFAULTS.lr
    betas: tuple[float, float] = (DEFAULTS.adam_beta1, DEFAULTS.adam_beta2)
    eps: float = DEFAULTS.adam_eps
    weight_decay: float = DEFAULTS.weight_decay
    """Of matrices; norms and biases do not decay."""


class ParamGroup(TypedDict, total=False):
    """A parameter group of torch.optim.AdamW, as far as it is read here; torch's own type is a mapping of anything."""

    params: list[Tensor]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    fused: bool | None
    foreach: bool | None


class SavedPosition(NamedTuple):
    """Where a run was when a checkpoint was saved."""

    step: int
    consumed_samples: int | None = None
    """None if the checkpoint does not say it."""
    run: str = ""
    data_fingerprint: str = ""
    recent_losses: tuple[float, ...] = ()
    callbacks: Mapping[str, Any] = {}


class TrainingState(NamedTuple):
    """The state of AdamW, and the position of its run."""

    moments: Mapping[str, WeightReader]
    """By the names of `MOMENTS`: tensors in hub names, of all weights that are trained."""
    num_updates: float
    """Updates that were applied: fewer than steps if some were skipped."""
    position: SavedPosition
    settings: AdamSettings = AdamSettings()
    masters: WeightReader | None = None
    """The weights in float32, where the checkpoint has them besides those in the model's type."""
