"""Checkpoints of a training run: a framework writes its files, and a manifest completes them.

The protocol, for every process: create an empty folder (the first process), write the own files, compute their
checksums, gather them, write the manifest (the first process), delete older checkpoints. The manifest is the last file,
written by rename: a folder without one was interrupted, and no reader loads it.

Files may be written while training continues: in a daemon thread, from a copy that the framework took on the training
thread. Collectives of training and of the writer must not mix on one process group, so the thread uses a separate one.
At most one checkpoint is being written; the next `save` waits for it.

A write that fails in one process fails in all of them: each gives its problem to the others before the manifest is
written and after it. It is tried twice; then the checkpoint is reported as failed, its folder is deleted, and training
continues until `max_failed` checkpoints in a row have failed. Only what the processes have agreed on counts, because
they notice the end of a thread at different steps.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from primus.callback import SavedCheckpoint
from primus.checkpoint import folders, manifest
from primus.checkpoint.checksum import choose_algorithm
from primus.checkpoint.manifest import CheckpointManifest, FileEntry
from primus.checkpoint.shape import Shape
from primus.errors import PrimusError
from primus.runs.files import sync_to_disk
from primus.session.checkpoints.remote import RemoteFolder
from primus.session.ranks.processes import Processes, find_first_problem

WriteFiles = Callable[[Path], None]
"""Writes this process's files of a checkpoint into a folder, and returns when they are on disk."""
TakeState = Callable[[], WriteFiles]
"""Takes the state to save, on the training thread."""

GIB = 1 << 30
PROBE_BYTES = 1 << 20
"""Size of the file that shows whether the disk takes any more: larger than the small files of any engine."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Location and options of a run's checkpoints, and the common fields of their manifests."""

    backend: str
    library_version: str
    """Version of the library that writes the files."""
    folder: Path
    run: str
    """Id of the run."""
    keep_last_n: int | None
    """Checkpoints to keep; all when None."""
    remote: RemoteFolder | None = None
    """Where each checkpoint is copied before it counts."""
    max_failed: int = 1
    """Failed checkpoints in a row after which the run must end."""
    model: Shape
    data_fingerprint: str
    global_batch_size: int | None = None
    retry_s: float = 2.0
    """Time before a failed write is tried again: the server of a file system may be back."""


