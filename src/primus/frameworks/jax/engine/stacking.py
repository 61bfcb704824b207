"""Weights of all layers as one array each: `model.layers.*.mlp.up_proj.weight` [L, F, D].

The layers then are one loop of the compiled step: compiling takes as long for 80 layers as for one, and a parameter of
all layers is updated at once. Checkpoints and weight readers have each layer's weight under its Hugging Face name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LAYER_PREFIX = "model.layers.*."
_LAYER = re.compile(r"model\.layers\.\d+\.")

Shapes = Mapping[str, tuple[int, ...]]


def get_stacked_name(name: str) -> str:
    """The array that a weight is in, by its Hugging Face name."""
    return _LAYER.sub(LAYER_PREFIX, name, count=1)


def group_names(names: Mapping[str, object]) -> dict[str, list[str]]:
    """Hugging Face names in each array, by layer; one name for a weight outside of the layers."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=_find_layer):
        groups.setdefault(get_stacked_name(name), []).append(name)
    return groups


def is_stacked(name: str) -> bool:
    """Whether an array has a first dimension of layers."""
    return name.startswith(LAYER_PREFIX)


def stack_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Shape of each array, from those of the weights by Hugging Face name."""
    return {
        key: (len(names), *shapes[names[0]]) if is_stacked(key) else shapes[names[0]]
        for key, names in group_names(shapes).items()
    }


def _find_layer(name: str) -> int:
    return int(name.split(".")[2]) if _LAYER.match(name) else -1
