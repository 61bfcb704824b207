"""Run the cells of a matrix, each by the ordinary launch, and keep the result of each.

A cell is in one of these states:

    no result                  its launch has not ended; it runs, or runs again after the harness was killed
    done                       it is not repeated, unless other processes disturbed it and that is asked for
    failed, refused            its result says why; the next `compare run` tries again
    submitted                  no result, and its newest run folder belongs to a job of a scheduler, which is waited for

The result is the last file that a cell writes, so a harness that is killed at any time loses one run at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from primus.comparison.fairness.fact_checks import MOST_LOAD
from primus.comparison.matrix.cell_launch import CellEnd, CellHarness, launch_cells
from primus.comparison.matrix.cells import MatrixCell
from primus.comparison.results.result import ComparisonResult
from primus.comparison.results.run_result import describe_unstarted_cell, read_result
from primus.errors import EXIT_TIMED_OUT, PrimusError
from primus.launch.jobs import job_states, submissions
from primus.launch.signals import raise_on_signals
from primus.runs.store import Run, list_runs


def run_cells(
    cells: Sequence[MatrixCell], harness: CellHarness, *, repeat_disturbed: bool = False
) -> list[ComparisonResult]:
    """Run all cells that have no complete result; a cell that fails does not stop the others.

    Args:
        cells: Of the matrix, in their order.
        harness: What they share.
        repeat_disturbed: Also run the cells again that shared the machine with other processes.

    Raises:
        PrimusError: A result cannot be written.
        KeyboardInterrupt: A signal has stopped the harness, and with it the cell that was running.
    """
    # Before the first run: results of another version of the matrix must not cost hours first.
    results = _read_kept_results(cells, harness, repeat_disturbed)
    launched: dict[tuple[object, ...], list[MatrixCell]] = {}
    for cell in cells:
        if cell.name not in results and cell.status == "runnable":
            launched.setdefault(cell.turn_key, []).append(cell)
    waiting: list[tuple[MatrixCell, Run]] = []
    with raise_on_signals():
        for number, cell in enumerate(cells, 1):
            if cell.name in results:
                continue
            if cell.status == "refused":
                harness.say(f"[{number}/{len(cells)}] {cell.name}")
                results[cell.name] = _keep_result(_describe_refusal(cell), harness)
            elif cell.status == "elsewhere":
                harness.say(f"[{number}/{len(cells)}] {cell.name}\n  not here: {cell.reason}")
            # The first of the cells that take turns launches all of them.
            elif group := launched.pop(cell.turn_key, None):
                names = ", ".join(each.name for each in group)
                harness.say(f"[{number}/{len(cells)}] {names}" + (" in turns" if len(group) > 1 else ""))
                for each, result in _run_group(group, harness, waiting):
                    results[each.name] = _keep_result(result, harness, name=each.name if len(group) > 1 else "")
        # All jobs are submitted before the first is waited for: a scheduler may run them at the same time.
        for cell, run in waiting:
            results[cell.name] = _keep_result(_wait_for_job(cell, run, harness), harness)
    return [results[cell.name] for cell in cells if cell.name in results]


def _read_kept_results(
    cells: Sequence[MatrixCell], harness: CellHarness, repeat_disturbed: bool
) -> dict[str, ComparisonResult]:
    """The results of cells that do not run again."""
    known = [(cell, harness.folder.read_cell_result(cell.place)) for cell in cells]
    done = [(cell, result) for cell, result in known if result is not None and result.state == "done"]
    # A cell is compared with those that it took turns with, so that all of them run again.
    again = {cell.turn_key for cell, result in done if repeat_disturbed and is_disturbed(result)}
    return {cell.name: result for cell, result in done if cell.turn_key not in again}


def is_disturbed(result: ComparisonResult) -> bool:
    """Whether other processes took so much of the machine that the speed is not that of the cell alone."""
    return bool(result.load.other_gpu_processes) or (result.load.other_cpu_share or 0.0) > MOST_LOAD


def _run_group(
    group: Sequence[MatrixCell], harness: CellHarness, waiting: list[tuple[MatrixCell, Run]]
) -> list[tuple[MatrixCell, ComparisonResult]]:
    """Launch a cell, or several that take turns; one that a scheduler has is added to `waiting`."""
    before = {cell.name: list_runs(harness.folder.runs / cell.name) for cell in group}
    newest = before[group[0].name][-1:]
    # An earlier start of the harness has submitted the job, and was killed: it is not submitted twice.
    if newest and _is_queued(newest[0]):
        waiting.append((group[0], newest[0]))
        harness.say(f"  is already a job: {newest[0].directory}")
        return []
    found = []
    for cell, end in zip(group, launch_cells(group, harness), strict=True):
        # Only the run folder of this launch: the earlier ones are of attempts that failed.
        runs = list_runs(harness.folder.runs / cell.name)[len(before[cell.name]) :]
        if not runs:
            found.append((cell, _describe_failed_launch(cell, end, harness)))
        elif _is_queued(runs[-1]):
            waiting.append((cell, runs[-1]))
        else:
            found.append((cell, _read_cell_result(cell, runs[-1], harness, end)))
    return found


def _read_cell_result(cell: MatrixCell, run: Run, harness: CellHarness, end: CellEnd | None) -> ComparisonResult:
    """The result of a run; of a folder that cannot be read, the reason."""
    try:
        place = structs.replace(cell.place, turn_group=end.turn_group if end else "")
        result = read_result(run, place, folder=harness.folder.path, load=end.load if end else None)
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


def _keep_result(result: ComparisonResult, harness: CellHarness, name: str = "") -> ComparisonResult:
    """Write a result, and say how the cell ended; with its name if several ended together."""
    harness.folder.save_cell_result(result)
    harness.say("  " + (f"{name}: " if name else "") + describe_end(result))
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
