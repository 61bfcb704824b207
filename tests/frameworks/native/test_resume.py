"""A run resumes where it stopped, with bit-identical losses, whatever ended it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.formats.open import open_checkpoint
from primus.errors import PrimusError, UnfitError, UsageError
from primus.experiment import load_run_experiment
from primus.frameworks import native
from primus.runs import events
from primus.runs.store import Run

MakeRun = Callable[..., Run]
Train = Callable[..., Any]


def losses(run: Run) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step, exactly as recorded."""
    return [(event["step"], event["loss"], event["grad_norm"]) for event in events.read_steps(run.events)]


def kinds(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


def test_a_killed_run_resumes_with_the_losses_of_an_uninterrupted_one(
    make_run: MakeRun, train: Train, start_workers: Callable[..., Any]
) -> None:
    settings = {"train_iters": 40, "save_interval": 5, "global_batch_size": 6}
    undisturbed = make_run("undisturbed", **settings)
    train(undisturbed)
    for is_async in (True, False):
        killed = make_run(f"killed-{is_async}", async_save=is_async, **settings)
        workers = start_workers(killed)
        workers.wait_for_checkpoint(5)
        workers.send(signal.SIGKILL)
        assert workers.wait() == [-signal.SIGKILL]
        assert events.read_steps(killed.events)[-1]["step"] < 40, "the run was killed on its way"

        train(killed, number=1)

        assert kinds(killed, "checkpoint_loaded")[-1]["step"] >= 5
        assert losses(killed) == losses(undisturbed)
        assert len(losses(killed)) == 40


@pytest.mark.slow
def test_two_killed_processes_resume_with_the_losses_of_uninterrupted_ones(
    make_run: MakeRun, start_workers: Callable[..., Any]
) -> None:
    settings = {"train_iters": 40, "save_interval": 5, "global_batch_size": 8}
    killed, undisturbed = make_run("killed", **settings), make_run("undisturbed", **settings)
    workers = start_workers(killed, world=2)
    workers.wait_for_checkpoint(5)
    workers.send(signal.SIGKILL)
    assert workers.wait() == [-signal.SIGKILL] * 2
    assert events.read_steps(killed.events)[-1]["step"] < 40, "the run was killed on its way"

    start_workers(killed, world=2, number=1).succeed()
    start_workers(undisturbed, world=2).succeed()

    assert kinds(killed, "checkpoint_loaded")[-1]["step"] >= 5
    assert losses(killed) == losses(undisturbed)
    assert len(losses(killed)) == 40


def test_another_number_of_processes_resumes_within_rounding(
    make_run: MakeRun, train: Train, start_workers: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"train_iters": 8, "save_interval": 4, "global_batch_size": 4}
    run, undisturbed = make_run("run", **settings), make_run("undisturbed", **settings)
    train(undisturbed)
    start_workers(run, world=2).succeed()
    (run.checkpoints / "step_00000008" / "manifest.json").unlink()

    train(run, number=1)

    assert "saved by 2 processes, resumed by 1" in capfd.readouterr().out
    assert kinds(run, "checkpoint_loaded")[-1]["world_size"] == 2
    for (step, loss, _), (_, expected, _) in zip(losses(run), losses(undisturbed), strict=True):
        # float32 sums in another order, through eight steps
        assert loss == pytest.approx(expected, rel=2e-5), f"step {step}"


def test_a_run_keeps_its_batch_when_the_number_of_processes_changes(
    make_run: MakeRun, train: Train, start_workers: Callable[..., Any]
) -> None:
    """`global_batch_size` is a micro batch of each process here."""
    run, undisturbed = make_run("run", save_interval=4), make_run("undisturbed", global_batch_size=4)
    train(undisturbed)
    start_workers(run, world=2).succeed()
    shutil.rmtree(run.checkpoints / "step_00000008")

    train(run, number=1)

    assert [step["global_batch_size"] for step in events.read_steps(run.events)] == [4] * 8
    for (step, loss, _), (_, expected, _) in zip(losses(run), losses(undisturbed), strict=True):
        assert loss == pytest.approx(expected, rel=2e-5), f"step {step}"
    third = make_run("third", load=str(run.directory), train_iters=9)
    train(third)
    assert events.read_steps(third.events)[-1]["global_batch_size"] == 2, "another run has its own"


def test_a_signal_ends_the_run_with_a_checkpoint_of_its_last_step(
    make_run: MakeRun, train: Train, start_workers: Callable[..., Any]
) -> None:
    settings = {"train_iters": 100, "global_batch_size": 2}
    stopped, undisturbed = make_run("stopped", **settings), make_run("undisturbed", **settings)
    workers = start_workers(stopped)
    workers.wait_for_step(5)
    workers.send(signal.SIGTERM)
    said = workers.succeed()

    (interrupted,) = kinds(stopped, "interrupted")
    last = events.read_steps(stopped.events)[-1]["step"]
    assert interrupted["signal"] == "SIGTERM" and interrupted["step"] == last < 100
    assert kinds(stopped, "checkpoint_saved")[-1]["step"] == last
    assert f"SIGTERM: stopping after step {last}" in said
    train(stopped, number=1)
    train(undisturbed)
    assert losses(stopped) == losses(undisturbed)


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_is_used(
    make_run: MakeRun, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(save_interval=2)
    train(run)
    before = losses(run)
    _damage(run.checkpoints / "step_00000008")
    capfd.readouterr()

    train(run, number=1)

    said = capfd.readouterr().out
    assert "checkpoint step_00000008 is skipped: __0_0.distcp does not have its checksum" in said
    assert kinds(run, "checkpoint_rejected")[-1]["step"] == 8
    assert kinds(run, "checkpoint_loaded")[-1]["step"] == 6
    assert losses(run) == before


def test_a_checkpoint_without_its_manifest_does_not_count(make_run: MakeRun, train: Train) -> None:
    run = make_run(save_interval=4)
    train(run)
    before = losses(run)
    (run.checkpoints / "step_00000008" / "manifest.json").unlink()
    train(run, number=1)
    assert "not complete" in kinds(run, "checkpoint_rejected")[-1]["reason"]
    assert kinds(run, "checkpoint_loaded")[-1]["step"] == 4
    assert losses(run) == before


def test_a_run_without_a_usable_checkpoint_starts_from_scratch_and_reports_it(
    make_run: MakeRun, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    train(run)
    before = losses(run)
    (run.checkpoints / "step_00000008" / "manifest.json").write_text("{")
    train(run, number=1)
    said = capfd.readouterr().out
    assert "manifest.json: damaged" in said and "training starts from scratch" in said
    assert losses(run) == before


def test_a_finished_run_has_nothing_left_to_do(
    make_run: MakeRun, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    train(run)
    train(run, number=1)
    assert "checkpoint is at step 8 of 8: nothing left to train" in capfd.readouterr().out


def test_a_checkpoint_past_the_last_step_is_an_error_and_not_a_run_that_is_done(
    make_run: MakeRun, train: Train
) -> None:
    first = make_run("first")
    train(first)
    second = make_run("second", load=str(first.directory), train_iters=4, lr_warmup_fraction=0.0)
    with pytest.raises(UsageError, match="checkpoint is at step 8, past train_iters 4: nothing to train"):
        train(second)


@pytest.mark.parametrize("name", ["checkpoints/step_00000004", "checkpoints", ""])
def test_load_takes_a_checkpoint_a_folder_of_them_or_a_run(make_run: MakeRun, train: Train, name: str) -> None:
    first = make_run("first", save_interval=4)
    train(first)
    (first.checkpoints / "step_00000008" / "manifest.json").unlink()
    second = make_run("second", load=str(first.directory / name))
    train(second)
    assert losses(second) == losses(first)[4:], "optimizer, schedule and data go on as well"


def test_finetune_takes_only_the_weights(make_run: MakeRun, train: Train) -> None:
    first = make_run("first", train_iters=1, lr_decay_style="constant")
    train(first)
    second = make_run("second", train_iters=2, load=str(first.directory), finetune=True)
    train(second)
    steps = losses(second)
    assert [step for step, *_ in steps] == [1, 2]
    assert steps[0][1] < losses(first)[0][1] - 0.1, "it has learnt the first batch, which comes again"


@pytest.mark.parametrize("to", ["huggingface", "torchtitan", "megatron"])
def test_load_takes_the_weights_of_a_converted_checkpoint(
    make_run: MakeRun, train: Train, tmp_path: Path, to: Any
) -> None:
    first = make_run("first", train_iters=1)
    train(first)
    same = make_run("same", train_iters=2, load=str(first.directory), finetune=True)
    train(same)
    spec = load_run_experiment(first).experiment.trainer.model
    planned = plan_conversion(open_checkpoint(str(first.directory), spec), TargetSettings(to))
    write_conversion(planned, tmp_path / "converted", lambda _: None)
    loaded = make_run("loaded", train_iters=2, load=str(tmp_path / "converted"))
    train(loaded)
    assert losses(loaded) == losses(same)


def test_a_folder_of_another_model_of_hugging_face_is_refused_by_config_check(
    make_run: MakeRun, train: Train, tmp_path: Path
) -> None:
    first = make_run("first", train_iters=1)
    train(first)
    spec = load_run_experiment(first).experiment.trainer.model
    planned = plan_conversion(open_checkpoint(str(first.directory), spec), TargetSettings("huggingface"))
    write_conversion(planned, tmp_path / "converted", lambda _: None)
    other = make_run("other", load=str(tmp_path / "converted"), ffn_hidden_size=96)
    with pytest.raises(UsageError, match="is of another model: ffn_hidden_size is 160 there and 96 here"):
        native.check(load_run_experiment(other).experiment)


def test_a_checkpoint_of_another_model_names_the_first_field_that_differs(make_run: MakeRun, train: Train) -> None:
    train(make_run("first"))
    other = make_run("second", load=str(make_run("first").directory), ffn_hidden_size=96)
    with pytest.raises(UsageError, match="another model: ffn_hidden_size is 160 there and 96 here"):
        train(other)


def test_a_load_that_leads_nowhere_is_an_error(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        train(make_run("a", load=str(tmp_path / "nowhere")))
    with pytest.raises(UsageError, match="no complete checkpoint"):
        train(make_run("b", load=str(tmp_path)))


def test_a_load_of_damaged_checkpoints_does_not_train_from_scratch(make_run: MakeRun, train: Train) -> None:
    first = make_run("first")
    train(first)
    _damage(first.checkpoints / "step_00000008")
    aside = first.checkpoints / "step_00000008.set_aside_1"
    shutil.copytree(first.checkpoints / "step_00000008", aside)
    with pytest.raises(PrimusError, match="is damaged"):
        train(make_run("third", load=str(aside)))
    with pytest.raises(PrimusError, match="is damaged"):
        train(make_run("second", load=str(first.directory)))


def test_a_folder_with_checkpoints_of_another_run_is_refused(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    train(make_run("first", save=shared))
    with pytest.raises(UsageError, match="holds checkpoints of another run, first"):
        train(make_run("second", save=shared))


def test_a_run_does_not_resume_with_other_data(make_run: MakeRun, train: Train) -> None:
    run = make_run(save_interval=4)
    train(run)
    (run.checkpoints / "step_00000008" / "manifest.json").unlink()
    manifest = run.checkpoints / "step_00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("mock:", "else:"))
    with pytest.raises(UnfitError, match="the training data has changed since step_00000004"):
        train(run, number=1)


def test_a_run_does_not_resume_in_the_order_of_another_version(make_run: MakeRun, train: Train) -> None:
    run = make_run(save_interval=4)
    train(run)
    for manifest in run.checkpoints.glob("step_*/manifest.json"):
        described = json.loads(manifest.read_text())
        described["data_fingerprint"] += "-1"
        manifest.write_text(json.dumps(described))
    with pytest.raises(UnfitError, match="the order of the samples differs: dataloader, or the version of primus"):
        train(run, number=1)


def _damage(checkpoint: Path) -> None:
    """Change one byte of a checkpoint's tensors."""
    file = checkpoint / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_checkpoint_of_other_data_is_loaded_only_with_allow_other_data(make_run: MakeRun, train: Train) -> None:
    first = make_run("first")
    train(first)
    settings: dict[str, Any] = {"load": str(first.directory), "seq_length": 16, "train_iters": 10}
    with pytest.raises(UnfitError, match="sample 17 of other data") as caught:
        train(make_run("second", **settings))
    assert "allow_other_data: true" in caught.value.hint
    third = make_run("third", allow_other_data=True, **settings)
    train(third)
    assert [step for step, _, _ in losses(third)] == [9, 10]
    fourth = make_run("fourth", finetune=True, **settings)
    train(fourth)
    assert losses(fourth)[0][0] == 1


def test_a_run_that_keeps_documents_apart_resumes_with_the_same_losses(make_run: MakeRun, train: Train) -> None:
    settings: dict[str, Any] = {"vocab_size": 16, "reset_position_ids": True, "reset_attention_mask": True}
    whole, plain = make_run("whole", save_interval=4, **settings), make_run("plain", vocab_size=16)
    train(whole)
    train(plain)
    assert losses(whole) != losses(plain)
    rest = make_run("rest", load=str(whole.checkpoints / "step_00000004"), **settings)
    train(rest)
    assert losses(rest) == losses(whole)[4:]
