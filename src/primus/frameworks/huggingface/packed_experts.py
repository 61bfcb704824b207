"""Experts of Mixtral and Qwen3-MoE: files name each matrix, the modules of transformers 5 stack those of a layer."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from primus.checkpoint.weights import TensorInfo, WeightReader

if TYPE_CHECKING:
    from torch import Tensor

STACKS = {"gate_up_proj": (("w1", "gate_proj"), ("w3", "up_proj")), "down_proj": (("w2", "down_proj"),)}
"""Names of the matrices of an expert that are side by side in a stack: Mixtral's, then Qwen3-MoE's."""
_STACK = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")


def is_stack(name: str) -> bool:
    """Whether a tensor of a module has matrices of all experts."""
    return _STACK.fullmatch(name) is not None


def read_module_tensor(weights: WeightReader, name: str, found: Collection[str]) -> Tensor:
    """A tensor of a module from weights in hub names, which are `found`."""
    import torch

    match, style = _STACK.fullmatch(name), _find_style(found)
    if match is None:
        return weights.read(_rename(name, style))
    prefix = _rename(f"{match[1]}.mlp.experts.", style)
    experts = sum(
        each.startswith(prefix) and each.endswith(f".{STACKS['down_proj'][0][style]}.weight") for each in found
    )
    return torch.stack(
        [
            torch.cat([weights.read(f"{prefix}{expert}.{part[style]}.weight") for part in STACKS[match[2]]])
            for expert in range(experts)
        ]
    )


def list_module_names(found: Collection[str]) -> set[str]:
    """The names of the modules' tensors that weights in hub names fill."""
    style = _find_style(found)
    stacks = {part[style]: stack for stack, parts in STACKS.items() for part in parts}
    return {
        re.sub(
            r"\.mlp\.experts\.\d+\.(\w+)\.weight",
            lambda match: f".mlp.experts.{stacks[match[1]]}",
            name.replace(".block_sparse_moe.", ".mlp."),
        )
        for name in found
    }


class UnpackedExperts:
    """Tensors of modules by hub names.

    Args:
        weights: The source, by the names of modules.
        hub_names: Those of the model's files.
    """

    def __init__(self, weights: WeightReader, hub_names: Collection[str]) -> None:
        self._weights, style = weights, _find_style(hub_names)
        self._places: dict[str, tuple[str, slice | None, int]] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for name, info in weights.list_tensors().items():
            match = _STACK.fullmatch(name)
            if match is None:
                hub = _rename(name, style)
                self._places[hub], self._tensors[hub] = (name, None, 0), info
                continue
            experts, rows, width = info.shape
            parts = STACKS[match[2]]
            size = rows // len(parts)
            for expert in range(experts):
                for index, part in enumerate(parts):
                    hub = _rename(f"{match[1]}.mlp.experts.{expert}.{part[style]}.weight", style)
                    self._places[hub] = name, slice(index * size, (index + 1) * size), expert
                    self._tensors[hub] = info._replace(shape=(size, width))

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored, part, expert = self._places[name]
        if part is None:
            return self._weights.read(stored, rows)
        whole = self._weights.read(stored, slice(expert, expert + 1))[0, part]
        return whole if rows is None else whole[rows]


def _find_style(hub_names: Collection[str]) -> int:
    """Which of the names in `STACKS`."""
    return 0 if any(".block_sparse_moe." in name for name in hub_names) else 1


def _rename(name: str, style: int) -> str:
    """A name of a module as that of a file."""
    return name if style else re.sub(r"\.mlp\.(gate|experts)\.", r".block_sparse_moe.\1.", name)
