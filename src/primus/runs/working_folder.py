"""The folder of the relative paths of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import structs

from primus.config.schema import Trainer
from primus.errors import PrimusError
from primus.runs.store import Run

TOKEN_FILES = ("train_data_path", "valid_data_path", "test_data_path")
MAYBE_ON_HUB = ("sft_data_path", "sft_valid_data_path", "tokenizer_model")
"""Settings whose words are paths, names on the hub, or weights."""
HUB = "hf:"


def find_working_folder(run: Run, workspace: str) -> Path:
    """The folder in which a run was started: the one that it recorded, if that exists; else the one of which its
    relative workspace is a part; else that of this process.

    Args:
        run: The run, which may have been moved.
        workspace: As its experiment names it.
    """
    try:
        recorded = run.read_metadata().working_folder
    except PrimusError:  # what has lost its metadata still has checkpoints
        recorded = ""
    if recorded and os.path.isdir(recorded):
        return Path(recorded)
    folder = run.directory.resolve().parents[1]
    parts = Path(os.path.normpath(workspace)).parts
    if not os.path.isabs(workspace) and ".." not in parts and folder.parts[len(folder.parts) - len(parts) :] == parts:
        return folder.parents[len(parts) - 1] if parts else folder
    return Path.cwd()


def anchor_paths(trainer: Trainer, folder: Path) -> Trainer:
    """`trainer` with its data, tokenizer and start named by absolute paths, where they are relative to `folder`."""
    data, load = trainer.data, trainer.checkpoint.load
    found: dict[str, Any] = {"data_path": str(folder / os.path.expanduser(data.data_path))}
    found |= {key: join_prefixes(given, folder) for key in TOKEN_FILES if (given := getattr(data, key))}
    found |= {key: _anchor_words(given, folder) for key in MAYBE_ON_HUB if (given := getattr(data, key))}
    if load is not None:
        prefix = HUB if load.startswith(HUB) else ""
        load = prefix + _anchor_existing(load.removeprefix(prefix), folder)
    checkpoint = structs.replace(trainer.checkpoint, load=load)
    return structs.replace(trainer, data=structs.replace(data, **found), checkpoint=checkpoint)


def join_prefixes(given: str | Iterable[str | float], folder: Path) -> list[str | float]:
    """Prefixes and weights of a setting, with relative paths below `folder`."""
    words: list[str | float] = list(given.split()) if isinstance(given, str) else list(given)
    return [_join_word(word, folder) for word in words]


def _join_word(word: str | float, folder: Path) -> str | float:
    try:
        float(word)
    except ValueError:
        return str(folder / os.path.expanduser(str(word)))
    return word


def _anchor_words(given: str | list[str | float], folder: Path) -> str | list[str | float]:
    if isinstance(given, str):
        is_one = len(given.split()) == 1 or (folder / os.path.expanduser(given)).exists()
        return _anchor_existing(given, folder) if is_one else _anchor_words(list(given.split()), folder)
    return [_anchor_existing(word, folder) if isinstance(word, str) else word for word in given]


def _anchor_existing(given: str, folder: Path) -> str:
    path = folder / os.path.expanduser(given)
    return str(path) if path.exists() else given
