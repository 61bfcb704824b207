"""Remove documents by quality rules (C4, Gopher, FineWeb, language, lists), with a report of what each rule removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from primus.data.pipeline import text_options
from primus.data.pipeline.text_options import TextOptions
from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.cleaning.job import Job
    from primus.data.cleaning.report import Report
    from primus.data.pipeline.result_folder import Made


class Options(TextOptions, frozen=True, kw_only=True):
    """Options of `data clean`."""

    recipe: str = ""
    """c4, fineweb, gopher, minimal, tprimat, or a .yaml file with rules and thresholds; see --list."""
    list: bool = False
    """Print the recipes, rules and thresholds."""
    language: str | None = None
    """Keep only documents in this language, like en."""
    language_share: Annotated[float, Meta(ge=0, le=1)] = 0.65
    """Share of a document that must be in --language."""
    compression: Literal["zst", "gz", "none"] = "zst"
    """Of the files that are written."""
    keep_removed: bool = False
    """Write what is removed, with the reason, into OUTPUT.removed."""


def run(options: Options, context: TaskContext) -> None:
    """Clean documents and tell what was removed, or print the recipes.

    Raises:
        PrimusError: See `primus.data.cleaning.job.clean`.
    """
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
    text_options.check(options, "clean")
    if not options.recipe:
        raise UsageError("no recipe", "give --recipe NAME or --recipe FILE.yaml (see --list)")
    from primus.data.cleaning import recipe
    from primus.data.cleaning.job import Job
    from primus.data.cleaning.rules.language import Language

    first = (Language(language=options.language, min_share=options.language_share),) if options.language else ()
    return Job(
        recipe=recipe.load(options.recipe, first),
        compression=options.compression,
        keep_removed=options.keep_removed,
        **text_options.settings(options),
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
