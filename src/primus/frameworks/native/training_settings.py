"""Settings of memory, precision and optimizers besides those of the schema, by Megatron-LM's names for them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

NonNegativeShare = Annotated[float, Meta(ge=0, lt=1)]
PositiveNumber = Annotated[float, Meta(gt=0)]
PositiveCount = Annotated[int, Meta(ge=1)]

RecomputedModule = Literal["layernorm", "mlp", "moe", "shared_experts", "core_attn", "moe_act"]


class TrainingSettings(Struct, frozen=True, kw_only=True):
    """What is kept in memory, in which precision, and how weights are updated."""

    mtp_loss_scaling_factor: Annotated[float, Meta(ge=0)] = 0.1
    """Weight of the mean loss of layers of multi-token prediction (mtp_num_layers); reported losses leave it out."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers in the backward pass (as recompute_activations), or what is cheap for its memory."""
    recompute_num_layers: PositiveCount | None = None
    """Number of layers of a pipeline stage that are recomputed, the first ones; all when null."""
    recompute_modules: tuple[RecomputedModule, ...] = ()
    """With `selective`, recompute these modules instead; native never keeps what core_attn and moe_act stand for."""
    cpu_offloading: bool = False
    """Keep the activations of layers in the memory of the host until the backward pass."""
    main_params_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of weights and states of AdamW; bf16 has no fp32 copies, and rounds each update up or down at random."""
    optimizer_cpu_offload: bool = False
    """Keep the states of the optimizer in the memory of the host, and update there."""
    fp16: bool = False
    """Compute in float16 with a dynamic loss scale, for devices without bfloat16; needs bf16: false."""
    initial_loss_scale: PositiveNumber = 65536.0
    """Loss scale of the first step."""
    min_loss_scale: PositiveNumber = 1.0
    """Below it the loss scale does not fall: an overflow is then a non-finite step."""
    loss_scale_window: PositiveCount = 1000
    """Steps without overflow after which the loss scale doubles."""
    hysteresis: PositiveCount = 2
    """Overflows before the loss scale is halved."""
    sgd_momentum: NonNegativeShare = 0.9
    """Momentum of SGD."""
    muon_momentum: NonNegativeShare = 0.95
    """Momentum of Muon."""
    muon_use_nesterov: bool = False
    """Nesterov's momentum for Muon."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of an update of R rows and C columns: sqrt(max(R, C)), sqrt(R / C) or sqrt(max(1, R / C))."""
    muon_extra_scale_factor: PositiveNumber = 1.0
    """Another factor of an update of Muon; 0.2 with `spectral` gives it the size of AdamW's."""
    muon_num_ns_steps: PositiveCount = 5
    """Newton-Schulz iterations of Muon."""
