"""Which frameworks can continue from the optimizer of another; no tensor library is imported."""

from __future__ import annotations

from pathlib import Path

from primus.checkpoint.manifest import CheckpointManifest
from primus.errors import UsageError

OPTIMIZERS_WRITTEN = ("native", "torchtitan", "megatron")
"""Backends for which `checkpoint convert` writes the state of an optimizer."""
OPTIMIZERS_READ = (*OPTIMIZERS_WRITTEN, "huggingface")
"""Those from whose checkpoints it reads it."""


def check_backend_of(saved: CheckpointManifest, folder: Path, backend: str, weights_only: bool) -> None:
    """Refuse to continue from the optimizer of another engine.

    Raises:
        UsageError: `weights_only` is not set, and the checkpoint is of another framework.
    """
    if saved.backend != backend and not weights_only:
        can_convert = saved.backend in OPTIMIZERS_READ and backend in OPTIMIZERS_WRITTEN
        conversion = f"convert it: primus-cli direct -- checkpoint convert {folder} NEW --to {backend}; or "
        raise UsageError(
            f"load: {folder} was saved by {saved.backend}, and {backend} cannot read the state of its optimizer",
            f"{conversion if can_convert else ''}set finetune: true to begin at step 0 with its weights",
        )
