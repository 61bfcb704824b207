"""The shard queue: processes on any machines share the shards of a stage through a folder.

States of shard 12, by the files in the folder:
    open      no ``000012.json``, and no lock on ``000012.claim``
    claimed   a process holds the file lock ``000012.claim``; the kernel releases it when the process dies
    done      ``000012.json``, the result, exists; it is written last, after the files ``000012.SUFFIX``

A process that repeats the command skips the shards that are done. The process that publishes the output deletes the
folder; the others take a missing folder as the end of the work.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash
from msgspec import Struct

from primus.data import atomic
from primus.data.megatron.manifest import FileFacts
from primus.data.readers.shard import Shard
from primus.errors import PrimusError

CHUNK = 1 << 22


class BadItem(Struct, frozen=True):
    """Something of the input that was left out."""

    where: str
    """File and line."""
    reason: str
    """What is wrong with it."""


class ShardResult(Struct, frozen=True, kw_only=True):
    """What a finished shard has given."""

    shard: int
    """Its index."""
    files: dict[str, FileFacts]
    """Its files by suffix."""
    counts: dict[str, int] = {}
    """Numbers that are added up over shards, such as documents."""
    bad: list[BadItem] = []
    """What was left out."""
    facts: dict[str, Any] = {}
    """Whatever else the stage needs to know of it."""


class Stage(Protocol):
    """One step of a pipeline. It is pickled for processes that are not forked."""

    identity: Any
    """Everything but the shards that decides what its files hold, as JSON."""

    def start(self) -> None:
        """Load what each process needs once; called again in a process that has it already."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Do one shard: a pure function of the shard and the stage.

        Raises:
            PrimusError: The input is bad; nothing of the shard is kept.
        """


@dataclass
class ShardOutput:
    """Where a stage puts what a shard gives; nothing has its final name before the shard is done."""

    stem: Path
    """Path of the shard's files without suffix."""
    max_bad: int = 0
    """Items of all shards together that may be left out."""
    report: Callable[[dict[str, int]], None] = lambda counts: None
    """Called with what was added to the counts, for showing progress."""
    durable: bool = True
    """Whether files must outlive a loss of power; a stage whose files are checked when they are used need not wait."""
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    bad_items: list[BadItem] = field(default_factory=list)
    _written: dict[str, Path] = field(default_factory=dict)

    def path(self, suffix: str) -> Path:
        """Where to write the shard's file with this suffix."""
        return self._written.setdefault(suffix, atomic.build_temporary_path(_shard_file(self.stem, suffix)))

    def add_counts(self, **amounts: int) -> None:
        """Add to the counts."""
        for name, amount in amounts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        self.report(amounts)

    def record_bad(self, where: str, reason: str) -> None:
        """Leave something out.

        Raises:
            PrimusError: More than `max_bad` were left out.
        """
        self.bad_items.append(BadItem(where, reason))
        check_bad(self.bad_items, self.max_bad)

    def commit(self, shard: Shard) -> ShardResult:
        """Give the files their names, then write the row."""
        files = {}
        # Data before result: a crash between the two leaves an open shard, never a result without its files.
        for suffix, written in self._written.items():
            files[suffix] = FileFacts(bytes=written.stat().st_size, xxh3=compute_checksum(written))
            if self.durable:
                atomic.sync_to_disk(written)
            os.replace(written, _shard_file(self.stem, suffix))
        row = ShardResult(shard=shard.index, files=files, counts=self.counts, bad=self.bad_items, facts=self.facts)
        with atomic.stage_files({_shard_file(self.stem, "json"): msgspec.json.encode(row)}, self.durable) as publish:
            publish()
        return row

    def discard(self) -> None:
        """Delete what a shard that failed has written."""
        for written in self._written.values():
            written.unlink(missing_ok=True)


