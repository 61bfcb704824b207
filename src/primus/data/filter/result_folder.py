"""A folder of documents that a job makes from others: found done, or made and given its name as a whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from primus.data import atomic
from primus.data.filter.job import Say, TextJob, TextReport
from primus.data.megatron.manifest import FileFacts
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import ShardQueue, ShardResult
from primus.errors import PrimusError, UsageError
from primus.redaction import redact, redact_tree

PUBLISH_TIMEOUT_S = 3600.0

Report = TypeVar("Report", bound=TextReport)


class FinishedElsewhere(Exception):
    """Another process has done everything and removed the work folder."""


@dataclass(frozen=True)
class JobResult(Generic[Report]):
    """The result of a job."""

    folder: Path
    """The job's output."""
    files: list[Path]
    """The documents that were kept, in the order of the input."""
    report: Report
    """What was done."""
    made: bool
    """Whether it was made now; false if it was there."""


ResultCollector = Callable[[], "tuple[Report, dict[Path, Path]]"]
"""Makes folders in the work folder; gives the report, and each folder by the name that it is to have, the last one
without its report."""


@dataclass(frozen=True, kw_only=True)
class ResultFolder(Generic[Report]):
    """The output of a job, and what tells whether it is there."""

    job: TextJob
    source: Inputs
    """The job's input."""
    settings: Any
    """What else decides what is in the folder, as JSON."""
    report_name: str
    """Name of the report in the folder."""
    report_type: type[Report]
    is_whole: Callable[[Report], bool] = lambda report: True
    """Whether what the report says of other folders is true."""
    difference: Callable[[Report], str | None]
    """Why a report is not that of the job, in words."""
    pages: Callable[[Report], dict[str, str]]
    """Pages for people, by suffix."""

    @cached_property
    def identity(self) -> str:
        """Changes with the settings."""
        return hashlib.sha256(msgspec.json.encode(self.settings, order="deterministic")).hexdigest()

    @property
    def work(self) -> Path:
        """Folder for whatever is not the result."""
        return self.job.output.with_name(f".{self.job.output.name}.work")

    def get(self, make: Callable[[], ResultCollector[Report]], say: Say) -> JobResult[Report]:
        """The result; made where it is not there.

        Args:
            make: Does the work, which goes on where it was.
            say: Receives lines for people.

        Raises:
            UsageError: Other data is at the output.
            PrimusError: Making it failed, or the output cannot be written.
        """
        if found := self._find_result():
            say(f"{self.job.output}: nothing to do, it was made from the same input before")
            return self._complete_result(found)
        try:
            self.job.output.parent.mkdir(parents=True, exist_ok=True)
            return self._publish_result(make(), say)
        except (FinishedElsewhere, PrimusError, OSError) as error:
            if found := self._find_result():  # another process has finished, and has taken away what this one needs
                return self._complete_result(found)
            self._sweep_work_folder()
            if isinstance(error, PrimusError):
                raise
            if isinstance(error, OSError):
                raise atomic.build_write_error(self.job.output, error) from None
        raise PrimusError(f"{self.work}: removed while it was in use", "run the same command again")

    def _find_result(self) -> JobResult[Report] | None:
        """What is at the output if the same job has made it.

        Raises:
            UsageError: There is something else, and the job does not replace it.
        """
        output = self.job.output
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return None
        try:
            report = msgspec.json.decode((output / self.report_name).read_bytes(), type=self.report_type)
        except (OSError, msgspec.MsgspecError):
            report = None
        if report and self._is_result(report):
            return self._build_result(report, made=False)
        if self.job.existing == "replace" and report:
            return None
        hint = "give another --output" + (", or replace it with --overwrite" if report else "")
        raise UsageError(f"{output} is there already and was made otherwise: {self._describe_difference(report)}", hint)

    def _is_result(self, report: Report) -> bool:
        same = report.identity == self.identity and len(report.bad) <= self.job.max_bad
        whole = same and has_files(self.job.output, report.files) and self.is_whole(report)
        return whole and not self.source.describe_difference(report.inputs)

    def _describe_difference(self, report: Report | None) -> str:
        if report is None:
            return f"it has no {self.report_name}"
        if difference := self.difference(report) or self.source.describe_difference(report.inputs):
            return difference
        if report.identity != self.identity:
            return "with other settings"
        if len(report.bad) > self.job.max_bad:
            return f"{len(report.bad)} bad documents were left out"
        return "a file of it is missing or damaged"

    def _build_result(self, report: Report, made: bool) -> JobResult[Report]:
        return JobResult(self.job.output, [self.job.output / name for name in sorted(report.files)], report, made)

    def _lock_path(self) -> Path:
        return self.job.output.with_name(f".{self.job.output.name}.lock")

    def _publish_result(self, collect: ResultCollector[Report], say: Say) -> JobResult[Report]:
        """Give the folders their names, and remove what they were made from."""
        waiting = f"to write {self.job.output}"
        with atomic.hold_lock(
            self._lock_path(), PUBLISH_TIMEOUT_S, lambda holder: say(f"waiting for {holder} {waiting}")
        ):
            if found := self._find_result():
                return found
            report, folders = collect()
            if not report.documents:
                shutil.rmtree(self.work, ignore_errors=True)
                raise UsageError(f"no text in {self.source}", "every document is empty or bad")
            content = msgspec.json.format(msgspec.json.encode(redact_tree(msgspec.to_builtins(report))), indent=1)
            with atomic.stage_files({list(folders.values())[-1] / self.report_name: content}) as publish:
                publish()
            for place, folder in folders.items():
                _move_folder(folder, place, self.work)
            self._write_pages(report)
        return self._build_result(report, made=True)

    def _complete_result(self, found: JobResult[Report]) -> JobResult[Report]:
        """Do what is left where a process was killed after it gave the folder its name."""
        left = self.work.exists() or self._lock_path().exists()
        if left or not all(self.job.page_path(kind).exists() for kind in ("md", "html")):
            with atomic.hold_lock(self._lock_path(), PUBLISH_TIMEOUT_S):
                self._write_pages(found.report)
        return found

    def _sweep_work_folder(self) -> None:
        """Delete the work folder where nothing in it is done or being done."""
        if not any(path.suffix in (".json", ".claim") for path in self.work.rglob("*")):
            shutil.rmtree(self.work, ignore_errors=True)

    def _write_pages(self, report: Report) -> None:
        """Write the pages, and delete what the result was made from; call it with the lock held."""
        pages = {self.job.page_path(kind): redact(page).encode() for kind, page in self.pages(report).items()}
        with atomic.stage_files(pages) as publish:
            publish()
        shutil.rmtree(self.work, ignore_errors=True)


