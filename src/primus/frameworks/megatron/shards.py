"""The part of Megatron's weights that one tensor-, pipeline- and expert-parallel rank holds."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.weights import TensorInfo, WeightReader, get_bounds
from primus.config.schema import ModelSpec
from primus.errors import UsageError

SplitKind = Literal["rows", "gated_rows", "columns", "whole"]
"""How tensor parallelism cuts a tensor: `gated_rows` cuts the gates and what they gate apart, so that each rank has
both."""

LayerSpecKind = Literal["local", "transformer_engine"]
"""Layer spec of a `GPTModel`, which decides the names in its state dict."""

SPLITS: tuple[tuple[str, SplitKind], ...] = (
    (r"(embedding\.word_embeddings|output_layer)\.weight", "rows"),
    (r".*\.linear_qkv\.(weight|bias)", "rows"),
    (r".*\.(linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.weight", "rows"),
    (r".*\.softmax_offset", "rows"),
    (r".*\.linear_fc1\.(weight|bias)", "gated_rows"),
    (r".*\.(linear_proj|linear_fc2)\.weight", "columns"),
)
"""How tensors are cut, by name (megatron/core/transformer/attention.py, mlp.py); others are whole on every rank."""

LOCAL_NAMES = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
)
"""Ends of names with Transformer Engine, which fuses norms into the projection after them, and with the local spec."""

STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.experts\.(linear_fc[12])\.(weight|bias)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class RankLayout(NamedTuple):
    """The place of one rank in a parallel layout, and the layers of its pipeline stage."""

    tensor_rank: int = 0
    tensor_size: int = 1
    first_layer: int = 0
    num_layers: int | None = None
    """Layers of the stage; all when None."""
    is_first_stage: bool = True
    is_last_stage: bool = True
    first_expert: int = 0
    num_experts: int | None = None
    """Experts of the expert-parallel rank; all when None."""
    padded_vocab_size: int | None = None
    """Rows of the embedding over all ranks, with padding."""


WHOLE_MODEL = RankLayout()


class ShardPlace(NamedTuple):
    """Where a rank's tensor comes from."""

    name: str
    split: SplitKind
    expert: int | None


