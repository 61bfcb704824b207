"""Show statistics and documents of token files, or the exact samples of a training step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from primus.config.flags import RunName
from primus.errors import UsageError
from primus.task import TaskContext
from primus.tasks.data import _examples

if TYPE_CHECKING:
    from primus.data.instruction.inspection import SampleSegment
    from primus.data.training.dataset import Datasets
    from primus.data.training.step_samples import InspectedStep, TrainingSample
    from primus.data.verify.survey import SurveyedDocument, TokenSurvey

SHOWN_CHARACTERS = 240
SHOWN_MASKED = 12

SOURCES = {"prefix": "a PREFIX", "config": "--config", "run": "--run"}
"""What can be inspected: one of these options, and how it is written."""

MEANT_FOR = {
    ("samples", "seed", "document", "tokenizer"): ("prefix",),
    ("output",): ("prefix", "run", "config"),
    ("step", "sample", "rank"): ("run", "config"),
    ("set", "world_size"): ("config",),
    ("workspace",): ("run",),
}
"""Options that only some of them have."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data inspect`."""

    prefix: Annotated[str | None, Meta(extra={"positional": True})] = None
    """Prefix of the .bin and .idx files."""
    samples: Annotated[int, Meta(ge=0)] = 0
    """Number of random documents to print."""
    seed: int = 0
    """Seed that selects the documents."""
    document: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Numbers of documents to print, counted from 0."""
    tokenizer: str | None = None
    """Tokenizer for decoding; by default the copy next to the files."""
    output: str | None = None
    """Write a histogram of document lengths to this file, as a page (.html) or an image (.svg); of instruction data, a
    page with each token of the samples."""
    config: Annotated[str | None, Meta(extra={"aliases": ("--exp",)})] = None
    """Show a step of this experiment file."""
    set: tuple[str, ...] = ()
    """Override keys of the experiment, as KEY=VALUE."""
    run: RunName | None = None
    """Show a step of this run: its folder, its id, or the name of an experiment for the newest run."""
    workspace: str = "./output"
    """Folder that holds all run folders."""
    step: Annotated[int, Meta(ge=1)] | None = None
    """Step, counted from 1."""
    sample: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Show only these samples, by their number in the run; without --step, the step of the first one."""
    rank: Annotated[int, Meta(ge=0)] | None = None
    """Show only the samples of this data-parallel rank."""
    world_size: Annotated[int, Meta(ge=1)] = 1
    """Number of ranks for --config; a run records its own."""
    full: bool = False
    """Print whole texts."""


def run(options: Options, context: TaskContext) -> None:
    """Print what token files hold, or the samples of a step.

    Raises:
        UsageError: The options exclude each other, or something that they name does not exist.
        UnfitError: The data of a run is not what it was trained on.
        PrimusError: A file is damaged.
    """
    named = [name for name in SOURCES if getattr(options, name) is not None]
    if len(named) != 1:
        raise UsageError(f"data inspect takes one of PREFIX, --config and --run, not {' and '.join(named) or 'none'}")
    _check_unused(options, named[0])
    if options.prefix is not None:
        _inspect_files(options, context)
        return
    if options.step is None and not options.sample:
        raise UsageError(f"--{named[0]} without --step or --sample", "give the step to show, like --step 1234")
    _inspect_step(options, context)


def _check_unused(options: Options, source: str) -> None:
    """Raises UsageError where an option is given that means nothing for what is inspected."""
    for name, default in zip(Options.__struct_fields__, Options.__struct_defaults__, strict=True):
        meant = next((sources for names, sources in MEANT_FOR.items() if name in names), (source,))
        if getattr(options, name) != default and source not in meant:
            option, given = name.replace("_", "-"), SOURCES[source]
            raise UsageError(
                f"--{option} has no effect with {given}", f"use it with {' or '.join(SOURCES[each] for each in meant)}"
            )


