"""Runs a filter job, or reuses its result. A rename publishes the output folder as a whole."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, cast

import msgspec

from primus.data import atomic
from primus.data.filter.job import FilterJob, FinishedElsewhere, Report, ResultCollector
from primus.data.filter.report import format_pages, format_summary
from primus.data.megatron.manifest import FileFacts
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import ShardQueue, ShardResult
from primus.data.shards.workers import Show
from primus.errors import PrimusError, UsageError
from primus.messages import Say
from primus.redaction import redact, redact_tree
from primus.runs.files import sync_to_disk

PUBLISH_TIMEOUT_S = 3600.0
"""Longest wait for another process that publishes the same result: collecting links files and syncs folders, which a
loaded network file system does slowly for large results."""


@dataclass(frozen=True)
class JobResult(Generic[Report]):
    """The result of a filter job."""

    folder: Path
    """The job's output."""
    files: list[Path]
    """Files of the kept documents, in the order of the input."""
    report: Report
    """Counts and samples."""
    made: bool
    """Whether this call wrote the result; False if it existed."""


def filter_documents(
    job: FilterJob[Report], say: Say = lambda text: None, show: Show = lambda progress: None
) -> JobResult[Report]:
    """Write the documents that a job keeps, or reuse the result of the same job.

    The output folder appears as a whole, with its report. Processes that run the same job share its shards, also on
    several machines. The result does not depend on their number.

    Args:
        job: Input, output and filter.
        say: Receives messages.
        show: Receives the progress.

    Raises:
        UsageError: An input is missing or unknown, a setting is invalid, a package is missing, or other data is at the
            output.
        PrimusError: Too many documents are bad, a file is damaged, or the output cannot be written.
    """
    done = ResultFolder(job, job.open_input()).find_or_make(say, show)
    for line in format_summary(done.report).splitlines() if done.made else done.report.list_warnings():
        say(line)
    return done


