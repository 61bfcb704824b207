"""The shard queue: processes on any machines share the shards of a stage through a folder.

States of shard 12, by the files in the folder:
    open      no ``000012.json``, and no lock on ``000012.claim``
    claimed   a process holds the file lock ``000012.claim``; the kernel releases it when the process dies
    done      ``000012.json``, the result, exists; it is written last, after the files ``000012.SUFFIX``

Transitions: open -> claimed (`_claim_shard`), claimed -> done (`ShardOutput.commit`), claimed -> open (the process dies
or the stage fails), done -> open (`ShardQueue.discard_result`). Any process may claim an open shard; only the process
that holds the claim writes the files of the shard.

A process that repeats the command skips the shards that are done. The process that publishes the output deletes the
folder; the other processes treat a missing folder as the end of the work.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from primus.data import atomic
from primus.data.megatron.manifest import FileFacts
from primus.data.readers.shard import Shard
from primus.errors import PrimusError
from primus.runs.files import sync_to_disk

Facts = TypeVar("Facts", bound=Struct)
CHUNK = 1 << 22
"""Bytes of one read for a checksum: few system calls, and constant memory for a file of any size."""


class BadItem(Struct, frozen=True):
    """An input document that was skipped."""

    where: str
    """File and line."""
    reason: str
    """Why the document is invalid."""


class ShardResult(Struct, frozen=True, kw_only=True):
    """Result of a finished shard; its JSON file marks the shard as done."""

    shard: int
    """Index of the shard."""
    files: dict[str, FileFacts]
    """Size and checksum of each file by suffix."""
    counts: dict[str, int] = {}
    """Numbers that are summed over shards, such as the number of documents."""
    bad: list[BadItem] = []
    """Skipped documents."""
    facts: object = None
    """What else the stage states, as JSON; see `read_facts`."""

    def read_facts(self, kind: type[Facts]) -> Facts:
        """The facts in the form in which the stage stated them."""
        return msgspec.convert(self.facts, kind, str_keys=True)


class Stage(Protocol):
    """One step of a pipeline. It is pickled for processes that are not forked, such as Ray tasks."""

    identity: Any
    """JSON value of every setting, apart from the shards, that determines the content of the files."""

    def start(self) -> None:
        """Load what each process needs once. A forked worker calls it again, so a repeated call must be cheap."""

    def run(self, shard: Shard, output: ShardOutput) -> None:
        """Process one shard. The output depends only on the shard and the stage.

        Raises:
            PrimusError: The input is invalid; no file of the shard is kept.
        """


@dataclass
class ShardOutput:
    """Output files of one shard. They have temporary names until `commit`."""

    stem: Path
    """Path of the shard's files without suffix."""
    max_bad: int = 0
    """Maximum number of skipped documents in all shards."""
    report: Callable[[dict[str, int]], None] = lambda counts: None
    """Called with each increment of the counts, for the progress display."""
    durable: bool = True
    """Whether `commit` syncs the files to disk. A stage whose files are verified on reading sets it to False."""
    counts: dict[str, int] = field(default_factory=dict)
    facts: Struct | None = None
    """What else the stage states about the shard."""
    bad_items: list[BadItem] = field(default_factory=list)
    _written: dict[str, Path] = field(default_factory=dict)

    def path(self, suffix: str) -> Path:
        """Temporary path of the shard's file with this suffix."""
        return self._written.setdefault(suffix, atomic.build_temporary_path(_shard_file(self.stem, suffix)))

    def add_counts(self, **amounts: int) -> None:
        """Add to the counts."""
        for name, amount in amounts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        self.report(amounts)

    def record_bad(self, where: str, reason: str) -> None:
        """Record a skipped document.

        Raises:
            PrimusError: More than `max_bad` documents are skipped.
        """
        self.bad_items.append(BadItem(where, reason))
        check_bad(self.bad_items, self.max_bad)

    def commit(self, shard: Shard) -> ShardResult:
        """Rename the files to their final names, then write the result."""
        files = {}
        # Data before result: a crash between the two leaves an open shard, never a result without its files.
        for suffix, written in self._written.items():
            files[suffix] = FileFacts(bytes=written.stat().st_size, xxh3=compute_checksum(written))
            if self.durable:
                sync_to_disk(written)
            os.replace(written, _shard_file(self.stem, suffix))
        facts = msgspec.to_builtins(self.facts)
        result = ShardResult(shard=shard.index, files=files, counts=self.counts, bad=self.bad_items, facts=facts)
        with atomic.stage_files({_shard_file(self.stem, "json"): msgspec.json.encode(result)}, self.durable) as publish:
            publish()
        return result

    def discard(self) -> None:
        """Delete the temporary files of a failed shard; after `commit`, none exist."""
        for written in self._written.values():
            written.unlink(missing_ok=True)


