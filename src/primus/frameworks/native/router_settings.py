"""Settings of routers besides those of the model, by the names that Megatron-LM has for them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class RouterSettings(Struct, frozen=True, kw_only=True):
    """How routers are trained."""

    moe_z_loss_coeff: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the z-loss, the mean square of the log-sum-exp of the scores."""
    moe_expert_capacity_factor: Annotated[float, Meta(gt=0)] | None = None
    """Rows of an expert as a multiple of an even share; the lowest scores above it are dropped. None drops nothing."""
    moe_router_bias_update_rate: Annotated[float, Meta(ge=0)] = 1e-3
    """Change of the bias of an expert in a step (moe_router_enable_expert_bias)."""
