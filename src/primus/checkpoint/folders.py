"""Folders of checkpoints: `step_00000100/` each, complete when it has a manifest."""

from __future__ import annotations

import os
import re
from pathlib import Path

from primus.checkpoint import manifest as manifests
from primus.errors import UsageError

FOREIGN_FILES = (
    *(".metadata", "config.json", "*.safetensors", "mp_rank_00*"),
    *("latest_checkpointed_iteration.txt", "step-*/.metadata", "iter_*"),
)
"""By which folders of Hugging Face, torchtitan and Megatron-LM are known."""
STEP = re.compile(r"step_(\d{8,})")
HUB_PREFIX = "hf:"
"""Begins the name of a model of the Hugging Face Hub where a folder may be named."""
ADAPTER_FOLDER, ADAPTER_CONFIG = "adapter", "adapter_config.json"
"""Of an adapter, and the folder for it in a checkpoint."""
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest iteration in a folder of Megatron-LM (megatron/training/checkpointing.py)."""


def name_step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step_{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder` by step, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    found = [entry for entry in folder.iterdir() if STEP.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=parse_step)


def parse_step(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = STEP.fullmatch(checkpoint.name)
    assert match
    return int(match[1])


def is_complete(checkpoint: Path) -> bool:
    """Whether it was written completely; its files may have been damaged since."""
    return (checkpoint / manifests.MANIFEST_NAME).is_file()


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first, so that an interrupted deletion leaves an incomplete checkpoint.

    Raises:
        OSError: A file cannot be deleted.
    """
    import shutil  # loads libraries of compression, which a launch needs as little as it deletes checkpoints

    # Without its manifest the checkpoint does not count, whatever is left when this is interrupted.
    (checkpoint / manifests.MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints, and incomplete ones older than the newest.

    Returns:
        The deleted folders.
    """
    # Called by the first process only, after a manifest was written.
    complete = [checkpoint for checkpoint in list_checkpoints(folder) if is_complete(checkpoint)]
    if not complete:
        return []
    # Newer incomplete ones may still be written.
    kept, newest = set(complete[-keep:]), parse_step(complete[-1])
    surplus = [found for found in list_checkpoints(folder) if found not in kept and parse_step(found) < newest]
    for checkpoint in surplus:
        remove_checkpoint(checkpoint)
    return surplus


def is_foreign(given: str) -> bool:
    """Whether `load:` names weights of another tool, which have no manifest; reads no tensors.

    Those are `hf:NAME_OR_PATH`, a file or folder of safetensors, and the folders of torchtitan and Megatron-LM.
    """
    path = Path(os.path.expanduser(given))
    if given.startswith("hf:") or path.suffix == ".safetensors":
        return True
    if not path.is_dir() or is_complete(path) or list_checkpoints(path) or list_checkpoints(path / "checkpoints"):
        return False
    tracked = find_tracked_iteration(path)
    if tracked is not None and is_complete(tracked):
        return False
    return any(next(path.glob(pattern), None) for pattern in FOREIGN_FILES)


def find_tracked_iteration(folder: Path) -> Path | None:
    """The iteration that a folder of Megatron names as its newest, there or not; None if it names none."""
    try:
        text = (folder / MEGATRON_TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return folder / (f"iter_{int(text):07d}" if text.isdecimal() else Path(text).name)


def find_candidates(given: str) -> list[Path]:
    """The complete checkpoints that `load:` names, newest first.

    Args:
        given: A checkpoint, a folder of checkpoints, or a run folder.

    Raises:
        UsageError: It names no complete checkpoint.
    """
    path = Path(os.path.expanduser(given))
    # A checkpoint may have any name here, also that of a renamed one after a rewind.
    if is_complete(path):
        return [path]
    if not path.is_dir():
        raise UsageError(f"load: no folder {path}", "give a checkpoint, a folder of checkpoints or a run folder")
    tracked = find_tracked_iteration(path)
    if tracked is not None and is_complete(tracked):
        return [tracked]
    if STEP.fullmatch(path.name):
        raise UsageError(f"load: {path} is not complete: it has no {manifests.MANIFEST_NAME}", _format_others(path))
    found = [found for found in list_checkpoints(path) + list_checkpoints(path / "checkpoints") if is_complete(found)]
    if not found:
        raise UsageError(
            f"load: no complete checkpoint in {path}",
            f"a checkpoint is a folder like step_00000100 with a {manifests.MANIFEST_NAME}",
        )
    return sorted(found, key=parse_step, reverse=True)


def _format_others(checkpoint: Path) -> str:
    complete = [found.name for found in list_checkpoints(checkpoint.parent) if is_complete(found)]
    return f"complete ones there: {', '.join(complete[-5:])}" if complete else "its writer was interrupted"