@dataclass(frozen=True)
class ShardQueue:
    """Shards of a stage, and the folder that tells which of them are done."""

    stage: Stage
    shards: Sequence[Shard]
    folder: Path
    max_bad: int = 0
    output: Path | None = None
    """What the files are made for, to name where they cannot be written."""
    _done: dict[int, ShardResult] = field(default_factory=dict, repr=False)

    def stem(self, shard: Shard) -> Path:
        """Path of a shard's files without suffix."""
        return self.folder / f"{shard.index:06d}"

    def find_result(self, shard: Shard) -> ShardResult | None:
        """The row of a shard if it is done and its files are still there; looked up until it is."""
        if found := self._done.get(shard.index) or self._read_result(self.stem(shard)):
            self._done[shard.index] = found
        return found

    def discard_result(self, row: ShardResult) -> None:
        """Let a finished shard be done again, as where its files are damaged."""
        self._done.pop(row.shard, None)
        self.result_file(row, "json").unlink(missing_ok=True)

    def _read_result(self, stem: Path) -> ShardResult | None:
        try:
            row = msgspec.json.decode(_shard_file(stem, "json").read_bytes(), type=ShardResult)
        except (OSError, msgspec.MsgspecError):
            return None
        return (
            row
            if all(_read_file_size(_shard_file(stem, suffix)) == facts.bytes for suffix, facts in row.files.items())
            else None
        )

    def list_remaining(self) -> list[Shard]:
        """Shards that are not done; none where somebody has finished the whole and removed the folder."""
        if not self.folder.is_dir():
            return []
        return [shard for shard in self.shards if not self.find_result(shard)]

    def list_results(self) -> list[ShardResult]:
        """Rows of the shards that are done, in order."""
        return [row for shard in self.shards if (row := self.find_result(shard))]

    def result_file(self, row: ShardResult, suffix: str) -> Path:
        """A file of a finished shard."""
        return _shard_file(self.folder / f"{row.shard:06d}", suffix)

    def process_shard(
        self, shard: Shard, report: Callable[[dict[str, int]], None] = lambda counts: None
    ) -> ShardResult | None:
        """Do a shard; None where another process holds it or has done it.

        Raises:
            PrimusError: The input is bad, or the folder cannot be written.
        """
        if self.find_result(shard):
            return None
        try:
            # The result is looked up again under the claim: its holder may have finished since the first look.
            with _claim_shard(_shard_file(self.stem(shard), "claim")) as ours:
                return self._run_stage(shard, report) if ours and not self.find_result(shard) else None
        except OSError as error:
            if not self.folder.is_dir():  # another process has published the output
                return None
            raise atomic.build_write_error(self.output or self.folder, error) from None

    def _run_stage(self, shard: Shard, report: Callable[[dict[str, int]], None]) -> ShardResult:
        atomic.remove_stale(self.folder, self.stem(shard).name)
        output = ShardOutput(self.stem(shard), self.max_bad, report)
        try:
            self.stage.run(shard, output)
            return output.commit(shard)
        finally:
            output.discard()


def open_shard_queue(
    stage: Stage, shards: Sequence[Shard], parent: Path, max_bad: int = 0, output: Path | None = None
) -> ShardQueue:
    """The board of a stage in a folder of its own below `parent`: another stage or input never finds these files."""
    digest = hashlib.sha256(msgspec.json.encode([stage.identity, list(shards)], order="deterministic")).hexdigest()
    folder = parent / digest[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise atomic.build_write_error(output or parent, error) from None
    return ShardQueue(stage, shards, folder, max_bad, output)


def process_shards(
    board: ShardQueue, report: Callable[[dict[str, int]], None], done: Callable[[ShardResult], bool]
) -> bool:
    """Do the shards that nobody has done or holds.

    Args:
        board: The shards.
        report: Called with counts while a shard is being done.
        done: Called with each row that this process made; True ends the work early.

    Returns:
        Whether no more is to be had; False where `done` ended it.

    Raises:
        PrimusError: A shard failed.
    """
    return not any(
        row and done(row) for row in (board.process_shard(shard, report) for shard in board.list_remaining())
    )


def check_bad(items: Sequence[BadItem], max_bad: int) -> None:
    """Make sure that no more was left out than may be.

    Raises:
        PrimusError: More was; the message names the first item that is too much.
    """
    if len(items) > max_bad:
        item = items[max_bad]
        more = f" (bad document {max_bad + 1} of at most {max_bad})" if max_bad else ""
        raise PrimusError(
            f"{item.where}: {item.reason}{more}", "correct it, or leave out up to N bad documents with --max-bad N"
        )


def compute_checksum(path: Path) -> str:
    """xxh3_128 of a file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


@contextmanager
def _claim_shard(path: Path) -> Iterator[bool]:
    """Whether a claim became ours."""
    descriptor = atomic.try_acquire(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            # Unlink while locked: a process that opens the path afterwards creates and locks a new file.
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _shard_file(stem: Path, suffix: str) -> Path:
    return stem.with_name(f"{stem.name}.{suffix}")


def _read_file_size(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_size
    return None
