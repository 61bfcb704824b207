"""Read values from files of `torch.save` without running anything that their pickle names."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from primus.errors import PrimusError

ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.storage", "UntypedStorage"),
}
"""What is imported besides torch's types and storages: it only holds values, as with `weights_only=True`."""


class InertValue:
    """Stands for an object of any other class; has its attributes, and none of its code."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_storage = module == "torch" and name.endswith("Storage") and name.isidentifier()
        if (module, name) in ALLOWED or is_type or is_storage:
            return super().find_class(module, name)
        return InertValue


_INERT_PICKLE: Any = SimpleNamespace(Unpickler=_InertUnpickler, load=pickle.load, __name__="pickle")


def load_inert_values(file: Path) -> dict[str, Any]:
    """The dict in a file of `torch.save`; objects of classes that may run code are `InertValue`s.

    Raises:
        PrimusError: It is missing or damaged.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=False, pickle_module=_INERT_PICKLE)
    except FileNotFoundError:
        raise PrimusError(f"{file}: missing", "copy the checkpoint again from its source") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise PrimusError(f"{file}: damaged: {first}", "copy it again from its source") from None
    if not isinstance(found, dict):
        raise PrimusError(f"{file}: not a checkpoint of Megatron")
    return found
