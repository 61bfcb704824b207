"""Tune matrix products on GPUs: each one once, on all GPUs of all nodes, into one file that later runs use."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from msgspec import Struct, structs

from primus.errors import PrimusError, UnfitError
from primus.report import table
from primus.runs import tuned_files
from primus.runs.files import write_json, write_text
from primus.runs.tuned_files import TunedFile
from primus.task import TaskContext
from primus.tuning.gemm.gpu_tuner import GpuProblem, GpuTuner, TunedPart
from primus.tuning.gemm.options import GemmOptions
from primus.tuning.search.claim import claim_host, claim_work
from primus.tuning.search.search import SearchRequest, run_search

MOST_LISTED = 20
POLL_S = 1.0
"""Time between two looks for the results of other nodes."""


class GemmTuningResult(Struct, frozen=True, kw_only=True):
    """The result of tuning."""

    library: str
    """hipBLASLt or TunableOp."""
    output: str
    version: str
    """The versions for which the solutions are valid; another version ignores or rejects the file."""
    num_shapes: int
    num_tuned: int
    share_of_calls: float
    """Share of the logged calls that have a tuned shape."""
    shapes: list[dict[str, str]]
    failures: dict[str, str]
    """Reason by shape."""
    verdict: str = ""
    """Whether later runs use it; empty without an experiment to compare."""


class GpuSearch(Struct, frozen=True, kw_only=True):
    """One call of `tune gemm` on GPUs."""

    tuner: GpuTuner[Any]
    options: GemmOptions
    context: TaskContext
    gpus: Sequence[str]

    @property
    def parts(self) -> Path:
        """Folder with the result of each problem; the next call tunes what is missing."""
        return Path(f"{self.tuner.output}.parts")


def tune_on_gpus(tuner: GpuTuner[Any], options: GemmOptions, context: TaskContext) -> None:
    """Tune what is not tuned yet, write the file, and keep it for later runs if real steps are faster.

    Raises:
        UnfitError: The tuner is not installed, or the machine has no GPU.
        UsageError: Another process writes the same file.
        PrimusError: A log has no shapes, or no shape can be tuned.
    """
    problems = tuner.collect_problems()
    gpus = options.gpus or tuple(str(index) for index in range(len(context.facts().devices)))
    if not gpus:
        raise UnfitError("no GPU was found to tune on", "name them: --gpus 0 1")
    search = GpuSearch(tuner=tuner, options=options, context=context, gpus=gpus)
    search.parts.mkdir(parents=True, exist_ok=True)
    with claim_host(search.parts):
        failures = _tune_problems(search, problems)
        if context.layout is not None and context.layout.node_rank > 0:
            return  # node 0 reports for all
        result, text = _merge_parts(search, problems, failures)
        if options.config is not None:
            result = _keep_if_faster(search, result, text)
    context.result(result, _format_result(search, result))


def _keep_if_faster(search: GpuSearch, result: GemmTuningResult, text: str) -> GemmTuningResult:
    """Compare runs with the file and without it; later runs use it if it is faster beyond the noise."""
    options, context, tuner = search.options, search.context, search.tuner
    assert options.config is not None
    request = SearchRequest(
        config=options.config,
        keys=tuple(f"env.{name}={value}" for name, value in tuner.list_variables().items()),
        metric="tokens_per_s",
        rungs=[options.steps],
        workspace=options.workspace,
        timeout_s=options.timeout,
        options=("--no-tuned",),
    )
    found = run_search(request, context)
    if not found.is_better:
        return structs.replace(result, verdict="not used by later runs: the interval contains no gain")
    valid_for = tuner.describe_validity()
    path = tuned_files.name_tuned_file(context.environ, tuner.kind, valid_for)
    gain = f"{found.gain:+.1%} tokens/s" if found.gain is not None else ""
    summary = (
        f"{result.num_tuned} of {result.num_shapes} shapes have a tuned solution of {result.version} {gain}".strip()
    )
    write_json(path, TunedFile(created=time.time(), valid_for=valid_for, text=text, summary=summary))
    return structs.replace(result, verdict=f"kept: later runs use it ({path}); direct --no-tuned disables it")


def _tune_problems(search: GpuSearch, problems: Sequence[GpuProblem]) -> dict[str, str]:
    """Tune all problems without a valid part; gives the reason of each failure by key."""
    known = _read_parts(search, problems)
    pending = [problem for problem in problems if problem.key not in known]
    failures = _share_problems(search, pending)
    fresh = _read_parts(search, pending)
    if fresh:
        # Solution indices are void in another version of the library: older parts are tuned again.
        version = next(iter(fresh.values())).version
        stale = [each for each in problems if each.key in known and known[each.key].version != version]
        if stale:
            name = search.tuner.name
            search.context.say(f"{len(stale)} shapes were tuned for another version of {name}, and are tuned again")
        for problem in stale:
            _name_part(search, problem).unlink(missing_ok=True)
        failures |= _share_problems(search, stale)
    return failures


def _share_problems(search: GpuSearch, problems: Sequence[GpuProblem]) -> dict[str, str]:
    """Tune problems that other nodes tune as well, each on one node; waits for those of the others."""
    failures: dict[str, str] = {}
    pending = list(problems)
    # A problem is over when its part exists or it failed here. One that another node holds stays pending: either its
    # part appears, or its claim becomes free, and the next round tunes it.
    while pending:
        before = len(pending)
        failures |= _run_on_gpus(search, pending)
        known = _read_parts(search, pending)
        pending = [problem for problem in pending if problem.key not in known and problem.key not in failures]
        if len(pending) == before:
            time.sleep(POLL_S)
    return failures


def _run_on_gpus(search: GpuSearch, problems: Sequence[GpuProblem]) -> dict[str, str]:
    # Two problems at once on a GPU would disturb each other's times, so each takes a GPU out of the queue. A thread for
    # each GPU suffices: it only waits for the process that measures.
    free: SimpleQueue[str] = SimpleQueue()
    for gpu in search.gpus:
        free.put(gpu)
    failures: dict[str, str] = {}
    done, printing = 0, threading.Lock()

    def tune(problem: GpuProblem) -> None:
        nonlocal done
        gpu = free.get()
        try:
            with claim_work(search.parts / "claims" / problem.key) as is_ours:
                if not is_ours or _read_parts(search, [problem]):  # another node tunes it, or has
                    return
                reason = _tune_problem(search, problem, gpu)
        finally:
            free.put(gpu)
        with printing:
            done += 1
            if reason:
                failures[problem.key] = reason
            search.context.say(f"  {done} of {len(problems)}: {problem.shape} on GPU {gpu}: {reason or 'tuned'}")

    with ThreadPoolExecutor(max_workers=len(search.gpus)) as pool:
        list(pool.map(tune, problems))
    return failures


def _tune_problem(search: GpuSearch, problem: GpuProblem, gpu: str) -> str:
    """Tune one problem on one GPU; gives the reason of a failure, else an empty text."""
    try:
        with tempfile.TemporaryDirectory(prefix="primus-tune-") as folder:
            text = search.tuner.tune_problem(problem, gpu, Path(folder))
        search.tuner.parse_part(text, problem.shape)
    except UnfitError:
        raise
    except PrimusError as error:
        return error.problem
    # Written last and by rename: a part that exists is complete, so an interrupted search resumes from its parts.
    write_text(_name_part(search, problem), text)
    return ""


def _name_part(search: GpuSearch, problem: GpuProblem) -> Path:
    return search.parts / f"{problem.key}.txt"


def _read_parts(search: GpuSearch, problems: Sequence[GpuProblem]) -> dict[str, TunedPart]:
    """The valid parts by key; a damaged part counts as missing."""
    found = {}
    for problem in problems:
        part = _name_part(search, problem)
        try:
            found[problem.key] = search.tuner.parse_part(part.read_text(encoding="utf-8"), str(part))
        except (OSError, PrimusError):
            continue
    return found


def _merge_parts(
    search: GpuSearch, problems: Sequence[GpuProblem], failures: dict[str, str]
) -> tuple[GemmTuningResult, str]:
    """The result, and the text of the written file."""
    known = _read_parts(search, problems)
    tuned = [problem for problem in problems if problem.key in known and problem.key not in failures]
    if not tuned:
        raise PrimusError("no shape could be tuned", "; ".join(sorted(set(failures.values()))[:3]))
    parts = [known[problem.key] for problem in tuned]
    text = search.tuner.write_output(parts)
    calls = sum(problem.count for problem in problems)
    result = GemmTuningResult(
        library=search.tuner.name,
        output=str(search.tuner.output),
        version=parts[0].version,
        num_shapes=len(problems),
        num_tuned=len(tuned),
        share_of_calls=sum(problem.count for problem in tuned) / calls,
        shapes=[
            {"shape": problem.shape, "calls": str(problem.count), "us": part.us, "solution": part.solution}
            for problem, part in zip(tuned, parts, strict=True)
        ],
        failures={problem.shape: failures[problem.key] for problem in problems if problem.key in failures},
    )
    return result, text


def _format_result(search: GpuSearch, result: GemmTuningResult) -> str:
    rows = [list(shape.values()) for shape in result.shapes[:MOST_LISTED]]
    lines = [table.format_table(["shape", "calls", "us", "solution"], rows, right=(1, 2))]
    lines += [f"not tuned: {shape}: {reason}" for shape, reason in result.failures.items()]
    lines.append(
        f"{result.num_tuned} of {result.num_shapes} shapes tuned, {result.share_of_calls:.0%} of the calls; "
        f"{result.library} {result.version}"
    )
    keys = " ".join(f"env.{name}={value}" for name, value in search.tuner.list_variables().items())
    lines.append(result.verdict or f"compare real steps: tune train --config FILE --keys {keys}")
    return "\n".join(lines)
