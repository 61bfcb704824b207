"""Evaluate a checkpoint: held-out loss, answers that match, tasks of lm-evaluation-harness."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta

from primus import __version__
from primus.errors import UsageError
from primus.model_source.options import SourceOptions
from primus.report import table
from primus.runs.evaluations import CheckpointEvaluation, write_evaluation
from primus.task import TaskContext

LONGEST = 2048
"""Tokens of a piece of --data, where neither the run nor --seq-length says it and the context is longer."""


class Options(SourceOptions, frozen=True, kw_only=True):
    """Options of `evaluate`."""

    checkpoint: Annotated[str, Meta(extra={"positional": True})]
    """Folder of a checkpoint, name or folder of a run, *.safetensors or *.bin file, or hf:NAME_OR_PATH."""
    data: str | None = None
    """Text or *.jsonl file whose loss is computed; rows have a text, or the columns of post-training. Without this
    and the next two options, the validation data of the run."""
    exact_match: str | None = None
    """JSONL file with prompt and answer: greedy answers are compared with these."""
    tasks: str | None = None
    """Tasks of lm-evaluation-harness, separated by commas."""
    include_path: str | None = None
    """Folder with YAML files of further tasks."""
    limit: Annotated[int, Meta(ge=1)] | None = None
    """Evaluate so many validation samples (by default those that training evaluates), or documents of each task (by
    default all)."""
    seq_length: Annotated[int, Meta(ge=1)] | None = None
    """Tokens in a piece of --data; by default those of the run, else 2048 or the context of the model."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 64
    """Longest answer of --exact-match, in tokens."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer of --exact-match ends."""
    chat: bool = False
    """Render prompts of --exact-match by the chat template."""
    batch_size: Annotated[int, Meta(ge=1)] = 32
    """Texts that are computed at once, except for validation samples."""
    tokenizer: str | None = None
    """Tokenizer, as of `generate`."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What would be read."""
    _check_input(options)
    what = [each for each in (options.data, options.exact_match, options.tasks) if each]
    return [f"{options.checkpoint} would be evaluated on {', '.join(what) or 'the validation data of its run'}"]


def run(options: Options, context: TaskContext) -> None:
    """Print the metrics; those of a run are kept in its folder.

    Raises:
        UsageError: There is nothing to evaluate on, or the model is not one that native computes.
        UnfitError: A package is missing.
        PrimusError: The checkpoint is damaged.
    """
    _check_input(options)
    from primus.model_source.hub_files import find_origin
    from primus.model_source.text_model import TextModel

    model = TextModel(options.checkpoint, options, options.tokenizer)
    origin, step = find_origin(model.opened.found), model.opened.step
    done = [
        CheckpointEvaluation(
            name=name, step=step, metrics=metrics, settings=settings, time=time.time(), version=__version__
        )
        for name, metrics, settings in _measure(model, origin.trainer, options)
    ]
    rows = [[each.name, key, table.format_number(value)] for each in done for key, value in each.metrics.items()]
    title = f"{model.opened.found.folder}{'' if step is None else f', step {step:,}'}"
    text = f"{title}\n{table.format_table(['data', 'metric', 'value'], rows, right=(2,))}"
    context.result({"checkpoint": str(model.opened.found.folder), "step": step, "evaluations": done}, text)
    if origin.run is not None:
        for each in done:
            write_evaluation(origin.run, each)


def _check_input(options: Options) -> None:
    if "" in options.stop:
        raise UsageError("--stop '': an empty text is everywhere", "give a text that ends an answer")
    if options.exact_match is None and (options.stop or options.chat):
        raise UsageError("--stop and --chat are for --exact-match only", "give --exact-match FILE, or leave them out")


def _measure(model: Any, trainer: Any, options: Options) -> Iterator[tuple[str, dict[str, float], dict[str, Any]]]:
    """Name, metrics and settings of each evaluation that is asked for."""
    from primus.model_source.measures import measure_matches, measure_texts, measure_validation
    from primus.model_source.text_model import AnswerStyle

    size = options.batch_size
    if not (options.data or options.exact_match or options.tasks):
        if trainer is None:
            raise UsageError(
                f"{options.checkpoint} is of no run, so that there are no validation data",
                "give --data FILE, --exact-match FILE or --tasks NAME",
            )
        yield "validation", measure_validation(model, trainer, options.limit), {"limit": options.limit}
    if options.data:
        length = options.seq_length or (trainer.training.seq_length if trainer else LONGEST)
        length = min(length, model.opened.spec.max_position_embeddings)
        metrics = measure_texts(model, options.data, length, size)
        yield f"data {os.path.basename(options.data)}", metrics, {"file": options.data, "seq_length": length}
    if options.exact_match:
        style = AnswerStyle(options.max_new_tokens, options.chat, stops=options.stop)
        metrics = measure_matches(model, options.exact_match, style, size)
        settings = {"file": options.exact_match, "max_new_tokens": options.max_new_tokens, "chat": options.chat}
        yield f"exact_match {os.path.basename(options.exact_match)}", metrics, settings | {"stop": options.stop}
    if options.tasks:
        from primus.model_source.harness import measure_tasks

        names = [name for name in options.tasks.split(",") if name]
        for name, metrics in measure_tasks(model, names, options.include_path, options.limit, size).items():
            yield f"task {name}", metrics, {"limit": options.limit}
