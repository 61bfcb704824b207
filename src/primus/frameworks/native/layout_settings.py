"""Settings of the layout besides those of the schema, by the names that Megatron-LM has for them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class LayoutSettings(Struct, frozen=True, kw_only=True):
    """How processes share a model."""

    num_distributed_optimizer_instances: Annotated[int, Meta(ge=1)] = 1
    """Copies of the sharded weights: each is sharded over an equal part of the processes that share a stage's matrices
    (hybrid sharding)."""
    num_virtual_stages_per_pipeline_rank: Annotated[int, Meta(ge=1)] = 1
    """Groups of consecutive layers on each pipeline stage (interleaved schedule)."""
