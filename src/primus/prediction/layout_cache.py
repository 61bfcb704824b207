"""Layouts that were checked before: whether one runs and fits, by the settings that decide it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import structs

from primus import __version__
from primus.config.load import Resolved
from primus.config.schema import CheckpointConfig, DataConfig, LoggingConfig, Trainer
from primus.errors import UsageError
from primus.prediction.fake_ranks import ALL_KINDS
from primus.prediction.layout_machine import LayoutMachine
from primus.prediction.layout_run import execute_layout
from primus.prediction.layout_verdict import GIB
from primus.runs.files import write_text

DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "sft_data_path", "packed_sequence")
"""Settings of the data that change operators."""


def check_layout(resolved: Resolved, machine: LayoutMachine, environ: Mapping[str, str]) -> str:
    """What was found, in one line; a layout that was accepted before is not executed again.

    Raises:
        UsageError: The layout cannot run, or a rank does not fit the memory of its device.
    """
    path = _find_file(resolved, machine, environ)
    if path.is_file():
        return f"{path.read_text(encoding='utf-8').strip()}, as checked before"
    report = execute_layout(resolved, machine, ALL_KINDS, environ)
    worst = max(report.fit, key=lambda each: each.needed_bytes, default=None)
    if worst is not None and not worst.fits:
        raise UsageError(
            f"rank {worst.rank} of {report.world_size} needs {worst.needed_bytes / GIB:.1f} GiB, its {report.machine}"
            f" has {worst.device_bytes / GIB:.1f} GiB",
            "analyze layout shows where it goes; recompute_activations: true, a smaller micro_batch_size or larger"
            " model-parallel sizes need less",
        )
    found = f"runs on {report.world_size} ranks"
    if worst is not None:
        found += f" and fits: {worst.needed_bytes / GIB:.1f} of {worst.device_bytes / GIB:.1f} GiB at most"
    write_text(path, f"{found}\n")
    return found


def _find_file(resolved: Resolved, machine: LayoutMachine, environ: Mapping[str, str]) -> Path:
    trainer = resolved.experiment.trainer
    data = DataConfig(**{name: getattr(trainer.data, name) for name in DOCUMENTS})
    matters: Trainer = structs.replace(trainer, data=data, checkpoint=CheckpointConfig(), logging=LoggingConfig())
    key = (matters, machine.name, machine.nnodes, machine.devices_per_node, machine.device_bytes, __version__)
    digest = hashlib.sha256(msgspec.json.encode(key, order="deterministic")).hexdigest()[:24]
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/tmp", ".cache")  # noqa: S108
    return Path(cache) / "primus" / "layouts" / digest
