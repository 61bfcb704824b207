"""Tune the matrix products that hipBLASLt logged: each shape once, on all GPUs, into one tuning file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from msgspec import Struct, structs

from primus.errors import PrimusError, UnfitError
from primus.machine import tuned_files
from primus.machine.tuned_files import TunedText
from primus.process import run_command
from primus.report import table
from primus.runs.files import write_json, write_text
from primus.task import TaskContext
from primus.tasks.tune import _search
from primus.tasks.tune._gemm_options import GemmOptions
from primus.tuning import hipblaslt
from primus.tuning.claim import claim_host, claim_work
from primus.tuning.hipblaslt import GemmProblem, TuningFile

BENCH_OPTIONS = {"skip_slow_solution_ratio": "0.7", "rotating": "512", "cold_iters": "20", "iters": "20"}
"""The values of AMD-AGI/Primus, examples/offline_tune/offline_tune_gemm.py."""
MOST_LISTED = 20
POLL_S = 1.0
"""Time between two looks for the results of other nodes."""


class GemmTuningResult(Struct, frozen=True, kw_only=True):
    """The result of tuning."""

    output: str
    version: str
    """Version of hipBLASLt; another version ignores the file."""
    num_shapes: int
    num_tuned: int
    share_of_calls: float
    """Of the logged calls that have a tuned shape."""
    shapes: list[dict[str, str]]
    failures: dict[str, str]
    """Reason by shape."""
    verdict: str = ""
    """Whether later runs use it; empty without an experiment to compare."""


def tune_logged_products(options: GemmOptions, context: TaskContext) -> None:
    """Tune what is not tuned yet by hipblaslt-bench, and write the file.

    Raises:
        UnfitError: The program is not installed, or there is no GPU.
        UsageError: Another process writes the same file.
        PrimusError: A log has no shapes, or no shape can be tuned.
    """
    problems = (
        hipblaslt.read_problems(map(Path, options.shapes)) if options.shapes else _collect_problems(options, context)
    )
    gpus = options.gpus or tuple(str(index) for index in range(len(context.facts().devices)))
    if not gpus:
        raise UnfitError("no GPU was found to tune on", "name them: --gpus 0 1")
    parts = Path(f"{options.output}.parts")
    parts.mkdir(parents=True, exist_ok=True)
    with claim_host(parts):
        failures = _tune_problems(problems, parts, gpus, options, context)
        if context.layout is not None and context.layout.node_rank > 0:
            return  # node 0 reports for all
        files = _read_parts(problems, parts)
        result = _merge_parts(problems, files, failures, Path(options.output))
        if options.config is not None:
            result = _keep_if_faster(result, options, context)
    context.result(result, _format_result(result))


def _collect_problems(options: GemmOptions, context: TaskContext) -> list[GemmProblem]:
    """The products of a step on fake tensors, as hipBLASLt gets them from PyTorch."""
    from primus.tasks.tune import _products

    found = _products.trace_products(_products.resolve_experiment(options, context), context, "cuda")
    problems = [hipblaslt.build_problem(each.product, each.calls) for each in found.products]
    return [problem for problem in problems if problem is not None]


def _keep_if_faster(result: GemmTuningResult, options: GemmOptions, context: TaskContext) -> GemmTuningResult:
    """Compare runs with the file and without it; later runs use it if it is faster beyond the noise."""
    assert options.config is not None
    request = _search.SearchRequest(
        config=options.config,
        keys=(f"env.{tuned_files.HIPBLASLT_VARIABLE}={Path(options.output).resolve()}",),
        metric="tokens_per_s",
        rungs=[options.steps],
        workspace=options.workspace,
        timeout_s=options.timeout,
        options=("--no-tuned",),
    )
    found = _search.run_search(request, context)
    if not found.is_better:
        return structs.replace(result, verdict="not used by later runs: the interval contains no gain")
    valid_for = tuned_files.describe_rocm(context.facts())
    path = tuned_files.name_tuned_file(context.environ, "hipblaslt", valid_for)
    gain = f"{found.gain:+.1%} tokens/s" if found.gain is not None else ""
    summary = (
        f"{result.num_tuned} of {result.num_shapes} shapes have a tuned solution of {result.version} {gain}".strip()
    )
    text = Path(options.output).read_text(encoding="utf-8")
    write_json(path, TunedText(created=time.time(), valid_for=valid_for, text=text, summary=summary))
    return structs.replace(result, verdict=f"kept: later runs use it ({path}); direct --no-tuned switches it off")


def _tune_problems(
    problems: Sequence[GemmProblem], parts: Path, gpus: Sequence[str], options: GemmOptions, context: TaskContext
) -> dict[str, str]:
    """Tune all problems without a valid part; gives the reason of each failure by key."""
    known = _read_parts(problems, parts)
    pending = [problem for problem in problems if problem.key not in known]
    failures = _share_problems(pending, parts, gpus, options, context)
    fresh = _read_parts(pending, parts)
    if fresh:
        # Solution indices are void in another version of the library: older parts are tuned again.
        version = next(iter(fresh.values())).version
        stale = [each for each in problems if each.key in known and known[each.key].version != version]
        if stale:
            context.say(f"{len(stale)} shapes were tuned for another version of hipBLASLt, and are tuned again")
        for problem in stale:
            (parts / f"{problem.key}.txt").unlink(missing_ok=True)
        failures |= _share_problems(stale, parts, gpus, options, context)
    return failures


def _share_problems(
    problems: Sequence[GemmProblem], parts: Path, gpus: Sequence[str], options: GemmOptions, context: TaskContext
) -> dict[str, str]:
    """Tune problems that other nodes tune as well, each on one node; waits for those of the others."""
    failures: dict[str, str] = {}
    pending = list(problems)
    while pending:
        before = len(pending)
        failures |= _run_on_gpus(pending, parts, gpus, options, context)
        known = _read_parts(pending, parts)
        pending = [problem for problem in pending if problem.key not in known and problem.key not in failures]
        if len(pending) == before:
            time.sleep(POLL_S)
    return failures


def _run_on_gpus(
    problems: Sequence[GemmProblem], parts: Path, gpus: Sequence[str], options: GemmOptions, context: TaskContext
) -> dict[str, str]:
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    failures: dict[str, str] = {}
    done, printing = 0, threading.Lock()

    def tune(problem: GemmProblem) -> None:
        nonlocal done
        gpu = free.get()
        part = parts / f"{problem.key}.txt"
        try:
            with claim_work(parts / "claims" / problem.key) as is_ours:
                if not is_ours or _read_parts([problem], parts):  # another node tunes it, or has
                    return
                reason = _tune_problem(problem, part, gpu, options, context)
        finally:
            free.put(gpu)
        with printing:
            done += 1
            if reason:
                failures[problem.key] = reason
            context.say(f"  {done} of {len(problems)}: {problem.shape} on GPU {gpu}: {reason or 'tuned'}")

    with ThreadPoolExecutor(max_workers=len(gpus)) as pool:
        list(pool.map(tune, problems))
    return failures


def _tune_problem(problem: GemmProblem, part: Path, gpu: str, options: GemmOptions, context: TaskContext) -> str:
    """Tune one problem on one GPU; gives the reason of a failure, else an empty text."""
    # Renamed when it is complete, so that a part that exists is never cut off by a kill.
    unfinished = part.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    environ = {**context.environ, "HIPBLASLT_TUNING_FILE": str(unfinished.resolve()), "HIP_VISIBLE_DEVICES": gpu}
    # A file in force would be what is measured.
    environ.pop("HIPBLASLT_TUNING_OVERRIDE_FILE", None)
    answer = run_command(
        hipblaslt.build_bench_command(options.bench, problem, BENCH_OPTIONS), environ, limit_s=options.timeout
    )
    if answer.state == "missing":
        raise UnfitError(answer.problem, "it is part of ROCm's hipblaslt packages; name another path by --bench")
    if answer.state != "ok":
        return answer.problem
    try:
        hipblaslt.parse_tuning_file(unfinished.read_text(encoding="utf-8"), unfinished.name)
    except OSError:
        return f"{options.bench} wrote no tuning file"
    except PrimusError as error:
        return error.problem
    os.replace(unfinished, part)
    return ""


def _read_parts(problems: Sequence[GemmProblem], parts: Path) -> dict[str, TuningFile]:
    """The valid parts by key; a damaged part counts as missing."""
    found = {}
    for problem in problems:
        part = parts / f"{problem.key}.txt"
        try:
            found[problem.key] = hipblaslt.parse_tuning_file(part.read_text(encoding="utf-8"), str(part))
        except (OSError, PrimusError):
            continue
    return found


def _merge_parts(
    problems: Sequence[GemmProblem], files: dict[str, TuningFile], failures: dict[str, str], output: Path
) -> GemmTuningResult:
    tuned = [problem for problem in problems if problem.key in files and problem.key not in failures]
    if not tuned:
        raise PrimusError("no shape could be tuned", "; ".join(sorted(set(failures.values()))[:3]))
    entries = [files[problem.key].entries[-1] for problem in tuned]
    version = files[tuned[0].key].version
    write_text(output, hipblaslt.format_tuning_file(version, entries))
    calls = sum(problem.count for problem in problems)
    return GemmTuningResult(
        output=str(output),
        version=version,
        num_shapes=len(problems),
        num_tuned=len(tuned),
        share_of_calls=sum(problem.count for problem in tuned) / calls,
        shapes=[
            {
                "shape": problem.shape,
                "calls": str(problem.count),
                "us": entry.values.get("us", ""),
                "solution": entry.values.get("solution_index", ""),
            }
            for problem, entry in zip(tuned, entries, strict=True)
        ],
        failures={problem.shape: failures[problem.key] for problem in problems if problem.key in failures},
    )


def _format_result(result: GemmTuningResult) -> str:
    rows = [list(shape.values()) for shape in result.shapes[:MOST_LISTED]]
    lines = [table.format_table(["shape", "calls", "us", "solution"], rows, right=(1, 2, 3))]
    lines += [f"not tuned: {shape}: {reason}" for shape, reason in result.failures.items()]
    lines.append(
        f"{result.num_tuned} of {result.num_shapes} shapes tuned, {result.share_of_calls:.0%} of the calls; hipBLASLt "
        f"{result.version}"
    )
    compare = f"tune train --config FILE --keys env.{tuned_files.HIPBLASLT_VARIABLE}={result.output}"
    lines.append(result.verdict or f"compare real steps: {compare}")
    return "\n".join(lines)
