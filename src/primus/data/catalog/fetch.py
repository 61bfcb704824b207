"""Fetches datasets of the Hugging Face Hub into a folder: whole files or documents, each file complete or absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.data import atomic
from primus.data import readers as documents
from primus.data.catalog import hub, splits
from primus.data.catalog.download import build_stream_url, download_file, download_from_hub
from primus.data.catalog.hub import HubFile, SplitListing
from primus.data.catalog.splits import SplitPart
from primus.data.readers import BadDocument, ReadOptions, columns
from primus.data.readers.compression import import_zstandard
from primus.data.readers.kinds import detect_kind
from primus.data.shards.document_writer import open_writer
from primus.data.shards.shard_queue import BadItem
from primus.errors import UsageError
from primus.messages import Say
from primus.runs.files import sync_to_disk

LOCK_TIMEOUT_S = 3600.0
SHOWN_EVERY = 1000
BY_LINE = ReadOptions("line")
REQUESTED = ("dataset", "split", "revision", "num_samples", "streaming")
"""Fields of a job that decide what is fetched."""
NOTES = ".fetch"
"""Folder in the output that records the complete files; hidden, so that readers of the folder skip it."""


@dataclass(frozen=True, kw_only=True)
class FetchJob:
    """Dataset to fetch, and the folder for it."""

    dataset: str
    """A named source or OWNER/NAME, with ``:CONFIG`` if there are several configurations."""
    output: Path
    """Folder for the files."""
    split: str = "train"
    """Split of the dataset, several, or rows of them; see `primus.data.catalog.splits`."""
    revision: str | None = None
    """Commit, branch or tag; the newest commit when None."""
    num_samples: int | None = None
    """Number of first documents to fetch, as compressed JSON lines; None for all files."""
    streaming: bool = False
    """Read the dataset's files without storing them."""
    workers: int = 4
    """Number of concurrent downloads."""


class FileSlice(Struct, frozen=True, kw_only=True):
    """Consecutive rows of a file."""

    file: HubFile
    first: int
    last: int
    """One past the last."""

    @property
    def name(self) -> str:
        """Name of the slice in the notes."""
        return f"{self.file.path}[{self.first}:{self.last}]"


class FetchRequest(Struct, frozen=True, kw_only=True):
    """The request that a folder was made for, with its files; another request needs another folder."""

    version: int = 1
    dataset: str
    split: str
    revision: str | None
    num_samples: int | None
    streaming: bool
    listing: SplitListing
    """Files on the hub, at one commit for the whole request."""
    slices: tuple[FileSlice, ...] | None = None
    """Rows of these files; None if the split names all or its first rows."""


class FetchedFile(Struct, frozen=True, kw_only=True):
    """A complete file."""

    file: str
    """Path in the folder."""
    source: str
    """Path in the repository."""
    bytes: int
    checksum: str
    """Verified checksum of the hub; empty for a file that was written from a part of another."""
    documents: int = 0
    """Number of documents, if counted."""
    bad: list[BadItem] = []
    """Bad documents, skipped."""


@dataclass
class FetchProgress:
    """Progress of a fetch."""

    files: int = 0
    bytes: int = 0
    num_bytes: int = 0
    documents: int = 0


@dataclass(frozen=True)
class FetchedDataset:
    """Contents of the folder."""

    folder: Path
    request: FetchRequest
    done: list[FetchedFile]
    """Complete files, in the order of the dataset."""
    made: bool
    """Whether this call fetched anything."""

    @property
    def files(self) -> list[str]:
        """Paths of the files, in order."""
        return [str(self.folder / each.file) for each in self.done]


def fetch_dataset(
    job: FetchJob, say: Say = lambda text: None, show: Callable[[FetchProgress], None] = lambda progress: None
) -> FetchedDataset:
    """Fetch a split of a dataset of the hub into a folder; complete files are skipped.

    Args:
        job: Dataset, split and output.
        say: Receives messages.
        show: Receives the progress, also from other threads.

    Raises:
        UsageError: The dataset, configuration or split is unknown, or the folder was made for another request.
        PrimusError: The hub does not respond, a download is damaged, or the folder cannot be written.
    """
    if not hub.is_hub(job.dataset):
        raise UsageError(f"{job.dataset}: a local dataset, nothing to download", "pass it to --dataset")
    present = _find_complete_dataset(job, say)  # without a lock, which another user may not be allowed to write
    if present is not None:
        return present
    try:
        _check_folder(job.output)
        (job.output / NOTES).mkdir(parents=True, exist_ok=True)
        lock = job.output / NOTES / "lock"
        # One process fetches at a time. A second one waits, and then finds the files complete.
        with atomic.hold_lock(
            lock, LOCK_TIMEOUT_S, lambda holder: say(f"waiting for {holder} to fetch into {job.output}")
        ):
            return _fetch_locked(job, say, show)
    except OSError as error:
        raise atomic.build_write_error(job.output, error) from None


