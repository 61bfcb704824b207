"""Run the cells of a matrix one after the other, each by the ordinary launch, and keep the result of each.

A cell is in one of these states:

    no result                  its launch has not ended; it runs, or runs again after the harness was killed
    done                       it is never repeated
    failed, refused            its result says why; the next `compare run` tries again
    submitted                  no result, and its newest run folder belongs to a job of a scheduler, which is waited for

The result is the last file that a cell writes, so a harness that is killed at any time loses one run at most.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, structs

from primus.comparison.cells import MatrixCell
from primus.comparison.comparison_folder import ComparisonFolder
from primus.comparison.machine_load import LoadRecorder
from primus.comparison.read_result import describe_unstarted_cell, read_result
from primus.comparison.result import ComparisonResult, ResultLoad
from primus.errors import EXIT_TIMED_OUT, PrimusError
from primus.launch.jobs import job_states, submissions
from primus.launch.signals import raise_on_signals
from primus.machine.facts import MachineFacts
from primus.messages import Say
from primus.process import end_program
from primus.redaction import redact
from primus.runs.store import Run, list_runs

PATIENCE_S = 30.0
"""Time for the launcher of a cell to stop its workers before all its processes are killed."""


class CellHarness(Struct, frozen=True, kw_only=True):
    """What all cells of a command share."""

    folder: ComparisonFolder
    environ: Mapping[str, str]
    facts: MachineFacts
    timeout_s: float
    say: Say


class CellEnd(Struct, frozen=True, kw_only=True):
    """How the launch of a cell ended."""

    exit_code: int
    last_line: str
    load: ResultLoad


def run_cells(cells: Sequence[MatrixCell], harness: CellHarness) -> list[ComparisonResult]:
    """Run all cells that have no complete result; a cell that fails does not stop the others.

    Raises:
        PrimusError: A result cannot be written.
        KeyboardInterrupt: A signal has stopped the harness, and with it the cell that was running.
    """
    # Before the first run: results of another version of the matrix must not cost hours first.
    known = {cell.name: harness.folder.read_cell_result(cell) for cell in cells}
    results: dict[str, ComparisonResult] = {}
    waiting: list[tuple[MatrixCell, Run]] = []
    with raise_on_signals():
        for number, cell in enumerate(cells, 1):
            found = known[cell.name]
            if found is not None and found.state == "done":
                results[cell.name] = found
                continue
            harness.say(f"[{number}/{len(cells)}] {cell.name}")
            if cell.status != "runnable":
                if cell.status == "refused":
                    results[cell.name] = _keep_result(_describe_refusal(cell), harness)
                else:
                    harness.say(f"  not here: {cell.reason}")
                continue
            result = _run_cell(cell, harness, waiting)
            if result is not None:
                results[cell.name] = _keep_result(result, harness)
        # All jobs are submitted before the first is waited for: a scheduler may run them at the same time.
        for cell, run in waiting:
            results[cell.name] = _keep_result(_wait_for_job(cell, run, harness), harness)
    return [results[cell.name] for cell in cells if cell.name in results]


def _run_cell(cell: MatrixCell, harness: CellHarness, waiting: list[tuple[MatrixCell, Run]]) -> ComparisonResult | None:
    """Launch a cell; None if a scheduler has it, which is added to `waiting`."""
    before = list_runs(harness.folder.runs / cell.name)
    # An earlier start of the harness has submitted the job, and was killed: it is not submitted twice.
    if before and _is_queued(before[-1]):
        waiting.append((cell, before[-1]))
        harness.say(f"  is a job already: {before[-1].directory}")
        return None
    end = _launch_cell(cell, harness)
    # Only the run folder of this launch: the earlier ones are of attempts that failed.
    runs = list_runs(harness.folder.runs / cell.name)[len(before) :]
    if not runs:
        return _describe_failed_launch(cell, end, harness)
    if _is_queued(runs[-1]):
        waiting.append((cell, runs[-1]))
        return None
    return _read_cell_result(cell, runs[-1], harness, end)


def _launch_cell(cell: MatrixCell, harness: CellHarness) -> CellEnd:
    """Run the command of a cell to its end, or to its time limit."""
    log = harness.folder.find_log(cell.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    recorder = LoadRecorder(harness.facts, harness.environ)
    with log.open("wb") as output, recorder:
        child = subprocess.Popen(
            [sys.executable, "-m", "primus", *cell.command],
            env=dict(harness.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the harness, which stops the launcher
            # A launcher here dies with its workers; one that has started others elsewhere must stop these first.
            preexec_fn=partial(_end_with_harness, signal.SIGKILL if cell.is_local else signal.SIGTERM),
        )
        try:
            code = child.wait(harness.timeout_s)
        except subprocess.TimeoutExpired:
            code = EXIT_TIMED_OUT
        finally:
            # Also after a signal: no process of a cell outlives the harness.
            end_program(child, PATIENCE_S)
    load = recorder.summarize_load() if cell.is_local else ResultLoad()
    return CellEnd(exit_code=code, last_line=_read_last_line(log), load=load)


def _end_with_harness(number: signal.Signals) -> None:
    """Have the kernel signal the launcher when the harness is killed (prctl(2))."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def _read_cell_result(cell: MatrixCell, run: Run, harness: CellHarness, end: CellEnd | None) -> ComparisonResult:
    """The result of a run; of a folder that cannot be read, the reason."""
    try:
        result = read_result(run, cell.place, folder=harness.folder.path, load=end.load if end else None)
    except PrimusError as error:
        return describe_unstarted_cell(cell.place, error.problem, error.hint, "failed")
    if end is not None and end.exit_code == EXIT_TIMED_OUT and result.state != "done":
        reason = f"the time limit of {harness.timeout_s / 60:g} minutes was reached"
        return structs.replace(result, reason=reason, hint="raise timeout_minutes: of the matrix")
    if result.state == "done" and not result.steps.number:
        return structs.replace(result, state="failed", reason="the run took no step")
    return result