@dataclass(frozen=True)
class FailedCheckpoint:
    """A checkpoint that could not be written."""

    step: int
    error: PrimusError
    num_failed: int
    """Checkpoints in a row that have failed."""


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a run when a checkpoint is saved."""

    step: int
    consumed_samples: int
    recent_losses: Sequence[float] = ()
    """See `bad_steps.BadStepDetector.losses`."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """State of callbacks by name."""
    compiled: bool = False
    """Whether the steps were taken by a compiled model."""


class CheckpointSaver:
    """Writes checkpoints one after the other; every process must make the same calls.

    Args:
        settings: Where and how.
        processes: Those that write together.
        saved: Called in this thread, from any method, when a checkpoint has become complete.
        failed: The same when one has failed.
        waits: Called with the step of a checkpoint that is still being written when the next one is due.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        processes: Processes,
        saved: Callable[[SavedCheckpoint], None],
        failed: Callable[[FailedCheckpoint], None] = lambda failed: None,
        waits: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.settings, self.processes = settings, processes
        self.last_step: int | None = None
        """Step of the newest checkpoint that was started and has not failed."""
        self.failure: FailedCheckpoint | None = None
        """The newest checkpoint, if it has failed."""
        self._saved, self._failed, self._waits = saved, failed, waits
        self._writing: _CheckpointWrite | None = None
        self._last_bytes = 0

    @property
    def has_given_up(self) -> bool:
        """Whether so many checkpoints in a row have failed that the run must end."""
        return self.failure is not None and self.failure.num_failed >= self.settings.max_failed

    def save(self, take_state: TakeState, position: TrainingPosition, num_bytes: int, in_thread: bool) -> None:
        """Write a checkpoint; a failure is reported, and does not raise.

        Args:
            take_state: Called in every process when the folder is there; what it returns runs in a thread if
                `in_thread`, and must then write a copy. It may be called twice.
            position: Of the run; not changed by the caller afterwards.
            num_bytes: Approximate size of the files of all processes together, which must be free on the disk; that of
                the checkpoint before if it is 0.
            in_thread: Return as soon as the folder is there, and write while training continues.
        """
        # One checkpoint at a time: a second writer would double the memory, and could overtake the first.
        if self._writing is not None and not self._writing.is_over:
            self._waits(self._writing.step)
        self.finish_writing()
        started = time.monotonic()
        writing = _CheckpointWrite(self.settings, self.processes, position, num_bytes or self._last_bytes)
        # A collective, on the training thread: all processes are at the same step here.
        if writing.prepare_folder():
            if in_thread:
                # The copy is complete when `take_state` returns: the next step may overwrite the weights.
                writing.start_thread(take_state())
            else:
                writing.write(take_state())
        writing.wait_s = time.monotonic() - started
        self._writing, self.last_step = writing, position.step
        if not in_thread:
            self.finish_writing()

    def poll(self) -> None:
        """Report a checkpoint that has become complete or has failed; neither waits nor communicates."""
        if self._writing is not None and self._writing.is_over:
            # The thread has ended, so this neither waits nor communicates: processes may get here at
            # different steps.
            self.finish_writing()

    def finish_writing(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that is being written is complete or has failed, at most `timeout_s`.

        Raises:
            PrimusError: A peer of this process was lost while it was written.
        """
        if self._writing is None or not self._writing.wait(timeout_s):
            return
        # Cleared before the result is read, which may raise: a failed write is reported once.
        writing, self._writing = self._writing, None
        error = writing.find_failure()
        if error is None:
            self.failure = None
            if writing.saved is not None:
                self._last_bytes = writing.saved.total_bytes
                self._saved(replace(writing.saved, wait_s=writing.wait_s))
            return
        self.last_step = None
        self.failure = FailedCheckpoint(writing.step, error, self.failure.num_failed + 1 if self.failure else 1)
        self._failed(self.failure)

    def check_last(self) -> None:
        """Wait for the checkpoint that is being written, and check that the newest one has not failed.

        Raises:
            PrimusError: It has: the steps since the one before it are in no checkpoint.
        """
        self.finish_writing()
        if self.failure is not None:
            raise self.failure.error


class _CheckpointWrite:
    """One checkpoint while it is written."""

    def __init__(
        self, settings: CheckpointSettings, processes: Processes, position: TrainingPosition, num_bytes: int
    ) -> None:
        self._settings, self._processes = settings, processes
        self._position, self._num_bytes = position, num_bytes
        self._folder = folders.name_step_folder(settings.folder, position.step)
        self._group = processes.writer_group  # made here, where every process arrives in the same order
        self._started = time.monotonic()
        self._thread: threading.Thread | None = None
        self._problem = ""
        """Why it has failed, the same in every process."""
        self._lost: BaseException | None = None
        """A peer is gone, so that the processes could not agree."""
        self.saved: SavedCheckpoint | None = None
        """The complete checkpoint, on the first process."""
        self.wait_s = 0.0
        """Time that the training thread has waited for this checkpoint."""

    @property
    def step(self) -> int:
        return self._position.step

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def prepare_folder(self) -> bool:
        """Create an empty folder for the checkpoint; replaces the incomplete one of a killed writer.

        Returns:
            Whether it is there, and the disk has enough space.
        """
        # All processes wait for the folder: none writes if it cannot be created.
        return self._try_twice(
            lambda: self._processes.broadcast_from_first(self._make_folder() if self._processes.is_first else "")
        )

    def _try_twice(self, action: Callable[[], str]) -> bool:
        """Whether `action`, which gives the problem on which the processes have agreed, succeeds at once or later."""
        self._problem = action()
        if self._problem:
            time.sleep(self._settings.retry_s)
            self._problem = action()
        return not self._problem

    def _make_folder(self) -> str:
        """Create the folder; returns the problem, if there is one."""
        try:
            if self._folder.exists():
                # A complete checkpoint of this step is only there if the step was repeated: the new one replaces it.
                folders.remove_checkpoint(self._folder)
            if self._settings.remote is not None:
                self._settings.remote.remove(self._folder.name)
            self._folder.mkdir(parents=True)
            # The writer of an engine may not agree with its peers on the failure of a small file.
            probe = self._folder / "probe"
            probe.write_bytes(bytes(PROBE_BYTES))
            sync_to_disk(probe)
            probe.unlink()
        except OSError as error:
            return error.strerror or str(error)
        return self._find_lack_of_space()

    def _find_lack_of_space(self) -> str:
        """The lack of space in words; empty if the checkpoint fits."""
        free = shutil.disk_usage(self._settings.folder).free
        # The size of all processes against one file system: nodes share the folder of checkpoints.
        if free >= self._num_bytes:
            return ""
        return f"no space left: it needs {self._num_bytes / GIB:.3f} GiB, and {free / GIB:.3f} GiB are free"

    def start_thread(self, write_files: WriteFiles) -> None:
        """Write in a thread that ends with the process."""
        # A daemon: a process that fails must not wait for the disk. The folder then has no manifest.
        self._thread = threading.Thread(target=self.write, args=(write_files,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the thread; returns whether it is over."""
        if self._thread is not None:
            # A limit is given only after a failure, when the peers of this process may be dead and the write may never
            # end.
            started = time.monotonic()
            self._thread.join(timeout_s)
            self.wait_s += time.monotonic() - started
        return self.is_over

    def write(self, write_files: WriteFiles) -> None:
        """Write all of it; `find_failure` has the outcome."""
        # May run in the writer thread. All collectives in here use the writer group.
        try:
            self._try_twice(partial(self._write_checkpoint, write_files))
        except BaseException as error:  # the edge of a thread; `find_failure` raises it
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._lost = error

    def _write_checkpoint(self, write_files: WriteFiles) -> str:
        """Write the files and the manifest; returns the problem of the first process that has one."""
        if self._problem:
            # The second time: the folder has a part of the files.
            self._problem = self._agree(self._make_folder() if self._processes.is_first else "")
            if self._problem:
                return self._problem
        problem = _find_problem(lambda: write_files(self._folder))
        entries: list[FileEntry] = []
        if not problem:
            problem = _find_problem(lambda: entries.extend(self._list_own_entries()))
        remote = self._settings.remote
        if not problem and remote is not None:
            # In the writer thread with `async_save`, as the files: training does not wait for the store.
            problem = _find_problem(lambda: remote.upload(self._folder, [each.name for each in entries]))
        # A barrier as well: behind it every file of every process is written.
        gathered = self._processes.all_gather_values((entries, problem), self._group)
        problem = find_first_problem([problem for _, problem in gathered])
        if not problem and self._processes.is_first:
            written = self._build_manifest([entry for entries, _ in gathered for entry in entries])
            problem = _find_problem(lambda: self._complete_checkpoint(written))
        # Only the first process has written the manifest.
        return self._agree(problem)

    def _agree(self, problem: str) -> str:
        return find_first_problem(self._processes.all_gather_values(problem, self._group))

    def find_failure(self) -> PrimusError | None:
        """Why it could not be written, once it is over; its folder is then deleted.

        Raises:
            PrimusError: A peer of this process was lost.
        """
        if self._lost is not None:
            raise self._build_failure(format_reason(self._lost)) from self._lost
        if not self._problem:
            return None
        return self._build_failure(self._find_lack_of_space() or self._problem)

    def _build_failure(self, reason: str) -> PrimusError:
        """The error; deletes the incomplete checkpoint."""
        if self._processes.is_first:
            with suppress(OSError):
                folders.remove_checkpoint(self._folder)
        return PrimusError(
            f"the checkpoint of step {self._position.step} could not be written to {self._folder}: {reason}",
            "free some space, set keep_last_n or choose another `save:`, then run the same command: it resumes from the"
            " checkpoint before",
        )

    def _complete_checkpoint(self, written: CheckpointManifest) -> None:
        """Write the manifest, on the first process; then delete older checkpoints."""
        # From here on the checkpoint counts. Older ones are deleted only afterwards.
        remote = self._settings.remote
        if remote is not None:
            remote.complete(self._folder.name, written)
        manifest.write_manifest(self._folder, written)
        seconds = time.monotonic() - self._started
        self.saved = SavedCheckpoint(self._position.step, self._folder, written.total_bytes, seconds)
        if self._settings.keep_last_n is None:
            return
        try:
            # Never the one that was just written: it is the newest complete one.
            folders.prune_checkpoints(self._settings.folder, self._settings.keep_last_n)
            if remote is not None:
                remote.prune(self._settings.keep_last_n)
        except OSError as error:  # the new checkpoint is as good as without it
            print(f"older checkpoints could not be deleted: {error}", file=sys.stderr)

    def _list_own_entries(self) -> list[FileEntry]:
        """Entries of the files that this process wrote; the first process adds those that belong to no process."""
        # torch.distributed.checkpoint names files __RANK_NUMBER.distcp, and its metadata .metadata.
        own = f"__{self._processes.rank}_"
        algorithm = choose_algorithm()
        names = sorted(path.relative_to(self._folder).as_posix() for path in _iterate_files(self._folder))
        mine = [name for name in names if _owns_file(own, name, self._processes.is_first)]
        return [manifest.build_entry(self._folder, name, algorithm) for name in mine]

    def _build_manifest(self, files: list[FileEntry]) -> CheckpointManifest:
        return CheckpointManifest(
            backend=self._settings.backend,
            run=self._settings.run,
            step=self._position.step,
            consumed_samples=self._position.consumed_samples,
            global_batch_size=self._settings.global_batch_size,
            recent_losses=list(self._position.recent_losses),
            callbacks=dict(self._position.callbacks),
            model=self._settings.model,
            data_fingerprint=self._settings.data_fingerprint,
            compiled=self._position.compiled,
            world_size=self._processes.world,
            torch_version=self._settings.library_version,
            created=time.time(),
            algorithm=choose_algorithm(),
            files=sorted(files, key=lambda file: file.name),
        )


def _iterate_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _owns_file(prefix: str, name: str, is_first: bool) -> bool:
    """Whether a file is of the process whose files begin with `prefix`; the first process has those of none."""
    base = name.rpartition("/")[2]
    return base.startswith(prefix) or (is_first and not base.startswith("__"))


def _find_problem(action: Callable[[], None]) -> str:
    """The failure of `action` in one line; empty if it succeeds."""
    try:
        action()
    except BaseException as error:
        # torch's CheckpointException derives from BaseException alone; a signal's KeyboardInterrupt passes.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return format_reason(error)
    return ""


def format_reason(error: BaseException) -> str:
    """The first failure in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if "unexpected pos" in str(error):  # caffe2/serialize/inline_container.cc, on a full disk too
        return "torch's writer was cut short, as by a full disk"
    return f"{type(error).__name__}: {error}".splitlines()[0]
