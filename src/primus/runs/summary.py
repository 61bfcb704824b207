"""Summarize a run in a few numbers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.runs import events
from primus.runs.store import Run, RunMetadata

WARM_UP_STEPS = 3
"""Number of warm-up steps of an attempt, which are excluded from rates."""


class RunSummary(Struct, frozen=True, kw_only=True):
    """One run, as `runs list` shows it."""

    id: str
    name: str
    state: str
    """As in metadata.json; ``died`` if the launcher ended without an outcome, ``damaged`` if it is unreadable."""
    directory: str
    created: float
    """Seconds since the epoch."""
    duration_s: float | None
    steps: int
    last_loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    """Median over the steps after warm-up."""
    rewinds: int
    checkpoints: int
    """Complete checkpoints, without those that a rewind has renamed."""
    size_bytes: int


def summarize_run(run: Run) -> RunSummary:
    """Summarize a run folder in any state, also after a crash of its writer."""
    import statistics  # imports random and fractions, which those who only flatten settings do not need

    try:
        metadata = run.read_metadata()
        state = find_run_state(run, metadata)
    except PrimusError:
        metadata = RunMetadata(
            id=run.id, name=run.directory.parent.name, task="", created=run.directory.stat().st_mtime
        )
        state = "damaged"
    recorded = list(events.read_events(run.events))
    steps = events.read_steps(run.events)
    rates = [event["tokens_per_s"] for event in steps[WARM_UP_STEPS:] if event.get("tokens_per_s")]
    evaluations = [event["loss"] for event in recorded if event["kind"] == "eval" and event.get("loss") is not None]
    return RunSummary(
        id=run.id,
        name=metadata.name,
        state=state,
        directory=str(run.directory),
        created=metadata.created,
        duration_s=_compute_duration(metadata, recorded),
        steps=steps[-1]["step"] if steps else 0,
        last_loss=next((event["loss"] for event in reversed(steps) if event.get("loss") is not None), None),
        eval_loss=evaluations[-1] if evaluations else None,
        tokens_per_s=statistics.median(rates) if rates else None,
        rewinds=sum(event["kind"] == "rewind" for event in recorded),
        checkpoints=sum("." not in found.parent.name for found in run.checkpoints.glob("step_*/manifest.json")),
        size_bytes=measure_folder_size(run.directory),
    )


def find_run_state(run: Run, metadata: RunMetadata) -> str:
    """The run's state; ``died`` if its metadata says running but no process executes it on this machine."""
    if metadata.outcome.state == "planned" and (run.directory / "submission.json").is_file():
        return "planned"  # a scheduler has it: `jobs list` shows its state
    if metadata.outcome.state in ("running", "planned") and not run.is_active():
        return "died"
    return metadata.outcome.state


def measure_folder_size(directory: Path) -> int:
    """Bytes of all files under `directory`."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # an active run may replace it at any time
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def flatten_run_settings(run: Run) -> dict[str, object]:
    """Every value of the run's configuration by flat key."""
    paths = [run.directory / "config" / name for name in ("primus_config.yaml", "model_config.yaml")]
    return flatten_settings(path.read_text(encoding="utf-8") for path in paths if path.is_file())


def flatten_settings(texts: Iterable[str]) -> dict[str, object]:
    """Every value of the resolved files of an experiment by flat key."""
    import yaml

    found: dict[str, object] = {}
    for text in texts:
        found |= _flatten_overrides(yaml.safe_load(text) or {})
    return found


def _flatten_overrides(tree: dict[str, object]) -> dict[str, object]:
    """Keys of the top level and of `overrides:`, without the levels around them."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if key == "env" and isinstance(value, dict):
            flat |= {f"env.{name}": text for name, text in value.items()}
        elif isinstance(value, dict):
            flat |= _flatten_overrides(value)
        else:
            flat[key] = value
    return flat


def _compute_duration(metadata: RunMetadata, recorded: list[events.Event]) -> float | None:
    if metadata.started is None:
        return None
    last = metadata.ended or (recorded[-1]["time"] if recorded else None)
    return last - metadata.started if last and last >= metadata.started else None
