"""Megatron-Bridge can be imported without Transformer Engine, which has no CPU version.

Its module of LoRA layers imports Transformer Engine for one class, which is used with Transformer Engine's layers only.
That module gets a stand-in while it is imported; all others see that Transformer Engine is missing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from datetime import date
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import Any

from primus.patch import Patch

PATCH = Patch(
    target="megatron-bridge",
    module="megatron.bridge",
    versions=">=0.6,<0.7",
    reason="megatron.bridge.peft imports Transformer Engine on machines that cannot have it",
    link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/3295",
    expires=date(2027, 6, 30),
    backend="megatron_bridge",
)
LAYERS, UTILITIES = "megatron.bridge.peft.lora_layers", "megatron.bridge.peft.utils"
STAND_INS = ("transformer_engine", "transformer_engine.pytorch")


class StandIn(types.ModuleType):
    """A module whose every name is a class without instances, or another such module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = StandIn(name) if name.islower() else type(name, (), {})
        setattr(self, name, value)
        return value


class AdapterFinder(MetaPathFinder):
    """Finds the two modules as Python does, and changes how they are executed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in (LAYERS, UTILITIES):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            change = _add_stand_ins if name == LAYERS else _drop_engine_classes
            setattr(spec.loader, "exec_module", change(spec.loader.exec_module))  # noqa: B010 - of this instance
        return spec


def is_needed() -> bool:
    """Whether Transformer Engine is not installed."""
    return find_spec("transformer_engine") is None


def apply() -> None:
    """Watch the import of the two modules."""
    if not any(isinstance(finder, AdapterFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AdapterFinder())


def _add_stand_ins(execute: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    def execute_with(module: types.ModuleType) -> None:
        engine = StandIn(STAND_INS[0])
        sys.modules.update(zip(STAND_INS, (engine, engine.pytorch), strict=True))
        try:
            execute(module)
        finally:
            for name in STAND_INS:
                del sys.modules[name]

    return execute_with


def _drop_engine_classes(execute: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    """Megatron-core's names of Transformer Engine's layers exist without it, as None; Bridge takes them for classes."""

    def execute_without(module: types.ModuleType) -> None:
        execute(module)
        module.__dict__["HAVE_TE"] = False

    return execute_without
