"""Options that `data clean` and `data dedup` share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.data.filter.job import FilterSettings


class FilterOptions(Struct, frozen=True, kw_only=True):
    """What to read, where to write, and which processes do the work."""

    input: tuple[str, ...] = ()
    """Files (.jsonl, .txt, .csv, .parquet, compressed or not, source code), folders, glob patterns and URLs."""
    dataset: str | None = None
    """Named dataset to read instead of files; `data prepare --list` lists them."""
    output: str = ""
    """Folder for the documents that are kept: compressed JSON lines with all fields."""
    json_key: str | None = None
    """Field or column that holds the text. Default: "text", or the only text column."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a .txt file."""
    max_bad: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of bad documents (broken JSON, missing or null text, not UTF-8) to skip and report."""
    workers: Annotated[int, Meta(ge=1)] | None = None
    """Number of processes; all cores by default. The result does not depend on it."""
    executor: Literal["local", "ray"] = "local"
    """Run on this machine, or on the Ray cluster at $RAY_ADDRESS."""
    overwrite: bool = False
    """Replace an existing result that was made from other input or with other settings."""


def check_options(options: FilterOptions, task: str) -> None:
    """Check for missing options and packages before any input is read.

    Args:
        options: The options.
        task: Name of the task, such as ``clean``.

    Raises:
        UsageError: The input or output is missing, or a required package is not installed.
    """
    if not options.input and not options.dataset:
        raise UsageError(f"nothing to {task}", "give --input PATH... or --dataset NAME")
    if not options.output:
        raise UsageError("no output", "give --output FOLDER")
    missing = [name for name in ("numpy", "xxhash", "zstandard") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"data {task} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def build_job_settings(options: FilterOptions) -> FilterSettings:
    """The fields of a `primus.data.filter.job.FilterJob` that the options set.

    Raises:
        UsageError: An input is missing or unknown, or has several columns that could be the text.
    """
    from primus.data.filter.job import choose_text_key

    return {
        "inputs": options.input,
        "dataset": options.dataset,
        "output": Path(os.path.expanduser(options.output)),
        "json_key": options.json_key or choose_text_key(options.input),
        "text_documents": options.text_documents,
        "max_bad": options.max_bad,
        "workers": options.workers,
        "executor": options.executor,
        "existing": "replace" if options.overwrite else "check",
    }
