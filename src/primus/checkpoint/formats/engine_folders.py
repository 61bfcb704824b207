"""DCP folders of native and torchtitan: engine names in `.metadata`, one chunk or more for each tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from primus.checkpoint import manifest
from primus.checkpoint.checksum import choose_algorithm
from primus.checkpoint.formats import dcp
from primus.checkpoint.formats.output import OutputPlan, split_rows
from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.shape import build_shape
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec

NATIVE_WEIGHT = "model."
"""Prefix of weights in checkpoints of native (primus/backends/native/state.py)."""


def plan_native(weights: WeightReader, spec: ModelSpec, step: int) -> OutputPlan:
    """A checkpoint of native with these weights, to be loaded by `load:` and `finetune: true`.

    Args:
        weights: In hub names.
        spec: The model.
        step: Optimizer steps that the weights were trained.

    Raises:
        UsageError: native cannot hold this model.
    """
    files = dcp.plan_files(list_chunks(EngineNames(weights, spec, "native"), NATIVE_WEIGHT))

    def finish(folder: Path, places: Mapping[str, Any]) -> None:
        dcp.write_metadata(folder, files, places)
        names = [dcp.METADATA_NAME, *(file.name for file in files)]
        write_converted_manifest(folder, "native", names, spec, step)

    return OutputPlan(files, finish)


def plan_torchtitan(weights: WeightReader, spec: ModelSpec) -> OutputPlan:
    """A DCP folder for torchtitan's `checkpoint.initial_load_path`, with the weights only.

    Raises:
        UsageError: torchtitan has no names for this model.
    """
    files = dcp.plan_files(list_chunks(EngineNames(weights, spec, "torchtitan")))

    def finish(folder: Path, places: Mapping[str, Any]) -> None:
        dcp.write_metadata(folder, files, places)

    return OutputPlan(files, finish)


def list_chunks(weights: WeightReader, prefix: str = "") -> Iterator[dcp.ChunkSource]:
    """Chunks of all tensors, of some rows each."""
    for name, info in weights.list_tensors().items():
        for rows in split_rows(info):
            start, stop = (rows.start, rows.stop) if rows else (0, info.shape[0] if info.shape else 0)
            offsets = (start, *(0 for _ in info.shape[1:])) if info.shape else ()
            sizes = (stop - start, *info.shape[1:]) if info.shape else ()

            def read(name: str = name, rows: slice | None = rows) -> torch.Tensor:
                return weights.read(name, rows)

            yield dcp.ChunkSource(prefix + name, info, offsets, sizes, read)


def write_converted_manifest(folder: Path, backend: str, names: list[str], spec: ModelSpec, step: int) -> None:
    """Complete a checkpoint of these files that no run wrote."""
    algorithm = choose_algorithm()
    manifest.write_manifest(
        folder,
        manifest.CheckpointManifest(
            backend=backend,
            run="",
            step=step,
            consumed_samples=0,
            model=build_shape(spec),
            data_fingerprint="",
            compiled=False,
            world_size=1,
            torch_version=str(torch.__version__),
            created=time.time(),
            algorithm=algorithm,
            files=[manifest.build_entry(folder, name, algorithm) for name in sorted(names)],
        ),
    )