class MegatronShard:
    """Tensors of one rank by the names of `GPTModel.state_dict()`; layers and experts count from 0 on each rank.

    Args:
        weights: The source, in hub names.
        spec: The model.
        layout: The rank.
        layer_spec: Decides the names of norms and experts.

    Raises:
        UsageError: The model has no names in Megatron, or cannot be cut like this.
    """

    def __init__(
        self,
        weights: WeightReader,
        spec: ModelSpec,
        layout: RankLayout = WHOLE_MODEL,
        layer_spec: LayerSpecKind = "local",
    ) -> None:
        self._weights = EngineNames(weights, spec, "megatron")
        self._layout = layout
        self._whole = self._weights.list_tensors()
        self._tied = not spec.untie_embeddings_and_output_weights
        self._places = self._find_places(layer_spec)
        for place in self._places.values():
            self._check_division(place)

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(self._compute_shape(place), self._whole[place.name].dtype)
            for name, place in self._places.items()
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        place = self._places[name]
        start, stop = get_bounds(rows, self._compute_shape(place)[0])
        tensor = self._read_rows(place, start, stop) if place.expert is None else self._read_expert(place)[start:stop]
        if place.split == "columns":
            width = tensor.shape[1] // self._layout.tensor_size
            tensor = tensor.narrow(1, self._layout.tensor_rank * width, width)
        return tensor

    def list_borders(self, name: str) -> list[int]:
        """Rows of a tensor between which rows are read without a copy, see `EngineNames.list_borders`."""
        place = self._places[name]
        is_gated = place.split == "gated_rows" and place.expert is None
        return [self._compute_shape(place)[0] // 2] if is_gated else []

    def _find_places(self, layer_spec: LayerSpecKind) -> dict[str, ShardPlace]:
        places: dict[str, ShardPlace] = {}
        for name in self._whole:
            local = self._rename_to_stage(name)
            if local is None:
                continue
            local = choose_spec_name(local, name, layer_spec, self._whole.keys())
            if local is None:
                continue
            split = find_split(name)
            stacked = STACKED_EXPERTS.fullmatch(local)
            if stacked is None:
                places.setdefault(local, ShardPlace(name, split, None))
                continue
            count = self._layout.num_experts or self._whole[name].shape[0]
            for expert in range(count):
                places[name_expert(stacked, expert, layer_spec)] = ShardPlace(
                    name, split, self._layout.first_expert + expert
                )
        if self._tied and self._layout.is_last_stage and not self._layout.is_first_stage:
            places["output_layer.weight"] = ShardPlace("embedding.word_embeddings.weight", "rows", None)
        return places

    def _rename_to_stage(self, name: str) -> str | None:
        """The name on this pipeline stage; None if the tensor belongs to another one."""
        layout = self._layout
        if name.startswith("embedding."):
            return name if layout.is_first_stage else None
        match = LAYER.match(name)
        if match is None:  # the last norm, the output head, multi-token prediction
            return name if layout.is_last_stage else None
        layer = int(match[1]) - layout.first_layer
        if layer < 0 or (layout.num_layers is not None and layer >= layout.num_layers):
            return None
        return f"decoder.layers.{layer}.{name[match.end() :]}"

    def _check_division(self, place: ShardPlace) -> None:
        """Each rank gets whole query groups and as many rows as the others."""
        info, size = self._whole[place.name], self._layout.tensor_size
        shape = info.shape if place.expert is None else info.shape[1:]
        width = {"columns": shape[-1], "rows": self._count_rows(place), "gated_rows": shape[0] // 2}.get(place.split, 0)
        if width % size:
            raise UsageError(
                f"tensor_model_parallel_size: {size} does not divide {place.name} of shape {list(shape)}",
                "choose a divisor; for the vocabulary, set make_vocab_size_divisible_by",
            )

    def _count_rows(self, place: ShardPlace) -> int:
        """Rows over all ranks, with those of a padded vocabulary."""
        rows = self._whole[place.name].shape[0]
        is_vocabulary = place.name in ("embedding.word_embeddings.weight", "output_layer.weight")
        return max(rows, self._layout.padded_vocab_size or 0) if is_vocabulary else rows

    def _compute_shape(self, place: ShardPlace) -> tuple[int, ...]:
        shape = self._whole[place.name].shape
        size = self._layout.tensor_size
        shape = (self._count_rows(place), *shape[1:]) if place.expert is None else shape[1:]
        if place.split == "columns":
            return (shape[0], shape[1] // size)
        return shape if place.split == "whole" else (shape[0] // size, *shape[1:])

    def _read_expert(self, place: ShardPlace) -> Tensor:
        assert place.expert is not None
        whole = self._weights.read(place.name, slice(place.expert, place.expert + 1))[0]
        if place.split != "gated_rows":
            return whole
        return torch.cat([self._cut_rows(half) for half in whole.chunk(2)])

    def _cut_rows(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._layout.tensor_size)[self._layout.tensor_rank]

    def _read_rows(self, place: ShardPlace, start: int, stop: int) -> Tensor:
        """Rows of the rank's tensor, of all columns."""
        rank, size = self._layout.tensor_rank, self._layout.tensor_size
        rows = self._count_rows(place)
        if place.split == "rows":
            first = rank * rows // size
            return self._read_padded(place.name, first + start, first + stop)
        if place.split != "gated_rows":
            return self._weights.read(place.name, slice(start, stop))
        half, own = rows // 2, rows // 2 // size
        found = []
        for number in range(2):
            first, last = max(start, number * own), min(stop, (number + 1) * own)
            shift = number * half + rank * own - number * own
            if first < last:
                found.append(self._weights.read(place.name, slice(first + shift, last + shift)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read_padded(self, name: str, start: int, stop: int) -> Tensor:
        """Rows, zeros where the vocabulary is padded."""
        first, last = get_bounds(slice(start, stop), self._whole[name].shape[0])
        found = self._weights.read(name, slice(first, last))
        missing = stop - start - len(found)
        if not missing:
            return found
        return torch.cat([found, found.new_zeros(missing, *found.shape[1:])])


def find_split(name: str) -> SplitKind:
    """How tensor parallelism cuts a tensor of `families/`."""
    return next((split for pattern, split in SPLITS if re.fullmatch(pattern, name)), "whole")


def choose_spec_name(local: str, name: str, layer_spec: LayerSpecKind, names: Collection[str]) -> str | None:
    """The name of `local` with a layer spec; None where the spec uses the tensor's other name.

    Args:
        local: The name on the rank.
        name: The name in `names`.
        layer_spec: The layer spec.
        names: All tensors; the norms before experts and of latents are there under both names.
    """
    if layer_spec == "local":
        for fused, separate in LOCAL_NAMES:
            if local.endswith(fused):
                return local.removesuffix(fused) + separate
        return local
    for fused, separate in LOCAL_NAMES:
        # Transformer Engine fuses the norm before a dense feed-forward, not that before experts.
        is_fused = not (fused.startswith("mlp.") and _find_neighbor(name, "mlp.router.weight") in names)
        unused, used = (separate, fused) if is_fused else (fused, separate)
        if name.endswith(unused) and name.removesuffix(unused) + used in names:
            return None
    return local


def _find_neighbor(name: str, end: str) -> str:
    """The tensor of the same layer whose name ends so."""
    match = LAYER.match(name)
    return f"{match[0]}{end}" if match else ""


def name_expert(stacked: re.Match[str], expert: int, layer_spec: LayerSpecKind) -> str:
    """The name of one expert: a separate module, or with Transformer Engine a weight of a grouped one."""
    module, projection, kind = stacked.groups()
    if layer_spec == "local":
        return f"{module}.local_experts.{expert}.{projection}.{kind}"
    return f"{module}.{projection}.{kind}{expert}"
