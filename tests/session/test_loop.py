"""Every engine that takes one step at a time gets the same data, schedule, reports, checkpoints and signals."""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from fakes.bigram_engine import INFO, BigramEngine, train_bigrams
from fakes.training_runs import write_training_run
from primus import experiment
from primus.callback import StepReport
from primus.checkpoint import manifest
from primus.checkpoint.family import list_hub_shapes
from primus.errors import FinalError, PrimusError, UsageError
from primus.models.counts import flops_per_token
from primus.process import measure_core_wait
from primus.runs import events, step_turns
from primus.runs.attempt import Attempt
from primus.runs.files import write_text
from primus.runs.store import Run
from primus.session.batches.batch_record import RECORD_VARIABLE
from primus.session.engine import MicroBatches, StateToSave, StepValues
from primus.session.loop import train_with_engine
from primus.session.open_session import open_session
from primus.session.ranks.processes import OneProcess
from primus.session.step_timer import StepTimer, TakenStep, build_rates
from primus.session.timing.collection_record import CollectionRecorder
from primus.session.training_run import TrainingRun

SETTINGS: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 32,
    "train_iters": 6,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "bf16": False,
    "lr": 1.0,
    "lr_decay_iters": 6,
    "lr_warmup_iters": 2,
    "disable_tensorboard": True,
}
Train = Callable[..., BigramEngine]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    return partial(write_training_run, tmp_path, SETTINGS)


@pytest.fixture
def train() -> Train:
    def train_run(run: Run, number: int = 0, stop: str | None = None, poison: int | None = None) -> BigramEngine:
        attempt = Attempt(run, number)
        attempt.stop_signal = stop
        try:
            return train_bigrams(experiment.read_run_experiment(run), attempt, poison)[1]
        finally:
            attempt.close()

    return train_run


