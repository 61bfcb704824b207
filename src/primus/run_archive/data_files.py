"""The data, tokenizer and initial weights of a run, as an archive holds them, and the settings that then name them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from primus.checkpoint import folders, manifest
from primus.config.schema import DataConfig, Trainer
from primus.config.token_files import parse_weighted_prefixes, parse_weighted_sources
from primus.data.prepare import named_dataset
from primus.errors import PrimusError, UsageError
from primus.run_archive.local_paths import IMPORTED_DATA
from primus.run_archive.manifest import DATA, RUN
from primus.runs.store import Run
from primus.runs.working_folder import TOKEN_FILES, join_prefixes

EXAMPLES = ("sft_data_path", "sft_valid_data_path")


class AddedFiles(Struct, frozen=True):
    """Files that an archive gets besides those of the run folder."""

    files: dict[str, Path]
    """Source by name in the archive."""
    settings: dict[str, object]
    """Values of settings that name them where they are imported."""


def collect_data(trainer: Trainer, working_folder: Path) -> AddedFiles:
    """The data and the tokenizer of a run.

    Args:
        trainer: Its settings.
        working_folder: Folder of its relative paths.

    Raises:
        UsageError: A file does not exist here.
    """
    data, files, settings = trainer.data, dict[str, Path](), dict[str, object]()
    if data.dataset:
        files |= _collect_dataset(data, trainer.model.vocab_size, working_folder)
        settings["data_path"] = f"{IMPORTED_DATA}/data_path"
    for key in TOKEN_FILES:
        given = getattr(data, key)
        if not given:
            continue
        words: list[str | float] = []
        for number, (prefix, weight) in enumerate(parse_weighted_prefixes(join_prefixes(given, working_folder), key)):
            place = f"{key}/{number}"
            files |= {f"{DATA}/{place}/{path.name}": path for path in _list_token_files(prefix)}
            words += [*([] if weight is None else [weight]), f"{IMPORTED_DATA}/{place}/{prefix.name}"]
        settings[key] = words
    for key in EXAMPLES:
        named: list[str | float] = []
        for number, (source, weight) in enumerate(parse_weighted_sources(getattr(data, key), key)):
            added = _collect_file(source, f"{key}/{number}", working_folder)
            files |= added.files
            named += [*([] if weight is None else [weight]), added.place or source]
        if named:
            settings[key] = named[0] if len(named) == 1 else named
    if data.tokenizer_model:
        added = _collect_file(data.tokenizer_model, "tokenizer_model", working_folder)
        files |= added.files
        settings["tokenizer_model"] = added.place or data.tokenizer_model
    return AddedFiles(files, settings)


class _AddedSource(NamedTuple):
    """A file or folder that a setting names."""

    files: dict[str, Path]
    """Source by name in the archive."""
    place: str
    """Value of the setting where it is imported; empty for a name on the hub, which an importer has, too."""


def _collect_file(given: str, key: str, working_folder: Path) -> _AddedSource:
    path = working_folder / os.path.expanduser(given)
    if not path.exists():
        return _AddedSource({}, "")
    # With the folder of a file, after which the data of a tokenizer.json are named.
    place = f"{key}/{path.parent.name}/{path.name}" if path.is_file() else f"{key}/{path.name}"
    return _AddedSource(_list_tree(path, f"{DATA}/{place}"), f"{IMPORTED_DATA}/{place}")


def collect_weights(run: Run, trainer: Trainer, working_folder: Path) -> AddedFiles:
    """The newest checkpoint of a run, and the weights that it began with.

    Raises:
        UsageError: The run has no complete checkpoint.
        PrimusError: The checkpoint is damaged.
    """
    save = trainer.checkpoint.save
    place = working_folder / os.path.expanduser(save) if save and "://" not in save else run.checkpoints
    complete = [found for found in folders.list_checkpoints(place) if folders.is_complete(found)]
    if not complete:
        raise UsageError(
            f"--with-checkpoint: {run.directory} has no complete checkpoint", "export it without this option"
        )
    newest = complete[-1]
    described = manifest.read_manifest(newest)
    if described and (damage := manifest.find_damage(newest, described)):
        raise PrimusError(f"{newest}: damaged: {damage}", "export the run without --with-checkpoint")
    files, settings = _list_tree(newest, f"{RUN}/checkpoints/{newest.name}"), dict[str, object]()
    load = trainer.checkpoint.load
    start = working_folder / os.path.expanduser(load) if load and not load.startswith(folders.HUB_PREFIX) else None
    if start and start.exists():
        files |= _list_tree(start, f"{DATA}/load/{start.name}")
        settings["load"] = f"{IMPORTED_DATA}/load/{start.name}"
    return AddedFiles(files, settings)


def _collect_dataset(data: DataConfig, vocab_size: int, working_folder: Path) -> dict[str, Path]:
    relative = named_dataset.find_prefix(data, vocab_size)
    prefix = working_folder / relative
    below = prefix.relative_to(working_folder / os.path.expanduser(data.data_path)).parent.as_posix()
    found = _list_token_files(prefix)
    if not any(path.suffix == ".bin" for path in found):
        raise UsageError(
            f"--with-data: the dataset {data.dataset} is not in {prefix.parent}", "export from where it is"
        )
    return {f"{DATA}/data_path/{below}/{path.name}": path for path in found}


def _list_token_files(prefix: Path) -> list[Path]:
    """The pair of a prefix, with its manifest and tokenizer."""
    return sorted(path for path in prefix.parent.glob(f"{prefix.name}.*") if path.is_file())


def _list_tree(path: Path, name: str) -> dict[str, Path]:
    return {name: path} if path.is_file() else dict(_walk(path, name))


def _walk(root: Path, name: str) -> Iterator[tuple[str, Path]]:
    for folder, _, files in os.walk(root):
        for path in (Path(folder, file) for file in files):
            yield f"{name}/{path.relative_to(root).as_posix()}", path
