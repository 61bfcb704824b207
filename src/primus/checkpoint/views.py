"""Readers that pass on another one: with a prefix removed, with some tensors of a third, or in another type."""

from __future__ import annotations

import torch
from torch import Tensor

from primus.checkpoint.family import BUFFERS
from primus.checkpoint.weights import TensorInfo, WeightReader


class PrefixedWeights:
    """The tensors whose names start with `prefix` and end with `suffix`, without these."""

    def __init__(self, weights: WeightReader, prefix: str, suffix: str = "") -> None:
        self._weights = weights
        self._tensors = {
            name: info
            for name, info in weights.list_tensors().items()
            if name.startswith(prefix) and name.endswith(suffix)
        }
        self._names = {name.removeprefix(prefix).removesuffix(suffix): name for name in self._tensors}

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {name: self._tensors[full] for name, full in self._names.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._weights.read(self._names[name], rows)


class FilledWeights:
    """The tensors of `weights`, and those of `others` that it lacks."""

    def __init__(self, weights: WeightReader, others: WeightReader) -> None:
        self._sources = {
            **dict.fromkeys(others.list_tensors(), others),
            **dict.fromkeys(weights.list_tensors(), weights),
        }

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {name: source.list_tensors()[name] for name, source in self._sources.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._sources[name].read(name, rows)


class CastWeights:
    """A source whose floating-point tensors are cast when they are read.

    Those of `family.BUFFERS` keep their type: they are float32 in published files.
    """

    def __init__(self, weights: WeightReader, dtype: torch.dtype) -> None:
        self._weights = weights
        self._tensors = {
            name: info._replace(dtype=dtype) if info.dtype.is_floating_point and not name.endswith(BUFFERS) else info
            for name, info in weights.list_tensors().items()
        }

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._weights.read(name, rows).to(self._tensors[name].dtype)
