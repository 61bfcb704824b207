"""Compare the weights of two checkpoints of any formats."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from primus.errors import EXIT_FAILED
from primus.model_source.options import SourceOptions, open_source, show_progress
from primus.report.table import format_table
from primus.task import TaskContext

SHOWN = 20


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `checkpoint diff`."""

    first: Annotated[str, Meta(extra={"positional": True})]
    """Folder of a checkpoint, name or folder of a run, *.safetensors or *.bin file, or hf:NAME_OR_PATH."""
    second: Annotated[str, Meta(extra={"positional": True})]
    """The other one."""


def run(options: Options, context: TaskContext) -> int:
    """Print every tensor that differs.

    Returns:
        1 if one does.

    Raises:
        UsageError: The checkpoint does not exist.
        PrimusError: One is damaged.
    """
    first, second = open_source(options.first, options), open_source(options.second, options)
    from primus.checkpoint.convert import compare_weights

    tensors = first.weights.list_tensors()
    with show_progress("comparing", sum(info.num_bytes for info in tensors.values())) as report:
        found = compare_weights(first.weights, second.weights, report)
    if not found:
        text = f"all {len(tensors):,} tensors are equal"
    else:
        columns = ["tensor", "difference", "elements", "largest", "relative"]
        rows = [
            [
                each.name,
                each.text or each.kind,
                f"{each.different:,}" if each.different else "",
                f"{each.max_difference:.2e}" if each.different else "",
                f"{each.max_difference / each.largest:.1e}" if each.largest else "",
            ]
            for each in found[:SHOWN]
        ]
        text = f"{len(found):,} of {len(tensors):,} tensors differ\n{format_table(columns, rows)}"
        if len(found) > SHOWN:
            text += f"\n... and {len(found) - SHOWN:,} more (--json lists all)"
    context.result({"tensors": len(tensors), "different": msgspec.to_builtins(found), "equal": not found}, text)
    return EXIT_FAILED if found else 0