def _describe_failed_launch(cell: MatrixCell, end: CellEnd, harness: CellHarness) -> ComparisonResult:
    """The result of a launch that made no run folder."""
    reason = end.last_line.removeprefix("primus-cli: ") or f"the launch exited with code {end.exit_code}"
    hint = f"read {harness.folder.find_log(cell.name)}"
    return describe_unstarted_cell(cell.place, reason, hint, "failed")


def _describe_refusal(cell: MatrixCell) -> ComparisonResult:
    return describe_unstarted_cell(cell.place, cell.reason, cell.hint, "refused")


def _is_queued(run: Run) -> bool:
    """Whether a scheduler has the run, and has not ended it."""
    try:
        return submissions.read_holder(run.directory) is not None and run.read_metadata().outcome.state in (
            "planned",
            "running",
        )
    # A folder that is damaged has no job to wait for, and the cell runs again.
    except PrimusError:
        return False


def _wait_for_job(cell: MatrixCell, run: Run, harness: CellHarness) -> ComparisonResult:
    submission = submissions.read_holder(run.directory)
    assert submission is not None, "the run is queued"
    harness.say(f"waiting for job {submission.id}: {cell.name}")
    state = job_states.wait_for_job(submission, harness.environ, harness.say, harness.timeout_s)
    result = _read_cell_result(cell, run, harness, None)
    if result.state == "done" or state.state == "done":
        return result
    return structs.replace(result, reason=result.reason or f"job {submission.id}: {job_states.format_state(state)}")


def _keep_result(result: ComparisonResult, harness: CellHarness) -> ComparisonResult:
    """Write a result, and say how the cell ended."""
    harness.folder.save_cell_result(result)
    harness.say("  " + describe_end(result))
    return result


def describe_end(result: ComparisonResult) -> str:
    """How a cell ended, as a line."""
    if result.state != "done":
        return f"{result.state}: {result.reason}" + (f"\n    {result.hint}" if result.hint else "")
    performance, last = (
        result.performance_metrics,
        next((x for x in reversed(result.loss_values) if x is not None), None),
    )
    rate = f"{performance.tokens_per_second:,.0f} tokens/s" if performance.tokens_per_second else "no rate"
    loss = "no finite loss" if last is None else f"loss {last:.4f}"
    return f"{performance.total_steps} steps, {rate}, {loss}"


def _read_last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    said = [line for line in lines if line.startswith("primus-cli: ")]
    return redact((said or lines or [""])[-1])
