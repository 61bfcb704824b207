"""Checkpoints of MaxText's own trainer, which are not read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from primus.checkpoint.formats.open import FoundCheckpoint
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.errors import UsageError

FORMATS: tuple[str, ...] = ()
ORBAX_FILES = ("_CHECKPOINT_METADATA", "manifest.ocdbt")
"""Of a step, and of the arrays in it (https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html)."""


def find_format(folder: Path, names: Collection[str]) -> str | None:
    """None.

    Raises:
        UsageError: The folder, a step in it, or the items of a step are a checkpoint of Orbax.
    """
    levels = () if names else ("", "*/", "*/*/")
    if any(next(folder.glob(f"{level}{name}"), None) for level in levels for name in ORBAX_FILES):
        raise UsageError(
            f"{folder}: checkpoints of Orbax, as MaxText itself writes them, are not read",
            "convert it for Hugging Face by python -m maxtext.checkpoint_conversion.to_huggingface"
            " (docs/engine-maxtext.md)",
        )
    return None


def open_weights(found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    """Not called: no format is read."""
    raise NotImplementedError
