"""Remove documents by quality rules (C4, Gopher, FineWeb, language, lists), with a report of what each rule removed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.cleaning.job import Job
    from primus.data.cleaning.report import Report
    from primus.data.pipeline.result_folder import Made


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data clean`."""

    input: tuple[str, ...] = ()
    """Files (.jsonl, .txt, .csv, .parquet, also compressed, source files), folders, patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files."""
    recipe: str = ""
    """c4, fineweb, gopher, minimal, tprimat, or a .yaml file with rules and thresholds; see --list."""
    list: bool = False
    """Print the recipes, rules and thresholds."""
    output: str = ""
    """Folder for the documents that are kept, as JSON lines with all their fields."""
    language: str | None = None
    """Keep only documents in this language, like en."""
    language_share: Annotated[float, Meta(ge=0, le=1)] = 0.65
    """Share of a document that must be in --language."""
    json_key: str | None = None
    """Field of a record, or column, that holds the text; text, or else the only one."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a .txt file."""
    compression: Literal["zst", "gz", "none"] = "zst"
    """Of the files that are written."""
    keep_removed: bool = False
    """Write what is removed, with the reason, into OUTPUT.removed."""
    max_bad: Annotated[int, Meta(ge=0)] = 0
    """Bad documents (broken JSON, no such field, null, not UTF-8) that may be left out; the report lists them."""
    workers: Annotated[int, Meta(ge=1)] | None = None
    """Processes; all cores by default. The result does not depend on it."""
    executor: Literal["local", "ray"] = "local"
    """Processes of this machine, or tasks of the Ray cluster of $RAY_ADDRESS."""
    overwrite: bool = False
    """Replace an earlier result at the output that was made otherwise."""


def run(options: Options, context: TaskContext) -> None:
    """Clean documents and tell what was removed, or print the recipes.

    Raises:
        PrimusError: See `primus.data.cleaning.job.clean`.
    """
    _check_packages()
    if options.list:
        _list(context)
        return
    job = _job(options)
    from primus.data.cleaning.job import clean
    from primus.data.pipeline.display import Display

    with Display() as display:
        cleaned = clean(job, display.say, display.show)
    value = _summary(job, cleaned)
    context.result(value, "\n".join(f"{name:16} {each}" for name, each in value.items()))


def _check_packages() -> None:
    """Tell what is missing where only the command line is installed.

    Raises:
        UsageError: A package that every job needs is not there.
    """
    missing = [name for name in ("numpy", "xxhash", "zstandard") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"data clean needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def _list(context: TaskContext) -> None:
    from primus.data.cleaning import recipe

    found = {name: recipe.load(name).content() for name in recipe.names()}
    lines = []
    for name, content in found.items():
        lines.append(f"{name} (words: {content['words']})")
        for rule in content["rules"]:
            thresholds = ", ".join(f"{key} {value}" for key, value in rule.items() if key != "rule")
            lines.append(f"  {rule['rule']}: {thresholds}")
    context.result(found, "\n".join(lines))


def _job(options: Options) -> Job:
    """The job that the options describe.

    Raises:
        UsageError: Something is missing or unknown.
    """
    if not options.input and not options.dataset:
        raise UsageError("nothing to clean", "give --input PATH... or --dataset NAME")
    if not options.recipe:
        raise UsageError("no recipe", "give --recipe NAME or --recipe FILE.yaml (see --list)")
    if not options.output:
        raise UsageError("no output", "give --output FOLDER")
    from primus.data.cleaning import recipe
    from primus.data.cleaning.job import Job
    from primus.data.cleaning.rules.language import Language
    from primus.data.pipeline.text_job import text_key

    first = (Language(language=options.language, min_share=options.language_share),) if options.language else ()
    return Job(
        inputs=options.input,
        dataset=options.dataset,
        output=Path(options.output).expanduser(),
        recipe=recipe.load(options.recipe, first),
        json_key=options.json_key or text_key(options.input),
        text_documents=options.text_documents,
        compression=options.compression,
        keep_removed=options.keep_removed,
        max_bad=options.max_bad,
        workers=options.workers,
        executor=options.executor,
        existing="replace" if options.overwrite else "check",
    )


def _summary(job: Job, cleaned: Made[Report]) -> dict[str, object]:
    from primus.data.cleaning.job import MANIFEST

    report = cleaned.report
    by_rule: dict[str, int] = {}
    for each in report.removed:
        by_rule[each.rule] = by_rule.get(each.rule, 0) + each.documents
    return {
        "folder": str(cleaned.folder),
        "made": cleaned.made,
        "documents": report.documents,
        "kept": report.kept,
        "removed": by_rule,
        "characters": report.characters,
        "kept_characters": report.kept_characters,
        "empty_documents": report.empty,
        "bad_documents": len(report.bad),
        "report": str(cleaned.folder / MANIFEST),
        "page": str(job.page()),
    }
