"""The folder of a comparison: its record, the result of each cell, and the run folders.

comparison.json            the record, which marks the folder
results/CELL.json          see `primus.comparison.results.result`
runs/CELL/RUN/             the run folders
logs/CELL.log              what the launcher of a cell printed
report/                    what `compare report` wrote
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from msgspec import Struct

import primus
from primus.comparison.results.result import ComparisonResult, ResultCell, load_result, save_result
from primus.errors import PrimusError, UsageError
from primus.runs import lock
from primus.runs.files import read_json, write_json

RECORD = "comparison.json"
RESULTS = "results"
RUNS = "runs"
LOGS = "logs"
REPORT = "report"


class ComparisonRecord(Struct, frozen=True, kw_only=True):
    """The comparison.json of a folder."""

    kind: Literal["primus-comparison"] = "primus-comparison"
    name: str
    matrix: str
    """The file, as it was named."""
    text: str
    """The text of that file."""
    cells: list[str]
    """Names of all cells, in the order of execution."""
    version: str = primus.__version__


class ComparisonFolder:
    """A folder of results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def runs(self) -> Path:
        return self.path / RUNS

    @property
    def picture_link(self) -> Path:
        """The link next to the folder to the picture of its report, where tprimat has it: `output/compare.png`."""
        return self.path.parent / "compare.png"

    def find_result_file(self, cell: str) -> Path:
        """The file of a cell's result, which need not exist."""
        return self.path / RESULTS / f"{cell}.json"

    def find_log(self, cell: str) -> Path:
        """The file of what its launcher prints."""
        return self.path / LOGS / f"{cell}.log"

    def read_record(self) -> ComparisonRecord | None:
        """The record; None if the folder is not a comparison.

        Raises:
            PrimusError: It is damaged.
        """
        path = self.path / RECORD
        return read_json(path, ComparisonRecord) if path.is_file() else None

    def update_record(self, name: str, matrix: str, text: str, cells: Sequence[str]) -> None:
        """Write the record; cells of earlier, larger selections stay in it."""
        before = self.read_record()
        kept = [each for each in before.cells if each not in cells] if before else []
        record = ComparisonRecord(name=name, matrix=matrix, text=text, cells=[*kept, *cells])
        write_json(self.path / RECORD, record)

    def read_cell_result(self, cell: ResultCell) -> ComparisonResult | None:
        """The result of a cell; None if it has none yet, or only a damaged one.

        Raises:
            UsageError: The result is of another version of the matrix, or of primus.
        """
        path = self.find_result_file(cell.name)
        if not path.is_file():
            return None
        try:
            found = load_result(path)
        except UsageError:
            raise
        except PrimusError:  # a disk that was full, for example; the run is repeated
            return None
        if found.state == "done" and found.cell.fingerprint != cell.fingerprint:
            raise UsageError(
                f"{self.path} has a result of {cell.name} with other settings than the matrix has now",
                "name another folder: --output, or delete the results: compare purge",
            )
        return found

    def save_cell_result(self, result: ComparisonResult) -> None:
        save_result(result, self.find_result_file(result.cell.name))

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the folder while its cells run.

        Raises:
            UsageError: Another process runs its cells.
            PrimusError: The folder cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PrimusError(f"{self.path}: cannot be created: {error.strerror}", "choose another --output") from None
        with lock.hold_run(self.path) as is_held:
            if not is_held:
                holder = lock.find_holder(self.path)
                raise UsageError(f"{self.path} is used by {holder}", "wait until that comparison ends")
            yield


def list_comparison_folders(workspace: Path) -> list[ComparisonFolder]:
    """The comparisons directly in a folder, or the folder itself if it is one. Links are not followed."""
    candidates: Sequence[Path] = [workspace]
    if workspace.is_dir() and not (workspace / RECORD).is_file():
        candidates = sorted(entry for entry in workspace.iterdir() if entry.is_dir() and not entry.is_symlink())
    return [ComparisonFolder(entry) for entry in candidates if _is_comparison(entry)]


def _is_comparison(path: Path) -> bool:
    try:
        return ComparisonFolder(path).read_record() is not None
    except PrimusError:  # JSON of another tool
        return False
