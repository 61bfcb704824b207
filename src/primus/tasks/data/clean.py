"""Remove low-quality documents by rules (C4, Gopher, FineWeb, language, lists) and report the removals of each rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from primus.data.filter.options import FilterOptions, build_job_settings, check_options
from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.filter.cleaning.job import CleanJob
    from primus.data.filter.cleaning.report import CleanReport
    from primus.data.filter.result_folder import JobResult


class Options(FilterOptions, frozen=True, kw_only=True):
    """Options of `data clean`."""

    recipe: str = ""
    """c4, fineweb, gopher, minimal, tprimat (see --list), or a .yaml file with rules and thresholds."""
    list: bool = False
    """List the recipes with their rules and thresholds."""
    language: str | None = None
    """Keep only documents in this language, such as en."""
    language_share: Annotated[float, Meta(ge=0, le=1)] = 0.65
    """Minimum share of a document in --language."""
    compression: Literal["zst", "gz", "none"] = "zst"
    """Compression of the written files."""
    keep_removed: bool = False
    """Also write the removed documents, with the reason of each, into OUTPUT.removed."""


def run(options: Options, context: TaskContext) -> None:
    """Clean documents and print the counts, or list the recipes.

    Raises:
        PrimusError: See `primus.data.filter.result_folder.filter_documents`.
    """
    if options.list:
        _print_recipes(context)
        return
    job = _build_clean_job(options)
    from primus.data.filter.result_folder import filter_documents
    from primus.data.shards.display import ProgressDisplay

    with ProgressDisplay() as display:
        cleaned = filter_documents(job, display.print_line, display.show_progress)
    value = _summarize_cleaning(job, cleaned)
    context.result(value, "\n".join(f"{name:16} {each}" for name, each in value.items()))


def _print_recipes(context: TaskContext) -> None:
    from primus.data.filter.cleaning import recipe

    found = {name: recipe.load_recipe(name).content() for name in recipe.list_presets()}
    lines = []
    for name, content in found.items():
        lines.append(f"{name} (words: {content.words})")
        for rule in content.rules:
            thresholds = ", ".join(f"{key} {value}" for key, value in rule.items() if key != "rule")
            lines.append(f"  {rule['rule']}: {thresholds}")
    context.result(found, "\n".join(lines))


def _build_clean_job(options: Options) -> CleanJob:
    """The job that the options describe.

    Raises:
        UsageError: Something is missing or unknown.
    """
    check_options(options, "clean")
    if not options.recipe:
        raise UsageError("no recipe", "give --recipe NAME or --recipe FILE.yaml (see --list)")
    from primus.data.filter.cleaning import recipe
    from primus.data.filter.cleaning.job import CleanJob
    from primus.data.filter.cleaning.rules.language import Language

    first = (Language(language=options.language, min_share=options.language_share),) if options.language else ()
    return CleanJob(
        recipe=recipe.load_recipe(options.recipe, first),
        compression=options.compression,
        keep_removed=options.keep_removed,
        **build_job_settings(options),
    )


def _summarize_cleaning(job: CleanJob, cleaned: JobResult[CleanReport]) -> dict[str, object]:
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
        "report": str(cleaned.folder / job.report_name),
        "page": str(job.page_path()),
    }
