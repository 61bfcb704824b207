"""Measure matrix products, attention, collectives, memory, storage and training; `benchmark list` lists all."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import structs

from primus import registry
from primus.benchmark import (
    ALIASES,
    BENCHMARKS,
    LIST,
    RESULT_FILE,
    BenchmarkOptions,
    BenchmarkPlan,
    BenchmarkRank,
    BenchmarkResult,
    find_benchmark_name,
    find_rank_file,
    parse_share,
)
from primus.errors import EXIT_FAILED, EXIT_OK, EXIT_UNFIT, PrimusError, UsageError
from primus.plan import LaunchJob
from primus.report import benchmark_files, benchmark_history
from primus.report.benchmark_comparison import RowComparison, compare_records, format_comparison
from primus.report.benchmark_page import format_page
from primus.report.benchmark_table import Record, find_slow_ranks, format_result_table, list_records
from primus.report.table import format_table
from primus.runs.files import read_json, to_json
from primus.runs.store import Run, RunOutcome
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt

Options = BenchmarkOptions
PLAN_FILE = "config/benchmark.json"
CLUSTER_VARIABLE = "PRIMUS_CLUSTER"
"""Label of the cluster in results of collectives (AMD-AGI/Primus, rccl_bench_args.py)."""
LAST = "last"
"""Word of `--baseline` for the previous result on this machine."""


def choose_options(words: Sequence[str]) -> type[BenchmarkOptions]:
    """The options of the benchmark that `words` name."""
    known = (LIST, *registry.list_plug_ins("benchmarks"), *ALIASES)
    # A value of an option may come first: `--duration 3 gemm`.
    plain = [word for word in words if not word.startswith("-")]
    name = next((word for word in plain if word.lower().replace("_", "-") in known), next(iter(plain), LIST))
    if name == LIST:
        return Options
    return registry.load_plug_in(BENCHMARKS, find_benchmark_name(name)).Options


def prepare(options: BenchmarkOptions, context: TaskContext) -> LaunchJob | None:
    """The job that measures; None for `benchmark list`.

    Raises:
        UsageError: An option is wrong, or the baseline is damaged.
    """
    if options.benchmark == LIST:
        if type(options) is not Options:  # an option that takes several values took the name for one of them
            raise UsageError("the benchmark is not named", "name it before its options: benchmark gemm --dtype bf16")
        return None
    name = find_benchmark_name(options.benchmark)
    plug_in = registry.load_plug_in(BENCHMARKS, name)
    plug_in.check_options(options)
    parse_share(options.precision, "--precision")
    # Before anything is measured: a wrong file must not cost the measurement.
    for path in options.output_file:
        if path != "-":
            benchmark_files.find_suffix(path)
    _read_baseline(options, context.environ)
    if plug_in.measure_launches:
        return None
    chosen = msgspec.to_builtins(options)
    if chosen.get("cluster") == "":
        chosen["cluster"] = context.environ.get(CLUSTER_VARIABLE, "")
    plan = BenchmarkPlan(benchmark=name, options=chosen, writes_to_console=not context.json)
    device: Literal["cpu"] | None = "cpu" if options.device == "cpu" else None
    return LaunchJob(
        name=f"benchmark-{name}", workspace=options.workspace, files={PLAN_FILE: to_json(plan)}, device=device
    )


def work(attempt: Attempt) -> None:
    """Measure, as one rank."""
    from primus.measure import benchmark_run

    benchmark_run.run_benchmark(attempt, read_json(attempt.run.directory / PLAN_FILE, BenchmarkPlan))


def run(options: BenchmarkOptions, context: TaskContext) -> int:
    """Measure, report, compare with the baseline; returns 3 if a row is slower, 1 if no case could be measured."""
    if options.benchmark == LIST:
        return _list_benchmarks(context)
    baseline = _read_baseline(options, context.environ)
    outcome, folder, started = RunOutcome(state="done"), None, time.time()
    if context.launch is None:
        result = _measure_launches(options, started, context)
        if context.layout and context.layout.node_rank:  # node 0 reports
            return EXIT_OK
    else:
        run_folder, outcome = context.launch()
        if context.layout and context.layout.node_rank:  # node 0 has the results of all ranks
            return outcome.exit_code or EXIT_OK
        folder = run_folder.directory
        result = _read_result(run_folder, outcome, options, started, context)
    found: list[RowComparison] = []
    mismatch: UsageError | None = None
    try:
        if baseline and not result.problem:
            found = compare_records(baseline, list_records(result), _read_tolerance(options))
    except UsageError as error:  # raised after the report: what was measured is not lost
        mismatch = error
    _report_result(result, found, options, context, folder)
    if outcome.state != "done" or result.problem:
        print(f"primus-cli: {result.problem or outcome.reason}", file=sys.stderr)
        return outcome.exit_code or EXIT_FAILED
    try:
        benchmark_history.keep_result(result, context.environ)
    except PrimusError as error:  # the result is printed, and is in its run folder or file
        print(f"primus-cli: note: later commands do not know this result: {error.problem}", file=sys.stderr)
    if mismatch is not None:
        raise mismatch
    return _judge_rows(result, found)


def _measure_launches(options: BenchmarkOptions, started: float, context: TaskContext) -> BenchmarkResult:
    """The result of a benchmark that launches runs."""
    name = find_benchmark_name(options.benchmark)
    measure = registry.load_plug_in(BENCHMARKS, name).measure_launches
    assert measure is not None
    rank = BenchmarkRank(
        rank=0,
        host=socket.gethostname(),
        device="",
        device_name="",
        rows=tuple(measure(options, context)),
        is_complete=True,
    )
    return BenchmarkResult(
        benchmark=name,
        options=msgspec.to_builtins(options),
        started=started,
        duration_s=time.time() - started,
        ranks=(rank,),
    )


def _judge_rows(result: BenchmarkResult, found: Sequence[RowComparison]) -> int:
    failed = [row for row in result.rows if row.value is None or row.wrong]
    if failed and (len(failed) == len(result.rows) or any(row.wrong for row in failed)):
        print(f"primus-cli: benchmark {result.benchmark}: {failed[0].problem}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_UNFIT if any(each.is_slower for each in found) else EXIT_OK


def _list_benchmarks(context: TaskContext) -> int:
    summaries = {name: registry.read_summary("benchmarks", name) for name in registry.list_plug_ins("benchmarks")}
    context.result(summaries, format_table(("benchmark", "measures"), list(summaries.items())))
    return EXIT_OK


def _read_tolerance(options: BenchmarkOptions) -> float:
    return parse_share(options.tolerance, "--tolerance")


def _read_baseline(options: BenchmarkOptions, environ: Mapping[str, str]) -> list[Record]:
    """Rows to compare with; none without a baseline.

    Raises:
        UsageError: The file is damaged, or there is none.
    """
    _read_tolerance(options)
    if options.baseline is None:
        return []
    name = find_benchmark_name(options.benchmark)
    path = benchmark_history.find_history_file(name, environ) if options.baseline == LAST else Path(options.baseline)
    if not path.is_file():
        raise UsageError(
            f"--baseline {options.baseline}: {path} does not exist",
            "measure once without --baseline, with --output-file",
        )
    records = benchmark_files.read_records(str(path))
    if not records:
        raise UsageError(f"--baseline {options.baseline}: {path} has no rows")
    return records


def _read_result(
    run_folder: Run, outcome: RunOutcome, options: BenchmarkOptions, started: float, context: TaskContext
) -> BenchmarkResult:
    """What rank 0 collected, or else what the ranks of this node left before the run ended."""
    file = run_folder.directory / RESULT_FILE
    if file.exists():
        result = read_json(file, BenchmarkResult)
    else:
        world_size = context.layout.world_size if context.layout else 1
        paths = [run_folder.directory / find_rank_file(rank) for rank in range(world_size)]
        ranks = tuple(read_json(path, BenchmarkRank) for path in paths if path.exists())
        missing = sorted(set(range(world_size)) - {rank.rank for rank in ranks if rank.is_complete})
        problem = f"no complete results of rank {', '.join(map(str, missing))}: {outcome.reason or outcome.state}"
        if world_size == 1 and ranks and ranks[0].problem:
            problem = ranks[0].problem
        result = BenchmarkResult(
            benchmark=find_benchmark_name(options.benchmark),
            options=msgspec.to_builtins(options),
            started=started,
            world_size=world_size,
            ranks=ranks,
            problem=problem,
        )
    return structs.replace(result, notes=tuple(find_slow_ranks(result)))


def _report_result(
    result: BenchmarkResult,
    found: Sequence[RowComparison],
    options: BenchmarkOptions,
    context: TaskContext,
    folder: Path | None,
) -> None:
    text = format_result_table(result)
    if "-" in options.output_file:
        text = benchmark_files.format_markdown(result)
    if found:
        text = f"{text}\n{format_comparison(found, _read_tolerance(options))}"
    context.result({"result": result, "comparison": found, "run": str(folder) if folder else None}, text)
    page = str(folder / "report/benchmark.html") if folder else "-"
    for path in (*options.output_file, page):
        if path != "-":
            benchmark_files.write_result(result, path, format_page, appends=options.append and path != page)
            context.say(f"written: {os.path.relpath(path)}")
    plug_in = registry.load_plug_in(BENCHMARKS, result.benchmark)
    for path, rows in plug_in.list_tables(options, result).items():
        benchmark_files.write_table(rows, path)
        context.say(f"written: {os.path.relpath(path)}")