def read_kind(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


def test_an_engine_is_reported_like_native(make_run: Callable[..., Run], train: Train) -> None:
    run = make_run(eval_interval=3, eval_iters=2, save_interval=2)
    engine = train(run)
    steps = read_kind(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["consumed_samples"] for step in steps] == [4, 8, 12, 16, 20, 24]
    assert steps[0]["learning_rate"] == 0.5 and steps[1]["learning_rate"] == 1.0, "warm-up of the experiment"
    assert steps[0]["loss"] == pytest.approx(math.log(512)), "the logits of 512 tokens are equal at first"
    assert all(step["tokens_per_s"] > 0 and step["tflops_per_device"] > 0 for step in steps)
    assert [event["step"] for event in read_kind(run, "eval")] == [3, 6]
    assert [event["step"] for event in read_kind(run, "checkpoint_saved")] == [2, 4, 6]
    (started,) = read_kind(run, "run_started")
    assert started["backend"] == "bigram" and started["compiled"] is False
    assert read_kind(run, "training_ended")
    assert engine.is_closed


def test_a_run_that_its_engine_compiles_is_recorded_as_compiled(make_run: Callable[..., Run]) -> None:
    run = make_run(compile=True, train_iters=1, lr_warmup_iters=0)
    attempt = Attempt(run, 0)
    with contextlib.closing(attempt):
        train_bigrams(experiment.read_run_experiment(run), attempt, compiles=True)
    assert read_kind(run, "run_started")[0]["compiled"] is True


def test_an_engine_gets_the_initial_weights_under_hub_names(make_run: Callable[..., Run], train: Train) -> None:
    assert "model.embed_tokens.weight" in train(make_run()).loaded_names
    assert train(make_run("own", init="engine")).loaded_names == [], "the engine keeps its own"


def test_a_stopped_run_saves_and_resumes_with_the_losses_of_an_undisturbed_one(
    make_run: Callable[..., Run], train: Train
) -> None:
    whole, stopped = make_run("whole", save_interval=2), make_run("stopped", save_interval=2, train_iters=4)
    train(whole)
    train(stopped)
    write_text(stopped.config, whole.config.read_text())
    train(stopped, number=1, stop="SIGTERM")
    assert read_kind(stopped, "interrupted")[0]["step"] == 4
    train(stopped, number=2)
    losses = [[step["loss"] for step in read_kind(run, "step")] for run in (whole, stopped)]
    assert losses[0] == losses[1]
    found = manifest.read_manifest(stopped.checkpoints / "step_00000006")
    assert found is not None and found.backend == "bigram"
    assert [file.name for file in found.files] == ["logits.npy"]


@pytest.mark.parametrize(("interval", "end"), [(None, "no checkpoint"), (4, "the newest checkpoint is of step 4")])
def test_a_run_that_does_not_save_its_last_step_says_so(
    make_run: Callable[..., Run],
    train: Train,
    capfd: pytest.CaptureFixture[str],
    interval: int | None,
    end: str,
) -> None:
    train(make_run(save_interval=interval, disable_last_saving=True))
    wanted = f"step 6 is not saved, by disable_last_saving: true; {end}"
    lines = [line for line in capfd.readouterr().out.splitlines() if "is not saved" in line]
    assert len(lines) == 1 and wanted in lines[0]


def test_a_step_that_is_not_finite_ends_the_run(make_run: Callable[..., Run], train: Train) -> None:
    run = make_run()
    with pytest.raises(FinalError, match="step 3: the loss or the gradient is not finite"):
        train(run, poison=3)
    assert [step["step"] for step in read_kind(run, "step")] == [1, 2, 3], "the step is reported first"


class LaunchedStep(NamedTuple):
    """A step whose numbers are read later."""

    number: int
    values: StepValues
    log: list[str]

    def read(self) -> StepValues:
        self.log.append(f"read {self.number}")
        return self.values


class LaunchingEngine(BigramEngine):
    """Its steps are running when they are launched, as on a GPU; `log` has what happens, with the steps launched.

    With `skips` a step that is not finite changes nothing.
    """

    def __init__(self, vocab_size: int, poison: int | None = None, *, skips: bool = False) -> None:
        super().__init__(vocab_size, poison)
        self.log: list[str] = []
        self.skips = skips

    def step(self, batches: MicroBatches, learning_rate: float) -> LaunchedStep:
        values = super().step(batches, learning_rate)
        self.log.append(f"launch {self.steps}")
        skipped = self.skips and self.steps == self.poison
        return LaunchedStep(self.steps, values._replace(skipped=skipped), self.log)

    def evaluate(self, batches: MicroBatches) -> tuple[float, int]:
        self.log.append(f"evaluate {self.steps}")
        return super().evaluate(batches)

    def save(self, folder: Path) -> None:
        self.log.append(f"save {self.steps}")
        super().save(folder)


def launch_steps(
    run: Run,
    poison: int | None = None,
    *,
    skips: bool = False,
    number: int = 0,
    kind: type[LaunchingEngine] = LaunchingEngine,
) -> list[str]:
    attempt = Attempt(run, number)
    asked = experiment.read_run_experiment(run)
    engine = kind(asked.trainer.model.vocab_size, poison, skips=skips)
    with contextlib.closing(attempt):
        session = open_session(asked, attempt, OneProcess(), INFO, {})
        with (
            contextlib.nullcontext() if skips or poison is None else pytest.raises(FinalError, match=f"step {poison}: ")
        ):
            train_with_engine(session, engine)
    return engine.log


def test_a_running_step_is_read_after_the_next_is_launched_or_before_its_state_is_used(
    make_run: Callable[..., Run], train: Train
) -> None:
    settings = {"train_iters": 4, "save_interval": 2, "eval_interval": 3, "eval_iters": 1}
    run, other = make_run("launched", **settings), make_run("at_once", **settings)
    assert launch_steps(run) == [
        "launch 1", "launch 2", "read 1", "read 2", "save 2",
        "launch 3", "read 3", "evaluate 3", "launch 4", "read 4", "evaluate 4", "save 4",
    ]  # fmt: skip
    train(other)
    assert [each["loss"] for each in read_kind(run, "step")] == [each["loss"] for each in read_kind(other, "step")]


def test_a_running_step_that_is_not_finite_is_not_saved(make_run: Callable[..., Run]) -> None:
    run = make_run(save_interval=2)
    assert launch_steps(run, poison=2) == ["launch 1", "launch 2", "read 1", "read 2"]
    assert [each["step"] for each in read_kind(run, "step")] == [1, 2]


def test_a_rewind_forgets_the_step_that_runs_and_the_state_of_the_bad_ones(make_run: Callable[..., Run]) -> None:
    run = make_run(train_iters=4, save_interval=2, nonfinite_policy="rewind", max_nonfinite_steps=1)
    assert launch_steps(run, poison=3, skips=True) == [
        "launch 1", "launch 2", "read 1", "read 2", "save 2", "launch 3", "launch 4", "read 3",
        "launch 5", "launch 6", "read 5", "read 6", "save 6",
    ]  # fmt: skip
    assert [each["step"] for each in read_kind(run, "step")] == [1, 2, 3, 3, 4]
    (rewind,) = read_kind(run, "rewind")
    assert (rewind["from_step"], rewind["to_step"], rewind["skipped_samples"]) == (3, 2, 4)
    assert [each["consumed_samples"] for each in read_kind(run, "step")] == [4, 8, 12, 16, 20]


def test_a_run_that_begins_before_skipped_data_skips_it_on_its_way(make_run: Callable[..., Run]) -> None:
    run = make_run(train_iters=4, save_interval=2, nonfinite_policy="rewind", max_nonfinite_steps=1)
    launch_steps(run, poison=3, skips=True)
    before = read_kind(run, "step")
    shutil.rmtree(run.checkpoints)
    launch_steps(run, number=1)
    again = read_kind(run, "step")[len(before) :]
    assert [each["consumed_samples"] for each in again] == [4, 8, 16, 20]
    assert [each["loss"] for each in again] == [each["loss"] for each in before[:2] + before[3:]]


class BackgroundEngine(LaunchingEngine):
    """Writes in a thread: the first checkpoint until the next step is taken, the second for a while."""

    def collect_state(self) -> StateToSave:
        return StateToSave(lambda: self.write_late, in_thread=True)

    def step(self, batches: MicroBatches, learning_rate: float) -> LaunchedStep:
        launched = super().step(batches, learning_rate)
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        return launched

    def write_late(self, folder: Path) -> None:
        time.sleep(0.2)
        super().save(folder)


def test_a_checkpoint_that_a_thread_writes_is_reported_after_the_step_in_which_it_ends_and_before_the_summary(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(save_interval=2, train_iters=4)
    launch_steps(run, kind=BackgroundEngine)
    kinds = ("step", "checkpoint_saved", "training_ended")
    # The report of a step follows the launch of the next one.
    assert [(each["kind"], each["step"]) for each in events.read_events(run.events) if each["kind"] in kinds] == [
        ("step", 1), ("step", 2), ("checkpoint_saved", 2), ("step", 3), ("step", 4), ("checkpoint_saved", 4),
        ("training_ended", 4),
    ]  # fmt: skip


class StoppedEngine(BigramEngine):
    """Skips steps 3 and 4; a signal arrives while it goes back from them."""

    attempt: Attempt

    def step(self, batches: MicroBatches, learning_rate: float) -> StepValues:
        return super().step(batches, learning_rate)._replace(skipped=self.steps in (3, 4))

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.attempt.stop_signal = "SIGTERM"


def test_a_signal_during_a_rewind_saves_no_step_that_is_on_disk(make_run: Callable[..., Run]) -> None:
    run = make_run(save_interval=1, nonfinite_policy="rewind", max_nonfinite_steps=2)
    asked = experiment.read_run_experiment(run)
    with contextlib.closing(Attempt(run, 0)) as attempt:
        engine = StoppedEngine(asked.trainer.model.vocab_size)
        engine.attempt = attempt
        train_with_engine(open_session(asked, attempt, OneProcess(), INFO, {}), engine)
    assert [each["to_step"] for each in read_kind(run, "rewind")] == [2]
    assert [each["step"] for each in read_kind(run, "checkpoint_saved")] == [1, 2, 3]
    assert [each["step"] for each in read_kind(run, "interrupted")] == [2]


class HopelessEngine(BigramEngine):
    """Its loss is 30 in each evaluation; a signal arrives during the one after step 2."""

    attempt: Attempt

    def evaluate(self, batches: MicroBatches) -> tuple[float, int]:
        if self.steps == 2:
            self.attempt.stop_signal = "SIGTERM"
        _, tokens = super().evaluate(batches)
        return 30.0 * tokens, tokens


def test_a_signal_precedes_the_stop_that_a_callback_asks_for_after_the_same_step(make_run: Callable[..., Run]) -> None:
    run = make_run(callbacks=[{"early_stopping": {"patience": 1}}], eval_interval=1, eval_iters=1)
    asked = experiment.read_run_experiment(run)
    with contextlib.closing(Attempt(run, 0)) as attempt:
        engine = HopelessEngine(asked.trainer.model.vocab_size)
        engine.attempt = attempt
        train_with_engine(open_session(asked, attempt, OneProcess(), INFO, {}), engine)
    assert [each["step"] for each in read_kind(run, "interrupted")] == [2], "the rest is left to the next attempt"
    assert not read_kind(run, "early_stop") and not read_kind(run, "training_ended")
    assert {each["perplexity"] for each in read_kind(run, "eval")} == {math.exp(20)}, "as Megatron-LM limits it"


def test_only_the_first_process_of_a_run_waits_for_turns(make_run: Callable[..., Run], tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    turns.mkdir()
    giver = step_turns.TurnGiver(turns)
    run = make_run()
    asked = experiment.read_run_experiment(run)
    with contextlib.closing(Attempt(run, 0)) as attempt, contextlib.closing(giver):
        first = open_session(asked, attempt, OneProcess(), INFO, {step_turns.VARIABLE: str(turns)})
        second = replace(first, processes=OneProcess(rank=1, world=2, is_first=False))
        engine = BigramEngine(asked.trainer.model.vocab_size)
        assert [TrainingRun(session, engine).turns is None for session in (first, second)] == [False, True]


def test_rates_are_those_of_each_device_and_of_its_peak(make_run: Callable[..., Run]) -> None:
    info = replace(INFO, num_devices=4, device_name="NVIDIA H100 80GB HBM3")
    rates_of = {}
    for bf16 in (False, True):
        run = make_run(str(bf16), bf16=bf16)
        asked = experiment.read_run_experiment(run)
        with contextlib.closing(Attempt(run, 0)) as attempt:
            rates_of[bf16] = build_rates(open_session(asked, attempt, OneProcess(), info, {}))
    assert rates_of[False].peak_tflops is None, "the peak is that of bfloat16"
    rates = rates_of[True]
    timer = StepTimer(rates, lambda: 3 << 30)
    timer.before_step()
    (report,) = timer.add_step(TakenStep(1, StepValues(1.0, 1.0), 0.1, 4, 0.0))
    assert report.tokens == 4 * 32 and report.memory_gib == 3
    assert report.tokens_per_s * report.step_time_s == pytest.approx(report.tokens)
    assert report.tokens_per_s_per_device == pytest.approx(report.tokens_per_s / 4)
    flops = flops_per_token(asked.trainer.model, 32, "causal")
    assert report.tflops_per_device == pytest.approx(report.tokens_per_s_per_device * flops / 1e12)
    assert report.mfu == pytest.approx(report.tflops_per_device / 989.4), "NVIDIA's dense bf16 peak of an H100 SXM"


def test_the_time_from_the_first_report_to_the_next_step_belongs_to_no_step(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    asked, now = experiment.read_run_experiment(run), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with contextlib.closing(Attempt(run, 0)) as attempt:
        timer = StepTimer(build_rates(open_session(asked, attempt, OneProcess(), INFO, {})), lambda: 0)
    times = []
    for number in (1, 2, 3):
        timer.before_step()
        now[0] += 1.0
        times += [each.step_time_s for each in timer.add_step(TakenStep(number, StepValues(1, 1), 0.1, 4, 0.0))]
        now[0] += 5.0  # loggers import their packages after the first step; later, this is the time of the next step
    assert times == [1.0, 1.0, 6.0]


def test_weights_that_are_not_finite_are_refused_before_the_first_step(
    make_run: Callable[..., Run], train: Train, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
    from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
    from primus.checkpoint.weights import TensorDict

    spec = experiment.read_run_experiment(make_run()).trainer.model
    weights = {name: torch.zeros(shape) for name, shape in list_hub_shapes(spec).items()}
    weights["model.norm.weight"][3] = math.nan
    opened = OpenedCheckpoint(TensorDict(weights), spec, None, FoundCheckpoint("native", tmp_path, None))
    write_conversion(
        plan_conversion(opened, TargetSettings("huggingface", nonfinite=True)), tmp_path / "hub", lambda _: None
    )
    given = f"hf:{tmp_path}/hub"
    run = make_run("second", load=given, finetune=True)
    with pytest.raises(PrimusError, match=r"/hub: model\.norm\.weight has 1 values that are NaN or infinite"):
        train(run)
    assert read_kind(run, "step") == []


def test_a_checkpoint_of_another_engine_gives_its_weights_only(make_run: Callable[..., Run], train: Train) -> None:
    first = make_run("first")
    train(first)
    folder = first.checkpoints / "step_00000006"
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"bigram"', '"native"'))
    with pytest.raises(UsageError, match="was saved by native, and bigram cannot read the state") as refused:
        train(make_run("second", load=str(folder)))
    assert "finetune: true" in refused.value.hint and "convert" not in refused.value.hint, "bigram is no target of it"
    with pytest.raises(UsageError, match="was saved by native, and the run is resumed by bigram"):
        train(first, number=1)


def test_the_first_step_records_the_settings_of_the_engine_and_the_inputs_if_asked(
    make_run: Callable[..., Run], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, first, second, other = make_run("plain"), make_run("first"), make_run("second"), make_run("other", seed=7)
    train(plain)
    monkeypatch.setenv(RECORD_VARIABLE, "1")
    for run in (first, second, other):
        train(run)
    (recorded,) = read_kind(first, "settings_in_force")
    assert (recorded["step"], recorded["settings"][0]["key"]) == (1, "parameters")
    assert "weights_fingerprint" not in read_kind(plain, "run_started")[0]
    marks = [read_kind(run, "run_started")[0]["weights_fingerprint"] for run in (first, second, other)]
    assert marks[0] == marks[1] != marks[2]
    assert read_kind(other, "run_started")[0]["weights_origin"] == "seed 7"
    own = make_run("own", init="engine")
    train(own)
    assert not any("note_collection" in repr(each) for each in gc.callbacks), "closed runs leave no callback"
    assert read_kind(own, "run_started")[0]["weights_origin"] == "engine"


class RecordedAttempt(Attempt):
    """An attempt that keeps the phases of its heartbeats."""

    def beat(self, phase: str, step: int = 0, timings: Mapping[str, float] | None = None) -> None:
        self.beats = [*getattr(self, "beats", []), (phase, step)]
        super().beat(phase, step, timings)


@pytest.mark.parametrize("compiles", [True, False])
def test_the_first_step_of_each_attempt_has_the_phase_compile_if_the_engine_compiles(
    make_run: Callable[..., Run], compiles: bool
) -> None:
    run = make_run(save_interval=2, train_iters=4)
    for number, first in enumerate((0, 2)):
        attempt = RecordedAttempt(run, number)
        train_bigrams(experiment.read_run_experiment(run), attempt, compiles=compiles)
        attempt.close()
        assert [beat for beat in attempt.beats if beat[0] == "compile"] == ([("compile", first)] if compiles else [])
        shutil.rmtree(run.checkpoints / "step_00000004", ignore_errors=True)


def test_each_activity_is_a_phase_from_its_beginning_to_its_end(make_run: Callable[..., Run]) -> None:
    run = make_run(save_interval=1, eval_interval=1, eval_iters=1, train_iters=2, lr_warmup_iters=0)
    with contextlib.closing(RecordedAttempt(run, 0)) as attempt:
        train_bigrams(experiment.read_run_experiment(run), attempt)
    each_step = ["train", "eval", "train", "checkpoint", "train"]
    assert attempt.beats == [
        ("data", 0), ("train", 0), *((phase, 1) for phase in each_step), *((phase, 2) for phase in each_step),
    ]  # fmt: skip


def test_collections_that_slow_a_step_are_recorded() -> None:
    found: list[dict[str, Any]] = []
    recorder = CollectionRecorder(lambda kind, **fields: found.append({"kind": kind, **fields}))
    report = StepReport(
        step=3, loss=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, consumed_samples=1, global_batch_size=1,
        step_time_s=1e-9, data_time_s=0.0, tokens_per_s=1.0, tokens_per_s_per_device=1.0, tflops_per_device=1.0,
        mfu=None, memory_gib=1.0, skipped=False,
    )  # fmt: skip
    try:
        started = time.perf_counter()
        gc.collect()
        longest = time.perf_counter() - started
        recorder.after_report(report)
        gc.collect()
        recorder.after_report(structs.replace(report, step=4, step_time_s=1e9))
        recorder.after_report(structs.replace(report, step=5))
    finally:
        recorder.close()
    assert [(event["kind"], event["step"]) for event in found] == [("garbage_collection", 3)], "each once"
    # Of all objects of this process, which take milliseconds; the recorder is called within the collection.
    assert longest / 2 < found[0]["time_s"] <= longest


def test_the_wait_for_cores_is_that_of_all_threads(tmp_path: Path) -> None:
    for thread, text in {"1": "600 100 9\n", "2": "200 100 9\n", "3": "", "4": "x y z"}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert measure_core_wait(tmp_path) == 0.2
    assert measure_core_wait(tmp_path / "none") is None
