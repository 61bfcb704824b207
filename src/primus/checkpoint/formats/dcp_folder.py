"""Plan folders of torch.distributed.checkpoint: names in `.metadata`, one chunk or more for each tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from primus.checkpoint import manifest
from primus.checkpoint.checksum import choose_algorithm
from primus.checkpoint.formats import dcp_output
from primus.checkpoint.formats.open import MODEL_FILE, TOKENIZER_FOLDER
from primus.checkpoint.output import JOURNAL, LOCK, OutputFile, OutputPlan, split_rows
from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.shape import build_shape
from primus.checkpoint.training_state import SavedPosition
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec


def plan_folder(
    files: list[OutputFile],
    backend: str | None = None,
    spec: ModelSpec | None = None,
    position: SavedPosition | None = None,
) -> OutputPlan:
    """A folder of these files, with a manifest for a framework that continues from it."""

    def finish(folder: Path, records: Mapping[str, dcp_output.FileContent]) -> None:
        dcp_output.write_metadata(folder, files, records)
        if backend is not None and spec is not None and position is not None:
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
