"""Find the start of a run: its own newest good checkpoint, the checkpoint of `load:`, or from scratch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from primus.checkpoint import folders, manifest
from primus.checkpoint.manifest import CheckpointManifest
from primus.checkpoint.shape import Shape, check_same_shape
from primus.config.schema import CheckpointConfig
from primus.data.training.dataset import describe_change
from primus.errors import PrimusError, UnfitError, UsageError
from primus.runs.store import Run
from primus.session.checkpoints.other_optimizers import check_backend_of
from primus.session.checkpoints.remote import RemoteFolder, fetch_given, is_remote
from primus.session.checkpoints.rewind import is_undone, read_rewinds
from primus.session.ranks.processes import Processes, find_first_problem

PrintLine = Callable[[str], None]
AppendEvent = Callable[..., None]
"""Appends an event: (kind, **fields)."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run starts from."""

    folder: Path
    manifest: CheckpointManifest
    weights_only: bool = False
    """Begin at step 0 with its weights."""

    @property
    def step(self) -> int:
        return 0 if self.weights_only else self.manifest.step

    @property
    def consumed_samples(self) -> int:
        return 0 if self.weights_only else self.manifest.consumed_samples

    @property
    def recent_losses(self) -> list[float]:
        return [] if self.weights_only else self.manifest.recent_losses

    @property
    def callback_state(self) -> Mapping[str, Any]:
        return {} if self.weights_only else self.manifest.callbacks


def own_folder(config: CheckpointConfig, run: Run) -> Path:
    """Folder of a run's own checkpoints, from which they are copied to a URL in `save:`."""
    local = config.save and not is_remote(config.save)
    return Path(os.path.expanduser(config.save)) if config.save and local else run.checkpoints


