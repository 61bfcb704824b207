"""Download a dataset from the Hugging Face Hub; resumes and skips files already present."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from primus.data.catalog.listing import list_named_datasets
from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.catalog.fetch import FetchedDataset, FetchProgress
    from primus.data.shards.workers import ShardProgress as Shown

SHOWN_BAD = 5
"""Maximum number of bad documents that are printed."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data fetch`."""

    dataset: Annotated[str | None, Meta(extra={"positional": True})] = None
    """A named dataset (see --list) or OWNER/NAME on the Hub, with :CONFIG to select a configuration."""
    list: bool = False
    """List the named datasets."""
    split: str = "train"
    """Split, in the syntax of the package datasets: train+test, train[:1%], train[:1000000]."""
    output: str | None = None
    """Folder for the files; by default, below --data-path."""
    data_path: str = "./data"
    """Folder of named datasets."""
    num_samples: Annotated[int, Meta(ge=1)] | None = None
    """Fetch only the first N documents, as compressed JSON lines."""
    streaming: bool = False
    """Do not store the dataset's own files; write the documents as compressed JSON lines."""
    revision: str | None = None
    """Commit, branch or tag; by default the newest commit."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 4
    """Number of concurrent downloads."""


def run(options: Options, context: TaskContext) -> None:
    """Fetch a dataset, or list the named ones.

    Raises:
        PrimusError: See `primus.data.catalog.fetch.fetch_dataset`.
    """
    if options.list:
        context.result(*list_named_datasets())
        return
    if not options.dataset:
        raise UsageError("nothing to fetch", "give a dataset, such as fineweb or OWNER/NAME (see --list)")
    from primus.data.catalog.dataset_folders import find_dataset_folder
    from primus.data.catalog.fetch import FetchJob, fetch_dataset
    from primus.data.shards.display import ProgressDisplay

    folder = Path(os.path.expanduser(options.output)) if options.output else None
    if folder is None and (options.num_samples or options.streaming):
        raise UsageError("no output", "give --output FOLDER; --data-path holds whole datasets only")
    job = FetchJob(
        dataset=options.dataset,
        output=folder or find_dataset_folder(Path(options.data_path), options.dataset, options.split),
        split=options.split,
        revision=options.revision,
        num_samples=options.num_samples,
        streaming=options.streaming,
        workers=options.workers,
    )
    with ProgressDisplay() as display:
        fetched = fetch_dataset(
            job, display.print_line, lambda progress: display.show_progress(_convert_progress(progress))
        )
        for line in _list_remarks(fetched, options.num_samples):
            display.print_line(line)
    value = _summarize_fetch(fetched)
    context.result(value, f"--input {value['folder']}")


def _convert_progress(progress: FetchProgress) -> Shown:
    from primus.data.shards.workers import ShardProgress as Shown

    counts = {"files": progress.files, "documents": progress.documents}
    return Shown("fetching", progress.num_bytes, progress.bytes, counts)


def _list_remarks(fetched: FetchedDataset, num_samples: int | None) -> list[str]:
    """Remarks for the user about the fetched dataset."""
    documents = sum(each.documents for each in fetched.done)
    bad = [item for each in fetched.done for item in each.bad]
    remarks = [f"{fetched.folder}: skipped {len(bad):,} bad documents"] if bad else []
    remarks += [f"  {item.where}: {item.reason}" for item in bad[:SHOWN_BAD]]
    if num_samples and documents < num_samples:
        remarks.append(f"{fetched.folder}: the dataset has only {documents:,} documents")
    return remarks


def _summarize_fetch(fetched: FetchedDataset) -> dict[str, object]:
    listing = fetched.request.listing
    return {
        "folder": str(fetched.folder),
        "made": fetched.made,
        "dataset": listing.repo,
        "config": listing.config,
        "split": listing.split,
        "revision": listing.revision,
        "files": len(fetched.done),
        "bytes": sum(each.bytes for each in fetched.done),
        "documents": sum(each.documents for each in fetched.done) or None,
        "bad_documents": sum(len(each.bad) for each in fetched.done),
    }
