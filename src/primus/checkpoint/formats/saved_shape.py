"""The sizes that a checkpoint says of its model, to name the settings in which an experiment differs from it."""

from __future__ import annotations

from primus.checkpoint.formats.open import (
    HUB_FORMATS,
    FoundCheckpoint,
    find_checkpoint,
    find_framework,
    find_spec,
    read_spec,
)
from primus.checkpoint.shape import Shape, build_shape, check_same_shape, list_differences
from primus.config.schema import ModelSpec
from primus.errors import UsageError

WITHOUT_WEIGHTS = (
    *("rotary_base", "rotary_percent", "rope_type", "rotary_scaling_factor"),
    *("norm_epsilon", "ffn_activation", "window_size", "moe_router_topk"),
)
"""Fields of a ModelSpec that change what a model computes, and no weight's shape."""


def check_saved_shape(found: FoundCheckpoint, spec: ModelSpec) -> None:
    """Compare the sizes that a checkpoint says of its model with those of an experiment.

    Raises:
        UsageError: They differ; names every setting.
    """
    saved = _read_saved_shape(found)
    if saved:
        check_same_shape(saved, build_shape(spec), str(found.folder))


def list_other_settings(given: str, spec: ModelSpec) -> list[str]:
    """Settings without a weight in which the model of a checkpoint differs from that of an experiment, in words.

    They are allowed: a longer context needs another rotary embedding. By mistake the model computes something else.
    """
    found = find_checkpoint(given)
    saved = find_spec(found)
    if saved is None:
        return []
    own = {field: getattr(spec, field) for field in WITHOUT_WEIGHTS}
    return list_differences({field: getattr(saved, field) for field in WITHOUT_WEIGHTS}, own)


def _read_saved_shape(found: FoundCheckpoint) -> Shape | None:
    """None where the checkpoint does not say them; the shapes of its tensors are checked anyway."""
    if found.format not in HUB_FORMATS and (shape := find_framework(found.format).read_shape(found)) is not None:
        return dict(shape)
    try:
        return build_shape(read_spec(found))
    except UsageError:
        return None