def _inspect_files(options: Options, context: TaskContext) -> None:
    from primus.config.token_files import resolve_prefix
    from primus.data.megatron.indexed_dataset import IndexedTokens
    from primus.data.verify import survey

    output = _parse_output_path(options)
    file = IndexedTokens(resolve_prefix(options.prefix or "", "prefix"))
    tokenizer = survey.load_tokenizer(file.prefix, options.tokenizer)
    found = survey.survey_tokens(file, tokenizer)
    numbers = [*options.document, *survey.choose_documents(file, options.samples, options.seed)]
    documents = [survey.decode_document(file, number, tokenizer) for number in numbers]
    blocks = [_format_survey(found), *(_format_document(document, options.full) for document in documents)]
    if options.document and not options.samples:
        blocks = blocks[1:]
    context.result({"survey": found, "documents": documents}, "\n\n".join(blocks))
    if output:
        _draw_length_histogram(found, output)
        context.say(f"\npicture: {output}")


def _parse_output_path(options: Options) -> Path | None:
    path = Path(options.output) if options.output else None
    if path and path.suffix not in (".html", ".svg"):
        raise UsageError(f"--output {path}: neither .html nor .svg", "give the file one of these endings")
    return path


def _draw_length_histogram(found: TokenSurvey, output: Path) -> None:
    from primus.report import histogram, page
    from primus.report.charts import select_wide
    from primus.runs import files

    title = f"{Path(found.prefix).name}: {found.tokens:,} tokens in {found.documents:,} documents"
    picture = histogram.draw_histogram(found.lengths.histogram, title, "documents", "tokens")
    if output.suffix == ".svg":
        files.write_text(output, f"{select_wide(picture)}\n")
        return
    frequent = [(each.token, repr(each.text or ""), f"{each.share:.2%}") for each in found.frequent]
    sections = [
        ("Lengths of documents", picture),
        ("Files", page.make_table(("", ""), _list_survey_facts(found))),
        (
            f"Most frequent of {_format_token_count(found)}",
            page.make_table(("token", "text", "share"), frequent, right=(0, 2)),
        ),
    ]
    files.write_text(output, page.format_page(f"Tokens of {Path(found.prefix).name}", sections, found.prefix))


def _format_survey(found: TokenSurvey) -> str:
    from primus.report import histogram, table

    lengths = found.lengths
    facts = _list_survey_facts(found)
    width = max(len(name) for name, _ in facts)
    spread = ", ".join(f"{percent} %: {length:,}" for percent, length in lengths.percentiles.items())
    frequent = [(str(each.token), f"{each.share:.2%}", repr(each.text) if each.text else "") for each in found.frequent]
    return "\n".join(
        [
            found.prefix,
            *(f"  {name:{width}}  {value}" for name, value in facts),
            "",
            f"tokens of a document: mean {lengths.mean:,.1f}; {spread}",
            histogram.format_text_histogram(lengths.histogram, "documents", "tokens"),
            "",
            f"most frequent of {_format_token_count(found)}",
            table.format_table(("token", "share", "text"), frequent, right=(0, 1)),
        ]
    )


def _format_token_count(found: TokenSurvey) -> str:
    part = "all" if found.counted_tokens == found.tokens else f"{found.counted_tokens:,} sampled"
    return f"{part} tokens ({found.distinct_tokens:,} different ones)"