def _find_complete_dataset(job: FetchJob, say: Say) -> FetchedDataset | None:
    """The dataset in the folder; None if it is incomplete, or may not be read."""
    with suppress(PermissionError):
        request = _read_request(job)
        if request is not None and _is_complete(request, done := _find_present_files(job.output, request)):
            say(f"{job.output}: nothing to do, all {len(done)} files of {job.dataset} are present")
            return FetchedDataset(job.output, request, _sort_files(request, done), made=False)
    return None


def _check_folder(folder: Path) -> None:
    """Check that the folder has no other files, which the download of files with the same names would replace.

    Raises:
        UsageError: The folder has files that were not fetched.
    """
    if folder.is_dir() and not (folder / NOTES).is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: contains other files, which a download could overwrite", "give another --output")


def _fetch_locked(job: FetchJob, say: Say, show: Callable[[FetchProgress], None]) -> FetchedDataset:
    request = _load_request(job, say)
    listing, folder = request.listing, job.output
    # Under the lock no other process writes here: unfinished files are from killed processes.
    for left in (folder / ".cache" / "huggingface").rglob("*.incomplete"):
        left.unlink()  # of a killed download; the hub's library does not reuse it
    for left in folder.glob("part-*.tmp.*"):
        left.unlink()
    present = _find_complete_dataset(job, say)  # another process may have fetched it before the lock was free
    if present is not None:
        return present
    done = _find_present_files(folder, request)
    _end_last_record(folder)
    files = listing.files if request.slices is None else [each.file for each in request.slices]
    size = sum(file.bytes for file in files)
    progress = FetchProgress(len(done), len(files), sum(each.bytes for each in done.values()), size)
    for each in (
        _write_samples(job, request, done, progress, show)
        if _makes_new_files(request)
        else _download_files(job, listing, done, progress, show)
    ):
        _record_file(folder, each)
        done[each.source] = each
        progress.files += 1
        show(progress)
    return FetchedDataset(folder, request, _sort_files(request, done), made=True)


def _load_request(job: FetchJob, say: Say) -> FetchRequest:
    """The request of the folder, read from its notes; the first call resolves and records it."""
    noted = _read_request(job)
    if noted is None:
        listing, slices = _list_files(job, say)
        noted = FetchRequest(listing=listing, slices=slices, **{name: getattr(job, name) for name in REQUESTED})
        # The request records the commit before the first download, so that a resumed fetch mixes no versions.
        with atomic.stage_files({_locate_request(job): msgspec.json.encode(noted)}) as publish:
            publish()
    return noted


def _locate_request(job: FetchJob) -> Path:
    return job.output / NOTES / "request.json"


def _read_request(job: FetchJob) -> FetchRequest | None:
    """The request in the notes of the folder; None for a folder without notes.

    Raises:
        UsageError: The folder was made for another request.
    """
    path = _locate_request(job)
    try:
        noted = msgspec.json.decode(path.read_bytes(), type=FetchRequest)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: damaged, {error}", "delete the folder and fetch again") from None
    for name in REQUESTED:
        if getattr(noted, name) != getattr(job, name):
            problem = f"{job.output}: contains {noted.dataset} with {name} {getattr(noted, name)}"
            raise UsageError(problem, "give another --output, or delete this folder")
    return noted


