"""Checkpoints of a training run: a backend writes its files, and a manifest completes them.

The protocol, for every process: create an empty folder (the first process), write the own files, compute their
checksums, gather them, write the manifest (the first process), delete older checkpoints. The manifest is the last file,
written by rename: a folder without one was interrupted, and no reader loads it.

Files may be written while training continues: in a daemon thread, from a copy that the backend took on the training
thread. Collectives of training and of the writer must not mix on one process group, so the thread uses a separate one.
At most one checkpoint is being written; the next `save` waits for it.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from primus.callback import SavedCheckpoint
from primus.checkpoint import folders, manifest
from primus.checkpoint.checksum import choose_algorithm
from primus.checkpoint.manifest import CheckpointManifest, FileEntry
from primus.checkpoint.shape import Shape
from primus.errors import PrimusError
from primus.session.processes import Processes, find_first_problem

WriteFiles = Callable[[Path], None]
"""Writes this process's files of a checkpoint into a folder, and returns when they are on disk."""
TakeState = Callable[[], WriteFiles]
"""Takes the state to save, on the training thread."""

GIB = 1 << 30


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
    model: Shape
    data_fingerprint: str


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
    """

    def __init__(
        self, settings: CheckpointSettings, processes: Processes, saved: Callable[[SavedCheckpoint], None]
    ) -> None:
        self.settings, self.processes = settings, processes
        self.last_step: int | None = None
        """Step of the newest checkpoint that was started."""
        self._saved = saved
        self._writing: _CheckpointWrite | None = None

    def save(self, take_state: TakeState, position: TrainingPosition, num_bytes: int, in_thread: bool) -> None:
        """Write a checkpoint.

        Args:
            take_state: Called in every process when the folder is there; what it returns runs in a thread if
                `in_thread`, and must then write a copy.
            position: Of the run; not changed by the caller afterwards.
            num_bytes: Approximate size of the files of all processes together, which must be free on the disk.
            in_thread: Return as soon as the folder is there, and write while training continues.

        Raises:
            PrimusError: This checkpoint, or the one before it, cannot be written.
        """
        # One checkpoint at a time: a second writer would double the memory, and could overtake the first.
        self.finish_writing()
        started = time.monotonic()
        writing = _CheckpointWrite(self.settings, self.processes, position, num_bytes)
        # A collective, on the training thread: all processes are at the same step here.
        writing.prepare_folder()
        if in_thread:
            # The copy is complete when `take_state` returns: the next step may overwrite the weights.
            writing.start_thread(take_state())
        else:
            writing.write(take_state())
        writing.wait_s = time.monotonic() - started
        # Set only if the write has started, so that a failed `save` can be repeated for the same step.
        self._writing, self.last_step = writing, position.step
        if not in_thread:
            self.finish_writing()

    def poll(self) -> None:
        """Report a checkpoint that has become complete; neither waits nor communicates.

        Raises:
            PrimusError: It could not be written.
        """
        if self._writing is not None and self._writing.is_over:
            # The thread has ended, so this neither waits nor communicates: processes may get here at
            # different steps.
            self.finish_writing()

    def finish_writing(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint that is being written is complete, at most `timeout_s`.

        Raises:
            PrimusError: It could not be written.
        """
        if self._writing is None or not self._writing.wait(timeout_s):
            return
        # Cleared before the result is read, which may raise: a failed write is reported once.
        writing, self._writing = self._writing, None
        saved = writing.take_result()
        if saved is not None:
            self._saved(saved)


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
        self._saved: SavedCheckpoint | None = None
        self._error: BaseException | None = None
        self.wait_s = 0.0
        """Time that the training thread has waited for this checkpoint."""

    @property
    def is_over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def prepare_folder(self) -> None:
        """Create an empty folder for the checkpoint; replaces the incomplete one of a killed writer.

        Raises:
            PrimusError: It cannot be created, or the disk has too little space.
        """
        # All processes wait for the folder, and all raise if it cannot be created: no process stays in a collective.
        problem = self._processes.broadcast_from_first(self._make_folder() if self._processes.is_first else "")
        if problem:
            raise self._build_failure(problem)

    def _make_folder(self) -> str:
        """Create the folder; returns the problem, if there is one."""
        try:
            if self._folder.exists():
                # A complete checkpoint of this step is only there if the step was repeated: the new one replaces it.
                folders.remove_checkpoint(self._folder)
            self._folder.mkdir(parents=True)
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
        """Write all of it; `take_result` returns or raises the outcome."""
        try:
            # May run in the writer thread. All collectives in here use the writer group.
            write_files(self._folder)
            self._complete_checkpoint()
        except BaseException as error:  # the edge of a thread; `take_result` raises it
            # torch's CheckpointException derives from BaseException alone; a signal's KeyboardInterrupt passes.
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._error = error

    def take_result(self) -> SavedCheckpoint | None:
        """The complete checkpoint, on the first process; None on the others.

        Raises:
            PrimusError: It could not be written; its folder is deleted.
        """
        if self._error is None:
            return self._saved and replace(self._saved, wait_s=self.wait_s)
        # torch's writer reports a full disk as "unexpected pos" (caffe2/serialize/inline_container.cc)
        raise self._build_failure(self._find_lack_of_space() or format_reason(self._error)) from self._error

    def _build_failure(self, reason: str) -> PrimusError:
        """The error to raise; deletes the incomplete checkpoint."""
        if self._processes.is_first:
            with suppress(OSError):
                folders.remove_checkpoint(self._folder)
        return PrimusError(
            f"the checkpoint of step {self._position.step} could not be written to {self._folder}: {reason}",
            "free some space, set keep_last_n or choose another `save:`, then run the same command: it resumes from the"
            " checkpoint before",
        )

    def _complete_checkpoint(self) -> None:
        """Write the manifest once every process has written its files; then delete older checkpoints."""
        entries, problem = self._list_own_entries()
        # A barrier as well: behind it every file of every process is written.
        gathered = self._processes.all_gather_values((entries, problem), self._group)
        problem = find_first_problem([problem for _, problem in gathered])
        if problem:
            raise OSError(problem)
        if not self._processes.is_first:
            return
        # Only the first process gets here; the others have no further part in the checkpoint.
        written = self._build_manifest([entry for entries, _ in gathered for entry in entries])
        # From here on the checkpoint counts. Older ones are deleted only afterwards.
        manifest.write_manifest(self._folder, written)
        seconds = time.monotonic() - self._started
        self._saved = SavedCheckpoint(self._position.step, self._folder, written.total_bytes, seconds)
        if self._settings.keep_last_n is not None:
            # Never the one that was just written: it is the newest complete one.
            folders.prune_checkpoints(self._settings.folder, self._settings.keep_last_n)

    def _list_own_entries(self) -> tuple[list[FileEntry], str]:
        """Entries of the files that this process wrote; the first process adds those that belong to no process."""
        # torch.distributed.checkpoint names files __RANK_NUMBER.distcp, and its metadata .metadata.
        own = f"__{self._processes.rank}_"
        algorithm = choose_algorithm()
        try:
            names = sorted(path.relative_to(self._folder).as_posix() for path in _iterate_files(self._folder))
            mine = [n for n in names if _owns_file(own, n, self._processes.is_first)]
            return [manifest.build_entry(self._folder, name, algorithm) for name in mine], ""
        except OSError as error:
            return [], error.strerror or str(error)

    def _build_manifest(self, files: list[FileEntry]) -> CheckpointManifest:
        return CheckpointManifest(
            backend=self._settings.backend,
            run=self._settings.run,
            step=self._position.step,
            consumed_samples=self._position.consumed_samples,
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


def format_reason(error: BaseException) -> str:
    """The first failure in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return (str(error) or type(error).__name__).splitlines()[0]