@dataclass(frozen=True)
class CheckpointSearch:
    """Finds the checkpoint that a run starts from; every process must make the same calls, in the same order.

    The run's own checkpoints come first, newest first, then those of `load:`. A checkpoint counts when it has a
    manifest and its files have their checksums. The processes share the files, and if one finds damage, all reject the
    checkpoint.
    """

    run: Run
    config: CheckpointConfig
    shape: Shape
    """Shape of the model to train."""
    processes: Processes
    say: PrintLine
    event: AppendEvent
    backend: str
    """Backend that trains: it reads its own format."""

    @property
    def folder(self) -> Path:
        return own_folder(self.config, self.run)

    def find_start(self, before: int | None = None) -> ResumePoint | None:
        """The checkpoint to start from; None means from scratch.

        Args:
            before: Only take own checkpoints of steps before this one.

        Raises:
            UsageError: `load:` names no checkpoint or one of another model; `save:` holds those of another run.
            PrimusError: All checkpoints of `load:` are damaged.
        """
        if self.remote is not None:
            self._share(partial(self._fetch_own, self.remote, before))
        newest_first = reversed(folders.list_checkpoints(self.folder))
        # A checkpoint of a step from `before` on contains bad steps.
        possible = [found for found in newest_first if before is None or folders.parse_step(found) < before]
        own = [found for found in possible if self._is_own(found)]
        # Own checkpoints win over `load:`, so that a restarted run does not begin again.
        start = self._find_first_good(own)
        if start is not None or self.config.load is None or folders.is_foreign(self.config.load):
            return start
        if is_remote(self.config.load):
            fetched = partial(fetch_given, self.config.load, self.run.directory / "loaded")
            return self._find_given(self._share(lambda: str(fetched())))
        return self._find_given(self.config.load)

    @cached_property
    def remote(self) -> RemoteFolder | None:
        """Where the run's checkpoints are copied."""
        return RemoteFolder(self.config.save) if self.config.save and is_remote(self.config.save) else None

    def _share(self, action: Callable[[], str]) -> str:
        """The result of `action` in the first process, for all; processes share the run folder.

        Raises:
            UsageError: It has failed; the same in all processes.
        """
        result: tuple[str, str, str] = ("", "", "")
        if self.processes.is_first:
            try:
                result = (action(), "", "")
            except PrimusError as error:
                result = ("", error.problem, str(error.hint or ""))
            except OSError as error:
                result = ("", f"{self.config.load or self.config.save}: {error}", "check the address and your rights")
        value: str
        value, problem, hint = self.processes.broadcast_from_first(result)
        if problem:
            raise UsageError(problem, hint)
        return value

    def _fetch_own(self, remote: RemoteFolder, before: int | None) -> str:
        """Download the run's newest checkpoint of a step before `before`, if the local folder has none as new."""
        rewinds = read_rewinds(self.run)
        for name in reversed(remote.list_complete()):
            found = remote.read_manifest(name)
            if found.run != self.run.id:
                raise UsageError(
                    f"save: {remote.url} holds checkpoints of another run, {found.run}",
                    "choose another place for this run; `load:` begins with theirs",
                )
            # A local one that contains bad steps is renamed; an object keeps its name.
            if (before is None or found.step < before) and not is_undone(found.consumed_samples, rewinds):
                return self._download_if_newer(remote, name)
        return ""

    def _download_if_newer(self, remote: RemoteFolder, newest: str) -> str:
        local = [found for found in folders.list_checkpoints(self.folder) if folders.is_complete(found)]
        if not local or local[-1].name < newest:
            self.say(f"downloading {newest} from {remote.url}")
            remote.download(newest, self.folder)
        return newest

    def _find_given(self, given: str) -> ResumePoint:
        start = self._find_first_good(folders.find_candidates(given))
        if start is None:
            raise PrimusError(f"load: every checkpoint of {given} is damaged", "load another, or train from scratch")
        check_same_shape(start.manifest.model, self.shape, str(start.folder))
        check_backend_of(start.manifest, start.folder, self.backend, self.config.finetune)
        return ResumePoint(start.folder, start.manifest, weights_only=self.config.finetune)

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether a checkpoint in the run's folder is complete; a checkpoint of another run is an error."""
        if not folders.is_complete(checkpoint):
            self._reject_checkpoint(checkpoint, "it is not complete: its writer was killed")
            return False
        try:
            found = manifest.read_manifest(checkpoint)
        except PrimusError:
            return True  # rejected later, with its reason
        if found is not None and found.backend != self.backend:
            raise UsageError(
                f"{checkpoint} was saved by {found.backend}, and the run is resumed by {self.backend}",
                "keep the framework of a run; another run can begin with its weights: load: and finetune: true",
            )
        if self.config.save is not None and not self.remote and found is not None and found.run != self.run.id:
            raise UsageError(
                f"save: {self.folder} holds checkpoints of another run, {found.run}",
                "choose another folder for this run; `load:` begins with theirs",
            )
        return True

    def _find_first_good(self, candidates: Sequence[Path]) -> ResumePoint | None:
        for folder in candidates:
            try:
                found = manifest.read_manifest(folder)
                problem = "" if found else "it is not complete"
            except PrimusError as error:
                # A damaged manifest is handled like damaged files: an older checkpoint may still be good.
                found, problem = None, error.problem
            # Each process has checked its share of the files; the gathered problem makes all of them reject it or none.
            problem = find_first_problem(self.processes.all_gather_values(problem or self._find_damage(folder, found)))
            if found is not None and not problem:
                # The search ends at the first good one; older checkpoints are not read, which would take minutes for
                # large models.
                return ResumePoint(folder, found)
            self._reject_checkpoint(folder, problem)
        return None

    def _find_damage(self, folder: Path, found: CheckpointManifest | None) -> str:
        assert found is not None
        return manifest.find_damage(folder, found, self.processes.rank, self.processes.world)

    def _reject_checkpoint(self, checkpoint: Path, reason: str) -> None:
        self.say(f"checkpoint {checkpoint.name} is skipped: {reason}")
        has_step = folders.STEP.fullmatch(checkpoint.name)  # `load:` accepts a renamed one
        step = folders.parse_step(checkpoint) if has_step else None
        self.event("checkpoint_rejected", step=step, name=checkpoint.name, reason=reason)


def check_same_data(start: ResumePoint, run: Run, fingerprint: str, allow_other_data: bool = False) -> None:
    """Check that training continues with the data that it began with, unless only weights are loaded.

    Raises:
        UnfitError: The checkpoint is the run's own and the data has changed; or it is of another run with other data,
            and `allow_other_data` is not set.
    """
    if start.weights_only or start.manifest.data_fingerprint == fingerprint:
        return
    change = describe_change(start.manifest.data_fingerprint, fingerprint)
    # No option overrides this: a run that resumes promises bit-identical losses.
    if start.manifest.run == run.id:
        raise UnfitError(
            f"the training data has changed since {start.folder.name} was saved ({change}): the run cannot resume",
            "restore it, or start a new run with `load:`, this checkpoint and `allow_other_data: true`",
        )
    if not allow_other_data:
        raise UnfitError(
            f"the training data differs from that of {start.folder} ({change}): training would continue at sample"
            f" {start.consumed_samples + 1:,} of other data",
            "set `allow_other_data: true` to continue, or `finetune: true` to begin at step 0 with its weights",
        )
