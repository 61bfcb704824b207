"""The number format of matrix products whose elements share scales in blocks: MXFP8, MXFP4, NVFP4."""

from __future__ import annotations

from primus.config.schema import Trainer

BLOCK_FORMATS = ("mxfp8", "mxfp4", "nvfp4")


def find_block_format(trainer: Trainer) -> str:
    """The block format in which matrix products are asked for, by Megatron-LM's arguments; empty without one."""
    settings = trainer.backend_args
    if settings.get("fp4"):
        return str(settings.get("fp4_recipe") or "nvfp4")  # Megatron-LM's default
    recipe = str(settings.get("fp8_recipe") or "") if trainer.training.fp8 else ""
    return recipe if recipe in BLOCK_FORMATS else ""
