"""A run that meets a loss spike, or one that is not finite, leaves the batch out, goes back or ends, as it was told."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import spiky
from primus.errors import FinalError, PrimusError, UsageError
from primus.frameworks.native.engine import driver as engine
from primus.runs import events, summary
from primus.runs.store import Run
from primus.session import recovery
from primus.session.bad_steps import BadSteps
from primus.session.checkpoints import rewind
from primus.session.checkpoints.rewind import Rewind, find_next_sample, is_undone, read_rewinds

MakeRun = Callable[..., Run]
Train = Callable[..., Any]
StartWorkers = Callable[..., Any]


def losses(run: Run) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events.read_steps(run.events)}


def kinds(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


@pytest.fixture
def reference(make_run: MakeRun, tmp_path: Path) -> Callable[[Run, int, dict[str, Any]], Run]:
    """``reference(run, step, settings)`` is a run that begins with a checkpoint of another, after data it never saw."""

    def make(run: Run, step: int, settings: dict[str, Any]) -> Run:
        copied = tmp_path / "of-reference" / f"step_{step:08d}"
        shutil.copytree(run.checkpoints / copied.name, copied)
        manifest = json.loads((copied / "manifest.json").read_text())
        manifest["consumed_samples"] = read_rewinds(run)[-1].end_sample
        (copied / "manifest.json").write_text(json.dumps(manifest))
        return make_run("reference", **{**settings, "load": str(copied)})

    return make


# Spikes


def test_without_a_policy_a_spike_is_a_step_like_others(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    run = make_run(**spiky.settings(tmp_path))
    train(run)
    steps = kinds(run, "step")
    assert max(step["loss"] for step in steps[25:]) > 2.0
    assert not any(step["skipped"] or step["spike"] for step in steps)
    assert not any(json.loads(path.read_text())["recent_losses"] for path in run.checkpoints.glob("*/manifest.json"))


def test_a_batch_whose_loss_is_a_spike_is_skipped(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    settings = spiky.settings(tmp_path)
    skipping, careless = make_run("skipping", **settings, loss_spike_policy="skip"), make_run("careless", **settings)
    train(skipping)
    train(careless)
    bad = spiky.BAD_STEP
    assert [step["step"] for step in kinds(skipping, "step") if step["skipped"]] == [bad]
    assert losses(skipping)[bad] == losses(careless)[bad], "both have seen it"
    assert losses(skipping)[bad + 1] < losses(careless)[bad + 1], "one has not learnt from it"


def test_a_run_that_skips_a_spike_resumes_as_if_it_had_not_stopped(
    make_run: MakeRun, train: Train, tmp_path: Path
) -> None:
    run = make_run(**spiky.settings(tmp_path, loss_spike_policy="skip", save_interval=1))
    train(run)
    before, bad = losses(run), spiky.BAD_STEP
    for checkpoint in run.checkpoints.iterdir():
        if int(checkpoint.name.removeprefix("step_")) >= bad:
            (checkpoint / "manifest.json").unlink()
    train(run, number=1)
    assert [step["step"] for step in kinds(run, "step") if step["spike"]] == [bad, bad], "its window was restored"
    assert losses(run) == before


@pytest.mark.parametrize("save_interval", [1, 4])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_rewound_run_is_one_that_never_saw_the_data_of_the_spike(
    make_run: MakeRun, train: Train, reference: Any, tmp_path: Path, is_async: bool, save_interval: int
) -> None:
    changes = {"loss_spike_policy": "rewind", "save_interval": save_interval, "async_save": is_async}
    settings = spiky.settings(tmp_path, **changes)
    run = make_run(**settings)
    train(run)

    (event,) = kinds(run, "rewind")
    shown = summary.summarize_run(run)
    assert (shown.rewinds, shown.checkpoints) == (1, len(list(run.checkpoints.glob("step_????????"))))
    bad = spiky.BAD_STEP
    start = (bad - 1) // save_interval * save_interval
    assert (event["from_step"], event["first_bad_step"], event["to_step"]) == (bad, bad, start)
    assert event["skipped_samples"] == (bad - start) * spiky.BATCH
    assert f"step {bad}: a loss spike" in event["reason"]
    expected = reference(run, start, settings)
    train(expected)
    assert losses(expected) == {step: loss for step, loss in losses(run).items() if step > start}
    assert list(losses(run)) == list(range(1, 37)), "a reader sees every step once"
    assert max(list(losses(run).values())[20:]) < 1.0
    ended = kinds(run, "training_ended")[-1]
    assert ended["steps"] == 36 + bad - start, "the repeated steps took time as well"


def test_a_run_rewinds_to_its_initial_weights_before_its_first_checkpoint(
    make_run: MakeRun, train: Train, tmp_path: Path
) -> None:
    settings = spiky.settings(tmp_path, loss_spike_policy="rewind", save_interval=35)
    run, fresh = make_run("run", **settings), make_run("fresh", **settings)
    train(run)
    (event,) = kinds(run, "rewind")
    assert event["to_step"] == 0 and event["skipped_samples"] == event["from_step"] * spiky.BATCH
    shutil.copy(run.directory / "rewinds.json", fresh.directory)
    train(fresh)
    assert not kinds(fresh, "rewind")
    assert losses(fresh) == losses(run)


def test_a_rewind_is_printed_and_recorded(
    make_run: MakeRun, train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(**spiky.settings(tmp_path, loss_spike_policy="rewind", disable_tensorboard=False))
    train(run)
    said = capfd.readouterr().out
    assert re.search(r"step 28: a loss spike: 2\.\d+, after a median of 0\.\d+ in the last 8 steps\n", said)
    assert "rewind 1 of 10: back to step 24; samples 96 to 111 are skipped" in said
    shown = EventAccumulator(str(run.directory / "tensorboard")).Reload().Scalars("lm loss")
    assert [scalar.step for scalar in shown] == list(range(1, 37))
    assert max(scalar.value for scalar in shown[20:]) < 1.0, "the repeated steps"


class Killed(BaseException):
    """The process ends here."""


def test_a_run_that_is_killed_while_it_rewinds_does_not_reach_the_spike_again(
    make_run: MakeRun, train: Train, tmp_path: Path
) -> None:
    settings = spiky.settings(tmp_path, save_interval=1, nonfinite_policy="rewind", max_nonfinite_steps=3)
    undisturbed = make_run("undisturbed", **settings)

    def end(*args: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        train(undisturbed)
        moments = [(rewind, "_rename_checkpoint"), (rewind, "set_aside_undone"), (recovery, "_rewind_to_start")]
        for module, name in moments:
            killed = make_run(f"killed-in{name}", **settings)
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(module, name, end)
                with pytest.raises(Killed):
                    train(killed)
            train(killed, number=1)
            bad = spiky.BAD_STEP
            assert kinds(killed, "checkpoint_loaded")[-1]["step"] == bad - 1, name
            assert losses(killed) == losses(undisturbed), name
            assert len(read_rewinds(killed)) == 1, name
            aside = sorted(path.name for path in killed.checkpoints.glob("*.set_aside_*"))
            assert aside == [f"step_{step:08d}.set_aside_1" for step in (bad, bad + 1)], name  # of the bad region


@pytest.mark.slow
def test_two_processes_killed_after_a_rewind_resume_as_uninterrupted_ones(
    make_run: MakeRun, start_workers: StartWorkers, reference: Any, tmp_path: Path
) -> None:
    settings = spiky.settings(tmp_path, loss_spike_policy="rewind", train_iters=45)
    killed, undisturbed = make_run("killed", **settings), make_run("undisturbed", **settings)
    workers = start_workers(killed, world=2)
    deadline = time.monotonic() + 60
    while not (killed.directory / "rewinds.json").exists():
        assert time.monotonic() < deadline and workers.processes[0].poll() is None, workers.log(0)
        time.sleep(0.001)
    workers.send(signal.SIGKILL)
    assert workers.wait() == [-signal.SIGKILL] * 2
    start_workers(killed, world=2, number=1).succeed()
    start_workers(undisturbed, world=2).succeed()

    assert len(read_rewinds(killed)) == len(kinds(undisturbed, "rewind")) == 1
    assert losses(killed) == losses(undisturbed)
    start = read_rewinds(undisturbed)[0].to_step
    expected = reference(undisturbed, start, settings)
    start_workers(expected, world=2).succeed()
    assert losses(expected) == {step: loss for step, loss in losses(undisturbed).items() if step > start}


def test_a_spike_may_end_the_run_for_good(make_run: MakeRun, start_workers: StartWorkers, tmp_path: Path) -> None:
    run = make_run(**spiky.settings(tmp_path, loss_spike_policy="stop"))
    workers = start_workers(run)
    assert workers.wait() == [1]
    failure = json.loads((run.attempt_folder(0) / "rank_0.error.json").read_text())
    assert failure["action"] == "stop"
    assert f"step {spiky.BAD_STEP}: a loss spike" in failure["problem"] and "lower lr" in failure["hint"]


# What is not finite


def poison(patch: pytest.MonkeyPatch) -> None:
    """The loss is not a number in the step that sees the noise of `spiky`, and in the two steps after it."""
    real, left = engine.train_step, [0]

    def train_step(trainable: Any, optimizer: Any, micro_batches: Any, **options: Any) -> Any:
        if any((tokens >= spiky.NOISE).any() for tokens, _ in micro_batches):
            left[0] = 3
        if left[0]:
            left[0] -= 1
            loss = trainable.loss
            trainable = dataclasses.replace(trainable, loss=lambda *given: loss(*given) * torch.nan)
        return real(trainable, optimizer, micro_batches, **options)

    patch.setattr(engine, "train_step", train_step)


def test_a_rewind_skips_data_whose_loss_is_not_finite(
    make_run: MakeRun, train: Train, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = spiky.settings(tmp_path, save_interval=1, nonfinite_policy="rewind", max_nonfinite_steps=3)
    run = make_run(**settings)
    poison(monkeypatch)
    train(run)
    (event,) = kinds(run, "rewind")
    bad = event["first_bad_step"]
    assert (event["from_step"], event["to_step"]) == (bad + 2, bad - 1)
    assert [step["skipped"] for step in kinds(run, "step") if step["step"] == bad] == [True, False]
    assert sorted(found["name"] for found in kinds(run, "checkpoint_set_aside")) == [
        f"step_{step:08d}.set_aside_1" for step in (bad, bad + 1)
    ]
    expected = reference(run, bad - 1, settings)
    train(expected)
    assert losses(expected) == {step: loss for step, loss in losses(run).items() if step >= bad}


@pytest.mark.parametrize("begins_with_weights", [False, True])
def test_a_rewind_to_the_beginning_repeats_the_dropout_of_its_adapters(
    make_run: MakeRun, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins_with_weights: bool
) -> None:
    adapters = {"peft": "lora", "peft_dim": 4, "peft_dropout": 0.3}
    changes = {"nonfinite_policy": "rewind", "max_nonfinite_steps": 3, "save_interval": 35, "backend_args": adapters}
    settings = spiky.settings(tmp_path, **changes)
    if begins_with_weights:
        first = make_run("first", train_iters=1)
        train(first)
        settings |= {"load": str(first.directory), "finetune": True}
    run, fresh = make_run("run", **settings), make_run("fresh", **settings)
    poison(monkeypatch)
    train(run)
    assert [event["to_step"] for event in kinds(run, "rewind")] == [0]
    shutil.copy(run.directory / "rewinds.json", fresh.directory)
    train(fresh)
    assert losses(fresh) == losses(run)


def test_steps_that_are_not_finite_are_skipped_by_default(
    make_run: MakeRun, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**spiky.settings(tmp_path))
    poison(monkeypatch)
    train(run)
    assert sum(step["skipped"] for step in kinds(run, "step")) == 3 and len(losses(run)) == 36


def test_the_first_step_that_is_not_finite_may_end_the_run(
    make_run: MakeRun, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(**spiky.settings(tmp_path, nonfinite_policy="stop"))
    poison(monkeypatch)
    with pytest.raises(FinalError, match=r"step \d+: the loss or the gradient is not finite"):
        train(run)
    assert [step["skipped"] for step in kinds(run, "step")][-2:] == [False, True]


def test_rewinds_that_do_not_help_end_the_run(make_run: MakeRun, train: Train) -> None:
    settings = {"lr": 1e3, "lr_decay_style": "constant", "clip_grad": 0.0, "save_interval": 1, "train_iters": 40}
    run = make_run(**settings, nonfinite_policy="rewind", max_nonfinite_steps=2, max_rewinds=3)
    with pytest.raises(FinalError, match="3 rewinds have not helped"):
        train(run)
    assert [event["number"] for event in kinds(run, "rewind")] == [1, 2, 3]
    good = kinds(run, "rewind")[-1]["first_bad_step"]
    assert not [path for path in run.checkpoints.glob("step_????????") if int(path.name[5:]) >= good]


def test_a_run_without_a_good_checkpoint_left_ends_with_an_error(
    make_run: MakeRun, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_interval": 1, "keep_last_n": 1, "nonfinite_policy": "rewind", "max_nonfinite_steps": 3}
    run = make_run(**spiky.settings(tmp_path, **settings))
    poison(monkeypatch)
    with pytest.raises(FinalError, match=r"no good checkpoint from before step \d+ is left") as error:
        train(run)
    assert "keep_last_n" in error.value.hint
    assert not kinds(run, "rewind") and not list(run.checkpoints.glob("step_????????"))


def test_a_rewind_needs_checkpoints(make_run: MakeRun, tmp_path: Path) -> None:
    from primus.experiment import read_run_experiment
    from primus.frameworks import native

    for policy in ("nonfinite_policy", "loss_spike_policy"):
        with pytest.raises(UsageError, match=f"{policy}: rewind needs checkpoints"):
            native.check(read_run_experiment(make_run(policy, **{policy: "rewind"})))


# The data that rewinds pass over


def rewound(first: int, end: int) -> Rewind:
    return Rewind(
        time=0.0, from_step=9, first_bad_step=9, to_step=0, first_sample=first, end_sample=end, reason="a loss spike"
    )


def test_data_of_all_rewinds_is_skipped() -> None:
    rewinds = [rewound(10, 20), rewound(10, 30), rewound(30, 40), rewound(60, 70)]
    assert [find_next_sample(sample, rewinds) for sample in (0, 9, 10, 19, 25, 40, 60, 70)] == [
        0,
        9,
        40,
        40,
        40,
        40,
        70,
        70,
    ]


def test_a_state_that_has_consumed_skipped_data_is_undone() -> None:
    rewinds = [rewound(10, 20)]
    assert [is_undone(sample, rewinds) for sample in (9, 10, 11, 20, 21)] == [False, False, True, True, False]


def test_a_rewind_renames_the_checkpoints_of_its_own_run_only(make_run: MakeRun, train: Train) -> None:
    run, other = make_run("run", save_interval=4), make_run("other", save_interval=2)
    train(run)
    train(other)
    # One folder of both, as where `save:` names that of another run.
    for step in (2, 6):
        shutil.move(other.checkpoints / f"step_{step:08d}", run.checkpoints)
    assert rewind.set_aside_undone(run.checkpoints, run, [rewound(4, 16)]) == [
        f"step_{step:08d}.set_aside_1" for step in (4, 8)
    ]
    assert sorted(path.name for path in run.checkpoints.glob("step_????????")) == ["step_00000002", "step_00000006"]


def test_a_damaged_file_of_rewinds_is_an_error(make_run: MakeRun, train: Train) -> None:
    run = make_run()
    (run.directory / "rewinds.json").write_text("[{")
    with pytest.raises(PrimusError, match=r"rewinds.json: damaged"):
        train(run)


def test_bad_steps_end_a_run_for_good_unless_they_are_answered() -> None:
    assert issubclass(BadSteps, FinalError)
