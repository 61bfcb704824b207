"""Initial weights in hub names, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from primus.checkpoint.family import choose_family, list_hub_shapes, list_rules, read_engine_rules
from primus.checkpoint.initial_values import STACK_DIMENSIONS, draw_initial_value
from primus.checkpoint.renaming import HubNames, compute_engine_shapes
from primus.checkpoint.weights import TensorInfo, WeightReader, get_bounds
from primus.config.schema import ModelSpec


class DrawnWeights:
    """Tensors that are drawn when they are read; the last one is kept."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, seed: int) -> None:
        self._shapes, self._spec, self._seed = shapes, spec, seed
        self._last: tuple[str, Tensor] | None = None

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(shape, torch.float32) for name, shape in self._shapes.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        start, stop = get_bounds(rows, self._shapes[name][0])
        if len(self._shapes[name]) == STACK_DIMENSIONS and stop - start == 1:
            return draw_initial_value(f"{name}[{start}]", self._shapes[name][1:], self._spec, self._seed).unsqueeze(0)
        # One draw serves query, key and value, which are parts of one tensor of native.
        if self._last is None or self._last[0] != name:
            self._last = name, draw_initial_value(name, self._shapes[name], self._spec, self._seed)
        return self._last[1][start:stop]


class InitialWeights:
    """The initial weights of a model in hub names: those that native starts from.

    Weights of models that native cannot hold are drawn by their hub names.

    Args:
        spec: The model.
        seed: The experiment's seed.

    Raises:
        UsageError: Weights of such a model have no names.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        shapes = list_hub_shapes(spec)
        self._weights: WeightReader = DrawnWeights(shapes, spec, seed)
        if read_engine_rules("native", choose_family(spec)[0]):
            native = compute_engine_shapes(list_rules(spec, "native"), shapes)
            self._weights = HubNames(DrawnWeights(native, spec, seed), spec, "native")

    def list_tensors(self) -> Mapping[str, TensorInfo]:
        return self._weights.list_tensors()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._weights.read(name, rows)
