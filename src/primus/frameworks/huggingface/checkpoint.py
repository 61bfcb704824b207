"""What the engine huggingface saves while it trains: a folder of torch.distributed.checkpoint with hub names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from primus.checkpoint.training_state import MOMENTS, TrainingState
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec

if TYPE_CHECKING:
    from primus.checkpoint.formats.open import FoundCheckpoint

FORMATS = ("transformers",)
EMBEDDING = "model.embed_tokens.weight"
"""Weight by which hub names are recognized, which may have a prefix."""


def find_format(folder: Path, names: Collection[str]) -> str | None:
    """`transformers` if a folder has weights in hub names."""
    return "transformers" if _find_prefix(names) is not None else None


def _find_prefix(names: Collection[str]) -> str | None:
    """What the names of weights in hub names begin with; None if there are none."""
    return next((name.removesuffix(EMBEDDING) for name in names if name.endswith(EMBEDDING)), None)


def open_weights(found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    """The weights in hub names."""
    from primus.checkpoint.formats.dcp import DcpFolder
    from primus.checkpoint.formats.huggingface import HuggingFaceWeights
    from primus.checkpoint.views import PrefixedWeights

    stored = DcpFolder(found.folder)
    named = PrefixedWeights(stored, _find_prefix(stored.list_tensors()) or "")
    return HuggingFaceWeights(found.folder, spec, _unpack(named, spec))


def _unpack(weights: WeightReader, spec: ModelSpec) -> WeightReader:
    """By the names of files, where those of modules differ."""
    if spec.num_experts is None:
        return weights
    from primus.checkpoint.family import list_hub_shapes
    from primus.frameworks.huggingface.packed_experts import UnpackedExperts

    return UnpackedExperts(weights, list_hub_shapes(spec))


def read_training_state(found: FoundCheckpoint, spec: ModelSpec, weights: WeightReader) -> TrainingState | None:
    """The state of AdamW; None if there is none."""
    from primus.checkpoint.formats.optimizer_state import (
        open_flat_state,
        read_param_groups,
        read_position,
        read_updates,
    )
    from primus.checkpoint.views import PrefixedWeights

    folder = open_flat_state(found)
    if folder is None:
        return None
    moments: dict[str, WeightReader] = {
        moment: _unpack(PrefixedWeights(folder, "optimizer.state.", f".{moment}"), spec) for moment in MOMENTS
    }
    return TrainingState(moments, read_updates(folder), read_position(found), read_param_groups(folder))
