"""Callbacks act inside the training loop; their state is saved with a checkpoint and restored from it."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import spiky
from primus import experiment, registry
from primus.errors import PrimusError, UsageError
from primus.frameworks import native
from primus.runs import events, step_turns
from primus.runs.attempt import Attempt
from primus.runs.store import Run

MakeRun = Callable[..., Run]
Train = Callable[..., Attempt]

MOMENTS = '''"""Record the moments of the training loop."""

from msgspec import Struct

from primus.callback import Callback


class Options(Struct, kw_only=True):
    fail_at: int | None = None
    stop_at: int | None = None
    stop_rank: int = 0


class Moments(Callback):
    def __init__(self, options, training):
        self.options, self.training, self.steps = options, training, []

    def record(self, moment, **fields):
        self.training.append_event("moment", name=moment, step=self.training.step, **fields)

    def before_train(self):
        self.record("before_train", restored=list(self.steps))

    def before_step(self):
        self.record("before_step")

    def after_step(self):
        self.record("after_step")
        self.steps.append(self.training.step)
        if self.training.step == self.options.fail_at and self.training.attempt.number == 0:
            raise ValueError("asked to")
        if self.training.step == self.options.stop_at and self.training.attempt.rank == self.options.stop_rank:
            self.training.request_stop("asked to")

    def after_report(self, report):
        self.record("after_report", loss=report.loss)

    def before_evaluation(self):
        self.record("before_evaluation")

    def after_evaluation(self, report):
        self.record("after_evaluation", data=report.data)

    def before_save(self):
        self.record("before_save")

    def after_save(self, saved):
        self.record("after_save", folder=saved.folder.name)

    def after_pause(self):
        self.record("after_pause")

    def after_rewind(self, step):
        self.record("after_rewind", restored=list(self.steps))

    def after_train(self):
        self.record("after_train")

    def close(self):
        self.record("close")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def build(options, training):
    return Moments(options, training)
'''


@pytest.fixture(autouse=True)
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback `moments` in the user's folder."""
    folder = tmp_path / "plug_ins"
    (folder / "callbacks").mkdir(parents=True)
    (folder / "callbacks" / "moments.py").write_text(MOMENTS)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(folder))
    registry._index_folders.cache_clear()


