"""Read files of `torch.save` lazily: their pickle gives tensors without data, which know their place."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primus.checkpoint.formats.tensor_bytes import read_tensor
from primus.checkpoint.weights import TensorInfo, get_bounds
from primus.errors import PrimusError

META_OFFSETS = "2.13"
"""Version of PyTorch since which tensors that are loaded onto `meta` know their place; before, only fake tensors do."""
TRUST_HINT = "if you trust who wrote it, add --trust-pickle"


class FileTensor(NamedTuple):
    """A tensor in a file of `torch.save`."""

    info: TensorInfo
    file: Path
    offset: int
    """First byte in the file."""


def read_rows(tensor: FileTensor, rows: slice | None = None) -> Tensor:
    """A tensor, or the part `rows` of its first dimension."""
    shape, dtype = tensor.info
    if not shape:
        return read_tensor(tensor.file, tensor.offset, (), dtype)
    start, stop = get_bounds(rows, shape[0])
    row_bytes = tensor.info.num_bytes // shape[0] if shape[0] else 0
    return read_tensor(tensor.file, tensor.offset + start * row_bytes, (stop - start, *shape[1:]), dtype)


def locate_tensors(tensors: Mapping[str, Any], file: Path) -> dict[str, FileTensor]:
    """Places of the tensors without data of a file; other values are excluded.

    Raises:
        PrimusError: The file is shorter than its tensors, or one of them is not stored row by row.
    """
    size = file.stat().st_size
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        info = TensorInfo(tuple(tensor.shape), tensor.dtype)
        if not tensor.is_contiguous():
            raise PrimusError(f"{file}: {name} is a transposed view", "save it again with .contiguous()")
        start = tensor.untyped_storage()._checkpoint_offset
        if start is None:
            raise PrimusError(
                f"{file}: not a zip file, as PyTorch writes since 1.6", "load it by torch.load and save it again"
            )
        offset = start + int(tensor.storage_offset()) * tensor.element_size()
        if offset + info.num_bytes > size:
            raise PrimusError(f"{file}: truncated: {name} ends at byte {offset + info.num_bytes} of {size}")
        found[name] = FileTensor(info, file, offset)
    return found


def load_state_without_data(file: Path, trust_pickle: bool, hint: str = TRUST_HINT) -> Any:
    """The content of a file of `torch.save`, its tensors without their data.

    Args:
        file: A zip file, as PyTorch writes since 1.6.
        trust_pickle: Load a pickle that may run code.
        hint: What to do about one that is not trusted.

    Raises:
        PrimusError: It is damaged or older, or its pickle is not trusted.
    """
    try:
        try:
            return _load_without_data(file, weights_only=True)
        except pickle.UnpicklingError as error:
            if not trust_pickle:
                raise _refuse_pickle(file, str(error), hint) from None
            return _load_without_data(file, weights_only=False, pickle_module=_LENIENT_PICKLE)
    except (RuntimeError, EOFError, OSError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise PrimusError(f"{file}: damaged: {reason}", "copy it again from its source") from None


def _refuse_pickle(file: Path, reason: str, hint: str) -> PrimusError:
    """What is said of a file that `weights_only` does not load, by torch's message (torch/serialization.py)."""
    named = re.search(r"GLOBAL (\S+)", reason)
    if named is None and not zipfile.is_zipfile(file):
        return PrimusError(f"{file}: damaged, or not a file of torch.save", "copy it again from its source")
    what = f"names {named[1]}" if named else "has more than tensors"
    return PrimusError(f"{file}: its pickle {what}, and may run code when it is loaded", hint)


def _load_without_data(file: Path, **options: Any) -> Any:
    if torch.__version__ >= META_OFFSETS:
        return torch.load(file, map_location="meta", **options)
    # Importing fake tensors takes half a second of processor time.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.load(file, map_location="cpu", **options)


class _UnknownValue:
    """Stands for a class of a package that is not installed: arguments of Megatron, states of its generators."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _LenientUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return _UnknownValue


_LENIENT_PICKLE: Any = SimpleNamespace(Unpickler=_LenientUnpickler, load=pickle.load, __name__="pickle")
