"""Sources of weights: tensors by name, read lazily, whole or some rows at a time.

Hub names, those of Hugging Face files on disk, are the meeting point: every checkpoint format and every engine maps to
and from them, never to each other. A source of weights in hub names is a `WeightReader`: the initial weights of a
model (`initial_weights.InitialWeights`), or a checkpoint of any format (`formats.open_checkpoint`).

    weights = InitialWeights(spec, seed)                        # hub names
    weights = renaming.HubNames(native, spec, "native")         # the tensors of native by native name, as hub names
    titan = renaming.EngineNames(weights, spec, "torchtitan")   # hub names as those of an engine
    for name in titan.list_tensors():
        parameters[name].copy_(titan.read(name))

The engines are the frameworks with names of weights: `native`, `torchtitan` and `megatron` (names of Megatron's
torch_dist files, one tensor for each layer; `frameworks/megatron/shards.py` reads the part of one rank).

A dict of tensors is a source too: `TensorDict(tensors)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorInfo(NamedTuple):
    """Size and type of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        size = self.dtype.itemsize
        for width in self.shape:
            size *= width
        return size


class WeightReader(Protocol):
    """Tensors by name. Reading needs memory for what is asked, not for the model."""

    def list_tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name; a tensor that two names share is listed once, by the embedding's name."""
        ...

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """One tensor on the CPU, or the part `rows` of its first dimension. The caller must not change it in place.

        Raises:
            KeyError: The tensor does not exist.
            PrimusError: The source is damaged.
        """
        ...


class TensorDict:
    """A dict of tensors as a `WeightReader`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor if rows is None else tensor[rows]


def get_bounds(rows: slice | None, num_rows: int) -> tuple[int, int]:
    """First row, and the one after the last, that `rows` selects; a step is not supported."""
    if rows is None:
        return 0, num_rows
    start, stop, step = rows.indices(num_rows)
    assert step == 1, "rows are read in order"
    return start, max(start, stop)