def _list_survey_facts(found: TokenSurvey) -> list[tuple[str, str]]:
    """What is known of the files, as names and values."""
    rows = [
        ("tokens", f"{found.tokens:,} ({found.dtype}, {found.bytes / 1e6:,.1f} MB)"),
        ("documents", f"{found.documents:,}" + (f" in {found.sequences:,} sequences" * _is_cut(found))),
    ]
    manifest = found.manifest
    if not manifest:
        return [*rows, ("manifest", "none: another program wrote these files")]
    tokenizer, recipe = manifest.tokenizer, manifest.recipe
    end = f", ends documents with {tokenizer.eod} ({tokenizer.eod_id})" if recipe.append_eod else ""
    inputs = "; ".join(f"{each.path} ({each.files} files, {each.bytes / 1e6:,.1f} MB)" for each in manifest.inputs)
    changed = [f"{name} {getattr(recipe, name)}" for name in recipe.__struct_fields__]
    rows += [
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens{end}"),
        ("made from", inputs),
        ("recipe", ", ".join(changed)),
        ("skipped", f"{manifest.empty_documents:,} empty and {manifest.bad_documents:,} bad documents"),
        *(("", bad) for bad in found.bad),
        ("identity", manifest.fingerprint),
    ]
    return rows


def _is_cut(found: TokenSurvey) -> bool:
    return found.sequences != found.documents


def _format_document(document: SurveyedDocument, full: bool) -> str:
    body = (
        _shorten_text(document.text, full)
        if document.text is not None
        else _shorten_text(_format_token_ids(document.ids), full)
    )
    return f"document {document.document:,}, {len(document.ids):,} tokens:\n{_indent_text(body)}"


def _inspect_step(options: Options, context: TaskContext) -> None:
    from primus import experiment
    from primus.data.instruction.policy_settings import learns_from_rewards
    from primus.data.open_samples import open_samples
    from primus.data.training import step_samples

    recorded = ""
    if options.run is not None:
        from primus.runs import store

        found = store.find_run(options.run, Path(options.workspace))
        trained = experiment.load_run_experiment(found, context.environ).experiment
        number = options.step or step_samples.find_step_of_sample(found, options.sample[0])
        step, recorded = step_samples.find_recorded_step(found, trained, number)
    else:
        trained = experiment.resolve_experiment(
            Path(options.config or ""), _check_changes(options), context.environ
        ).experiment
        step = step_samples.plan_step(trained, options.step or 1, options.world_size)
        if options.step is None:
            number = options.sample[0] // step.global_batch_size + 1
            step = step_samples.plan_step(trained, number, options.world_size)
    if learns_from_rewards(trained.trainer.backend_args):
        raise UsageError(
            "the samples of train rl are what the model generates", "runs rollouts RUN --step N shows those of a run"
        )
    data = open_samples(trained.trainer, refuses=False)
    step_samples.check_recorded(data, recorded)
    numbers = _select_sample_numbers(options, step)
    samples = list(step_samples.read_samples(step, data, trained.trainer, numbers))
    segments = _list_segments(data, numbers)
    if options.output:
        _write_page(options, step, data, samples, segments)
    is_colored = sys.stdout.isatty() and not context.environ.get("NO_COLOR")
    shown = [_sample_text(sample, options.full, segments.get(sample.sample), is_colored) for sample in samples]
    masks = {"masks": data.mask_reports, "segments": segments} if segments else {}
    reports = [_examples.format_reports(data.mask_reports)] if segments else []
    context.result({"step": step, "samples": samples, **masks}, "\n\n".join([*reports, _step_text(step), *shown]))
    if options.output:
        context.say(f"\npage: {options.output}")


def _write_page(
    options: Options,
    step: InspectedStep,
    data: Datasets,
    samples: Sequence[TrainingSample],
    segments: dict[int, list[SampleSegment]],
) -> None:
    """Write a page of instruction data.

    Raises:
        UsageError: The data is of another kind, or the file is not a page.
    """
    output = _parse_output_path(options)
    if output is None or output.suffix != ".html" or not segments:
        problem = "a page (.html) of a step needs instruction data" if not segments else "a step is shown as a page"
        raise UsageError(f"--output {options.output}: {problem}", "name a file that ends in .html, or remove it")
    _examples.write_page(output, f"Step {step.step:,}", data.mask_reports, samples, segments)


