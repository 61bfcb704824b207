"""The tensors of a model and its optimizer that a checkpoint holds, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from primus.frameworks.native.engine.model import Transformer
from primus.frameworks.native.engine.optimizer import fill_state, read_state, write_state
from primus.frameworks.native.engine.placement import PlacedWeight, WeightPiece

WEIGHT = "model."
"""Prefix of a weight's name."""
STEPS = "optimizer.step"
"""Updates that the optimizer has applied: the same for every weight, and fewer than steps if some were skipped."""


class StoredWeight(Tensor):
    """The pieces of a weight that this process has, as torch.distributed.checkpoint saves and loads them whatever the
    layout is. The tensor itself has the shape of the whole weight and no memory."""

    pieces: list[WeightPiece]
    local: Tensor
    """All of this process, of which `pieces` are parts."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, pieces: list[WeightPiece]) -> StoredWeight:
        stored: StoredWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        stored.pieces = pieces
        return stored

    def replace_pieces(self, local: list[Tensor]) -> StoredWeight:
        """The same with other tensors, in the order of `pieces`."""
        pieces = [piece._replace(local=each) for piece, each in zip(self.pieces, local, strict=True)]
        return StoredWeight(self.shape, self.dtype, pieces)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a weight that is in pieces")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_describe_chunk(piece),
                    properties=TensorProperties.create_from_tensor(piece.local),
                    size=self.size(),
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_describe_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece.local for piece in self.pieces if torch.Size(piece.offsets) == index.offset)


def _describe_chunk(piece: WeightPiece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.local.shape)


def collect_weights(model: Transformer) -> dict[str, Tensor]:
    """Trained weights and biases of routers by name, each once, in place: what is copied into them is in the model."""
    placed = dict(_list_trained(model)) | model.place_balance_biases()
    return {WEIGHT + name: _store(weight.place(weight.tensor.detach()), model) for name, weight in placed.items()}


def collect_moments(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments and step count by name; moments are zero before the first step. They are in place, but
    those of 8 bits are float32 copies."""
    named: dict[str, Tensor] = {}
    fill_state(optimizer)
    for name, weight in _list_trained(model):
        for kind, tensor in read_state(optimizer, name, weight).items():
            if kind == "step":
                named[STEPS] = tensor.cpu()
            else:
                named[f"optimizer.{kind}.{name}"] = _store(weight.place(tensor), model)
    return named


def take_moments(model: Transformer, optimizer: torch.optim.Optimizer, named: dict[str, Tensor]) -> None:
    """Take over what was read into the result of `collect_moments`; every weight gets the one step count."""
    for name, weight in _list_trained(model):
        state = read_state(optimizer, name, weight)
        if "step" in state:
            state["step"].copy_(named[STEPS])
        stored = {kind: named[f"optimizer.{kind}.{name}"] for kind in state if kind != "step"}
        moments = {kind: each.local if isinstance(each, StoredWeight) else each for kind, each in stored.items()}
        write_state(optimizer, name, weight, moments)


def _list_trained(model: Transformer) -> list[tuple[str, PlacedWeight]]:
    return [(name, weight) for name, weight in model.place_weights().items() if weight.tensor.requires_grad]


def _store(weight: PlacedWeight, model: Transformer) -> Tensor:
    """A process without others has whole tensors."""
    if model.layout.losses is None:
        return weight.tensor
    stored = StoredWeight(weight.shape, weight.local.dtype, weight.list_pieces())
    stored.local = weight.local
    return stored
