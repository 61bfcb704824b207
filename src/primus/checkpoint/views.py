"""Readers that pass on another one: under other names, with tensors of a third, checked, or in another type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from primus.checkpoint.family import BUFFERS
from primus.checkpoint.output import split_rows
from primus.checkpoint.weights import TensorInfo, WeightReader
from primus.errors import PrimusError


class RenamedWeights:
    """Tensors of a source under other names; tensors without one are excluded.

    Args:
        weights: The source.
        names: The name in the source by the new one.
    """

    def __init__(self, weights: WeightReader, names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names
        tensors = weights.list_tensors()
        self._tensors = {name: tensors[stored] for name, stored in names.items()}

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return self._weights.read(self._names[name], rows)


class PrefixedWeights(RenamedWeights):
    """The tensors whose names start with `prefix` and end with `suffix`, without these."""

    def __init__(self, weights: WeightReader, prefix: str, suffix: str = "") -> None:
        found = [name for name in weights.list_tensors() if name.startswith(prefix) and name.endswith(suffix)]
        super().__init__(weights, {name.removeprefix(prefix).removesuffix(suffix): name for name in found})


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


class FiniteWeights:
    """A source in which a value that is not finite is an error.

    Args:
        weights: The source.
        where: It, for messages.
        advice: What else to do, for messages.
    """

    def __init__(self, weights: WeightReader, where: str, advice: str = "load another checkpoint") -> None:
        self._weights, self._where, self._advice = weights, where, advice

    def list_tensors(self) -> Mapping[str, TensorInfo]:
        return self._weights.list_tensors()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = self._weights.read(name, rows)
        if not is_finite(tensor):
            info = self._weights.list_tensors()[name]
            count = sum(count_nonfinite(self._weights.read(name, part)) for part in split_rows(info))
            raise PrimusError(
                f"{self._where}: {name} has {count:,} values that are NaN or infinite",
                f"{self._advice}; `checkpoint verify` names every such tensor",
            )
        return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if not tensor.numel():
        return True
    if tensor.dtype.itemsize < 2:  # float8 has no minimum
        return bool(tensor.float().isfinite().all())
    # One pass without a mask, at the speed of memory: a NaN is both the smallest and the largest element.
    return all(bool(end.isfinite()) for end in tensor.aminmax())


def count_nonfinite(tensor: Tensor) -> int:
    """Number of elements that are NaN or infinite."""
    return 0 if is_finite(tensor) else int((~tensor.float().isfinite()).sum())


class CastWeights:
    """A source whose floating-point tensors are cast when they are read; a finite value stays finite.

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
        source, dtype = self._weights.read(name, rows), self._tensors[name].dtype
        tensor = source.to(dtype)
        if dtype == torch.float16 and source.dtype != dtype and tensor.isinf().sum() > source.isinf().sum():
            largest = float(source[source.isfinite()].abs().max())
            raise PrimusError(
                f"{name} has values up to {largest:.3g}, and float16 has none above {torch.finfo(dtype).max:.0f}",
                "--dtype bf16 holds them",
            )
        return tensor