def _list_files(job: FetchJob, say: Say) -> tuple[SplitListing, tuple[FileSlice, ...] | None]:
    """Files of all named splits, and slices of them if the splits name other rows than all or the first ones."""
    parts = splits.parse_split(job.split)
    if job.num_samples is not None and not all(part.is_whole for part in parts):
        raise UsageError(f"--num-samples with --split '{job.split}'", "use only one of them")
    listings: dict[str, SplitListing] = {}
    for part in parts:
        if part.split not in listings:
            first = next(iter(listings.values()), None)
            listings[part.split] = hub.list_split_files(
                job.dataset, part.split, first.revision if first else job.revision, say
            )
    for note in dict.fromkeys(listing.note for listing in listings.values() if listing.note):
        say(note)
    files = tuple(dict.fromkeys(file for listing in listings.values() for file in listing.files))
    listing = msgspec.structs.replace(listings[parts[0].split], split=job.split, files=files)
    if all(part.is_whole for part in parts) or _limit_documents(job) is not None:
        return listing, None
    say(f"{job.dataset}: counting the rows of its files to resolve the split '{job.split}'")
    counts: dict[str, int] = {}
    for name, each in listings.items():
        ends = [part.end for part in parts if part.split == name]
        counts |= _count_files(job, each, None if None in ends else max(filter(None, ends), default=0))
    slices = tuple(_list_slices(parts, listings, counts))
    if not slices:
        raise UsageError(f"split '{job.split}': selects none of {sum(counts.values()):,} rows", "select more rows")
    return listing, slices


def _list_slices(
    parts: Iterable[SplitPart], listings: dict[str, SplitListing], counts: dict[str, int]
) -> Iterator[FileSlice]:
    """Rows of files for the parts of splits."""
    for part in parts:
        files, before = listings[part.split].files, 0
        files = tuple(file for file in files if file.path in counts)
        rows = part.select_rows(sum(counts[file.path] for file in files))
        for file in files:
            first, last = max(rows.start - before, 0), min(rows.stop - before, counts[file.path])
            if first < last:
                yield FileSlice(file=file, first=first, last=last)
            before += counts[file.path]


def _count_files(job: FetchJob, listing: SplitListing, end: int | None) -> dict[str, int]:
    """Rows of each file, up to the file with row `end`; a slice from the end or in percent needs those of all files."""
    counts: dict[str, int] = {}
    for file in listing.files:
        if end is not None and sum(counts.values()) >= end:
            break
        counts[file.path] = _count_rows(job, listing, file)
    return counts


def _count_rows(job: FetchJob, listing: SplitListing, file: HubFile) -> int:
    """Count the rows of a file: from the footer of a parquet file, else by reading the whole file."""
    if detect_kind(file.path) == ".parquet":
        return columns.count_rows(build_stream_url(listing, file))
    source = _choose_source(job, listing, file)
    return sum(
        1 for _ in documents.read_documents(source, listing.text or documents.choose_text_column([source]), BY_LINE)
    )


def _limit_documents(job: FetchJob | FetchRequest) -> int | None:
    """Number of first documents to fetch; None if the request needs all or other ones."""
    if job.num_samples is not None:
        return job.num_samples
    parts = splits.parse_split(job.split)
    return parts[0].num_first if len(parts) == 1 else None


def _makes_new_files(request: FetchRequest) -> bool:
    return request.streaming or request.slices is not None or _limit_documents(request) is not None


def _is_complete(request: FetchRequest, done: dict[str, FetchedFile]) -> bool:
    limit = _limit_documents(request)
    if limit is not None and sum(each.documents for each in done.values()) >= limit:
        return True
    return len(done) == len(_list_names(request))


def _list_names(request: FetchRequest) -> list[str]:
    """Names of the files or slices to fetch, in order."""
    if request.slices is not None:
        return [each.name for each in request.slices]
    return [file.path for file in request.listing.files]


def _sort_files(request: FetchRequest, done: dict[str, FetchedFile]) -> list[FetchedFile]:
    return [done[name] for name in _list_names(request) if name in done]


def _record_file(folder: Path, done: FetchedFile) -> None:
    with (folder / NOTES / "done.jsonl").open("ab") as notes:
        notes.write(msgspec.json.encode(done) + b"\n")
        notes.flush()
        # A file counts as complete only after its record is on disk: after a crash it is fetched again, not trusted.
        os.fsync(notes.fileno())


def _find_present_files(folder: Path, request: FetchRequest) -> dict[str, FetchedFile]:
    """Files that are recorded as complete and have the recorded size."""
    path = folder / NOTES / "done.jsonl"
    known = set(_list_names(request))
    found: dict[str, FetchedFile] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            done = msgspec.json.decode(line, type=FetchedFile)
        except msgspec.MsgspecError:
            continue
        file = folder / done.file
        if done.source in known and file.is_file() and file.stat().st_size == done.bytes:
            found[done.source] = done
    return found


