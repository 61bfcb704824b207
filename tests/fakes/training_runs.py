"""Run folders of the model `tiny` as the launcher leaves them to workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from primus.runs.files import write_json, write_text
from primus.runs.store import Run
from primus.runtime import LaunchRequest


def write_training_run(
    folder: Path,
    defaults: Mapping[str, Any],
    name: str = "run",
    framework: str = "native",
    stage: str = "pre_trainer",
    **settings: Any,
) -> Run:
    """The run `name` below `folder`; `settings` win over `defaults`."""
    run = Run(folder / name)
    module = {"framework": framework, "model": "tiny", "overrides": {**defaults, **settings}}
    written = {"exp_name": "test", "workspace": str(folder), "modules": {stage: module}}
    write_text(run.config, yaml.safe_dump(written))
    write_json(run.directory / "request.json", LaunchRequest(runtimes=(), task="train pretrain"))
    return run
