"""Megatron's `torch_dist` format: a DCP folder with Megatron's names, whose layers are stacked where they are alike.

    TARGET/latest_checkpointed_iteration.txt      a number, or "release" for weights without a step
    TARGET/iter_0000100/ or TARGET/release/       .metadata, *.distcp, common.pt, metadata.json

Tensors are whole in the files, so that ranks of any layout load them. Layers of one kind are stacked: the first axis of
`decoder.layers.mlp.linear_fc1.weight` is the layer. With dense layers before experts, each layer has its own name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from primus.checkpoint.formats import dcp_output
from primus.checkpoint.formats.dcp import DcpFolder
from primus.checkpoint.formats.dcp_folder import write_converted_manifest
from primus.checkpoint.output import OutputPlan, split_rows
from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.training_state import TrainingState
from primus.checkpoint.views import CastWeights, PrefixedWeights
from primus.checkpoint.weights import TensorInfo, WeightReader, get_bounds
from primus.config.schema import ModelSpec
from primus.models import counts

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
FORMAT_FILE = "metadata.json"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of metadata.json (megatron/core/dist_checkpointing/core.py, CheckpointingConfig)."""
CHECKPOINT_VERSION = 3.0
"""Order of the rows of linear_qkv (megatron/training/checkpointing.py, fix_query_key_value_ordering)."""

SHARDING_TYPE = "fully_reshardable"
"""Form of the distributed optimizer's state in which it is saved by weight."""

STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.+)")
LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")


class MegatronLayers:
    """The tensors of a folder with a name for each layer, stacked in the files or not.

    Args:
        folder: Has `.metadata`.
        prefix: Of the tensors' names in the files, without which they are listed.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder = DcpFolder(folder)
        self._prefix = prefix
        self._tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for name, info in PrefixedWeights(self._folder, prefix).list_tensors().items():
            stacked = STACKED.fullmatch(name)
            if stacked is None:
                self._tensors[name] = info
                continue
            for layer in range(info.shape[0]):
                single = f"{stacked[1]}{layer}.{stacked[2]}"
                self._tensors[single] = info._replace(shape=info.shape[1:])
                self._places[single] = prefix + name, layer

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        if name not in self._places:
            return self._folder.read(self._prefix + name, rows)
        stacked, layer = self._places[name]
        shape = self._tensors[name].shape
        start, stop = get_bounds(rows, shape[0])
        rest = shape[1:]
        return self._folder.read_box(stacked, (layer, start, *(0 for _ in rest)), (1, stop - start, *rest))[0]


def name_iteration(step: int | None) -> str:
    """The folder of a step (megatron/training/checkpointing.py, get_checkpoint_name)."""
    return f"iter_{step:07d}" if step else "release"


def plan_torch_dist(
    weights: WeightReader, spec: ModelSpec, step: int | None, training: TrainingState | None = None
) -> OutputPlan:
    """A folder in `torch_dist` for Megatron's `--load`; without a state of the optimizer by `--finetune`.

    Raises:
        UsageError: Megatron has no names for this model.
    """
    step = training.position.step if training else step
    iteration = name_iteration(step)
    chunks = list_chunks(EngineNames(weights, spec, "megatron"), spec)
    if training is not None:
        chunks = chain(chunks, _list_state_chunks(weights, spec, training))
    files = dcp_output.plan_files(chunks, f"{iteration}/")

    def finish(folder: Path, records: Mapping[str, dcp_output.FileContent]) -> None:
        inner = folder / iteration
        dcp_output.write_metadata(inner, files, records)
        common = {"iteration": step or 0, "checkpoint_version": CHECKPOINT_VERSION}
        torch.save(common | (_build_common_state(spec, training) if training else {}), inner / COMMON)
        (inner / FORMAT_FILE).write_text(json.dumps(FORMAT), encoding="utf-8")
        if training is not None:
            write_converted_manifest(inner, "megatron", records, spec, training.position)
        write_tracker(folder, step)

    return OutputPlan(files, finish)


def _list_state_chunks(
    weights: WeightReader, spec: ModelSpec, training: TrainingState
) -> Iterator[dcp_output.ChunkSource]:
    """The moments, and the float32 weights that the distributed optimizer keeps."""
    masters = CastWeights(training.masters or weights, torch.float32)
    for kind, source in {"param": masters, **training.moments}.items():
        named = EngineNames(source, spec, "megatron", trained_only=True)
        yield from list_chunks(named, spec, f"optimizer.state.{kind}.")


def _build_common_state(spec: ModelSpec, training: TrainingState) -> dict[str, object]:
    """The optimizer's part of common.pt (megatron/core/optimizer/distrib_optimizer.py, state_dict)."""
    settings = training.settings
    shared = {
        "lr": settings.lr,
        "max_lr": settings.lr,
        "min_lr": None,
        "betas": settings.betas,
        "eps": settings.eps,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "default_config": True,
        # Identify a group, with wd_mult and is_expert_parallel (optimizer.py, param_group_identifier_keys).
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "step": training.num_updates,
    }
    groups = [
        shared | {"wd_mult": decays, "weight_decay": settings.weight_decay * decays, "is_expert_parallel": is_expert}
        for is_expert in ((False, True) if spec.num_experts else (False,))
        for decays in (1.0, 0.0)
    ]
    state = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING_TYPE}
    return {
        # Experts have an optimizer of their own.
        "optimizer": {0: state, 1: state} if spec.num_experts else state,
        "layout": {"use_distributed_optimizer": True},
        "content_metadata": {
            "distrib_optim_sharding_type": SHARDING_TYPE,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }


def write_tracker(folder: Path, step: int | None) -> None:
    """Name the iteration that Megatron loads."""
    (folder / TRACKER).write_text(f"{step or 'release'}\n", encoding="utf-8")


def list_chunks(weights: EngineNames, spec: ModelSpec, prefix: str = "") -> Iterator[dcp_output.ChunkSource]:
    """Chunks of all tensors; a chunk of a stack is some rows of one layer. `prefix` begins their names."""
    kinds = {layer.moe for layer in counts.list_layers(spec)}
    # A stack has a type that holds the values of all layers.
    dtypes: dict[str, torch.dtype] = {}
    for name, info in weights.list_tensors().items():
        stacked = LAYER.sub(r"\1\3", name)
        dtypes[stacked] = torch.promote_types(dtypes.get(stacked, info.dtype), info.dtype)
    for name, info in weights.list_tensors().items():
        layer = LAYER.fullmatch(name)
        is_stacked = layer is not None and len(kinds) == 1
        whole = info
        if layer and is_stacked:
            whole = TensorInfo((spec.num_layers, *info.shape), dtypes[layer[1] + layer[3]])
        first = (int(layer[2]),) if layer and is_stacked else ()
        for rows in split_rows(info, borders=weights.list_borders(name)):
            start, stop = (rows.start, rows.stop) if rows else (0, info.shape[0])

            def read(name: str = name, rows: slice | None = rows, is_stacked: bool = is_stacked) -> Tensor:
                tensor = weights.read(name, rows)
                return tensor.unsqueeze(0) if is_stacked else tensor

            yield dcp_output.ChunkSource(
                prefix + (layer[1] + layer[3] if layer and is_stacked else name),
                whole,
                (*first, start, *(0 for _ in info.shape[1:])),
                (*(1 for _ in first), stop - start, *info.shape[1:]),
                read,
            )