def has_files(folder: Path, files: dict[str, FileFacts]) -> bool:
    """Whether a folder has files of these names and sizes."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
    return all(sizes.get(name) == facts.bytes for name, facts in files.items())


def collect_files(
    board: ShardQueue, rows: Sequence[ShardResult], suffix: str, name: str, ending: str
) -> tuple[Path, dict[str, FileFacts]]:
    """A folder beside a board with names for its files, which keep the old ones so that nobody does them again.

    Args:
        board: The board.
        rows: Its rows.
        suffix: Which file of each row.
        name: Name of the folder.
        ending: What the names end in, after the number of the shard.
    """
    folder = board.folder.with_name(f"{name}.{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = {}
    for row in rows:
        file = f"{row.shard:06d}.{ending}"
        files[file] = row.files[suffix]
        try:
            os.link(board.result_file(row, suffix), folder / file)
        except OSError:  # a file system without hard links
            shutil.copyfile(board.result_file(row, suffix), folder / file)
            atomic.sync_to_disk(folder / file)
    return folder, files


def _move_folder(folder: Path, place: Path, work: Path) -> None:
    """Give a folder its name; what is there, and is to be replaced, goes into the work folder."""
    if place.exists():
        with suppress(OSError):
            place.rmdir()
    if place.exists():
        place.rename(work / f"replaced.{place.name}.{os.getpid()}")
    folder.rename(place)
    atomic.sync_to_disk(place.parent)
