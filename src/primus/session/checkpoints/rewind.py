"""Rewinds of a run: which data they skip, and which checkpoints they invalidate.

A rewind takes a run back to a good checkpoint and continues with the data after the bad steps, as the authors of PaLM
did by hand (arXiv 2204.02311, section 5.1). `rewinds.json` in the run folder is written before anything else changes:
an attempt can be killed at any moment, and the next one skips the same data and renames the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from primus.checkpoint import folders, manifest
from primus.errors import PrimusError
from primus.runs.files import read_json, write_json
from primus.runs.store import Run
from primus.session.ranks.processes import Processes

REWINDS_FILE = "rewinds.json"


class Rewind(Struct, frozen=True, kw_only=True):
    """One rewind; data is counted in samples since the beginning of the run."""

    time: float
    """Seconds since the epoch."""
    from_step: int
    """Last step before the rewind."""
    first_bad_step: int
    to_step: int
    """Step of the checkpoint; 0 for the initial weights."""
    first_sample: int
    """First sample that is skipped: the position of the checkpoint."""
    end_sample: int
    """First sample after those that are skipped."""
    reason: str

    @property
    def skipped_samples(self) -> int:
        return self.end_sample - self.first_sample


def read_rewinds(run: Run) -> list[Rewind]:
    """The rewinds of a run so far, oldest first.

    Raises:
        PrimusError: Their file is damaged.
    """
    path = run.directory / REWINDS_FILE
    return read_json(path, list[Rewind]) if path.exists() else []


def write_rewinds(run: Run, rewinds: Sequence[Rewind]) -> None:
    """Replace the file of a run's rewinds."""
    write_json(run.directory / REWINDS_FILE, rewinds)


def find_next_sample(consumed_samples: int, rewinds: Sequence[Rewind]) -> int:
    """The first sample from `consumed_samples` on that no rewind skips."""
    for rewind in rewinds:
        if rewind.first_sample <= consumed_samples < rewind.end_sample:
            # Rewinds may overlap or touch: continue until no rewind has the sample.
            return find_next_sample(rewind.end_sample, rewinds)
    return consumed_samples


def is_undone(consumed_samples: int, rewinds: Sequence[Rewind]) -> bool:
    """Whether a rewind has undone the state that had consumed so many samples.

    The state at the checkpoint itself (`first_sample`) is good; the one at the end of the skipped data is not.
    """
    return any(rewind.first_sample < consumed_samples <= rewind.end_sample for rewind in rewinds)


def set_aside_undone(folder: Path, run: Run, rewinds: Sequence[Rewind]) -> list[str]:
    """Rename the checkpoints of a run that a rewind has undone, so that nothing resumes from them."""
    if not rewinds:
        return []
    return [
        _rename_checkpoint(checkpoint)
        for checkpoint in folders.list_checkpoints(folder)
        if (found := _read_manifest(checkpoint)) and found.run == run.id and is_undone(found.consumed_samples, rewinds)
    ]


def set_aside_from(folder: Path, first_bad_step: int) -> list[str]:
    """Rename the checkpoints of bad steps."""
    bad = [found for found in folders.list_checkpoints(folder) if folders.parse_step(found) >= first_bad_step]
    return [_rename_checkpoint(checkpoint) for checkpoint in bad if folders.is_complete(checkpoint)]


def set_aside(
    processes: Processes, rename: Callable[[], list[str]], say: Callable[[str], None], event: Callable[..., None]
) -> None:
    """Have the first process rename checkpoints, print and record it; the others wait until it is done.

    Raises:
        PrimusError: A checkpoint could not be renamed.
    """
    names, problem = processes.broadcast_from_first(_try_renames(rename) if processes.is_first else None)
    for name in names:
        say(f"checkpoint {name.partition('.')[0]} contains bad steps: renamed to {name}")
        event("checkpoint_set_aside", name=name)
    # After the broadcast, so that all processes raise.
    if problem:
        raise PrimusError(f"checkpoints of bad steps could not be renamed: {problem}", "rename or delete them")


def _try_renames(rename: Callable[[], list[str]]) -> tuple[list[str], str]:
    try:
        return rename(), ""
    except OSError as error:
        return [], error.strerror or str(error)


def _read_manifest(checkpoint: Path) -> manifest.CheckpointManifest | None:
    try:
        return manifest.read_manifest(checkpoint)
    except PrimusError:  # damaged: it is skipped anyway
        return None


def _rename_checkpoint(checkpoint: Path) -> str:
    """Rename a checkpoint to a name that no search finds, and that `load:` accepts; returns the new name."""
    # Rename, do not delete: a rewind that was a mistake can be undone by hand with `load:`.
    number = 1
    while (target := checkpoint.with_name(f"{checkpoint.name}.set_aside_{number}")).exists():
        number += 1
    checkpoint.rename(target)
    return target.name
