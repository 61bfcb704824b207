"""Convert a checkpoint between Hugging Face, native, torchtitan and Megatron."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from primus.errors import UsageError
from primus.model_source.hub_files import NAME_ONE, ExportedFiles, collect_hub_files
from primus.model_source.options import SourceOptions, open_source, show_progress
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.checkpoint.convert import PlannedConversion, TargetSettings
    from primus.checkpoint.formats.open import OpenedCheckpoint
    from primus.data.hub_files import HubFiles

Size = Annotated[int, Meta(ge=1)]


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `checkpoint convert`."""

    source: Annotated[str, Meta(extra={"positional": True})]
    """Folder of a checkpoint, name or folder of a run, *.safetensors or *.bin file, or hf:NAME_OR_PATH."""
    target: Annotated[str, Meta(extra={"positional": True})]
    """New folder."""
    to: Literal["huggingface", "native", "megatron", "torchtitan"]
    """Format of the target."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of the weights; by default that of the source."""
    format: Literal["torch_dist", "torch"] = "torch_dist"
    """Format of Megatron: torch_dist, which any layout loads, or torch, the older one with a file for each rank."""
    tp: Size = 1
    """Tensor-parallel size of --format torch."""
    pp: Size = 1
    """Pipeline-parallel size of --format torch."""
    ep: Size = 1
    """Expert-parallel size of --format torch."""
    tokenizer: str | None = None
    """Tokenizer: a tokenizer.json, a SentencePiece model, a folder with one, or a hub name; by default that
    of the checkpoint, of its run or of the weights that the run began from."""
    optimizer: bool = True
    """Convert the state of AdamW and the position of the run, too, so that training continues from the target."""
    allow_nonfinite: bool = False
    """Convert NaN and infinite values, too, instead of refusing them."""
    verify: bool = False
    """Read the target again and compare every tensor, and the logits where native or transformers can compute them."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What would be read and written."""
    from primus.checkpoint.formats.open import must_download

    if must_download(options.source):
        return [f"{options.source} would be downloaded first"]
    from primus.checkpoint.family import choose_family

    opened, planned, exported = _plan(options)
    plan = planned.plan
    written = options.to if options.to != "megatron" else f"megatron, {_format_layout(options)}"
    return [
        f"source: {opened.found.folder} ({opened.found.format}), {choose_family(opened.spec)[0]} model",
        f"target: {Path(os.path.expanduser(options.target))} ({written})",
        f"tensors: {len(planned.weights.list_tensors()):,} weights",
        f"optimizer: {planned.optimizer_note}",
        *_format_tokenizer(exported, options.to),
        *(f"not in the target: {setting}" for setting in planned.lost),
        f"files: {len(plan.files):,} with {plan.num_bytes / 1e9:,.2f} GB of tensors",
        *(f"  {file.name}: {file.num_bytes / 1e9:,.2f} GB" for file in plan.files),
    ]


def run(options: Options, context: TaskContext) -> None:
    """Convert a checkpoint and print where it is.

    Raises:
        UsageError: The target exists, or cannot hold this model.
        PrimusError: The source is damaged, or the target cannot be written; nothing is left of it then.
    """
    target = Path(os.path.expanduser(options.target))
    opened, planned, exported = _plan(options)
    from primus.checkpoint.convert import write_conversion
    from primus.checkpoint.formats.huggingface import check_copies

    check_copies(opened.weights, str(opened.found.folder))
    with show_progress("converting", planned.plan.num_bytes) as report:
        kept = write_conversion(planned, target, report)
    num_tensors = len(planned.weights.list_tensors())
    result: dict[str, object] = {
        "source": str(opened.found.folder),
        "source_format": opened.found.format,
        "target": str(target),
        "format": options.to,
        "step": opened.step,
        "tensors": num_tensors,
        "optimizer": planned.optimizer_note,
        "tokenizer": exported.tokenizer,
        "lost": list(planned.lost),
        "bytes": planned.plan.num_bytes,
        "resumed_files": kept,
    }
    source = f"{opened.found.folder} ({opened.found.format})"
    lines = [
        f"{target}: {options.to}, {num_tensors:,} tensors of {source}, {planned.plan.num_bytes / 1e9:,.2f} GB",
        f"optimizer: {planned.optimizer_note}",
        *_format_tokenizer(exported, options.to),
        *(f"not in the target: {setting}" for setting in planned.lost),
    ]
    if kept:
        lines.append(f"resumed: {kept} files of an interrupted conversion were complete")
    if options.verify:
        from primus.tasks.checkpoint._verify import verify_conversion

        verified = verify_conversion(planned, opened.spec, target, options)
        result["verified"] = verified
        lines += [f"verified: {line}" for line in verified]
    context.result(result, "\n".join(lines))


def _format_tokenizer(exported: ExportedFiles, to: str) -> list[str]:
    """Which tokenizer the target has, in words; its absence matters to Hugging Face only."""
    if exported.tokenizer is not None:
        where = "" if to == "huggingface" else ", kept for a conversion to huggingface"
        return [f"tokenizer: {exported.tokenizer}{where}"]
    return [f"tokenizer: none, {exported.problem}: {NAME_ONE}"] if to == "huggingface" else []


def _plan(options: Options) -> tuple[OpenedCheckpoint, PlannedConversion, ExportedFiles]:
    from primus.checkpoint import conversion

    conversion.check_target(Path(os.path.expanduser(options.target)))
    _check_layout(options)
    opened = open_source(options.source, options)
    from primus.checkpoint.convert import plan_conversion

    exported = collect_hub_files(opened, options.to, options.tokenizer)
    return opened, plan_conversion(opened, _build_settings(options, exported.files)), exported


def _format_layout(options: Options) -> str:
    if options.format == "torch_dist":
        return "torch_dist, which any layout loads"
    return f"torch, TP {options.tp}, PP {options.pp}, EP {options.ep}"


def _check_layout(options: Options) -> None:
    for name in ("tp", "pp", "ep"):
        if getattr(options, name) > 1 and options.format != "torch":
            raise UsageError(
                f"--{name} {getattr(options, name)}: a checkpoint in {options.to} has no parallel layout",
                f"leave --{name} out: any layout loads it; or --to megatron --format torch",
            )


def _build_settings(options: Options, hub_files: HubFiles) -> TargetSettings:
    from primus.checkpoint.convert import TargetSettings
    from primus.checkpoint.output import RankGrid

    return TargetSettings(
        options.to,
        options.dtype,
        options.format,
        RankGrid(options.tp, options.pp, options.ep),
        hub_files,
        options.optimizer,
        options.allow_nonfinite,
    )
