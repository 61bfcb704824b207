"""Open a checkpoint of any format by its path, or a model of the Hugging Face Hub by its name."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from primus import registry
from primus.checkpoint import folders, manifest
from primus.checkpoint.folders import ADAPTER_CONFIG, ADAPTER_FOLDER, HUB_PREFIX
from primus.checkpoint.formats.model_config import read_model_config, read_quantization
from primus.checkpoint.shape import FIELDS, Shape, build_shape, check_same_shape
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.errors import PrimusError, UsageError
from primus.framework import CHECKPOINTS, FrameworkCheckpoint
from primus.web.hub import find_cached_model, find_model_folder

HUB_FORMATS = ("huggingface", "peft")
"""Formats of no framework; `peft` is an adapter, read merged into its model. The others are those of the frameworks'
`checkpoint.py`."""

MODEL_FILE = "model_config.yaml"
"""The model of a folder that `checkpoint convert` wrote, and in `config/` of a run that a checkpoint belongs to."""
TOKENIZER_FOLDER = "tokenizer"
"""In a folder that `checkpoint convert` wrote: files of the source that only the format of Hugging Face has."""
ITERATION = re.compile(r"iter_(\d{7})")
TITAN_STEP = re.compile(r"step-(\d+)")
NAME_MODEL = "name it by --model PRESET or a YAML file"
PARENTS = 3
"""Folders above a checkpoint in which its run may be: checkpoints/, the run."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint whose format is known."""

    format: str
    """One of `HUB_FORMATS`, or that of a framework."""
    folder: Path
    """The folder with its files."""
    step: int | None
    """Optimizer steps taken, where it says so."""


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose weights can be read."""

    weights: WeightReader
    """In hub names."""
    spec: ModelSpec
    step: int | None
    found: FoundCheckpoint
    has_sizes_only: bool = False
    """Whether `spec` has no more than the sizes of tensors: the base of its rotary embedding is not known."""
    others: tuple[Path, ...] = ()
    """Folders of further checkpoints that the weights come from."""


def open_checkpoint(given: str, spec: ModelSpec | None = None, trust_pickle: bool = False) -> OpenedCheckpoint:
    """The weights of a checkpoint in hub names, its model, and its step if it has one. Every tensor is accounted for.

    Args:
        given: A folder (also that of a run, or of several checkpoints: the newest), a *.safetensors or *.bin file, or
            `hf:NAME_OR_PATH`.
        spec: The model, for a checkpoint that does not say it; that of an experiment is checked against the weights.
        trust_pickle: Whether pickles that may run code are loaded.

    Raises:
        UsageError: The checkpoint does not exist, or its model is not known.
        PrimusError: It is damaged, incomplete, or of another model.
    """
    found = find_checkpoint(given)
    whole = spec or find_spec(found)
    chosen = whole or _read_sizes(found.folder)
    return OpenedCheckpoint(open_weights(found, chosen, trust_pickle), chosen, found.step, found, whole is None)


def open_weights(found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool = False) -> WeightReader:
    """The weights of a checkpoint of a known format, in hub names."""
    if found.format == "huggingface":
        return _open_huggingface(found.folder, spec, trust_pickle)
    if found.format == "peft":
        return _open_peft(found.folder, spec, trust_pickle)
    return find_framework(found.format).open_weights(found, spec, trust_pickle)


def find_framework(name: str) -> FrameworkCheckpoint:
    """The framework that writes checkpoints of a format."""
    return next(each for each in _list_frameworks() if name in each.FORMATS)


def _list_frameworks() -> list[FrameworkCheckpoint]:
    return [registry.load_plug_in(CHECKPOINTS, name) for name in registry.list_plug_ins(CHECKPOINTS.name)]


def find_checkpoint(given: str) -> FoundCheckpoint:
    """The checkpoint that a path or a name of the hub names.

    Raises:
        UsageError: There is none.
        PrimusError: The model is not in the cache, and cannot be downloaded.
    """
    if given.startswith(HUB_PREFIX):
        name = given.removeprefix(HUB_PREFIX)
        if not name:
            raise UsageError(f"{given} names no model", "give hf:ORGANIZATION/NAME[@REVISION], or hf:FOLDER")
        return FoundCheckpoint("huggingface", find_model_folder(name), None)
    path = Path(os.path.expanduser(given))
    if path.is_file():
        if path.suffix in (".safetensors", ".bin"):
            return FoundCheckpoint("huggingface", path, None)
        raise UsageError(f"{path}: not a checkpoint", "give its folder, or a *.safetensors or *.bin file")
    if not path.is_dir():
        hint = f"hf:{given} names a model of the Hugging Face Hub" if given.count("/") == 1 else "check the path"
        raise UsageError(f"no folder {path}", hint)
    found = _detect_format(path) or _find_newest(path)
    if found is None:
        raise UsageError(
            f"{path}: no checkpoint of Hugging Face, native, torchtitan or Megatron",
            "give the folder with config.json, .metadata, manifest.json or mp_rank_00",
        )
    return found


def read_spec(found: FoundCheckpoint) -> ModelSpec:
    """The model of a checkpoint, or only the sizes of its tensors where no more is known.

    Raises:
        UsageError: It does not say them.
    """
    return find_spec(found) or _read_sizes(found.folder)


def find_spec(found: FoundCheckpoint) -> ModelSpec | None:
    """The model of a checkpoint: of its config.json, of the run that it belongs to, or of its conversion, if any."""
    from primus.config.extended_files import load_model

    folder = found.folder
    if found.format == "huggingface" or (found.format == "transformers" and (folder / "config.json").is_file()):
        return read_model_config(folder)
    places = [folder / MODEL_FILE]
    for parent in list(folder.resolve().parents)[:PARENTS]:
        places += [parent / MODEL_FILE, parent / "config" / MODEL_FILE]
    for place in places:
        if place.is_file():
            return load_model(str(place))
    if found.format == "peft":
        from primus.checkpoint.formats.adapter import find_base

        return find_spec(find_checkpoint(find_base(folder)))
    return None


def check_foreign(given: str, wanted: Shape) -> None:
    """Check that a foreign checkpoint exists, and is of this model where its config.json says so; reads no weights.

    Raises:
        UsageError: It does not exist, or is of another model.
        PrimusError: Its config.json is damaged.
    """
    if given.startswith(HUB_PREFIX):
        name = given.removeprefix(HUB_PREFIX)
        path = Path(os.path.expanduser(name))
        folder = path if path.exists() else find_cached_model(name)
        if folder is None:
            return  # downloaded when training starts
    else:
        folder = Path(os.path.expanduser(given))
        if not folder.exists():
            raise UsageError(f"load: no file {folder}", "check the path")
    if (folder / "config.json").is_file():
        check_same_shape(build_shape(read_model_config(folder)), wanted, given)


def must_download(given: str) -> bool:
    """Whether `open_checkpoint` would download a model of the hub."""
    name = given.removeprefix(HUB_PREFIX)
    return name != given and not Path(os.path.expanduser(name)).exists() and find_cached_model(name) is None


def _detect_format(folder: Path) -> FoundCheckpoint | None:
    """The format of a folder by the files in it."""
    step = _parse_step(folder)
    saved = manifest.read_manifest(folder)
    if saved is not None:
        step = saved.step
    if (folder / ADAPTER_CONFIG).is_file():
        return FoundCheckpoint("peft", folder, _parse_step(folder.parent))
    if (folder / ADAPTER_FOLDER / ADAPTER_CONFIG).is_file():
        return FoundCheckpoint("peft", folder / ADAPTER_FOLDER, step)
    if (folder / ".metadata").is_file():
        return FoundCheckpoint(_detect_dcp(folder), folder, step)
    weights = chain(folder.glob("*.safetensors"), folder.glob("pytorch_model*.bin"))
    if (folder / "config.json").is_file() or any(weights):
        return FoundCheckpoint("huggingface", folder, None)
    name = _find_format(folder, ())
    return FoundCheckpoint(name, folder, step) if name else None


def _detect_dcp(folder: Path) -> str:
    """The format of a DCP folder by the names in it."""
    from primus.checkpoint.formats.dcp import read_metadata

    names = read_metadata(folder).state_dict_metadata.keys()
    if found := _find_format(folder, names):
        return found
    raise UsageError(
        f"{folder}: torch.distributed.checkpoint with names of no known engine, like {min(names, default='none')}",
        f"engines: {', '.join(registry.list_plug_ins(CHECKPOINTS.name))}",
    )


def _find_format(folder: Path, names: Collection[str]) -> str | None:
    """The format of a folder that a framework recognizes."""
    return next(filter(None, (each.find_format(folder, names) for each in _list_frameworks())), None)


def _find_newest(folder: Path) -> FoundCheckpoint | None:
    """The newest checkpoint in a folder of Megatron, of torchtitan, of native, or of a run."""
    tracked = folders.find_tracked_iteration(folder)
    if tracked is not None:
        found = _detect_format(tracked) if tracked.is_dir() else None
        if found is None:
            raise PrimusError(
                f"{folder / folders.MEGATRON_TRACKER} names {tracked.name}, which is not a checkpoint",
                "name another iteration's folder",
            )
        return found
    complete = [path for path in folders.list_checkpoints(folder) if folders.is_complete(path)]
    complete += [path for path in folders.list_checkpoints(folder / "checkpoints") if folders.is_complete(path)]
    if complete:
        newest = max(complete, key=folders.parse_step)
        return _detect_format(newest) or next(filter(None, map(_detect_format, sorted(newest.iterdir()))), None)
    steps = [path for path in folder.iterdir() if TITAN_STEP.fullmatch(path.name) and (path / ".metadata").is_file()]
    if steps:
        return _detect_format(max(steps, key=lambda path: int(path.name.removeprefix("step-"))))
    return None


def _parse_step(folder: Path) -> int | None:
    for pattern in (folders.STEP, ITERATION, TITAN_STEP):
        match = pattern.fullmatch(folder.name)
        if match:
            return int(match[1])
    return None


def _read_sizes(folder: Path) -> ModelSpec:
    """A model with the sizes of a manifest; enough for the names of its weights, not for its config.json.

    Raises:
        UsageError: There is no manifest.
    """
    saved = manifest.read_manifest(folder)
    if saved is None:
        raise UsageError(f"{folder}: the checkpoint does not name its model", NAME_MODEL)
    return msgspec.convert({field: saved.model[field] for field in FIELDS if field in saved.model}, ModelSpec)


def _open_huggingface(folder: Path, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    from primus.checkpoint.formats.huggingface import HuggingFaceWeights, PickleFolder, has_pickles_only

    pickles = PickleFolder(folder, trust_pickle) if has_pickles_only(folder) else None
    try:
        return HuggingFaceWeights(folder, spec, pickles)
    except PrimusError as error:
        method = read_quantization(folder)
        if method:
            raise PrimusError(
                error.problem, f"its weights are quantized by {method}: fp8 blocks and MXFP4 are read, others are not"
            ) from None
        raise


def _open_peft(folder: Path, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    from primus.checkpoint.formats.adapter import AdaptedWeights, find_base

    return AdaptedWeights(open_weights(find_checkpoint(find_base(folder)), spec, trust_pickle), folder)
