"""Datasets of the Hugging Face hub in a folder: whole files or the first documents, each complete or not there."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from primus.data import atomic
from primus.data import readers as documents
from primus.data.catalog import hub, splits
from primus.data.catalog.hub import HubFile, SplitListing
from primus.data.catalog.splits import SplitPart
from primus.data.readers import BadDocument, columns
from primus.data.readers.compression import import_zstandard
from primus.data.readers.kinds import detect_kind
from primus.data.readers.remote import read_hub_endpoint
from primus.data.retries import retry_request
from primus.data.shards.document_writer import open_writer
from primus.data.shards.shard_queue import BadItem
from primus.errors import PrimusError, UsageError

LOCK_TIMEOUT_S = 3600.0
CHUNK = 1 << 20
SHOWN_EVERY = 1000
NOTES = ".fetch"
"""Folder in the output that says what is there; hidden, so that no reader takes it for text."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class FetchJob:
    """What to fetch and where to."""

    dataset: str
    """A named source or OWNER/NAME, with ``:CONFIG`` where there are several."""
    output: Path
    """Folder of the files."""
    split: str = "train"
    """Split of the dataset, several, or rows of them; see `primus.data.catalog.splits`."""
    revision: str | None = None
    """Commit, branch or tag; the newest commit when None."""
    num_samples: int | None = None
    """Take the first documents only, as compressed JSON lines."""
    streaming: bool = False
    """Read the dataset's files without storing them."""
    workers: int = 4
    """Files that are downloaded at a time."""


class FileSlice(Struct, frozen=True, kw_only=True):
    """Consecutive rows of a file."""

    file: HubFile
    first: int
    last: int
    """One past the last."""

    @property
    def name(self) -> str:
        """Stands for it in the notes."""
        return f"{self.file.path}[{self.first}:{self.last}]"


class FetchRequest(Struct, frozen=True, kw_only=True):
    """What a folder was asked to hold and which files that means; another request needs another folder."""

    version: int = 1
    dataset: str
    split: str
    revision: str | None
    num_samples: int | None
    streaming: bool
    listing: SplitListing
    """Files of the hub, at one commit however long fetching takes."""
    slices: tuple[FileSlice, ...] | None = None
    """Rows of these files, where the split names rows that are not its first ones."""


class FetchedFile(Struct, frozen=True, kw_only=True):
    """One file that is complete."""

    file: str
    """In the folder."""
    source: str
    """In the repository."""
    bytes: int
    checksum: str
    """The hub's own checksum, verified; empty for a file that was made from part of another."""
    documents: int = 0
    """Documents, where they were counted."""
    bad: list[BadItem] = []
    """Bad documents that were left out."""


@dataclass
class FetchProgress:
    """How far fetching is."""

    files: int = 0
    num_files: int = 0
    bytes: int = 0
    num_bytes: int = 0
    documents: int = 0


@dataclass(frozen=True)
class FetchedDataset:
    """What is in the folder."""

    folder: Path
    request: FetchRequest
    done: list[FetchedFile]
    """In the order of the dataset."""
    made: bool
    """Whether anything had to be done."""

    @property
    def files(self) -> list[str]:
        """Paths of the files, in order."""
        return [str(self.folder / each.file) for each in self.done]


def fetch_dataset(
    job: FetchJob, say: Say = lambda text: None, show: Callable[[FetchProgress], None] = lambda progress: None
) -> FetchedDataset:
    """Bring a split of a dataset of the hub into a folder; what is there already is not fetched again.

    Args:
        job: What to fetch.
        say: Receives lines for people.
        show: Receives the progress, also from other threads.

    Raises:
        UsageError: There is no such dataset, configuration or split, or the folder holds something else.
        PrimusError: The hub does not answer, a file came damaged, or the folder cannot be written.
    """
    if not hub.is_hub(job.dataset):
        raise UsageError(f"{job.dataset}: nothing to fetch, it is on this machine", "use it with --dataset right away")
    try:
        _check_folder(job.output)
        (job.output / NOTES).mkdir(parents=True, exist_ok=True)
        lock = job.output / NOTES / "lock"
        with atomic.hold_lock(
            lock, LOCK_TIMEOUT_S, lambda holder: say(f"waiting for {holder} to fetch into {job.output}")
        ):
            return _fetch_locked(job, say, show)
    except OSError as error:
        raise atomic.build_write_error(job.output, error) from None


def find_dataset_folder(data_path: Path, dataset: str, split: str) -> Path:
    """Where a dataset of the hub lies in the data folder when no other place is named."""
    return Path(os.path.expanduser(data_path)) / name_dataset_folder(dataset) / f"raw-{_name_split_folder(split)}"


