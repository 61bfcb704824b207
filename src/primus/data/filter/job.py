"""The contract of filter jobs: `CleanJob` and `DedupJob` write a folder with some of the documents of their input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypedDict, TypeVar

from primus.data import readers
from primus.data.filter.report import FilterReport
from primus.data.shards import inputs
from primus.data.shards.executors import Executor
from primus.data.shards.inputs import Inputs
from primus.data.shards.workers import Show
from primus.errors import UsageError

Report = TypeVar("Report", bound=FilterReport)

ResultCollector = Callable[[], "tuple[Report, dict[Path, Path]]"]
"""Creates folders in the work folder. Returns the report, and each folder by its final path, the output last."""


class FinishedElsewhere(Exception):
    """Another process has finished the job and removed the work folder."""


class FilterSettings(TypedDict):
    """The fields of a `FilterJob` that do not say how documents are filtered."""

    inputs: tuple[str, ...]
    dataset: str | None
    output: Path
    json_key: str
    text_documents: str
    max_bad: int
    workers: int | None
    executor: Executor
    existing: Literal["check", "replace"]


@dataclass(frozen=True, kw_only=True)
class FilterJob(Generic[Report]):
    """Input, output and processes of a filter. A subclass defines how documents are filtered."""

    report_type: ClassVar[type[FilterReport]] = FilterReport
    report_name: ClassVar[str] = "report.json"
    """File name of the report in the output."""

    inputs: tuple[str, ...] = ()
    """Files, folders, glob patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files."""
    output: Path
    """Folder for the kept documents; the human-readable report is ``OUTPUT.report.md`` and ``.html``."""
    json_key: str = "text"
    """Field or column of the text."""
    text_documents: str = "file"
    """Unit that is a document in a .txt file."""
    max_bad: int = 0
    """Maximum number of bad documents to skip."""
    workers: int | None = None
    """Number of processes; all cores when None."""
    executor: Executor = "local"
    """Processes of this machine or tasks of a Ray cluster."""
    existing: Literal["check", "replace"] = "check"
    """Whether other data at the output is an error (``check``) or is replaced."""

    def collect_settings(self) -> Any:
        """All settings that change the result, as JSON."""
        raise NotImplementedError

    def describe_difference(self, report: Report) -> str | None:
        """Describe how the recipe of an existing report differs from this job's; None if it does not."""
        return None

    def is_complete(self, report: Report) -> bool:
        """Whether the files that the report names outside the output exist."""
        return True

    def run_stages(self, source: Inputs, work: Path, identity: str, show: Show) -> ResultCollector[Report]:
        """Filter the documents in shards.

        Args:
            source: The input.
            work: Folder for intermediate files.
            identity: Hash of `collect_settings`.
            show: Receives the progress.

        Raises:
            FinishedElsewhere: Another process has finished the job.
        """
        raise NotImplementedError

    def open_input(self) -> Inputs:
        """Open the input.

        Raises:
            UsageError: The input is missing or unknown, or the output lies in it.
        """
        if bool(self.inputs) == bool(self.dataset):
            raise UsageError("both an input and a dataset" if self.inputs else "no input", "give one of them")
        if self.output.name in ("", "."):
            raise UsageError(f"output '{self.output}' is not the name of a folder", "give a new folder like data/new")
        return inputs.open_input(self.inputs, self.dataset, self.output, self.text_documents)

    def page_path(self, kind: str = "html") -> Path:
        """Path of the readable report, ``md`` or ``html``."""
        return self.output.with_name(f"{self.output.name}.report.{kind}")


def choose_text_key(paths: tuple[str, ...]) -> str:
    """Choose the field or column of the text for an input without a given one.

    Raises:
        UsageError: There are several candidates, or the input is missing or unknown.
    """
    return readers.choose_text_column((file for path in paths for file in readers.find_files(path)), "--json-key")
