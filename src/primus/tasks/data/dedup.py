"""Remove documents that repeat earlier ones, exactly or nearly (MinHash), with a report and samples."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.dedup.job import Job
    from primus.data.dedup.report import Report
    from primus.data.pipeline.result_folder import Made


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data dedup`."""

    input: tuple[str, ...] = ()
    """Files (.jsonl, .txt, .csv, .parquet, also compressed, source files), folders, patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files; `data prepare --list` shows them."""
    output: str = ""
    """Folder for the documents that are kept, as .jsonl.zst with all their fields."""
    method: Literal["exact", "minhash"] = "minhash"
    """Remove equal documents only, or near copies too."""
    bands: Annotated[int, Meta(ge=1)] = 14
    """Bands of the MinHash signature: documents that agree in one are copies."""
    rows: Annotated[int, Meta(ge=1)] = 8
    """Hashes in a band; more of them find only what is more alike."""
    ngram: Annotated[int, Meta(ge=1)] = 5
    """Words of a shingle."""
    seed: Annotated[int, Meta(ge=0)] = 1
    """Of the hash functions."""
    normalize: bool = False
    """With the exact method: compare without case, accents, punctuation and spacing, and take any number as 0."""
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


def run(options: Options, context: TaskContext) -> None:
    """Remove copies and tell how many there were.

    Raises:
        PrimusError: See `primus.data.dedup.job.dedup`.
    """
    job = _job(options)
    from primus.data.dedup.job import dedup
    from primus.data.pipeline.display import Display

    with Display() as display:
        done = dedup(job, display.say, display.show)
    value = _summary(job, done)
    context.result(value, "\n".join(f"{name:17} {each}" for name, each in value.items()))


def _job(options: Options) -> Job:
    """The job that the options describe.

    Raises:
        UsageError: Something is missing.
    """
    if not options.input and not options.dataset:
        raise UsageError("nothing to deduplicate", "give --input PATH... or --dataset NAME")
    if not options.output:
        raise UsageError("no output", "give --output FOLDER")
    if options.normalize and options.method != "exact":
        raise UsageError(
            "--normalize with --method minhash", "leave it out: MinHash always compares words without case and spacing"
        )
    missing = [name for name in ("numpy", "xxhash", "zstandard") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"data dedup needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")
    from primus.data.dedup.job import Job
    from primus.data.dedup.recipe import Recipe
    from primus.data.pipeline.text_job import text_key

    return Job(
        inputs=options.input,
        dataset=options.dataset,
        output=Path(options.output).expanduser(),
        recipe=Recipe(
            method=options.method,
            bands=options.bands,
            rows=options.rows,
            ngram=options.ngram,
            seed=options.seed,
            normalize=options.normalize,
        ),
        json_key=options.json_key or text_key(options.input),
        text_documents=options.text_documents,
        max_bad=options.max_bad,
        workers=options.workers,
        executor=options.executor,
        existing="replace" if options.overwrite else "check",
    )


def _summary(job: Job, done: Made[Report]) -> dict[str, object]:
    from primus.data.dedup.job import REPORT

    report = done.report
    return {
        "folder": str(done.folder),
        "made": done.made,
        "documents": report.documents,
        "kept": report.kept,
        "removed_exact": report.removed_exact,
        "removed_near": report.removed_near,
        "clusters": report.clusters,
        "empty_documents": report.empty,
        "bad_documents": len(report.bad),
        "threshold": report.threshold,
        "report": str(done.folder / REPORT),
        "page": str(job.page()),
    }
