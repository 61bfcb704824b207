"""Run a matrix of platforms, frameworks, models and settings, and keep a result of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, structs

from primus.errors import EXIT_FAILED, EXIT_OK, UnfitError, UsageError, did_you_mean
from primus.report import table
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.comparison.folder.comparison_folder import ComparisonFolder
    from primus.comparison.matrix.cells import MatrixCell
    from primus.comparison.matrix.matrix import LoadedMatrix
    from primus.comparison.results.result import ComparisonResult

MOST_SHOWN = 60


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare run`."""

    matrix: str
    """Matrix file (docs/compare-platforms.md), or a config.env of tprimat."""
    output: str | None = None
    """Folder of the results; that of the matrix when omitted."""
    runtime: str = ""
    """Runtime that starts each cell as a separate job, such as "slurm sbatch -N 1"."""
    platforms: str = ""
    """Only these platforms, separated by commas."""
    frameworks: str = ""
    """Only these frameworks, separated by commas."""
    models: str = ""
    """Only these models, separated by commas."""
    repetitions: Annotated[int, Meta(ge=1)] | None = None
    """Runs of each cell; those of the matrix when omitted."""
    repeat_disturbed: bool = False
    """Repeat the cells during which other processes took more than 5 % of the machine."""


class CellSummary(Struct, frozen=True, kw_only=True):
    """A cell in the result of `compare run`."""

    cell: str
    state: str
    reason: str = ""
    hint: str = ""
    tokens_per_s: float | None = None
    loss: float | None = None
    run: str = ""