def _list_segments(data: Datasets, numbers: Sequence[int]) -> dict[int, list[SampleSegment]]:
    """Prompts and answers of samples of instruction data; nothing for others."""
    if not data.mask_reports or data.tokenizer_path is None:
        return {}
    from primus.data.instruction.inspection import list_segments
    from primus.data.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(data.tokenizer_path, fast=False)
    return {number: list_segments(data.train, number, tokenizer) for number in numbers}


def _check_changes(options: Options) -> tuple[str, ...]:
    for change in options.set:
        if "=" not in change:
            raise UsageError(f"--set {change}: no value", "give KEY=VALUE")
    return options.set


def _select_sample_numbers(options: Options, step: InspectedStep) -> list[int]:
    """The samples to show.

    Raises:
        UsageError: The step has no such sample or rank.
    """
    whole = range(step.first_sample, step.first_sample + step.global_batch_size)
    if options.rank is not None and options.rank >= step.world_size:
        raise UsageError(f"no rank {options.rank} among {step.world_size}", "see --world-size")
    for number in options.sample:
        if number not in whole:
            raise UsageError(
                f"sample {number:,} is not in step {step.step:,}", f"the step has {whole[0]:,} to {whole[-1]:,}"
            )
    numbers = list(options.sample or whole)
    return [each for each in numbers if options.rank is None or step.locate_sample(each)[0] == options.rank]


def _step_text(step: InspectedStep) -> str:
    last = step.first_sample + step.global_batch_size - 1
    how = "as the run has recorded" if step.recorded else "of a run that passes over no data"
    return (
        f"step {step.step:,}: samples {step.first_sample:,} to {last:,}, {how};"
        f" micro batches of {step.micro_batch_size} on {step.world_size} data-parallel ranks"
    )


def _sample_text(sample: TrainingSample, full: bool, segments: Sequence[SampleSegment] | None, is_colored: bool) -> str:
    lines = [f"sample {sample.sample:,} (rank {sample.rank}, micro batch {sample.micro_batch})"]
    place = 0
    for part in sample.parts:
        cut = f", sequence {part.sequence:,}" if part.sequence != part.document else ""
        place += part.tokens
        lines.append(
            f"  tokens {place - part.tokens:,} to {place - 1:,}: {part.prefix}, document {part.document:,}{cut}"
            f" from its token {part.first_token:,}"
        )
    if segments is not None:
        return "\n".join([*lines, *_format_segments(sample, segments, full, is_colored)])
    if sample.masked:
        more = f" and {len(sample.masked) - SHOWN_MASKED:,} more" if len(sample.masked) > SHOWN_MASKED else ""
        lines.append(f"  excluded from the loss: positions {', '.join(map(str, sample.masked[:SHOWN_MASKED]))}{more}")
    text = _format_token_ids(sample.ids) if sample.text is None else sample.text
    return "\n".join([*lines, _indent_text(_shorten_text(text, full))])


def _format_segments(
    sample: TrainingSample, segments: Sequence[SampleSegment], full: bool, is_colored: bool
) -> list[str]:
    used = sum(segment.tokens for segment in segments)
    num_predictions = len(sample.ids) - 1
    lines = [f"  {num_predictions - len(sample.masked):,} of {num_predictions:,} predictions count in the loss"]
    for segment in segments:
        last = segment.first_token + segment.tokens - 1
        kind = "counts" if segment.is_counted else "does not count"
        lines.append(f"  tokens {segment.first_token:,} to {last:,}: row {segment.row:,}, {kind}")
        text = _examples.format_tokens(segment) if is_colored else _shorten_text(segment.text or "", full)
        lines.append(_indent_text(text))
    return [*lines, f"  tokens {used:,} to {len(sample.ids) - 1:,}: padding"] if used < len(sample.ids) else lines


def _format_token_ids(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _shorten_text(text: str, full: bool) -> str:
    if full or len(text) <= 2 * SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]} [...] {text[-SHOWN_CHARACTERS:]}"


def _indent_text(text: str) -> str:
    return "    " + text.replace("\n", "\n    ")
