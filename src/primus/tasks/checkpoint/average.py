"""Average the weights of several checkpoints of one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from primus.errors import UsageError
from primus.model_source.hub_files import collect_hub_files
from primus.model_source.options import SourceOptions, check_torch, find_place, load_spec, show_progress
from primus.task import TaskContext


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `checkpoint average`."""

    checkpoints: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """Two checkpoints or more, of any formats, or names of runs."""
    output: str
    """New folder."""
    to: Literal["huggingface", "native", "megatron", "torchtitan"] = "huggingface"
    """Format of the new folder."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of the weights; by default that of the first checkpoint."""


def run(options: Options, context: TaskContext) -> None:
    """Write the mean of the weights, computed in float32.

    Raises:
        UsageError: The output exists, or the checkpoints are not of one model.
        PrimusError: A checkpoint is damaged, or the output cannot be written.
    """
    if len(options.checkpoints) < 2:
        raise UsageError("an average needs two checkpoints or more", "name each as an argument")
    from primus.checkpoint import conversion

    target = Path(os.path.expanduser(options.output))
    conversion.check_target(target)
    check_torch()
    from primus.checkpoint.convert import TargetSettings, open_average, plan_conversion, write_conversion

    opened = open_average(
        [find_place(each, options) for each in options.checkpoints],
        load_spec(options),
        options.trust_pickle,
        lambda _: None,
    )
    exported = collect_hub_files(opened, options.to, None)
    planned = plan_conversion(opened, TargetSettings(options.to, options.dtype, hub_files=exported.files))
    with show_progress("averaging", planned.plan.num_bytes) as report:
        write_conversion(planned, target, report)
    value = {"target": str(target), "format": options.to, "checkpoints": list(options.checkpoints)}
    context.result(value, f"{target}: {options.to}, mean of {len(options.checkpoints)} checkpoints")