class MatrixSummary(Struct, frozen=True, kw_only=True):
    """The result of `compare run`."""

    name: str
    output: str
    cells: list[CellSummary]
    states: dict[str, int]
    """Number of cells by state; `elsewhere` for those of other platforms."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """The command of each cell, for a dry run."""
    from primus.comparison.matrix import cell_engines
    from primus.comparison.matrix.cells import list_cells

    loaded = _load_matrix(options, context)
    cells = list_cells(loaded, context.environ, context.facts(), _count_processes(context), options.runtime)
    installs = cell_engines.describe_installs(cells, context.environ)
    lines = [*loaded.notes, *installs, f"results: {loaded.output}; {len(cells)} cells, {loaded.matrix.order}"]
    first = [cell for cell in cells if cell.place.repetition == 1]
    lines += [_describe_cell(cell) for cell in first]
    if len(first) < len(cells):
        lines.append(f"and the same {loaded.matrix.repetitions - 1} times more, in this order")
    return lines


def run(options: Options, context: TaskContext) -> int:
    """Run the cells, and print how each ended.

    Exit codes: 0 if every cell that applies here is done, 1 if one failed or is refused, 3 if none applies.

    Raises:
        UnfitError: No cell applies here.
        UsageError: The matrix is invalid, its folder has results of another version of it, or another process runs it.
        PrimusError: A result cannot be written.
    """
    from primus.comparison.folder.comparison_folder import ComparisonFolder
    from primus.comparison.matrix import cell_engines, cell_runs
    from primus.comparison.matrix.cell_launch import CellHarness
    from primus.comparison.matrix.cells import list_cells

    if context.layout is not None and context.layout.nnodes > 1:
        raise UsageError(
            "compare run launches its cells from one node",
            'start it on one node; --runtime "slurm sbatch -N 2" gives each cell its nodes',
        )
    loaded, facts = _load_matrix(options, context), context.facts()
    cells = list_cells(loaded, context.environ, facts, _count_processes(context), options.runtime)
    for note in loaded.notes:
        context.say(f"note: {note}")
    folder = ComparisonFolder(loaded.output)
    harness = CellHarness(
        folder=folder,
        environ=context.environ,
        facts=facts,
        timeout_s=60 * loaded.matrix.timeout_minutes,
        say=context.say,
    )
    with folder.hold_lock():
        text = loaded.file.read_text(encoding="utf-8")
        folder.update_record(loaded.matrix.name, str(loaded.file), text, [cell.name for cell in cells])
        cells = cell_engines.install_engines(cells, context.environ, context.say)
        found = cell_runs.run_cells(cells, harness, repeat_disturbed=options.repeat_disturbed)
        results = {result.cell.name: result for result in found}
    rows = [_summarize_cell(cell, results.get(cell.name)) for cell in cells]
    states = dict(Counter(row.state for row in rows))
    summary = MatrixSummary(name=loaded.matrix.name, output=str(folder.path), cells=rows, states=states)
    context.result(summary, format_summary(summary))
    if loaded.draws_report and "done" in states:
        _write_report(folder, context)
    if states.keys() == {"elsewhere"}:
        raise UnfitError(f"no cell of {loaded.file} runs here: {rows[0].reason}", rows[0].hint)
    return EXIT_OK if states.keys() <= {"done", "elsewhere"} else EXIT_FAILED


def _write_report(folder: ComparisonFolder, context: TaskContext) -> None:
    """Write the page, and the picture if it can be drawn here: cells that are done are not failed by it."""
    from primus.comparison.report.files import write_final_report

    try:
        written = write_final_report(folder)
    except UnfitError as error:
        context.say(f"note: no picture of {folder.path}: {error.problem}; {error.hint}")
        return
    context.say("files:\n" + "\n".join(map(str, written)))


def format_summary(summary: MatrixSummary) -> str:
    """The cells as a table, and what to do next."""
    rows = [
        [row.cell, row.state, table.format_number(row.tokens_per_s), "" if row.loss is None else f"{row.loss:.4f}"]
        for row in summary.cells[:MOST_SHOWN]
    ]
    lines = ["", table.format_table(["cell", "state", "tokens/s", "loss"], rows, right=(2, 3))]
    if len(summary.cells) > MOST_SHOWN:
        lines.append(f"and {len(summary.cells) - MOST_SHOWN} more cells in {summary.output}/results")
    problems = {(row.cell.rpartition("_")[0], row.reason, row.hint) for row in summary.cells if row.reason}
    lines += [f"{cell}: {reason}" + (f"\n  {hint}" if hint else "") for cell, reason, hint in sorted(problems)]
    states = ", ".join(f"{count} {state}" for state, count in summary.states.items())
    is_done = "done" in summary.states
    next_command = f"; compare them: primus-cli direct -- compare report {summary.output} --html" if is_done else ""
    return "\n".join([*lines, f"{states}{next_command}"])


def _load_matrix(options: Options, context: TaskContext) -> LoadedMatrix:
    """The matrix, restricted to what the options name."""
    from primus.comparison.matrix.matrix_file import load_matrix

    loaded = load_matrix(Path(options.matrix), context.environ)
    matrix = loaded.matrix
    platforms = _select_names(options.platforms, list(matrix.platforms), "--platforms")
    frameworks = _select_names(options.frameworks, matrix.frameworks, "--frameworks")
    models = _select_names(options.models, list(matrix.models), "--models")
    matrix = structs.replace(
        matrix,
        output=options.output or matrix.output,
        platforms={name: matrix.platforms[name] for name in platforms},
        frameworks=frameworks,
        models={name: matrix.models[name] for name in models},
        repetitions=options.repetitions or matrix.repetitions,
    )
    return structs.replace(loaded, matrix=matrix)


def _select_names(text: str, known: Sequence[str], option: str) -> list[str]:
    """The names of an option, in the order of the matrix; all if it is empty."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise UsageError(f"{option}: '{name}' is not in the matrix", did_you_mean(name, known))
    return [name for name in known if name in asked or not asked]


def _count_processes(context: TaskContext) -> int:
    """Processes of a cell whose platform does not say it: those of this launch, or one for each device."""
    if context.layout is not None:
        return context.layout.nproc
    return max(1, len(context.facts().partitions))


def _describe_cell(cell: MatrixCell) -> str:
    """A cell in a dry run: its command, and why it does not run here."""
    reason = "" if cell.status == "runnable" else f"{cell.status}: {cell.reason}; "
    return f"{cell.name}: {reason}{cell.shown_command if cell.command else cell.hint}".rstrip("; ")


def _summarize_cell(cell: MatrixCell, result: ComparisonResult | None) -> CellSummary:
    if result is None:
        return CellSummary(cell=cell.name, state="elsewhere", reason=cell.reason, hint=cell.hint)
    return CellSummary(
        cell=cell.name,
        state=result.state,
        reason=result.reason,
        hint=result.hint,
        tokens_per_s=result.performance_metrics.tokens_per_second,
        loss=next((loss for loss in reversed(result.loss_values) if loss is not None), None),
        run=result.run,
    )