def _name_split_folder(split: str) -> str:
    """A split as part of a folder's name, without what shells and patterns take for theirs."""
    if re.fullmatch(r"[\w.-]+", split):
        return split
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', split).strip('-')}-{hashlib.sha256(split.encode()).hexdigest()[:8]}"


def name_dataset_folder(dataset: str) -> str:
    """Name of a dataset as that of a folder: ``owner--name-config`` of ``OWNER/NAME:CONFIG``."""
    return dataset.lower().replace("_", "-").replace("/", "--").replace(":", "-")


def _check_folder(folder: Path) -> None:
    """Make sure that no file in the folder is taken for one of a download that was not finished, and replaced.

    Raises:
        UsageError: There are files that nobody has fetched.
    """
    if folder.is_dir() and not (folder / NOTES).is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder}: holds other files, which may have the same names", "give another --output")


def _fetch_locked(job: FetchJob, say: Say, show: Callable[[FetchProgress], None]) -> FetchedDataset:
    request = _load_request(job, say)
    listing, folder = request.listing, job.output
    for left in (folder / ".cache" / "huggingface").rglob("*.incomplete"):
        left.unlink()  # of a download that was killed; the hub's library uses none twice
    for left in folder.glob("part-*.tmp.*"):
        left.unlink()
    done = _find_present_files(folder, request)
    if _is_complete(request, done):
        say(f"{folder}: nothing to do, {len(done)} files of {job.dataset} are there")
        return FetchedDataset(folder, request, _sort_files(request, done), made=False)
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
    """What the folder is to hold: as it was noted there, else found out and noted.

    Raises:
        UsageError: The folder was asked to hold something else.
    """
    path = job.output / NOTES / "request.json"
    try:
        noted = msgspec.json.decode(path.read_bytes(), type=FetchRequest)
    except FileNotFoundError:
        noted = None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: damaged, {error}", "delete the folder and fetch again") from None
    names = ("dataset", "split", "revision", "num_samples", "streaming")
    if noted is None:
        listing, slices = _list_files(job, say)
        noted = FetchRequest(listing=listing, slices=slices, **{name: getattr(job, name) for name in names})
        with atomic.stage_files({path: msgspec.json.encode(noted)}) as publish:
            publish()
        return noted
    for name in names:
        if getattr(noted, name) != getattr(job, name):
            problem = f"{job.output}: holds {noted.dataset} with {name} {getattr(noted, name)}"
            raise UsageError(problem, "give another --output, or delete this folder")
    return noted


def _list_files(job: FetchJob, say: Say) -> tuple[SplitListing, tuple[FileSlice, ...] | None]:
    """The files of all splits that are named, and which of their rows, where that is not all or the first ones."""
    parts = splits.parse_split(job.split)
    if job.num_samples is not None and not all(part.is_whole for part in parts):
        raise UsageError(f"--num-samples with --split '{job.split}'", "leave one of them out")
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
    say(f"{job.dataset}: counting the rows of {len(files)} files, which '{job.split}' needs")
    counts = {file.path: _count_rows(job, listing, file) for file in files}
    slices = tuple(_list_slices(parts, listings, counts))
    if not slices:
        raise UsageError(f"split '{job.split}': no rows, of {sum(counts.values()):,}", "name more")
    return listing, slices


def _list_slices(
    parts: Iterable[SplitPart], listings: dict[str, SplitListing], counts: dict[str, int]
) -> Iterator[FileSlice]:
    """The rows of files that parts of splits are."""
    for part in parts:
        files, before = listings[part.split].files, 0
        rows = part.select_rows(sum(counts[file.path] for file in files))
        for file in files:
            first, last = max(rows.start - before, 0), min(rows.stop - before, counts[file.path])
            if first < last:
                yield FileSlice(file=file, first=first, last=last)
            before += counts[file.path]


def _count_rows(job: FetchJob, listing: SplitListing, file: HubFile) -> int:
    """Rows of a file: of parquet what its end says, which is all that is read of it; else by reading the file."""
    if detect_kind(file.path) == ".parquet":
        return columns.count_rows(_stream_url(listing, file))
    source = _choose_source(job, listing, file)
    return sum(
        1 for _ in documents.read_documents(source, listing.text or documents.choose_text_column([source]), "line")
    )


def _limit_documents(job: FetchJob | FetchRequest) -> int | None:
    """How many of the first documents are wanted, where that is known beforehand."""
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
    """What is to be fetched, in order: files, or rows of files."""
    if request.slices is not None:
        return [each.name for each in request.slices]
    return [file.path for file in request.listing.files]


def _sort_files(request: FetchRequest, done: dict[str, FetchedFile]) -> list[FetchedFile]:
    return [done[name] for name in _list_names(request) if name in done]


