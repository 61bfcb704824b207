"""A study: the trials of one search, recorded so that a killed search resumes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from primus.errors import PrimusError
from primus.runs.files import read_json, write_json
from primus.tuning.search.claim import claim_host, claim_work
from primus.tuning.search.trial import TrialResult


class StudyRecord(Struct, frozen=True, kw_only=True):
    """The study.json of a study."""

    config: str
    """Experiment file."""
    keys: dict[str, list[str]]
    metric: str
    trials: list[TrialResult] = []


class Study:
    """The folder of a study, which several processes may execute at once: each trial is claimed by one of them.

    trials/HASH.json holds a result, claims/HASH/.lock its claim, which ends with its holder; study.json holds all.
    """

    def __init__(self, folder: Path, record: StudyRecord) -> None:
        self.folder, self._record = folder, record

    @property
    def record(self) -> StudyRecord:
        """The record with the results of all processes so far; a damaged result counts as none."""
        trials = list(self._record.trials)
        for file in sorted((self.folder / "trials").glob("*.json")):
            with contextlib.suppress(PrimusError):
                trials.append(read_json(file, TrialResult))
        return structs.replace(self._record, trials=trials)

    def find_result(self, settings: Mapping[str, str], steps: int) -> TrialResult | None:
        """The result of an earlier trial. What failed with fewer steps fails with more."""
        for trial in self.record.trials:
            is_same = trial.settings == dict(settings)
            if is_same and (trial.steps == steps or (trial.state != "done" and trial.steps <= steps)):
                return trial
        return None

    def find_trial_folder(self, settings: Mapping[str, str], steps: int) -> Path:
        """Workspace of the run of a trial."""
        return self.folder / "runs" / _hash_trial(settings, steps)

    @contextmanager
    def claim_trial(self, settings: Mapping[str, str], steps: int) -> Iterator[bool]:
        """Be the only one that executes a trial; gives False while another process does."""
        # A claim for each trial, and steps in its name: hosts share the trials of a rung, and a longer one is another.
        with claim_work(self.folder / "claims" / _hash_trial(settings, steps)) as is_ours:
            yield is_ours

    def add_result(self, result: TrialResult) -> None:
        """Record a trial at once: a kill loses only the trial that is running."""
        write_json(self.folder / "trials" / f"{_hash_trial(result.settings, result.steps)}.json", result)
        # A file for each trial is the record; this one is a summary of all of them, which may lag.
        write_json(self.folder / "study.json", self.record)


@contextmanager
def open_study(
    workspace: Path, name: str, record: StudyRecord, content: str, *, shares_host: bool = False
) -> Iterator[Study]:
    """The study of this search in `workspace`, new or with its earlier trials.

    Args:
        workspace: Folder of all run folders.
        name: Its experiment.
        record: Without trials.
        content: The resolved experiment: another one is another study.
        shares_host: Whether processes of one host may execute it at once; trials that measure speed must not.

    Raises:
        UsageError: Another process of this host runs this search.
    """
    # Equal commands meet in one folder, on any host; a changed experiment or grid never reuses results.
    identity = hashlib.sha256(msgspec.json.encode(record) + content.encode()).hexdigest()[:8]
    folder = workspace / "tune" / f"{name}-{identity}"
    with contextlib.nullcontext() if shares_host else claim_host(folder):
        yield Study(folder, record)


def _hash_trial(settings: Mapping[str, str], steps: int) -> str:
    return hashlib.sha256(msgspec.json.encode((sorted(settings.items()), steps))).hexdigest()[:16]
