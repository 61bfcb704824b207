"""Adapters in the format of peft: written into a checkpoint, and merged into the weights that they belong to.

peft: `src/peft/utils/save_and_load.py` (names), `tuners/lora/config.py` (adapter_config.json).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from primus.checkpoint.folders import ADAPTER_CONFIG, ADAPTER_FOLDER, HUB_PREFIX
from primus.checkpoint.formats.safetensors_file import SafetensorsFile, build_header
from primus.checkpoint.weights import TensorDict, TensorInfo, WeightReader
from primus.errors import PrimusError, UsageError
from primus.runs.files import write_bytes, write_text
from primus.web.hub import name_cached_model, split_revision

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
LENGTH = ".lora_magnitude_vector"
"""Of DoRA: the length of each row of the adapted weight."""
OTHER_FORMS = ("fan_in_fan_out", "modules_to_save", "use_qalora", "use_bdlora", "lora_bias")
"""Settings of adapters that are more than a product of two matrices, or of matrices that stand otherwise."""


class AdapterFiles(NamedTuple):
    """An adapter in memory."""

    load: str
    """The checkpoint of the model under it, as `load:` names it."""
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write both files into a new folder."""
        folder.mkdir(parents=True, exist_ok=True)
        base, revision = name_base(self.load, folder)
        config = {"base_model_name_or_path": base, "revision": revision or None, **self.config}
        blocks = [tensor.contiguous().numpy().tobytes() for tensor in self.tensors.values()]
        header = build_header(TensorDict(self.tensors).list_tensors(), {"format": "pt"})
        write_bytes(folder / WEIGHTS_FILE, header + b"".join(blocks))
        write_text(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def has_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint holds an adapter instead of the weights of a model."""
    return (checkpoint / ADAPTER_FOLDER / ADAPTER_CONFIG).is_file()


def name_parts(weight: str) -> tuple[str, str, str]:
    """The names of the two matrices that belong to a weight of the hub, and of the lengths of its rows."""
    module = PREFIX + weight.removesuffix(".weight")
    return module + DOWN, module + UP, module + LENGTH


def name_base(load: str, folder: Path) -> tuple[str, str]:
    """The model under an adapter in `folder`, as adapter_config.json names it, and its revision.

    It is a name of the hub; for a folder outside of the hub's cache it is the path from `folder`, so that the two can
    be moved together, and the file says nothing about the machine.
    """
    name = load.removeprefix(HUB_PREFIX)
    path = Path(os.path.expanduser(name)).resolve()
    if not path.exists():
        return split_revision(name)
    cached = name_cached_model(path)
    if cached is not None:
        return cached
    return os.path.relpath(path, folder.resolve()), ""


def build_config(
    tensors: Mapping[str, Tensor], rank: int, alpha: int, dropout: float, num_layers: int
) -> dict[str, Any]:
    """adapter_config.json of adapters, without the name of their model."""
    modules = [name.removeprefix(PREFIX).removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]
    short = sorted({name.rpartition(".")[2] for name in modules})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        # A short name chooses the matrix in every layer.
        "target_modules": short if len(short) * num_layers == len(modules) else modules,
        "bias": "none",
        "inference_mode": True,
    }


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a folder.

    Raises:
        PrimusError: It is damaged, or of adapters other than LoRA.
    """
    file = folder / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(config, dict)
        rank, alpha = config["r"], config["lora_alpha"]
        assert rank > 0 and alpha is not None
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise PrimusError(f"{file}: damaged: r and lora_alpha are needed", "copy it again from its source") from None
    others = [name for name in OTHER_FORMS if config.get(name)]
    if config.get("peft_type") != "LORA" or others:
        what = ", ".join(others) or f"peft_type {config.get('peft_type')}"
        raise PrimusError(f"{file}: {what}: only LoRA and DoRA are merged", "merge it with peft: merge_and_unload()")
    return config


def find_base(folder: Path) -> str:
    """The checkpoint that an adapter belongs to, as `load:` names it; a relative path begins at the adapter.

    Raises:
        UsageError: The adapter does not say it, or it was moved.
    """
    config = read_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise UsageError(
            f"{folder / ADAPTER_CONFIG}: the adapter does not name its model", "set base_model_name_or_path in it"
        )
    for path in (folder / base, Path(os.path.expanduser(base))):
        if path.exists():
            return str(path)
    if base.startswith((".", "/", "~")):
        raise UsageError(
            f"{folder / ADAPTER_CONFIG}: its model {base} does not exist",
            "write the place of the model into base_model_name_or_path, as a path or a name of the Hugging Face Hub",
        )
    return f"hf:{base}@{revision}" if revision else f"hf:{base}"


class AdaptedWeights:
    """The weights of a model, in hub names, with an adapter merged into them as they are read.

    Raises:
        PrimusError: The adapter is damaged, or of another model.
    """

    def __init__(self, base: WeightReader, folder: Path) -> None:
        config = read_config(folder)
        self._base, self._config = base, config
        self._file = SafetensorsFile(folder / WEIGHTS_FILE)
        found, known = self._file.list_tensors(), base.list_tensors()
        self._adapted = {
            name
            for name, info in known.items()
            if name.endswith(".weight") and self._fits(name_parts(name), info.shape, found)
        }
        self._has_length = {name for name in self._adapted if name_parts(name)[2] in found}
        surplus = set(found) - {part for name in self._adapted for part in name_parts(name)}
        if surplus:
            raise PrimusError(
                f"{folder}: {min(surplus)} belongs to no weight of the model", "choose the model of the adapter"
            )

    def list_tensors(self) -> Mapping[str, TensorInfo]:
        return self._base.list_tensors()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        weight = self._base.read(name, rows)
        if name not in self._adapted:
            return weight
        down, up, length = name_parts(name)
        down_RD = self._file.read(down).float()
        product = self._file.read(up, rows).float() @ down_RD
        merged = weight.float() + self._compute_scale(name, len(down_RD)) * product
        if name in self._has_length:
            merged *= (self._file.read(length, rows).float() / merged.norm(dim=1)).unsqueeze(1)
        return merged.to(weight.dtype)

    def _compute_scale(self, name: str, rank: int) -> float:
        """Of one matrix; a pattern is a regular expression of the end of its name (peft, get_pattern_key)."""
        patterns = self._config.get("alpha_pattern") or {}
        module = name.removesuffix(".weight")
        fitting = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
        alpha = float(next(fitting, self._config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _fits(self, parts: tuple[str, str, str], shape: tuple[int, ...], found: Mapping[str, TensorInfo]) -> bool:
        down, up = (found.get(part) for part in parts[:2])
        if down is None or up is None:
            return False
        return (up.shape[0], down.shape[1]) == shape and up.shape[1] == down.shape[0]