@dataclass(frozen=True)
class ResultFolder(Generic[Report]):
    """The output of a job: finds an existing result, or runs the job and publishes the result.

    States of an output, in order: absent; a work folder with finished shards; the final folder next to the work folder
    (a process was killed between the rename and the cleanup); the final folder with its pages. Every process moves the
    output to the next state under the lock, so that each of them may be killed at any moment.
    """

    job: FilterJob[Report]
    source: Inputs
    """The job's input."""

    @cached_property
    def identity(self) -> str:
        """Hash of the settings."""
        return hashlib.sha256(msgspec.json.encode(self.job.collect_settings(), order="deterministic")).hexdigest()

    @property
    def work(self) -> Path:
        """Folder for shards and other intermediate files."""
        return self.job.output.with_name(f".{self.job.output.name}.work")

    def find_or_make(self, say: Say, show: Show) -> JobResult[Report]:
        """Find the existing result, or create it.

        Raises:
            UsageError: Other data is at the output.
            PrimusError: The job failed, or the output cannot be written.
        """
        if found := self._find_result():
            say(f"{self.job.output}: nothing to do, already made from the same input")
            return self._complete_result(found)
        try:
            self.job.output.parent.mkdir(parents=True, exist_ok=True)
            collect = self.job.run_stages(self.source, self.work, self.identity, show)
            self.source.check_unchanged()
            return self._publish_result(collect, say)
        except (FinishedElsewhere, PrimusError, OSError) as error:
            # A process that finishes first removes the work folder, which fails this process with any of these errors.
            if found := self._find_result():
                return self._complete_result(found)
            self._sweep_work_folder()
            if isinstance(error, PrimusError):
                raise
            if isinstance(error, OSError):
                raise atomic.build_write_error(self.job.output, error) from None
        raise PrimusError(f"{self.work}: removed while it was in use", "run the same command again")

    def _find_result(self) -> JobResult[Report] | None:
        """The result of the same job, if it is at the output.

        Raises:
            UsageError: Other data is at the output, and the job does not replace it.
        """
        output = self.job.output
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return None
        try:
            content = (output / self.job.report_name).read_bytes()
            report = cast("Report", msgspec.json.decode(content, type=self.job.report_type))
        except (OSError, msgspec.MsgspecError):
            report = None
        if report and self._is_result(report):
            return self._build_result(report, made=False)
        if self.job.existing == "replace" and report:
            return None
        hint = "give another --output" + (", or replace it with --overwrite" if report else "")
        raise UsageError(f"{output} exists and differs: {self._describe_difference(report)}", hint)

    def _is_result(self, report: Report) -> bool:
        same = report.identity == self.identity and len(report.bad) <= self.job.max_bad
        whole = same and has_files(self.job.output, report.files) and self.job.is_complete(report)
        return whole and not self.source.describe_difference(report.inputs)

    def _describe_difference(self, report: Report | None) -> str:
        if report is None:
            return f"it has no {self.job.report_name}"
        if difference := self.job.describe_difference(report) or self.source.describe_difference(report.inputs):
            return difference
        if report.identity != self.identity:
            return "it was made with other settings"
        if len(report.bad) > self.job.max_bad:
            return f"{len(report.bad)} bad documents were skipped"
        return "one of its files is missing or damaged"

    def _build_result(self, report: Report, made: bool) -> JobResult[Report]:
        return JobResult(self.job.output, [self.job.output / name for name in sorted(report.files)], report, made)

    def _lock_path(self) -> Path:
        return self.job.output.with_name(f".{self.job.output.name}.lock")

    def _publish_result(self, collect: ResultCollector[Report], say: Say) -> JobResult[Report]:
        """Rename the folders to their final names, and delete the work folder."""
        waiting = f"to write {self.job.output}"
        with atomic.hold_lock(
            self._lock_path(), PUBLISH_TIMEOUT_S, lambda holder: say(f"waiting for {holder} {waiting}")
        ):
            # Another process may have published the result while this one waited for the lock.
            if found := self._find_result():
                return found
            report, folders = collect()
            if not report.documents:
                shutil.rmtree(self.work, ignore_errors=True)
                raise UsageError(f"no text in {self.source}", "every document is empty or bad")
            content = msgspec.json.format(msgspec.json.encode(redact_tree(msgspec.to_builtins(report))), indent=1)
            with atomic.stage_files({list(folders.values())[-1] / self.job.report_name: content}) as publish:
                publish()
            # The report goes into the output before the rename, so that a folder with the final name always has one.
            # The output is the last folder: once it has its name, the result is complete.
            for place, folder in folders.items():
                _move_folder(folder, place, self.work)
            self._write_pages(report)
        return self._build_result(report, made=True)

    def _complete_result(self, found: JobResult[Report]) -> JobResult[Report]:
        """Write the pages and clean up, if a process was killed after it renamed the output."""
        left = self.work.exists() or self._lock_path().exists()
        # The pages follow from the report, so that any process can write them again.
        if left or not all(self.job.page_path(kind).exists() for kind in ("md", "html")):
            with atomic.hold_lock(self._lock_path(), PUBLISH_TIMEOUT_S):
                self._write_pages(found.report)
        return found

    def _sweep_work_folder(self) -> None:
        """Delete the work folder if no shard in it is finished (.json) or claimed by a process (.claim)."""
        if not any(path.suffix in (".json", ".claim") for path in self.work.rglob("*")):
            shutil.rmtree(self.work, ignore_errors=True)

    def _write_pages(self, report: Report) -> None:
        """Write the pages and delete the work folder. The caller holds the lock."""
        pages = {self.job.page_path(kind): redact(page).encode() for kind, page in format_pages(report).items()}
        with atomic.stage_files(pages) as publish:
            publish()
        shutil.rmtree(self.work, ignore_errors=True)


def has_files(folder: Path, files: dict[str, FileFacts]) -> bool:
    """Whether a folder has files of these names and sizes."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
    return all(sizes.get(name) == facts.bytes for name, facts in files.items())


def collect_files(
    queue: ShardQueue, shard_results: Sequence[ShardResult], suffix: str, name: str, ending: str
) -> tuple[Path, dict[str, FileFacts]]:
    """Link the files of a shard queue into a new folder next to it. The queue keeps its files: no shard runs again.

    Args:
        queue: The shard queue.
        shard_results: Its results.
        suffix: Suffix of the file to take from each result.
        name: Name of the folder.
        ending: Suffix of the new names, after the number of the shard.
    """
    # One folder per process: several processes may collect at the same time.
    folder = queue.folder.with_name(f"{name}.{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = {}
    for shard_result in shard_results:
        file = f"{shard_result.shard:06d}.{ending}"
        files[file] = shard_result.files[suffix]
        try:
            os.link(queue.result_file(shard_result, suffix), folder / file)
        except OSError:  # a file system without hard links
            shutil.copyfile(queue.result_file(shard_result, suffix), folder / file)
            sync_to_disk(folder / file)
    return folder, files


def _move_folder(folder: Path, place: Path, work: Path) -> None:
    """Rename a folder to its final name. An existing folder is replaced: it moves into the work folder."""
    # An empty folder is removed. Other content moves aside as a whole, so that it never mixes with the new files.
    if place.exists():
        with suppress(OSError):
            place.rmdir()
    if place.exists():
        place.rename(work / f"replaced.{place.name}.{os.getpid()}")
    folder.rename(place)
    sync_to_disk(place.parent)
