"""Show a checkpoint's format, model, step and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from primus.model_source.options import SourceOptions, open_source
from primus.report.table import format_table
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.checkpoint.formats.open import OpenedCheckpoint


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `checkpoint show`."""

    checkpoint: Annotated[str, Meta(extra={"positional": True})]
    """Folder of a checkpoint, name or folder of a run, *.safetensors or *.bin file, or hf:NAME_OR_PATH."""
    tensors: bool = False
    """List every tensor by its name on the Hugging Face Hub."""


def run(options: Options, context: TaskContext) -> None:
    """Print what a checkpoint has; reads its headers, not its weights.

    Raises:
        UsageError: The checkpoint does not exist.
        PrimusError: It is damaged, or lacks a tensor.
    """
    opened = open_source(options.checkpoint, options)
    value = _summarize(opened)
    tensors = opened.weights.list_tensors()
    text = "\n".join(f"{name:12} {_format_value(each)}" for name, each in value.items() if each is not None)
    if options.tensors:
        rows = [[name, format_shape(info.shape), format_dtype(info.dtype)] for name, info in tensors.items()]
        text += "\n\n" + format_table(["tensor", "shape", "type"], rows)
        value["tensor_list"] = [
            {"name": name, "shape": list(info.shape), "dtype": format_dtype(info.dtype)}
            for name, info in tensors.items()
        ]
    context.result(value, text)


def _summarize(opened: OpenedCheckpoint) -> dict[str, object]:
    from primus.checkpoint.family import choose_family

    name, family = choose_family(opened.spec)
    tensors = opened.weights.list_tensors()
    dtypes: dict[str, int] = {}
    for info in tensors.values():
        dtype = format_dtype(info.dtype)
        dtypes[dtype] = dtypes.get(dtype, 0) + info.num_bytes // info.dtype.itemsize
    return {
        "folder": str(opened.found.folder),
        "format": opened.found.format,
        "step": opened.step,
        "family": f"{name} ({family.architecture})",
        "layers": opened.spec.num_layers,
        "hidden_size": opened.spec.hidden_size,
        "vocab_size": opened.spec.vocab_size,
        "tied": not opened.spec.untie_embeddings_and_output_weights,
        "tensors": len(tensors),
        "parameters": sum(dtypes.values()),
        "types": ", ".join(dtypes),
        "bytes": sum(info.num_bytes for info in tensors.values()),
    }


def format_dtype(dtype: Any) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def format_shape(shape: tuple[int, ...]) -> str:
    """``4096 x 128``."""
    return " x ".join(map(str, shape))


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