def _end_last_record(folder: Path) -> None:
    """End the line of a process that was killed while it appended a record, so that the next record is readable."""
    path = folder / NOTES / "done.jsonl"
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as notes:
            notes.write(b"\n")


def _download_files(
    job: FetchJob,
    listing: SplitListing,
    done: dict[str, FetchedFile],
    progress: FetchProgress,
    show: Callable[[FetchProgress], None],
) -> Iterator[FetchedFile]:
    """Download the missing files, several at a time."""
    # Not `snapshot_download`: docs/decisions/0048-one-place-for-http.md
    missing = [file for file in listing.files if file.path not in done]

    def count(num_bytes: int) -> None:
        progress.bytes += num_bytes
        show(progress)

    pool = ThreadPoolExecutor(job.workers)
    try:
        futures = [pool.submit(_fetch_file, listing, file, job.output, count) for file in missing]
        for future in as_completed(futures):
            yield future.result()
    finally:
        # An error stops the remaining downloads; complete ones are already recorded.
        pool.shutdown(cancel_futures=True)


def _fetch_file(listing: SplitListing, file: HubFile, folder: Path, count: Callable[[int], None]) -> FetchedFile:
    download_file(listing, file, folder, count)
    return FetchedFile(file=file.path, source=file.path, bytes=file.bytes, checksum=file.checksum)


def _write_samples(
    job: FetchJob,
    request: FetchRequest,
    done: dict[str, FetchedFile],
    progress: FetchProgress,
    show: Callable[[FetchProgress], None],
) -> Iterator[FetchedFile]:
    """Write the documents of each file as compressed JSON lines, up to the requested number."""
    listing, limit = request.listing, _limit_documents(request)
    progress.documents = sum(each.documents for each in done.values())
    wanted = request.slices or [FileSlice(file=file, first=0, last=-1) for file in listing.files]
    for index, (name, each) in enumerate(zip(_list_names(request), wanted, strict=True)):
        # Files are read in order until the limit, so that the number of files depends on their contents.
        left = None if limit is None else limit - progress.documents
        if left is not None and left <= 0:
            return
        if name in done:
            continue
        rows = None if request.slices is None else range(each.first, each.last)
        path = job.output / f"part-{index:05}.jsonl.zst"
        sample = _FileSample(path, _choose_source(job, listing, each.file), listing.text, left, rows, name)
        yield sample.write(each.file, progress, show)
        progress.bytes += each.file.bytes


def _choose_source(job: FetchJob, listing: SplitListing, file: HubFile) -> str:
    """URL or path for reading a file: on the hub with `streaming`, else in the hub's cache."""
    return build_stream_url(listing, file) if job.streaming else str(download_from_hub(listing, file))


@dataclass(frozen=True)
class _FileSample:
    """The first documents of one file."""

    path: Path
    source: str
    text: str | None
    most: int | None
    rows: range | None
    """Rows to take; all when None."""
    name: str
    """Name of the sample in the notes."""

    def write(self, file: HubFile, progress: FetchProgress, show: Callable[[FetchProgress], None]) -> FetchedFile:
        """Write the file of these documents; it is complete or absent."""
        key = self.text or documents.choose_text_column([self.source])
        import_zstandard(str(self.path))
        written, bad = atomic.build_temporary_path(self.path), list[BadItem]()
        try:
            with open_writer(written, key) as writer:
                items = documents.read_documents(self.source, key, BY_LINE._replace(fields=True))
                for item in islice(items, self.rows.start, self.rows.stop) if self.rows else items:
                    if isinstance(item, BadDocument):
                        bad.append(BadItem(item.where, item.reason))
                        continue
                    writer.write(item)
                    progress.documents += 1
                    if writer.documents % SHOWN_EVERY == 0:
                        show(progress)
                    if writer.documents == self.most:
                        break
            sync_to_disk(written)
            size = written.stat().st_size
            atomic.publish_file(written, self.path)
        finally:
            written.unlink(missing_ok=True)
        return FetchedFile(
            file=self.path.name, source=self.name, bytes=size, checksum="", documents=writer.documents, bad=bad
        )
