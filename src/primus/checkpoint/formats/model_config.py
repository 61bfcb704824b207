"""The `config.json` of a folder of Hugging Face: the model, and what else it says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from primus.config.schema import ModelSpec
from primus.errors import PrimusError

if TYPE_CHECKING:
    from primus.config.imports.foreign_config import ForeignConfig


def read_model_config(folder: Path) -> ModelSpec:
    """The model of a folder of Hugging Face, by its config.json.

    Raises:
        PrimusError: The file is missing or damaged.
        UsageError: It describes a model that this package does not know.
    """
    file, values = read_config_file(folder)
    try:
        spec = msgspec.convert(_import_config(folder, values).model, ModelSpec)
    except ValueError as error:
        raise PrimusError(f"{file}: damaged: {error}") from None
    if spec.mtp_num_layers and not _has_prediction_layers(folder, spec.num_layers):
        # transformers saves DeepSeek-V3 without these layers, and keeps their number in config.json.
        return msgspec.structs.replace(spec, mtp_num_layers=0)
    return spec


def read_config_file(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The config.json of a folder of Hugging Face, or of the one with this file, and its path.

    Raises:
        PrimusError: It is missing or damaged.
    """
    file = _find_file(folder)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PrimusError(f"{file}: missing", "name the model by --model PRESET or its YAML file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PrimusError(f"{file}: damaged: {error}") from None
    if not isinstance(values, dict):
        raise PrimusError(f"{file}: damaged: not a JSON object")
    return file, values


def list_lost_settings(folder: Path) -> list[str]:
    """What a config.json says of its model that primus has no key for, so that other formats do not have it."""
    _, values = read_config_file(folder)
    return [
        f"{each.key}: {each.value if isinstance(each.value, str) else json.dumps(each.value)}: {each.reason}"
        for each in _import_config(folder, values).warnings
    ]


def _import_config(folder: Path, values: dict[str, Any]) -> ForeignConfig:
    from primus.config.imports import hugging_face  # only for folders of Hugging Face

    return hugging_face.read_model_config(values, str(_find_file(folder)), folder.name)


def _find_file(folder: Path) -> Path:
    return (folder.parent if folder.is_file() else folder) / "config.json"


def _has_prediction_layers(folder: Path, num_layers: int) -> bool:
    """Whether files have layers of multi-token prediction, which follow the others; true if this is not known.

    Without a tensor library, as experiments are checked where none is installed.
    """
    index = folder / "model.safetensors.index.json"
    files = [folder] if folder.is_file() else [index] if index.is_file() else sorted(folder.glob("*.safetensors"))
    try:
        names = [name for file in files for name in _list_names(file)]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return True  # reported when the file is opened
    return not names or any(f"layers.{num_layers}." in name for name in names)


def _list_names(file: Path) -> list[str]:
    """Names of the tensors in an index, or in a file of safetensors."""
    if file.suffix == ".json":
        return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        return list(json.loads(opened.read(min(length, file.stat().st_size))))


def read_quantization(folder: Path) -> str:
    """The method by which config.json says that weights are quantized; empty if it does not say it."""
    try:
        settings = read_config_file(folder)[1].get("quantization_config")
    except PrimusError:
        return ""
    return str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
