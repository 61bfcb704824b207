"""Read the steps of training logs of other frameworks, and write them as results that can be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from primus.comparison.results.log_result import (
    LogFacts,
    LogSummary,
    build_log_result,
    list_known_settings,
    list_notes,
    summarize_log,
)
from primus.comparison.results.result import save_result
from primus.errors import UsageError
from primus.report.table import format_number, format_table
from primus.runs import store
from primus.task import TaskContext
from primus.training_logs.find_logs import LogGroup, find_logs
from primus.training_logs.merge_logs import read_log_group
from primus.training_logs.read_log import TrainingLog, UnreadLine
from primus.training_logs.step_merger import LogAttempt

MOST_NAMED = 3


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare extract`."""

    what: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """Logs, event files of TensorBoard, runs (folder, run id or experiment), or folders with them; ranks and attempts
    in a folder are merged.
    `-` reads standard input."""
    format: str = "auto"
    """Format of the logs: primus, megatron, megatron-bridge, nemo, torchtitan, maxtext, nanotron, llm-foundry,
    automodel, torchtune, litgpt, olmo-core, huggingface, deepspeed, mlperf, tensorboard; auto recognizes it."""
    output: str | None = None
    """Folder of the results, one JSON file for each run; none are written when omitted."""
    platform: Literal["amd", "nvidia", "cpu"] | None = None
    """Platform on which the run trained; required to write results. Logs of Primus imply amd."""
    framework: str = ""
    """Name of the framework in the results (default: the format)."""
    model: str = ""
    """Name of the model in the results."""
    device_name: str = ""
    """Model of the devices, such as MI300X."""
    devices: Annotated[int, Meta(ge=1)] | None = None
    """Number of devices, if the log does not say it; for tokens per second."""
    seq_length: Annotated[int, Meta(ge=1)] | None = None
    """Tokens of a sample, if the log does not say it; for tokens per second."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


class ExtractedLog(Struct, frozen=True, kw_only=True):
    """What `compare extract --json` prints of a run."""

    log: str
    format: str
    trainer: str
    summary: LogSummary
    attempts: list[LogAttempt]
    num_ranks: int
    num_evaluations: int
    num_lines: int
    num_unread: int
    unread: list[UnreadLine]
    settings: dict[str, str]
    notes: list[str]
    steps: dict[str, list[float]]
    """Columns; JSON has null for a value that is missing or is not a finite number."""
    result: str | None = None
    """File of the result."""


def run(options: Options, context: TaskContext) -> None:
    """Read the logs and print a table of the runs.

    Raises:
        UsageError: A word names no log, or a log has no steps.
    """
    workspace = Path(options.workspace)
    groups = find_logs([word if word == "-" else store.find_place(word, workspace) for word in options.what])
    extracted, skipped = [], []
    for group in groups:
        try:
            log = read_log_group(group, options.format)
        except UsageError:
            if len(groups) == 1:
                raise
            skipped.append(group.name)
            continue
        extracted.append(_extract(log, group, options))
    if not extracted:
        raise UsageError(f"none of {len(skipped)} logs has steps: {_name_some(skipped)}")
    context.result(extracted, format_extracted(extracted, skipped))


def _extract(log: TrainingLog, group: LogGroup, options: Options) -> ExtractedLog:
    facts = LogFacts(
        platform=options.platform or ("amd" if log.format == "primus" else ""),
        framework=options.framework,
        model=options.model,
        device_name=options.device_name,
        num_devices=options.devices,
        sequence_length=options.seq_length,
    )
    return ExtractedLog(
        log=log.path,
        format=log.format,
        trainer=log.title,
        summary=summarize_log(log, facts),
        attempts=log.attempts,
        num_ranks=log.num_ranks,
        num_evaluations=len(log.evaluations),
        num_lines=log.num_lines,
        num_unread=log.num_unread,
        unread=log.unread,
        settings=log.settings,
        notes=list_notes(log, list_known_settings(log, facts)),
        steps={name: column.tolist() for name, column in log.steps.columns.items()},
        result=_write_result(log, group, facts, Path(options.output)) if options.output else None,
    )


def _write_result(log: TrainingLog, group: LogGroup, facts: LogFacts, folder: Path) -> str:
    if not facts.platform:
        raise UsageError(f"{log.path}: the log does not name the platform", "add --platform amd, nvidia or cpu")
    result = build_log_result(log, facts)
    stem = re.sub(r"[^\w.-]+", "-", Path(group.name).with_suffix("").as_posix()).strip("-.")
    file = folder / f"{result.cell.name}_{stem}.json"
    folder.mkdir(parents=True, exist_ok=True)
    save_result(result, file)
    return str(file)


def format_extracted(extracted: Sequence[ExtractedLog], skipped: Sequence[str]) -> str:
    """A table of the runs, then what is doubtful in each."""
    header = ["log", "trainer", "steps", "from", "to", "ms/step", "tokens/s/device", "TFLOP/s/device", "GiB", "loss"]
    rows = [_format_row(each) for each in extracted]
    lines = [format_table(header, rows, right=range(2, len(header))), ""]
    for each in extracted:
        notes = list(each.notes)
        if not each.summary.is_steady:
            notes.append("the step times are not steady: the figures are from the second half of the run")
        notes += [f"not read, line {line.number}: {line.text} ({line.problem})" for line in each.unread]
        notes += [f"result: {each.result}"] if each.result else []
        lines += [f"{each.log}: {note}" for note in notes]
    # Their content is not shown: a folder holds other things than logs.
    lines += [f"without steps: {_name_some(skipped)}"] if skipped else []
    return "\n".join(lines).rstrip()


def _name_some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + rest


def _format_row(each: ExtractedLog) -> list[str]:
    summary = each.summary
    time_s = summary.step_time_s
    figures: list[Any] = [
        None if time_s is None else 1000 * time_s,
        summary.tokens_per_s_per_device,
        summary.tflops_per_device,
        summary.memory_gib,
        summary.last_loss,
    ]
    counts = [f"{summary.num_steps:,}", str(summary.first_step), str(summary.last_step)]
    return [each.log, each.trainer, *counts, *map(format_number, figures)]
