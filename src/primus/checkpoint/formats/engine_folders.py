"""DCP folders of native and torchtitan: engine names in `.metadata`, one chunk or more for each tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from primus.checkpoint import manifest
from primus.checkpoint.checksum import choose_algorithm
from primus.checkpoint.conversion import JOURNAL, LOCK
from primus.checkpoint.formats import dcp_output
from primus.checkpoint.formats.open import MODEL_FILE, TOKENIZER_FOLDER
from primus.checkpoint.formats.output import OutputFile, OutputPlan, split_rows
from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.shape import build_shape
from primus.checkpoint.training_state import SavedPosition, TrainingState
from primus.checkpoint.weights import TensorDict, WeightReader
from primus.config.schema import ModelSpec

NATIVE_WEIGHT = "model."
"""Prefix of weights in checkpoints of native (primus/frameworks/native/engine/state.py)."""
NATIVE_STEPS = "optimizer.step"
TITAN_STATE = "optimizer.state."
"""Prefix of the optimizer's tensors in checkpoints of torchtitan."""


def plan_native(weights: WeightReader, spec: ModelSpec, step: int, training: TrainingState | None = None) -> OutputPlan:
    """A checkpoint of native for `load:`; with `finetune: true` if it has no state of the optimizer.

    Args:
        weights: In hub names.
        spec: The model.
        step: Optimizer steps that the weights were trained.
        training: The state of the optimizer.

    Raises:
        UsageError: native cannot hold this model.
    """
    chunks = list_chunks(EngineNames(weights, spec, "native"), NATIVE_WEIGHT + "{}")
    if training is not None:
        steps = TensorDict({NATIVE_STEPS: torch.tensor(training.num_updates)})
        moments = [
            list_chunks(EngineNames(source, spec, "native", trained_only=True), f"optimizer.{moment}.{{}}")
            for moment, source in training.moments.items()
        ]
        chunks = chain(chunks, *moments, list_chunks(steps))
    position = training.position if training else SavedPosition(step, 0)
    return _plan_folder(dcp_output.plan_files(chunks), "native", spec, position)


def plan_torchtitan(weights: WeightReader, spec: ModelSpec, training: TrainingState | None = None) -> OutputPlan:
    """A DCP folder for torchtitan's `checkpoint.initial_load_path`.

    Raises:
        UsageError: torchtitan has no names for this model.
    """
    if training is None:
        return _plan_folder(dcp_output.plan_files(list_chunks(EngineNames(weights, spec, "torchtitan"))))
    moments = {
        moment: EngineNames(source, spec, "torchtitan", trained_only=True)
        for moment, source in training.moments.items()
    }
    parameters = moments["exp_avg"].list_tensors()
    steps = TensorDict({f"{name}.step": torch.tensor(training.num_updates) for name in parameters})
    chunks = chain(
        list_chunks(EngineNames(weights, spec, "torchtitan")),
        list_chunks(steps, TITAN_STATE + "{}"),
        *(list_chunks(named, f"{TITAN_STATE}{{}}.{moment}") for moment, named in moments.items()),
    )
    values = _list_titan_values({name: len(info.shape) for name, info in parameters.items()}, training)
    return _plan_folder(dcp_output.plan_files(chunks, values=values), "torchtitan", spec, training.position)


def _list_titan_values(num_axes: Mapping[str, int], training: TrainingState) -> dict[str, Any]:
    """What torchtitan saves besides tensors (torchtitan/components/optimizer/utils.py, get_flat_optim_state_dict)."""
    settings, step = training.settings, training.position.step
    values: dict[str, Any] = {"train_state.step": step, "train_state.ntokens_seen": 0, "lr_scheduler.last_epoch": step}
    for name, axes in num_axes.items():
        group = {
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay if axes > 1 else 0.0,
            "decoupled_weight_decay": True,
            "fused": True,
            "foreach": False,
            "amsgrad": False,
            "maximize": False,
            "capturable": False,
            "differentiable": False,
            "initial_lr": settings.lr,
        }
        values |= {f"optimizer.param_groups.{name}.{key}": value for key, value in group.items()}
    return values


def _plan_folder(
    files: list[OutputFile], backend: str | None = None, spec: ModelSpec | None = None, position: Any = None
) -> OutputPlan:
    """A folder of these files, with a manifest for a backend that continues from it."""

    def finish(folder: Path, records: Mapping[str, dcp_output.FileContent]) -> None:
        dcp_output.write_metadata(folder, files, records)
        if backend is not None and spec is not None:
            write_converted_manifest(folder, backend, records, spec, position)

    return OutputPlan(files, finish)


def list_chunks(weights: WeightReader, pattern: str = "{}") -> Iterator[dcp_output.ChunkSource]:
    """Chunks of all tensors, of some rows each, under the names that `pattern` makes of theirs."""
    for name, info in weights.list_tensors().items():
        for rows in split_rows(info, borders=weights.list_borders(name) if isinstance(weights, EngineNames) else ()):
            start, stop = (rows.start, rows.stop) if rows else (0, info.shape[0] if info.shape else 0)
            offsets = (start, *(0 for _ in info.shape[1:])) if info.shape else ()
            sizes = (stop - start, *info.shape[1:]) if info.shape else ()

            def read(name: str = name, rows: slice | None = rows) -> torch.Tensor:
                return weights.read(name, rows)

            yield dcp_output.ChunkSource(pattern.format(name), info, offsets, sizes, read)


def write_converted_manifest(
    folder: Path,
    backend: str,
    records: Mapping[str, dcp_output.FileContent],
    spec: ModelSpec,
    position: SavedPosition,
) -> None:
    """Complete a checkpoint that no run wrote; large files have the checksums of their records."""
    algorithm = choose_algorithm()
    checksums = {Path(name).name: record["checksum"] for name, record in records.items()}
    files = [
        manifest.FileEntry(name=path.name, bytes=path.stat().st_size, checksum=checksums[path.name])
        if path.name in checksums
        else manifest.build_entry(folder, path.name, algorithm)
        for path in sorted(folder.iterdir())
        if path.name not in (MODEL_FILE, TOKENIZER_FOLDER, JOURNAL, LOCK)
    ]
    manifest.write_manifest(
        folder,
        manifest.CheckpointManifest(
            backend=backend,
            run=position.run,
            step=position.step,
            consumed_samples=position.consumed_samples or 0,
            recent_losses=list(position.recent_losses),
            callbacks=dict(position.callbacks),
            model=build_shape(spec),
            data_fingerprint=position.data_fingerprint,
            compiled=False,
            world_size=1,
            torch_version=str(torch.__version__),
            created=time.time(),
            algorithm=algorithm,
            files=files,
        ),
    )
