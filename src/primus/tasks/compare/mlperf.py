"""Write the MLPerf log of a run, or check that the runs of MLPerf logs converge as the reference does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus.comparison.mlperf.convergence import (
    ConvergedRun,
    ConvergenceCheck,
    check_convergence,
    read_converged_run,
    read_references,
)
from primus.comparison.mlperf.log import MlperfSubmission, format_mlperf_log
from primus.errors import EXIT_FAILED, EXIT_OK, UsageError
from primus.report.table import format_table
from primus.runs import store
from primus.runs.files import write_text
from primus.task import TaskContext

LOG = "report/mlperf.log"
"""Name in the run folder."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare mlperf`."""

    what: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """A run (folder, id or experiment), to write its log; or MLPerf logs of three or more runs, to check them."""
    output: str | None = None
    """File of the log; `report/mlperf.log` in the run folder when omitted."""
    benchmark: str = "llama31_8b"
    """Benchmark of the run."""
    organization: str = "unknown"
    """Submitter."""
    platform: str = ""
    """Name of the system (default: the host of the run)."""
    division: Literal["closed", "open"] = "closed"
    """Division of the submission."""
    target: float | None = None
    """Evaluation loss at which the run has converged, such as 3.3; the log ends there."""
    reference: str | None = None
    """File of reference convergence points (default: that of the installed package mlperf_logging)."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


class ConvergenceReport(Struct, frozen=True, kw_only=True):
    """What a check prints as JSON."""

    check: ConvergenceCheck
    runs: list[ConvergedRun]
    reference: str


def run(options: Options, context: TaskContext) -> int:
    """Write the log of a run, or check logs.

    Exit codes: 1 if the runs converge significantly faster than the reference, or do not converge.

    Raises:
        UsageError: A word is neither a run nor an MLPerf log, or the reference is missing.
        PrimusError: The run took no step.
    """
    if all(Path(word).is_file() for word in options.what):
        return _check_logs(options, context)
    if len(options.what) != 1:
        raise UsageError(
            "compare mlperf takes one run, or MLPerf logs", "name files of three or more runs to check them"
        )
    found = store.find_run(options.what[0], Path(options.workspace))
    submission = MlperfSubmission(
        benchmark=options.benchmark,
        organization=options.organization,
        platform=options.platform or found.read_metadata().host or "unknown",
        division=options.division,
        target=options.target,
    )
    file = Path(options.output) if options.output else found.directory / LOG
    text = format_mlperf_log(found, submission)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    context.result({"log": str(file), "lines": text.count("\n")}, f"{text.count(chr(10))} lines: {file}")
    return EXIT_OK


def _check_logs(options: Options, context: TaskContext) -> int:
    runs = [read_converged_run(Path(word)) for word in options.what]
    kinds = sorted({(each.benchmark, each.batch_size) for each in runs})
    if len(kinds) > 1:
        found = ", ".join(f"{benchmark} with batch size {size:g}" for benchmark, size in kinds)
        raise UsageError(f"the logs are of different benchmarks or batch sizes: {found}")
    ((benchmark, batch_size),) = kinds
    file = Path(options.reference) if options.reference else _find_reference(benchmark)
    check = check_convergence([each.count for each in runs], batch_size, read_references(file, benchmark))
    report = ConvergenceReport(check=check, runs=runs, reference=str(file))
    context.result(report, format_report(report))
    return EXIT_OK if check.passes else EXIT_FAILED


def format_report(report: ConvergenceReport) -> str:
    """The runs, then the verdict."""
    check = report.check
    rows = [
        [each.log, f"{each.count:,.0f}" if each.count < float("inf") else "did not converge"] for each in report.runs
    ]
    lines = [format_table(["log", "count"], rows, right=(1,)), ""]
    if check.mean is not None and check.limit is not None and check.reference is not None:
        reference = f"{check.reference.mean:,.2f}, deviation {check.reference.deviation:,.2f}"
        lines += [
            f"mean without the extremes: {check.mean:,.2f}; of the reference: {reference}, limit {check.limit:,.2f}",
            f"factor of the time to train: {check.normalization:.4f}",
        ]
    return "\n".join([*lines, f"{'passes' if check.passes else 'fails'}: {check.reason}"])


def _find_reference(benchmark: str) -> Path:
    package = find_spec("mlperf_logging")
    folders = (package.submodule_search_locations or []) if package else []
    # The folders are named by version: training_5.1.0.
    files = [file for folder in folders for file in Path(folder).glob(f"rcp_checker/training_*/rcps_{benchmark}.json")]
    if not files:
        raise UsageError(
            f"no reference convergence points of {benchmark}",
            "name their file with --reference, or pip install mlperf_logging",
        )
    return max(files, key=lambda file: [int(part) for part in file.parent.name.partition("_")[2].split(".")])