def _record_file(folder: Path, done: FetchedFile) -> None:
    with (folder / NOTES / "done.jsonl").open("ab") as notes:
        notes.write(msgspec.json.encode(done) + b"\n")
        notes.flush()
        os.fsync(notes.fileno())


def _find_present_files(folder: Path, request: FetchRequest) -> dict[str, FetchedFile]:
    """Files that are noted as complete and have their size; a killed writer's last note may be broken."""
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
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as notes:
            notes.write(b"\n")
    return found


def _download_files(
    job: FetchJob,
    listing: SplitListing,
    done: dict[str, FetchedFile],
    progress: FetchProgress,
    show: Callable[[FetchProgress], None],
) -> Iterator[FetchedFile]:
    """Download what is missing, several files at a time."""
    # Not `huggingface_hub.snapshot_download`: it verifies no checksums, cannot record each file when it is complete,
    # and repeats the listing of the repository, so that it would replace only the pool of threads below.
    missing = [file for file in listing.files if file.path not in done]

    def count(num_bytes: int) -> None:
        progress.bytes += num_bytes
        show(progress)

    pool = ThreadPoolExecutor(job.workers)
    try:
        futures = [pool.submit(_download_file, listing, file, job.output, count) for file in missing]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _download_file(listing: SplitListing, file: HubFile, folder: Path, count: Callable[[int], None]) -> FetchedFile:
    path = folder / file.path
    if path.exists():
        path.unlink()  # it is not noted as complete
    _download_from_hub(listing, file, count, local_dir=str(folder))
    _verify_file(path, file)
    return FetchedFile(file=file.path, source=file.path, bytes=file.bytes, checksum=file.checksum)


def _download_from_hub(listing: SplitListing, file: HubFile, count: Callable[[int], None], **where: str) -> Path:
    """Download a file to a folder or into the hub's cache; an interrupted download goes on where it was."""
    library = hub.import_hub_library(listing.repo)

    def download() -> str:
        path: str = library.hf_hub_download(
            listing.repo,
            file.path,
            repo_type="dataset",
            revision=listing.revision,
            endpoint=read_hub_endpoint(),
            tqdm_class=_make_progress_bar(library, count),
            **where,
        )
        return path

    with hub.hub_errors(listing.repo):
        return Path(retry_request(read_hub_endpoint(), download))


def _make_progress_bar(library: Any, count: Callable[[int], None]) -> Any:
    """A progress bar for the hub's library that draws nothing and counts bytes."""

    class Bar(library.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return Bar


def _verify_file(path: Path, file: HubFile) -> None:
    """Compare a file with the hub's size and checksum.

    Raises:
        PrimusError: It differs; it is removed.
    """
    kind, _, expected = file.checksum.partition(":")
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            digest.update(chunk)
    if path.stat().st_size != file.bytes or (expected and digest.hexdigest() != expected):
        path.unlink()
        raise PrimusError(
            f"{path}: came damaged from {read_hub_endpoint()}", "run this again; the other files are kept"
        )


def _write_samples(
    job: FetchJob,
    request: FetchRequest,
    done: dict[str, FetchedFile],
    progress: FetchProgress,
    show: Callable[[FetchProgress], None],
) -> Iterator[FetchedFile]:
    """Documents of each file as compressed JSON lines, up to the number that was asked for."""
    listing, limit = request.listing, _limit_documents(request)
    progress.documents = sum(each.documents for each in done.values())
    wanted = request.slices or [FileSlice(file=file, first=0, last=-1) for file in listing.files]
    for index, (name, each) in enumerate(zip(_list_names(request), wanted, strict=True)):
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
    """Where a file is read that is not kept: on the hub, or in the hub's cache."""
    return (
        _stream_url(listing, file) if job.streaming else str(_download_from_hub(listing, file, lambda num_bytes: None))
    )


def _stream_url(listing: SplitListing, file: HubFile) -> str:
    return f"hf://datasets/{listing.repo}@{quote(listing.revision, safe='')}/{file.path}"


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
    """What stands for it in the notes."""

    def write(self, file: HubFile, progress: FetchProgress, show: Callable[[FetchProgress], None]) -> FetchedFile:
        """Make the file of these documents, complete or not at all."""
        key = self.text or documents.choose_text_column([self.source])
        import_zstandard(str(self.path))
        written, bad = atomic.build_temporary_path(self.path), list[BadItem]()
        try:
            with open_writer(written, key) as writer:
                items = documents.read_documents(self.source, key, "line", fields=True)
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
            atomic.sync_to_disk(written)
            size = written.stat().st_size
            atomic.publish_file(written, self.path)
        finally:
            written.unlink(missing_ok=True)
        return FetchedFile(
            file=self.path.name, source=self.name, bytes=size, checksum="", documents=writer.documents, bad=bad
        )
