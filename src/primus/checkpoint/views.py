"""Readers that pass on another one: with a prefix removed, or in another type."""

from __future__ import annotations

import torch
from torch import Tensor

from primus.checkpoint.weights import TensorInfo, WeightReader

KEPT_TYPE = ("e_score_correction_bias",)
"""Ends of names whose type is not changed: the balancing bias of DeepSeek-V3, float32 in published files."""


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


class CastWeights:
    """A source whose floating-point tensors are cast when they are read."""

    def __init__(self, weights: WeightReader, dtype: torch.dtype) -> None:
        self._weights = weights
        self._tensors = {
            name: info._replace(dtype=dtype) if info.dtype.is_floating_point and not name.endswith(KEPT_TYPE) else info
            for name, info in weights.list_tensors().items()
        }

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._weights.read(name, rows).to(self._tensors[name].dtype)
