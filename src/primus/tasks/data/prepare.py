"""Make Megatron .bin/.idx token files from text, step by step: fetch, clean, remove copies, tokenize, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from primus.data.catalog.listing import list_named_datasets
from primus.data.encode.options import EncodeOptions, check_packages, make_job, output_prefix, summarise_prepared
from primus.errors import UsageError
from primus.task import TaskContext


class Options(EncodeOptions, frozen=True, kw_only=True):
    """Options of `data prepare`."""

    dataset: str | None = None
    """Named dataset, or OWNER/NAME[:CONFIG] on the Hugging Face hub, instead of files; see --list."""
    split: str = "train"
    """Split of a dataset of the hub, or as of the package datasets: train+test, train[:1%], train[:1000000]."""
    num_samples: Annotated[int, Meta(ge=1)] | None = None
    """Take the first documents of a dataset of the hub only."""
    list: bool = False
    """Print the named datasets."""
    data_path: str = "./data"
    """Folder of a dataset, and of its tokens where --output is not given."""
    clean: str | None = None
    """Recipe of cleaning rules, such as fineweb or a file; what is kept is put into PREFIX.clean."""
    dedup: Literal["none", "exact", "minhash"] = "none"
    """Remove documents that repeat earlier ones, exactly or nearly; what is kept is put into PREFIX.unique."""
    verify: bool = True
    """Read the token files again and check them."""


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

    job = make_job(options, output, options.tokenizer, dataset=options.dataset)
    before = steps.EncodeSteps(
        clean=options.clean,
        dedup=options.dedup,
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
    values = [summarise_prepared(each) for each in prepared]
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
    if options.output:
        return output_prefix(options.output)
    if not options.dataset:
        raise UsageError("no output", "give --output PREFIX")
    check_packages("data prepare")
    from primus.data.prepare import named_dataset

    return named_dataset.choose_output_prefix(Path(options.data_path), options.dataset, options.tokenizer)
