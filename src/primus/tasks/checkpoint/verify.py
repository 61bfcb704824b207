"""Check a checkpoint: every tensor, NaN and infinite values, copies, checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from primus.errors import EXIT_FAILED
from primus.model_source.options import SourceOptions, open_source, show_progress
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.checkpoint.formats.open import OpenedCheckpoint


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `checkpoint verify`."""

    checkpoint: Annotated[str, Meta(extra={"positional": True})]
    """Folder of a checkpoint, name or folder of a run, *.safetensors or *.bin file, or hf:NAME_OR_PATH."""


def run(options: Options, context: TaskContext) -> int:
    """Read every tensor and print what is wrong.

    Returns:
        1 if something is.

    Raises:
        UsageError: The checkpoint does not exist.
        PrimusError: A file is missing or truncated, or a tensor is missing, left over or of another shape.
    """
    opened = open_source(options.checkpoint, options)
    findings = _find_problems(opened)
    tensors = opened.weights.list_tensors()
    state = "corrupt" if findings else "ok"
    lines = [f"{opened.found.folder}: {opened.found.format}, {len(tensors):,} tensors: {state}"]
    lines += [f"  {finding}" for finding in findings]
    value = {"folder": str(opened.found.folder), "format": opened.found.format, "findings": findings}
    context.result({**value, "ok": not findings}, "\n".join(lines))
    return EXIT_FAILED if findings else 0


def _find_problems(opened: OpenedCheckpoint) -> list[str]:
    from primus.checkpoint import manifest
    from primus.checkpoint.convert import find_nonfinite
    from primus.checkpoint.formats.huggingface import HuggingFaceWeights

    findings = []
    saved = manifest.read_manifest(opened.found.folder)
    damage = manifest.find_damage(opened.found.folder, saved) if saved else ""
    if damage:
        findings.append(damage)
    total = sum(info.num_bytes for info in opened.weights.list_tensors().values())
    with show_progress("verifying", total) as report:
        nonfinite = find_nonfinite(opened.weights, report)
    findings += [f"{tensor.name}: {tensor.different:,} elements are NaN or infinite" for tensor in nonfinite]
    if isinstance(opened.weights, HuggingFaceWeights):
        copy = opened.weights.find_different_copy()
        findings += [copy] if copy else []
    return findings
