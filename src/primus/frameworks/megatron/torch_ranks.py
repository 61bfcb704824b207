"""Megatron's older format `torch`: a pickle for each tensor-, pipeline- and expert-parallel rank.

    TARGET/latest_checkpointed_iteration.txt
    TARGET/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

The tensors of a rank are below "model", in a zip file of `torch.save`. Their places in it are read from its pickle with
fake tensors, so that a tensor is read and written alone, and no rank is in memory as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from primus.checkpoint.family import list_hub_shapes, list_rules
from primus.checkpoint.formats.tensor_bytes import write_tensor
from primus.checkpoint.formats.torch_file import FileTensor, load_state_without_data, locate_tensors, read_rows
from primus.checkpoint.formats.torch_output import save_streamed
from primus.checkpoint.output import OutputFile, OutputPlan, RankGrid, split_rows
from primus.checkpoint.renaming import compute_engine_shapes
from primus.checkpoint.weights import TensorInfo, WeightReader, get_bounds
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError
from primus.frameworks.megatron.shards import (
    LOCAL_NAMES,
    STACKED_EXPERTS,
    LayerSpecKind,
    MegatronShard,
    RankLayout,
    find_split,
    name_expert,
)
from primus.frameworks.megatron.torch_dist import CHECKPOINT_VERSION, name_iteration, write_tracker

FILE_NAME = "model_optim_rng.pt"
LAYER_SPECS: tuple[LayerSpecKind, ...] = ("local", "transformer_engine")
RANK_FOLDER = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.mlp\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$")
"""The number of an expert, as a separate module or as a weight of a grouped one."""
WITHOUT_WEIGHTS = ("rotary_pos_emb.inv_freq",)
"""Ends of names of tensors that are computed from settings."""
TIED_HEAD = "output_layer.weight"
"""A copy of the embedding on the last pipeline stage, where they are tied."""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class MegatronRanks:
    """The tensors of all ranks put together, by the names of `families/`.

    Args:
        folder: Has mp_rank_00 or mp_rank_00_000.
        spec: The model.
        trust_pickle: Load pickles that may run code.

    Raises:
        PrimusError: A rank's file is missing or damaged, or its pickle is not trusted.
    """

    def __init__(self, folder: Path, spec: ModelSpec, trust_pickle: bool) -> None:
        self._ranks, self._grid = _read_ranks(folder, spec, trust_pickle)
        self._parts: dict[str, list[list[FileTensor]]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for name, shape in compute_engine_shapes(list_rules(spec, "megatron"), list_hub_shapes(spec)).items():
            parts = self._find_parts(name, shape)
            if parts is not None:
                self._parts[name] = parts
                self._tensors[name] = TensorInfo(self._compute_shape(name, parts), parts[0][0].info.dtype)
        self._check_surplus(folder, spec)

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        shape = self._tensors[name].shape
        start, stop = get_bounds(rows, shape[0])
        if STACKED_EXPERTS.fullmatch(name):
            experts = [_join_ranks(name, self._parts[name][expert]) for expert in range(start, stop)]
            return torch.stack(experts) if experts else torch.empty((0, *shape[1:]))
        return _join_rows(name, self._parts[name][0], start, stop)

    def _check_surplus(self, folder: Path, spec: ModelSpec) -> None:
        """Every tensor of the ranks is one of the model."""
        used = {id(part) for parts in self._parts.values() for part in parts}
        known = WITHOUT_WEIGHTS if spec.untie_embeddings_and_output_weights else (*WITHOUT_WEIGHTS, TIED_HEAD)
        surplus = sorted(
            name for name, part in self._ranks.items() if id(part) not in used and not name.endswith(known)
        )
        if surplus:
            raise PrimusError(
                f"{folder}: {len(surplus)} tensors are not part of the model, among them {surplus[0]}",
                "check that it is of this model",
            )

    def _find_parts(self, name: str, shape: tuple[int, ...]) -> list[list[FileTensor]] | None:
        """The tensors of all tensor ranks, for each expert of a stack; None if the ranks do not have this name."""
        names = [name]
        stacked = STACKED_EXPERTS.fullmatch(name)
        if stacked:
            for kind in LAYER_SPECS:
                experts = [self._ranks.get(name_expert(stacked, expert, kind)) for expert in range(shape[0])]
                if all(experts):
                    return [expert for expert in experts if expert]
            return None
        names += [name.removesuffix(fused) + local for fused, local in LOCAL_NAMES if name.endswith(fused)]
        found = next((self._ranks[each] for each in names if each in self._ranks), None)
        return None if found is None else [found]

    def _compute_shape(self, name: str, parts: list[list[FileTensor]]) -> tuple[int, ...]:
        one, count = parts[0][0].info.shape, len(parts[0])
        split = find_split(name)
        if split == "columns":
            one = (one[0], one[1] * count)
        elif split != "whole":
            one = (one[0] * count, *one[1:])
        return (len(parts), *one) if STACKED_EXPERTS.fullmatch(name) else one


def _join_ranks(name: str, ranks: list[FileTensor]) -> Tensor:
    return _join_rows(name, ranks, 0, sum(rank.info.shape[0] for rank in ranks))


def _join_rows(name: str, ranks: list[FileTensor], start: int, stop: int) -> Tensor:
    """Rows of a tensor that is cut over tensor ranks."""
    split = find_split(name)
    if split == "whole" or len(ranks) == 1:
        return read_rows(ranks[0], slice(start, min(stop, ranks[0].info.shape[0])))
    if split == "columns":
        return torch.cat([read_rows(rank, slice(start, min(stop, rank.info.shape[0]))) for rank in ranks], 1)
    # Each rank has one piece of the rows, or with gates one piece of each half.
    pieces = 2 if split == "gated_rows" else 1
    size = ranks[0].info.shape[0] // pieces
    found = []
    for number in range(start // size, -(-stop // size)):
        half, rank = divmod(number, len(ranks))
        first, last = max(start, number * size), min(stop, (number + 1) * size)
        shift = half * size - number * size
        found.append(read_rows(ranks[rank], slice(first + shift, last + shift)))
    return torch.cat(found) if found else read_rows(ranks[0], slice(0, 0))


def _read_ranks(folder: Path, spec: ModelSpec, trust_pickle: bool) -> tuple[dict[str, list[FileTensor]], RankGrid]:
    """Tensors of all tensor ranks by name, with layers and experts counted over all ranks."""
    files = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = RANK_FOLDER.fullmatch(path.name)
        if match and (path / FILE_NAME).is_file():
            second, third = match[2], match[3]
            # With one stage the second number is the expert rank (megatron/training/checkpointing.py).
            files[int(match[1]), int(second or 0), int(third or 0)] = path / FILE_NAME
    if not files:
        raise PrimusError(f"{folder}: no rank has {FILE_NAME}", "give the folder with mp_rank_00")
    sizes = [max(rank[axis] for rank in files) + 1 for axis in range(3)]
    states = {rank: _read_state(file, trust_pickle) for rank, file in files.items()}
    if sizes[2] == 1 and sizes[1] > 1 and _has_all_layers(states[0, 0, 0], spec):
        # Expert ranks, not stages.
        states = {(t, 0, e): state for (t, e, _), state in states.items()}
        sizes = [sizes[0], 1, sizes[1]]
    grid = RankGrid(*sizes)
    expected = grid.tensor * grid.pipeline * grid.expert
    if len(states) != expected:
        raise PrimusError(f"{folder}: {len(states)} of {expected} ranks are there", "copy the checkpoint again")
    joined: dict[str, list[FileTensor]] = {}
    first_layer = 0
    for stage in range(grid.pipeline):
        layers = 0
        for expert in range(grid.expert):
            for rank in range(grid.tensor):
                state = states[rank, stage, expert]
                layers = max(layers, 1 + max((_parse_layer(name) for name in state), default=-1))
                count = 1 + max((_parse_expert(name) for name in state), default=-1)
                for name, tensor in state.items():
                    whole = _rename_globally(name, first_layer, expert * count)
                    held = joined.setdefault(whole, [])
                    if len(held) == rank:
                        held.append(tensor)
        first_layer += layers
    return joined, grid


def _has_all_layers(state: Mapping[str, FileTensor], spec: ModelSpec) -> bool:
    return len({_parse_layer(name) for name in state} - {-1}) == spec.num_layers


def _parse_layer(name: str) -> int:
    match = LAYER.match(name)
    return int(match[1]) if match else -1


def _rename_globally(name: str, first_layer: int, first_expert: int) -> str:
    name = LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    match = EXPERT.search(name)
    if match is None:
        return name
    start, end = match.span(match.lastindex or 0)
    return f"{name[:start]}{_parse_expert(name) + first_expert}{name[end:]}"


def _parse_expert(name: str) -> int:
    match = EXPERT.search(name)
    return int(match[match.lastindex or 0]) if match else -1


def _read_state(file: Path, trust_pickle: bool) -> dict[str, FileTensor]:
    """Places of the tensors below "model"."""
    state = load_state_without_data(file, trust_pickle)
    if not isinstance(state, dict):
        raise PrimusError(f"{file}: not a checkpoint of Megatron")
    if "model" not in state:
        kind = "virtual pipeline stages" if "model0" in state else "no model"
        raise PrimusError(f"{file}: has {kind}", "save it again without them, or as torch_dist")
    tensors = {name: each for name, each in state["model"].items() if not name.endswith("_extra_state")}
    return locate_tensors(tensors, file)


# Writing


def plan_ranks(weights: WeightReader, spec: ModelSpec, step: int | None, grid: RankGrid) -> OutputPlan:
    """A folder in the format `torch` with the names of Transformer Engine, for a parallel layout.

    Raises:
        UsageError: The model cannot be cut like this.
    """
    if spec.num_layers % grid.pipeline:
        raise UsageError(f"--pp {grid.pipeline} does not divide {spec.num_layers} layers", "choose a divisor")
    if grid.expert > 1 and not spec.num_experts:
        raise UsageError(f"--ep {grid.expert}: this model has no experts", "leave --ep out")
    if spec.num_experts and spec.num_experts % grid.expert:
        raise UsageError(f"--ep {grid.expert} does not divide {spec.num_experts} experts", "choose a divisor")
    files = []
    for stage in range(grid.pipeline):
        for expert in range(grid.expert):
            for rank in range(grid.tensor):
                shard = MegatronShard(weights, spec, _lay_out(spec, grid, rank, stage, expert), "transformer_engine")
                total = sum(info.num_bytes for info in shard.list_tensors().values())
                name = f"{name_iteration(step)}/{_name_rank(grid, rank, stage, expert)}/{FILE_NAME}"
                files.append(OutputFile(name, total, _RankWriter(shard, step)))

    def finish(folder: Path, _: Mapping[str, Any]) -> None:
        write_tracker(folder, step)

    return OutputPlan(files, finish)


def _lay_out(spec: ModelSpec, grid: RankGrid, rank: int, stage: int, expert: int) -> RankLayout:
    layers = spec.num_layers // grid.pipeline
    experts = (spec.num_experts or 0) // grid.expert
    return RankLayout(
        tensor_rank=rank,
        tensor_size=grid.tensor,
        first_layer=stage * layers,
        num_layers=layers,
        is_first_stage=stage == 0,
        is_last_stage=stage == grid.pipeline - 1,
        first_expert=expert * experts,
        num_experts=experts or None,
    )


def _name_rank(grid: RankGrid, rank: int, stage: int, expert: int) -> str:
    """The folder of a rank (megatron/training/checkpointing.py, get_checkpoint_name)."""
    name = f"mp_rank_{rank:02d}"
    if grid.pipeline > 1:
        name += f"_{stage:03d}"
    return name + (f"_{expert:03d}" if grid.expert > 1 else "")


class _RankWriter:
    """Writes a rank's file, one tensor after the other."""

    def __init__(self, shard: MegatronShard, step: int | None) -> None:
        self._shard, self._step = shard, step

    def __call__(self, file: BinaryIO, report: Callable[[int], None]) -> None:
        tensors = self._shard.list_tensors()
        names = list(tensors)
        empty = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in tensors.items()}

        def write_elements(index: int) -> None:
            name, info = names[index], tensors[names[index]]
            for rows in split_rows(info, borders=self._shard.list_borders(name)):
                report(write_tensor(file, self._shard.read(name, rows).to(info.dtype)))

        content = {"model": empty, "iteration": self._step or 0, "checkpoint_version": CHECKPOINT_VERSION}
        save_streamed(content, list(empty.values()), file, write_elements)
