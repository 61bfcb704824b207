"""The way from the training loop to the optimizer is short: how many files of the package a reader of a step passes.

Counted is one ordinary step of the quick start, which evaluates and saves nothing: from the call of `loop.step` to the
call of the next one, in the training thread, which does not read batches ahead. A file counts once. Bodies of modules
and classes are not run by then.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import yaml

import primus
from primus import experiment
from primus.frameworks import native
from primus.runs.attempt import Attempt
from primus.runs.files import write_json, write_text
from primus.runs.store import Run
from primus.runtime import LaunchRequest

PACKAGE = f"{os.path.dirname(primus.__file__)}{os.sep}"
EXAMPLE = Path(__file__).parents[2] / "examples/quickstart.yaml"
CHANGES = {"dataset": None, "mock_data": True, "seq_length": 16, "micro_batch_size": 1, "train_iters": 5}
"""Random tokens, and few of them: no file of the path depends on it."""
RECORDED_STEP = 3


class StepRecorder:
    """Records the files of one step; an argument of `sys.setprofile`."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        """In the order of their first call."""
        self.files_to_optimizer: list[str] = []
        """Those that were called before the optimizer."""
        self.stack: list[str] = []
        """Those whose functions are running when the optimizer is called, without repetitions."""
        self._num_steps = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        file = _name_file(frame)
        self._num_steps += file == "session/loop.py" and frame.f_code.co_name == "step"
        if self._num_steps != RECORDED_STEP:
            return
        if file is not None:
            self.files.setdefault(file)
        elif frame.f_globals["__name__"].startswith("torch.optim.") and frame.f_code.co_name == "step":
            self.files_to_optimizer = list(self.files)
            callers = list(_iterate_callers(frame))
            self.stack = list(dict.fromkeys(reversed(callers[: callers.index("session/loop.py") + 1])))


def _name_file(frame: FrameType) -> str | None:
    file = frame.f_code.co_filename
    return file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else None


def _iterate_callers(frame: FrameType) -> Iterator[str]:
    caller = frame.f_back
    while caller is not None:
        if (file := _name_file(caller)) is not None:
            yield file
        caller = caller.f_back


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> StepRecorder:
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    settings = yaml.safe_load(EXAMPLE.read_text())
    settings["modules"]["pre_trainer"]["overrides"] |= CHANGES
    write_text(run.config, yaml.safe_dump(settings))
    write_json(run.directory / "request.json", LaunchRequest(runtimes=(), task="train pretrain"))
    recorder = StepRecorder()
    with contextlib.closing(Attempt(run, 0)) as attempt:
        asked = experiment.read_run_experiment(run)
        before = sys.getprofile()
        sys.setprofile(recorder)
        try:
            native.train(asked, attempt)
        finally:
            sys.setprofile(before)
    return recorder


def test_a_step_passes_at_most_six_files_from_the_loop_to_the_optimizer(recorded: StepRecorder) -> None:
    assert recorded.stack[0] == "session/loop.py" and recorded.stack[-1] == "frameworks/native/engine/step.py"
    assert len(recorded.stack) <= 6, recorded.stack


def test_a_step_runs_through_at_most_so_many_files(recorded: StepRecorder) -> None:
    assert len(recorded.files_to_optimizer) <= 19, recorded.files_to_optimizer
    assert len(recorded.files) <= 31, list(recorded.files)