def kinds(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


def moments(run: Run) -> list[str]:
    return [f"{event['name']} {event['step']}" for event in kinds(run, "moment")]


def losses(run: Run) -> list[float]:
    return [event["loss"] for event in kinds(run, "step")]


def test_moments_come_in_order_and_do_not_change_the_losses(make_run: MakeRun, train: Train) -> None:
    settings = {"train_iters": 2, "eval_interval": 1, "eval_iters": 1, "save_interval": 1, "async_save": False}
    plain, run = make_run("plain", **settings), make_run(callbacks=["moments"], **settings)
    train(plain)
    train(run)
    assert losses(run) == losses(plain)
    step = ["before_step {}", "after_step {}", "after_report {}", "before_evaluation {}", "after_evaluation {}"]
    saved = ["before_save {}", "after_save {}"]
    first = [moment.format(0 if moment.startswith("before_step") else 1) for moment in [*step, *saved]]
    second = [moment.format(1 if moment.startswith("before_step") else 2) for moment in [*step, *saved]]
    assert moments(run)[: len(first) + 1] == ["before_train 0", *first]
    rest = moments(run)[len(first) + 1 :]
    assert [moment for moment in rest if moment in second] == second
    assert rest[-2:] == ["after_train 2", "close 2"]


def test_a_run_waits_for_its_turns_and_no_step_contains_the_wait(
    make_run: MakeRun, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(step_turns.VARIABLE, str(tmp_path))
    giver, pause_s = step_turns.TurnGiver(tmp_path), 2.0

    def give_turns_late() -> None:
        for number in (1, 2):
            giver.wait_until_ready(lambda: False, time.monotonic() + 60)
            time.sleep(pause_s)
            giver.give(step_turns.Turn(number, 2))

    thread = threading.Thread(target=give_turns_late)
    thread.start()
    run = make_run(callbacks=["moments"], train_iters=4)
    train(run)
    thread.join(10)
    assert [(event["number"], event["first_step"]) for event in kinds(run, "turn")] == [(1, 1), (2, 3)]
    assert [moment for moment in moments(run) if "pause" in moment] == ["after_pause 0", "after_pause 2"]
    times = [event["step_time_s"] for event in kinds(run, "step")]
    assert times[2] < pause_s, times


def test_the_state_is_saved_with_the_checkpoint_and_restored_on_resume(make_run: MakeRun, train: Train) -> None:
    run = make_run(callbacks=[{"moments": {"fail_at": 6}}], save_interval=4, async_save=False)
    with pytest.raises(PrimusError, match=r"callback moments: after_step failed: .*moments.py:\d+: ValueError"):
        train(run)
    manifest = json.loads((run.checkpoints / "step_00000004" / "manifest.json").read_text())
    assert manifest["callbacks"] == {"moments": {"steps": [1, 2, 3, 4]}}
    train(run, number=1)
    begun = [event for event in kinds(run, "moment") if event["name"] == "before_train"]
    assert [event["restored"] for event in begun] == [[], [1, 2, 3, 4]]
    assert "close 6" in moments(run), "a callback is closed after a failure"
    tuned = make_run("tuned", callbacks=["moments"], load=str(run.directory), finetune=True, train_iters=1)
    train(tuned)
    assert kinds(tuned, "moment")[0]["restored"] == [], "only the weights"


def test_a_rewind_restores_the_state_of_the_checkpoint(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    settings = spiky.settings(tmp_path, loss_spike_policy="rewind", async_save=False)
    run = make_run(callbacks=["moments"], **settings)
    train(run)
    (rewind,) = kinds(run, "rewind")
    (event,) = [event for event in kinds(run, "moment") if event["name"] == "after_rewind"]
    assert event["step"] == rewind["to_step"] and event["restored"] == list(range(1, rewind["to_step"] + 1))


def test_a_rewind_to_the_initial_weights_restores_the_initial_state(make_run: MakeRun, train: Train) -> None:
    bad = {"lr": 1e3, "lr_decay_style": "constant", "clip_grad": 0.0, "save_interval": 100, "max_nonfinite_steps": 1}
    run = make_run(callbacks=["moments"], nonfinite_policy="rewind", max_rewinds=1, **bad)
    with pytest.raises(PrimusError, match="1 rewinds have not helped"):
        train(run)
    (event,) = [event for event in kinds(run, "moment") if event["name"] == "after_rewind"]
    assert (event["step"], event["restored"]) == (0, [])


def test_a_requested_stop_evaluates_saves_and_ends_the_run(make_run: MakeRun, train: Train) -> None:
    later = {"early_stopping": {"patience": 2, "min_delta": 100.0}}
    run = make_run(callbacks=[{"moments": {"stop_at": 3}}, later], eval_interval=1, eval_iters=1)
    train(run)
    assert len(losses(run)) == 3 and len(kinds(run, "eval")) == 3, "the last step is not evaluated twice"
    (stop,) = kinds(run, "early_stop")
    assert (stop["step"], stop["reason"]) == (3, "asked to"), "the first reason, of two after this step"
    assert [event["step"] for event in kinds(run, "checkpoint_saved")] == [3]
    assert kinds(run, "training_ended") and moments(run)[-2] == "after_train 3"


def test_a_stop_that_one_of_two_processes_requests_ends_both(
    make_run: MakeRun, start_workers: Callable[..., Any]
) -> None:
    run = make_run(callbacks=[{"moments": {"stop_at": 3, "stop_rank": 1}}], micro_batch_size=1)
    start_workers(run, world=2).succeed()
    assert len(losses(run)) == 3
    assert kinds(run, "early_stop")[0]["reason"] == "requested by another rank"


def test_early_stopping_ends_a_run_that_does_not_improve(make_run: MakeRun, train: Train) -> None:
    patient = {"early_stopping": {"patience": 2, "min_delta": 100.0}}
    run = make_run(callbacks=[patient], eval_interval=1, eval_iters=1)
    train(run)
    assert len(losses(run)) == 3, "the first evaluation is the best one, and two more are no improvement"
    assert "has not improved on" in kinds(run, "early_stop")[0]["reason"]


def test_the_garbage_collector_is_automatic_again_after_the_run(make_run: MakeRun, train: Train) -> None:
    assert gc.isenabled()
    train(make_run(callbacks=[{"garbage_collector": {"interval": 2}}], train_iters=3))
    assert gc.isenabled()


def test_a_wrong_callback_is_refused_before_anything_starts(make_run: MakeRun) -> None:
    with pytest.raises(UsageError, match="no callback 'momnts'"):
        native.check(experiment.read_run_experiment(make_run(callbacks=["momnts"])))


def test_the_example_of_the_documentation_runs_and_resumes(
    make_run: MakeRun, train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs/training.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "plug_ins/callbacks/plateau.py").write_text(example)
    registry._index_folders.cache_clear()
    failing = {"moments": {"fail_at": 6}}
    run = make_run(callbacks=[{"plateau": {"interval": 3}}, failing], save_interval=4, async_save=False)
    with pytest.raises(PrimusError, match="asked to"):
        train(run)
    train(run, number=1)
    steps = {event["step"]: event["loss"] for event in kinds(run, "step")}
    printed = capfd.readouterr().out
    for last in (3, 6):
        mean = sum(steps[step] for step in range(last - 2, last + 1)) / 3
        assert f"mean loss of steps up to {last}: {mean:.4f}" in printed
