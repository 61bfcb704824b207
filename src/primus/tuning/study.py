"""A study: the trials of one search, recorded so that a killed search resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from primus.errors import UsageError
from primus.runs import lock
from primus.runs.files import read_json, write_json
from primus.tuning.trial import TrialResult


class StudyRecord(Struct, frozen=True, kw_only=True):
    """The study.json of a study."""

    config: str
    """Experiment file."""
    keys: dict[str, list[str]]
    metric: str
    trials: list[TrialResult] = []


class Study:
    """The folder of a study."""

    def __init__(self, folder: Path, record: StudyRecord) -> None:
        self.folder, self.record = folder, record

    def find_result(self, settings: Mapping[str, str], steps: int) -> TrialResult | None:
        """The result of an earlier trial. What failed with fewer steps fails with more."""
        for trial in self.record.trials:
            is_same = trial.settings == dict(settings)
            if is_same and (trial.steps == steps or (trial.state != "done" and trial.steps <= steps)):
                return trial
        return None

    def add_result(self, result: TrialResult) -> None:
        """Record a trial at once: a kill loses only the trial that is running."""
        self.record = structs.replace(self.record, trials=[*self.record.trials, result])
        write_json(self.folder / "study.json", self.record)


@contextmanager
def open_study(workspace: Path, name: str, record: StudyRecord, content: str) -> Iterator[Study]:
    """The study of this search in `workspace`, new or with its earlier trials.

    Args:
        workspace: Folder of all run folders.
        name: Its experiment.
        record: Without trials.
        content: The resolved experiment: another one is another study.

    Raises:
        UsageError: Another process runs this search.
    """
    identity = hashlib.sha256(msgspec.json.encode(record) + content.encode()).hexdigest()[:8]
    folder = workspace / "tune" / f"{name}-{identity}"
    folder.mkdir(parents=True, exist_ok=True)
    with lock.hold_run(folder) as is_held:
        if not is_held:
            raise UsageError(f"{folder} is executed by {lock.find_holder(folder)}", "wait until that search ends")
        file = folder / "study.json"
        yield Study(folder, read_json(file, StudyRecord) if file.exists() else record)