@dataclass(frozen=True)
class ShardQueue:
    """Shards of a stage, and the folder that records which of them are done. Safe to use from several processes."""

    stage: Stage
    shards: Sequence[Shard]
    folder: Path
    max_bad: int = 0
    output: Path | None = None
    """Final output, for error messages."""
    _done: dict[int, ShardResult] = field(default_factory=dict, repr=False)
    """Results found so far: a finished shard stays done, so only open shards are read from the folder again."""

    def stem(self, shard: Shard) -> Path:
        """Path of a shard's files without suffix."""
        return self.folder / f"{shard.index:06d}"

    def find_result(self, shard: Shard) -> ShardResult | None:
        """Result of a shard if it is done and its files exist; None otherwise."""
        if found := self._done.get(shard.index) or self._read_result(self.stem(shard)):
            self._done[shard.index] = found
        return found

    def discard_result(self, result: ShardResult) -> None:
        """Reopen a finished shard, for example because one of its files is damaged."""
        # Without its JSON file the shard is open. Its data files stay: the next commit replaces them.
        self._done.pop(result.shard, None)
        self.result_file(result, "json").unlink(missing_ok=True)

    def _read_result(self, stem: Path) -> ShardResult | None:
        try:
            result = msgspec.json.decode(_shard_file(stem, "json").read_bytes(), type=ShardResult)
        except (OSError, msgspec.MsgspecError):  # a result that a power failure truncated counts as missing
            return None
        # Each look compares sizes only, which finds deleted and truncated files; readers verify the checksums.
        return (
            result
            if all(_read_file_size(_shard_file(stem, suffix)) == facts.bytes for suffix, facts in result.files.items())
            else None
        )

    def list_remaining(self) -> list[Shard]:
        """Shards that are not done; empty if another process has published the output and removed the folder."""
        if not self.folder.is_dir():
            return []
        return [shard for shard in self.shards if not self.find_result(shard)]

    def list_results(self) -> list[ShardResult]:
        """Results of the finished shards, in order."""
        return [result for shard in self.shards if (result := self.find_result(shard))]

    def result_file(self, result: ShardResult, suffix: str) -> Path:
        """Path of a file of a finished shard."""
        return _shard_file(self.folder / f"{result.shard:06d}", suffix)

    def process_shard(
        self, shard: Shard, report: Callable[[dict[str, int]], None] = lambda counts: None
    ) -> ShardResult | None:
        """Claim and process a shard; return None if another process holds it or has finished it.

        Raises:
            PrimusError: The input is invalid, or the folder cannot be written.
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
        # Only the holder of the claim writes files of this shard, so existing temporary files belong to dead processes.
        atomic.remove_stale(self.folder, self.stem(shard).name)
        output = ShardOutput(self.stem(shard), self.max_bad, report)
        try:
            self.stage.run(shard, output)
            return output.commit(shard)
        finally:
            # Runs while the claim is held: no other process can have files of the same temporary names.
            output.discard()


def open_shard_queue(
    stage: Stage, shards: Sequence[Shard], parent: Path, max_bad: int = 0, output: Path | None = None
) -> ShardQueue:
    """Open the shard queue of a stage. Its folder below `parent` is named by a digest of the stage and the shards.

    Processes with the same settings and input share the folder; other settings or another input use another folder.
    """
    digest = hashlib.sha256(msgspec.json.encode([stage.identity, list(shards)], order="deterministic")).hexdigest()
    folder = parent / digest[:16]  # 64 bits: a work folder holds a handful of queues, so a collision is negligible
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise atomic.build_write_error(output or parent, error) from None
    return ShardQueue(stage, shards, folder, max_bad, output)


def process_shards(
    queue: ShardQueue, report: Callable[[dict[str, int]], None], done: Callable[[ShardResult], bool]
) -> bool:
    """Process the shards that are open, each at most once.

    Args:
        queue: The shard queue.
        report: Called with counts while a shard is processed.
        done: Called with each result of this process; a return value of True stops the work early.

    Returns:
        True if no open shard is left; False if `done` stopped the work.

    Raises:
        PrimusError: A shard failed.
    """
    # A shard that another process holds is passed once, without waiting: callers repeat the call until none remains.
    return not any(
        result and done(result) for result in (queue.process_shard(shard, report) for shard in queue.list_remaining())
    )


def check_bad(items: Sequence[BadItem], max_bad: int) -> None:
    """Check that at most `max_bad` documents are skipped.

    Raises:
        PrimusError: More are skipped; the message names the first one above the limit.
    """
    if len(items) > max_bad:
        item = items[max_bad]
        more = f" (bad document {max_bad + 1} of at most {max_bad})" if max_bad else ""
        raise PrimusError(
            f"{item.where}: {item.reason}{more}", "correct it, or skip up to N bad documents with --max-bad N"
        )


def compute_checksum(path: Path) -> str:
    """Checksum (xxh3_128) of a file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


@contextmanager
def _claim_shard(path: Path) -> Iterator[bool]:
    """Try to claim a shard without waiting; yield whether this process holds the claim within the block."""
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
