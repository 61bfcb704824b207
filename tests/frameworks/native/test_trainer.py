"""What a training run does, says and leaves behind, and what it says when it cannot."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from fakes import cli
from fakes.small_disk import mount_small_disk
from primus.callback import StepReport
from primus.checkpoint import folders
from primus.config.load import load_experiment
from primus.config.schema import Experiment, TrainingConfig
from primus.data.encode.job import EncodeJob, prepare_token_files
from primus.errors import PrimusError, UnfitError, UsageError
from primus.experiment import read_run_experiment
from primus.frameworks import native
from primus.frameworks.native.engine import compilation
from primus.frameworks.native.engine import driver as engine
from primus.frameworks.native.engine.batch import to_batch
from primus.runs import events
from primus.runs.attempt import Attempt
from primus.runs.step_line import format_evaluation_line, format_step_line
from primus.runs.store import Run
from primus.session.bad_steps import BadStepDetector
from primus.session.checkpoints.saver import CheckpointSettings
from primus.session.engine import StepValues
from primus.session.step_timer import Rates, StepTimer, TakenStep

MakeRun = Callable[..., Run]
Train = Callable[..., Any]


def kinds(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


# A whole run


def test_every_step_is_an_event_with_all_fields(make_run: MakeRun, train: Train) -> None:
    run = make_run(global_batch_size=6)
    train(run)
    steps = kinds(run, "step")
    assert [step["step"] for step in steps] == list(range(1, 9))
    last = steps[-1]
    assert set(StepReport.__struct_fields__) <= set(last)
    assert last["consumed_samples"] == 8 * 6 and last["tokens"] == 6 * 32
    assert last["tokens_per_s"] == pytest.approx(last["tokens"] / last["step_time_s"])
    assert 0 <= last["data_time_s"] < last["step_time_s"] and last["cpu_time_s"] > 0
    assert last["mfu"] is None and last["flops_convention"] == "causal" and not last["skipped"]
    assert 0.05 < last["memory_gib"] < 100


def test_a_run_begins_and_ends_with_an_event(make_run: MakeRun, train: Train) -> None:
    run = make_run()
    train(run)
    (started,), (ended,) = kinds(run, "run_started"), kinds(run, "training_ended")
    assert started["parameters"] == 151_872 and started["world_size"] == 1 and started["compiled"] is False
    assert set(started["versions"]) == {"primus", "python", "torch"}
    assert ended["steps"] == 8 and ended["tokens"] == 8 * 2 * 32
    rounding = 0.0005 / ended["time_s"]  # the time is written to the millisecond
    assert ended["tokens_per_s"] == pytest.approx(ended["tokens"] / ended["time_s"], rel=rounding + 0.001)


def test_the_data_of_a_run_is_described_in_its_folder(make_run: MakeRun, train: Train) -> None:
    run = make_run()
    train(run)
    described = yaml.safe_load((run.directory / "config" / "data_config.yaml").read_text())
    assert described["mock_data"] is True
    assert described["fingerprint"] == kinds(run, "run_started")[0]["data_fingerprint"]


def test_accumulated_micro_batches_give_the_losses_of_a_whole_batch(make_run: MakeRun, train: Train) -> None:
    whole, parts = make_run("whole", micro_batch_size=4), make_run("parts", micro_batch_size=1, global_batch_size=4)
    train(whole)
    train(parts)
    for one, other in zip(kinds(whole, "step"), kinds(parts, "step"), strict=True):
        # float32 sums in another order, through eight steps
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)


def test_evaluation_is_due_at_its_interval_and_at_the_end(make_run: MakeRun, train: Train) -> None:
    run = make_run(eval_interval=3, eval_iters=2)
    train(run)
    found = kinds(run, "eval")
    assert [event["step"] for event in found] == [3, 6, 8]
    assert found[0]["tokens"] == 2 * 2 * 32
    assert found[0]["perplexity"] == pytest.approx(math.exp(found[0]["loss"]))


def test_no_iterations_of_evaluation_mean_none(make_run: MakeRun, train: Train) -> None:
    run = make_run(eval_interval=3, eval_iters=0)
    train(run)
    assert kinds(run, "eval") == []
    assert len(kinds(run, "step")) == 8


def test_an_evaluation_does_not_call_the_compiled_model(
    make_run: MakeRun, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients it would be compiled again, which takes longer than the evaluation."""
    import torch

    has_gradients = []

    def compile_model(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        def call_model(*given: torch.Tensor) -> torch.Tensor:
            has_gradients.append(torch.is_grad_enabled())
            loss: torch.Tensor = model(*given)
            return loss

        return call_model

    monkeypatch.setattr(torch, "compile", compile_model)
    monkeypatch.setenv("CXX", sys.executable)
    run = make_run(compile=True, eval_interval=1, train_iters=2)
    train(run)
    assert has_gradients == [True, True] and len(kinds(run, "eval")) == 2


def test_evaluation_does_not_change_the_training(make_run: MakeRun, train: Train) -> None:
    with_eval, without = make_run("with", eval_interval=2), make_run("without")
    train(with_eval)
    train(without)
    assert [s["loss"] for s in kinds(with_eval, "step")] == [s["loss"] for s in kinds(without, "step")]


def test_lines_are_printed_at_the_log_interval_with_means(
    make_run: MakeRun, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(log_interval=3)
    train(run)
    lines = re.findall(r"iteration +(\d+)/ +8 .*lm loss: (\S+)", capfd.readouterr().out)
    assert [int(step) for step, _ in lines] == [1, 3, 6, 8]
    mean = sum(step["loss"] for step in kinds(run, "step")[3:6]) / 3
    assert float(lines[2][1]) == pytest.approx(mean, rel=1e-6)


def test_disable_last_saving_leaves_the_last_step_unsaved(make_run: MakeRun, train: Train) -> None:
    run = make_run(save_interval=3, disable_last_saving=True)
    train(run)
    assert [event["step"] for event in kinds(run, "checkpoint_saved")] == [3, 6]
    assert (run.checkpoints / "step_00000006" / "manifest.json").exists()


def test_a_stop_before_the_first_step_saves_nothing(make_run: MakeRun, train: Train) -> None:
    run = make_run()
    train(run, stop="SIGINT")
    assert kinds(run, "interrupted") == [{**kinds(run, "interrupted")[0], "signal": "SIGINT", "step": 0}]
    assert not kinds(run, "step") and not kinds(run, "checkpoint_saved")


def test_the_whole_run_repeats_bit_by_bit_with_bf16_and_read_ahead(make_run: MakeRun, train: Train) -> None:
    settings = {"bf16": True, "global_batch_size": 6, "num_workers": 2, "deterministic": True}
    first, second = make_run("first", **settings), make_run("second", **{**settings, "num_workers": 0})
    import torch

    try:
        train(first)
        train(second)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [s["loss"] for s in kinds(first, "step")] == [s["loss"] for s in kinds(second, "step")]


def test_a_text_is_learnt_and_a_sample_of_it_is_written(
    make_run: MakeRun, train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run(
        mock_data=False,
        train_data_path=str(_prepared(tmp_path)),
        split="90,10",
        train_iters=40,
        micro_batch_size=8,
        eval_interval=40,
        sample_tokens=12,
        sample_prompt="one two",
        vocab_size=300,
    )
    train(run)
    assert kinds(run, "step")[0]["loss"] > 5.0
    assert kinds(run, "eval")[-1]["loss"] < 0.5, "the text repeats eleven words"
    text = (run.directory / "report" / "sample.txt").read_text()
    assert text.startswith("one two three four five")
    said = capfd.readouterr().out
    assert "sample of 12 tokens:\n" + text in said
    assert kinds(run, "sample")[-1]["time_s"] > 0


def test_tensorboard_gets_the_losses_of_every_step(make_run: MakeRun, train: Train) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    run = make_run(disable_tensorboard=False, eval_interval=4)
    train(run)
    (file,) = (run.directory / "tensorboard").iterdir()
    values: dict[str, dict[int, float]] = {}
    for raw in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(raw)
        for value in event.summary.value:
            values.setdefault(value.tag, {})[event.step] = value.simple_value
    assert values["lm loss"] == {s["step"]: np.float32(s["loss"]) for s in kinds(run, "step")}
    assert set(values["lm loss validation"]) == {4, 8}


def test_lines_stand_above_the_bar_of_the_launching_terminal(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    master, slave = os.openpty()
    run = make_run(eval_interval=8)
    monkeypatch.setenv("PRIMUS_PROGRESS", os.ttyname(slave))
    pieces: list[bytes] = []
    reader = threading.Thread(target=_until_closed, args=(master, pieces))
    reader.start()
    with os.fdopen(slave, "w") as terminal:
        attempt = Attempt(run, 0, console=terminal)
        native.train(read_run_experiment(run), attempt)
        attempt.close()
    reader.join(30)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(pieces).decode())
    for step in (1, 8):
        assert shown.count(f"step {step}/8") == 1
    assert "validation loss at step 8" in shown
    assert re.search(r"\b[1-8]/8\b.*tokens/s", shown), "the bar"
    assert "iteration        1/       8" in capfd.readouterr().out, "the log of the rank has the lines as well"


def _until_closed(master: int, shown: list[bytes]) -> None:
    """Read a pseudo-terminal until nobody has its other end open, which is an error on Linux (EIO)."""
    with suppress(OSError):
        while data := os.read(master, 4096):
            shown.append(data)
    os.close(master)


# What goes wrong


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(make_run: MakeRun, train: Train) -> None:
    run = make_run(
        lr=1e3, weight_decay=1e12, lr_decay_style="constant", max_nonfinite_steps=3, save_interval=1, clip_grad=0.0
    )
    with pytest.raises(PrimusError, match=r"steps \d+ to \d+: the loss or the gradient is not finite") as error:
        train(run)
    assert "lower lr" in error.value.hint
    steps = kinds(run, "step")
    assert [step["skipped"] for step in steps[-3:]] == [True] * 3
    assert not steps[-4]["skipped"], "it stopped after three in a row"


def delay_writing(patch: pytest.MonkeyPatch, holds: Callable[[], object]) -> None:
    """Checkpoints are written once `holds`."""
    real = engine.prepare_files

    def prepare_files(*given: Any) -> Callable[[Path], None]:
        write = real(*given)

        def write_late(folder: Path) -> None:
            cli.wait_for(holds, "the time to write", timeout_s=10)
            write(folder)

        return write_late

    patch.setattr(engine, "prepare_files", prepare_files)


def test_steps_are_taken_while_a_checkpoint_is_written(
    make_run: MakeRun, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(save_interval=2, async_save=True, train_iters=4)
    delay_writing(monkeypatch, lambda: len(kinds(run, "step")) >= 3)
    train(run)
    assert [saved["step"] for saved in kinds(run, "checkpoint_saved")] == [2, 4]


def test_a_run_that_fails_writes_its_checkpoint_to_the_end(
    make_run: MakeRun, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failed, real = make_run(save_interval=2, async_save=True), threading.Event(), engine.train_step

    def train_step(*given: Any, **options: Any) -> Any:
        if kinds(run, "step")[-1:] and kinds(run, "step")[-1]["step"] == 2:
            failed.set()
            raise RuntimeError("the abacus is broken")
        return real(*given, **options)

    monkeypatch.setattr(engine, "train_step", train_step)
    # Behind the failure, so that only a run that waits for it has it.
    delay_writing(monkeypatch, lambda: failed.wait(10) and not time.sleep(0.3))
    with pytest.raises(RuntimeError, match="the abacus"):
        train(run)
    assert folders.is_complete(run.checkpoints / "step_00000002")


def test_a_first_checkpoint_that_does_not_fit_is_not_begun(
    make_run: MakeRun, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointSettings, "retry_s", 0.0)
    with mount_small_disk(tmp_path / "disk", 3) as disk:
        run = make_run(train_iters=1, save=str(disk), ffn_hidden_size=1024)
        with pytest.raises(PrimusError, match=r"no space left: it needs 0\.00[1-9] GiB, and 0\.003 GiB are free"):
            train(run)


def test_only_steps_in_a_row_end_a_run() -> None:
    rates = Rates(global_batch_size=1, tokens=1, num_devices=1, flops_per_token=1.0, peak_tflops=None)
    timer, detector = StepTimer(rates, lambda: 0), BadStepDetector(TrainingConfig(max_nonfinite_steps=2))

    def take(number: int, loss: float, skipped: bool) -> None:
        for found in timer.add_step(TakenStep(number, StepValues(loss, 1.0, skipped), 0.1, number, 0.0)):
            detector.after_report(found)

    for number, skipped in enumerate([True, False, True, False, True], start=1):
        take(number, 1.0, skipped)
    with pytest.raises(PrimusError, match="steps 5 to 6: the loss"):
        take(6, math.nan, True)


def test_a_batch_that_does_not_divide_is_a_usage_error(make_run: MakeRun, train: Train) -> None:
    with pytest.raises(UsageError, match="global_batch_size 5 does not divide"):
        train(make_run(global_batch_size=5))


def test_evaluation_without_validation_data_is_a_usage_error(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    prefix = _prepared(tmp_path)
    with pytest.raises(UsageError, match="eval_interval is 2, but validation data is missing: split"):
        train(make_run(mock_data=False, train_data_path=str(prefix), split="100", eval_interval=2))


def test_the_test_data_is_measured_once_after_the_last_step(make_run: MakeRun, train: Train, tmp_path: Path) -> None:
    prefix = str(_prepared(tmp_path))
    run = make_run(mock_data=False, train_data_path=prefix, split="80,10,10", eval_iters=2, train_iters=2)
    train(run)
    (found,) = kinds(run, "test")
    assert found["step"] == 2 and found["tokens"] == 2 * 2 * 32 and 0 < found["loss"] < 10
    described = yaml.safe_load((run.directory / "config" / "data_config.yaml").read_text())
    (corpus,) = described["corpora"]
    assert corpus["samples"] == 4 and corpus["epochs"] == pytest.approx(4 / described["samples_per_epoch"], abs=1e-6)


def test_a_replay_with_other_data_is_refused(make_run: MakeRun, train: Train) -> None:
    run = make_run()
    (run.directory / "config" / "replayed_data_config.yaml").write_text("fingerprint: mock:1:1\n")
    with pytest.raises(UnfitError, match="differs from that of the replayed run"):
        train(run)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_named_at_the_start(make_run: MakeRun, train: Train, package: str) -> None:
    if _is_installed(package):
        pytest.skip(f"{package} is installed here")
    run = make_run(**{f"disable_{package}": False})
    with pytest.raises(UnfitError, match=f"the package {package} is not installed"):
        train(run)
    assert not kinds(run, "step")


def test_memory_that_runs_out_is_explained(make_run: MakeRun, start_workers: Callable[..., Any]) -> None:
    run = make_run(ffn_hidden_size=20_000_000)  # one matrix of 10 GB
    workers = start_workers(run, limit_bytes=6 << 30)
    assert workers.wait() == [1]
    assert "out of memory in" in workers.log(0) and "of 6 GiB for each process" in workers.log(0)
    assert "no single setting fits" in workers.log(0)


# The contract of a backend


def experiment(tmp_path: Path, **settings: Any) -> Experiment:
    file = tmp_path / "e.yaml"
    module = {"framework": "native", "model": "tiny", "overrides": {"mock_data": True, **settings}}
    file.write_text(yaml.safe_dump({"exp_name": "e", "modules": {"pre_trainer": module}}))
    return load_experiment(file, environ={}).experiment


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mtp_num_layers", 1),
        ("activation_clamp", 7.0),
        ("add_bias_linear", True),
    ],
)
def test_what_native_does_not_build_is_refused_by_its_field(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{field}: {str(value).lower()}: native does not support") as error:
        native.check(experiment(tmp_path, **{field: value}))
    assert error.value.hint


def test_what_native_builds_is_accepted(tmp_path: Path) -> None:
    native.check(experiment(tmp_path, qk_layernorm=True, add_qkv_bias=True, rope_type="llama3"))
    native.check(experiment(tmp_path, window_size=16, tensor_model_parallel_size=2))


def test_backend_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no backend arguments, found flash"):
        native.check(experiment(tmp_path, backend_args={"flash": True}))


def test_checking_needs_no_torch() -> None:
    program = "import sys; from primus.frameworks import native; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_torch_training_says_what_to_install(make_run: MakeRun) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from primus.frameworks import native; from primus.errors import UnfitError\n"
        "try: native.train(None, None)\n"
        "except UnfitError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert "needs PyTorch" in done.stdout and "./primus-cli setup" in done.stdout


# The line


def report(step: int = 1, **changes: Any) -> StepReport:
    values: dict[str, Any] = {
        "step": step,
        "loss": 8.25,
        "grad_norm": 5.96,
        "learning_rate": 1.5e-4,
        "tokens": 8192,
        "consumed_samples": 32 * step,
        "global_batch_size": 32,
        "step_time_s": 0.2716,
        "data_time_s": 0.001,
        "tokens_per_s": 24690.0,
        "tokens_per_s_per_device": 12345.6,
        "tflops_per_device": 0.24,
        "mfu": None,
        "memory_gib": 1.0,
        "skipped": False,
        **changes,
    }
    return msgspec.convert(values, StepReport)


def at(line: str) -> str:
    """The line without the day's date."""
    return re.sub(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] ", " [TIME] ", line)


def test_the_line_of_a_step_has_megatrons_segments() -> None:
    assert at(format_step_line([report()], 300, 0.0)) == (
        " [TIME] iteration        1/     300 | consumed samples:           32 | elapsed time per iteration (ms): 271.6"
        " | tokens/s/device: 12345.6 | compute per device (TFLOP/s, causal): 0.240 | MFU: -"
        " | learning rate: 1.500000E-04 | global batch size:    32 | lm loss: 8.250000E+00 | grad norm: 5.960"
        " | number of skipped iterations:   0 | memory per device (GiB): 1.00 |"
    )


def test_rates_of_a_line_are_totals_over_totals() -> None:
    fast = report(1, step_time_s=1.0, tokens_per_s_per_device=8192.0, tflops_per_device=8.0, mfu=0.8)
    slow = report(2, step_time_s=3.0, tokens_per_s_per_device=8192 / 3, tflops_per_device=8 / 3, mfu=0.8 / 3)
    line = format_step_line([fast, slow], 300, 0.0)
    assert "(ms): 2000.0 | tokens/s/device: 4096.0 | compute per device (TFLOP/s, causal): 4.000 | MFU: 40.0%" in line


def test_skipped_steps_are_counted_and_not_averaged() -> None:
    line = format_step_line([report(1, loss=2.0), report(2, loss=math.nan, grad_norm=math.inf, skipped=True)], 300, 0.0)
    assert "lm loss: 2.000000E+00 | grad norm: inf | number of skipped iterations:   1 |" in line
    assert "lm loss: NAN" in format_step_line([report(1, loss=math.nan, skipped=True)], 300, 0.0)


def test_the_line_of_an_evaluation_has_megatrons_words() -> None:
    expected = "validation loss at iteration 100 | lm loss value: 5.000000E+00 | lm loss PPL: 1.484132E+02 |"
    assert at(format_evaluation_line(100, 5.0, math.exp(5), 0.0)) == f" [TIME] {expected}"


# Decisions


def decide(asked: Any, before: bool | None = None, flops: float = 0.0, **environ: str) -> compilation.CompileDecision:
    return compilation.decide_compilation(
        asked,
        before=before,
        flops_per_device=flops,
        device_type="cpu",
        threads=2,
        environ={"CXX": sys.executable, **environ},
    )


def test_a_long_run_is_compiled_and_a_short_one_is_not() -> None:
    assert decide("auto", flops=1e17).compiled
    assert not decide("auto", flops=1e12).compiled
    assert decide(True).compiled and not decide(False, flops=1e17).compiled


def test_a_resumed_run_is_compiled_as_before() -> None:
    assert decide("auto", before=True, flops=1e12).compiled
    assert not decide("auto", before=False, flops=1e17).compiled


def test_without_a_compiler_nothing_is_compiled_unless_it_was_asked_for() -> None:
    decision = decide("auto", flops=1e17, CXX="no-such-compiler")
    assert decision == compilation.CompileDecision(False, "this machine has no C++ compiler (no-such-compiler)")
    with pytest.raises(UnfitError, match=r"has no C\+\+ compiler"):
        decide(True, CXX="no-such-compiler")


def test_nothing_is_predicted_after_the_masked_token() -> None:
    import torch

    tokens, targets = to_batch(np.array([[5, 1, 7, 1, 9]]), 1, torch.device("cpu"))
    assert tokens.tolist() == [[5, 1, 7, 1]]
    assert targets.tolist() == [[1, -100, 1, -100]]


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _prepared(folder: Path) -> Path:
    """Prefix of token files with a tokenizer of 300 tokens, of a text that is easy to learn."""
    for number in range(20):
        file = folder / "text" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("one two three four five six seven eight nine ten. " * 40)
    output = folder / "numbers"
    prepare_token_files(EncodeJob(inputs=(str(folder / "text"),), tokenizer="bpe:300", output=output))
    return output
