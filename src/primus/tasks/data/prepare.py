"""Make Megatron .bin/.idx token files from text: fetch, clean, deduplicate, tokenize and verify."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from primus.data.catalog.listing import list_named_datasets
from primus.data.encode.options import EncodeOptions, check_packages, make_job, output_prefix, summarize_prepared
from primus.data.filter.dedup.recipe import MAX_REMOVED
from primus.errors import UsageError
from primus.task import TaskContext


class Options(EncodeOptions, frozen=True, kw_only=True):
    """Options of `data prepare`."""

    dataset: str | None = None
    """Named dataset (see --list), or OWNER/NAME[:CONFIG] on the Hugging Face Hub, instead of files."""
    split: str = "train"
    """Split of a dataset on the Hub, in the syntax of the package datasets: train+test, train[:1%], train[:1000000]."""
    num_samples: Annotated[int, Meta(ge=1)] | None = None
    """Use only the first N documents of a dataset on the Hub."""
    list: bool = False
    """List the named datasets."""
    data_path: str = "./data"
    """Folder for named datasets, and for their token files without --output."""
    clean: str | None = None
    """Clean the text first by this recipe, such as fineweb or a file; the result is in PREFIX.clean."""
    dedup: Literal["none", "exact", "minhash"] = "none"
    """Remove exact duplicates, or near-duplicates too; the result is in PREFIX.unique."""
    max_removed: Annotated[float, Meta(ge=0, le=1)] = MAX_REMOVED
    """With --dedup minhash: largest share of documents to remove as near-duplicates; more is an error."""
    verify: bool = True
    """Verify the token files afterwards."""


def run(options: Options, context: TaskContext) -> None:
    """Prepare the data, or list the named datasets.

    Raises:
        PrimusError: See `primus.data.encode.job.prepare_token_files`.
    """
    if options.list:
        context.result(*list_named_datasets())
        return
    output = _choose_output_prefix(options)
    check_packages("data prepare")
    from primus.data.encode.job import prepare_token_files
    from primus.data.prepare import steps
    from primus.data.shards.display import ProgressDisplay

    job = replace(make_job(options, output, options.tokenizer), dataset=options.dataset)
    before = steps.EncodeSteps(
        clean=options.clean,
        dedup=options.dedup,
        max_removed=options.max_removed,
        data_path=Path(options.data_path),
        split=options.split,
        num_samples=options.num_samples,
    )
    with ProgressDisplay() as display:
        prepared = prepare_token_files(
            steps.run_steps(before, job, display.print_line, display.show_progress),
            display.print_line,
            display.show_progress,
        )
        if options.verify:
            steps.verify_prepared([each for each in prepared if each.made], display.print_line)
    values = [summarize_prepared(each) for each in prepared]
    context.result(values, "\n".join(f"--train_data_path {value['prefix']}" for value in values))


def _choose_output_prefix(options: Options) -> Path:
    """Prefix of the files.

    Raises:
        UsageError: It is not known, or something else is missing.
    """
    if not options.input and not options.dataset:
        raise UsageError("nothing to prepare", "give --input PATH... or --dataset NAME (see --list)")
    if options.input and options.dataset:
        raise UsageError("both --input and --dataset", "give one of them")
    if not options.tokenizer:
        raise UsageError("no tokenizer", "give --tokenizer PATH, a hub name, or bpe:VOCAB to train one on the text")
    if options.max_removed != MAX_REMOVED and options.dedup != "minhash":
        raise UsageError(f"--max-removed with --dedup {options.dedup}", "remove it, or give --dedup minhash")
    if options.output:
        return output_prefix(options.output)
    if not options.dataset:
        raise UsageError("no output", "give --output PREFIX")
    check_packages("data prepare")
    from primus.data.prepare import named_dataset

    return named_dataset.choose_output_prefix(Path(options.data_path), options.dataset, options.tokenizer)
