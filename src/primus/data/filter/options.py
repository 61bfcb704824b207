"""Options that the tasks have in common which make a folder of documents from documents."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError


class TextOptions(Struct, frozen=True, kw_only=True):
    """What to read, where to write, and who does it."""

    input: tuple[str, ...] = ()
    """Files (.jsonl, .txt, .csv, .parquet, also compressed, source files), folders, patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files; `data prepare --list` shows them."""
    output: str = ""
    """Folder for the documents that are kept, as compressed JSON lines with all their fields."""
    json_key: str | None = None
    """Field of a record, or column, that holds the text; text, or else the only one."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a .txt file."""
    max_bad: Annotated[int, Meta(ge=0)] = 0
    """Bad documents (broken JSON, no such field, null, not UTF-8) that may be left out; the report lists them."""
    workers: Annotated[int, Meta(ge=1)] | None = None
    """Processes; all cores by default. The result does not depend on it."""
    executor: Literal["local", "ray"] = "local"
    """Who does the work: processes of this machine, or the Ray cluster that $RAY_ADDRESS names."""
    overwrite: bool = False
    """Replace an earlier result at the output that was made otherwise."""


def check(options: TextOptions, task: str) -> None:
    """Find what is missing before anything is read.

    Args:
        options: The options.
        task: What is done, as it is typed.

    Raises:
        UsageError: There is no input or output, or a package that every job needs is not there.
    """
    if not options.input and not options.dataset:
        raise UsageError(f"nothing to {task}", "give --input PATH... or --dataset NAME")
    if not options.output:
        raise UsageError("no output", "give --output FOLDER")
    missing = [name for name in ("numpy", "xxhash", "zstandard") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"data {task} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def build_job_settings(options: TextOptions) -> dict[str, Any]:
    """The fields of a `primus.data.filter.job.TextJob` that the options describe.

    Raises:
        UsageError: An input is missing or unknown, or has several columns that could be the text.
    """
    from primus.data.filter.job import parse_text_key

    return {
        "inputs": options.input,
        "dataset": options.dataset,
        "output": Path(os.path.expanduser(options.output)),
        "json_key": options.json_key or parse_text_key(options.input),
        "text_documents": options.text_documents,
        "max_bad": options.max_bad,
        "workers": options.workers,
        "executor": options.executor,
        "existing": "replace" if options.overwrite else "check",
    }
