"""Logs of healthy runs, and logs that show a failure without a known signature."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main
from primus.diagnosis.diagnose import diagnose_logs

MEGATRON = " [2025-05-27 15:23:0{step}] iteration        {step}/    24 | consumed samples: 1024 | lm loss: 1.0E+01 |"
TITAN = "[titan] 2026-02-24 19:46:1{step},508 - root - INFO - step:  {step}  loss:  7.62585  tps: 10,050"
TRAINER = "{{'loss': 1.5{step}, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.0{step}}}"
DEEPSPEED = "[2025-05-27 15:23:0{step},123] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, lr=[1e-05]"
MAXTEXT = "completed step: {step}, seconds: 1.341, TFLOP/s/device: 257.929, total_weights: 262144, loss: 0.000"
FOUNDRY = "[batch={step}/100]:"
TRAINERS = [MEGATRON, TITAN, TRAINER, DEEPSPEED, MAXTEXT, FOUNDRY]

SURVIVED = [
    "[W1121 10:00:00.0 socket.cpp:697] [c10d] The client socket has failed (errno: 111 - Connection refused).",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.",
    "ModuleNotFoundError: No module named 'apex'",
    "OSError: [Errno 28] No space left on device",
]


@pytest.mark.parametrize("step", TRAINERS)
@pytest.mark.parametrize("line", SURVIVED)
def test_an_error_that_training_survived_is_not_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str, line: str
) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join([line, *(step.format(step=number) for number in range(1, 6))]) + "\n")
    assert main(["direct", "--", "diagnose", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "no sign of a failure was found" in shown and "training continued after it" in shown


@pytest.mark.parametrize(
    "done",
    [
        "[after training is done] datetime: 2025-05-27 15:23:07",
        "[titan] 2026-02-24 19:46:17,508 - root - INFO - Training completed",
        "{'train_runtime': 12.5, 'train_samples_per_second': 25.6, 'train_loss': 1.2, 'epoch': 1.0}",
        "`Trainer.fit` stopped: `max_steps=100` reached.",
    ],
)
def test_errors_before_the_end_of_a_successful_training_are_harmless(tmp_path: Path, done: str) -> None:
    (tmp_path / "a.log").write_text(f"{SURVIVED[0]}\n{done}\n")
    assert diagnose_logs([tmp_path / "a.log"]).reason == ""


CALM_LINES = [
    '{"time":"2025-12-01T18:05:37+08:00","level":"INFO","msg":"api: retrying error","error":"Post: unexpected EOF"}',
    'time="2025-12-01T18:05:37Z" level=info msg="OSError: [Errno 28] No space left on device"',
    "[2025-12-06 15:32:18,446][cache][INFO] - OSError: [Errno 28] No space left on device",
    "2025-12-06 15:32:18,446 - cache - DEBUG - torch.OutOfMemoryError: CUDA out of memory.",
    "I1206 15:32:18.446 7 cache.cc:12] open: No space left on device",
]


@pytest.mark.parametrize("line", CALM_LINES)
def test_a_line_whose_level_is_below_a_warning_is_no_cause(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.log").write_text(f"loading\n{line}\n")
    assert diagnose_logs([tmp_path / "a.log"]).causes == ()


def test_the_level_of_a_line_does_not_hide_the_end_of_a_process_or_a_loss_that_is_not_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        'time="2024-02-21T09:32:29Z" level=info msg="Pod: ns.job-worker-0 exited with code 1"\n'
    )
    assert diagnose_logs([tmp_path / "a.log"]).reason
    (tmp_path / "a.log").write_text("".join(f"2024-02-21 - INFO - step {step} loss: nan\n" for step in range(3)))
    found = diagnose_logs([tmp_path / "a.log"])
    assert found.cause and found.cause.signature == "not-finite"


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
@pytest.mark.parametrize("num_later", [0, 1, 2, 9])
def test_a_warning_that_other_lines_follow_is_no_cause(tmp_path: Path, level: str, num_later: int) -> None:
    later = [f"[2025-12-06 15:32:2{number}][checkpoint][INFO] - saved part {number}" for number in range(num_later)]
    line = f"[2025-12-06 15:32:18][http][{level}] - cannot open x: No space left on device"
    (tmp_path / "a.log").write_text("\n".join(["loading", line, *later]) + "\n")
    limit = 1 if level == "WARNING" else 7
    assert bool(diagnose_logs([tmp_path / "a.log"]).reason) == (num_later <= limit)


def test_a_retry_is_not_a_failure_before_the_last_one(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("connect to 10.0.0.1: Connection refused, attempt 1 of 30\nconnected\n")
    assert diagnose_logs([log]).reason == ""
    log.write_text("connect to 10.0.0.1: Connection refused, attempt 30 of 30\n")
    assert diagnose_logs([log]).reason


@pytest.mark.parametrize(
    "last",
    [
        "mypackage.errors.StrangeError: the disk is round",
        "Segmentation fault (core dumped)",
        "2026-01-10 12:00:00 FATAL the disk is round",
    ],
)
def test_an_unknown_failure_is_distinguished_from_a_healthy_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join([*(TITAN.format(step=number) for number in range(1, 6)), last]) + "\n")
    code = main(["direct", "--", "diagnose", str(log)])
    shown = capsys.readouterr().out
    assert code == (4 if "FATAL" in last else 0) and last.split()[-1] in shown
    log.write_text("\n".join([last, *(TITAN.format(step=number) for number in range(1, 6))]) + "\n")
    assert main(["direct", "--", "diagnose", str(log)]) == 0


def test_the_headline_of_many_ranks_is_the_first_exception(tmp_path: Path) -> None:
    for rank in range(64):
        second = 10 if rank == 41 else 30
        lines = [TITAN.format(step=1), f"[2026-03-10 12:00:{second}]", f"ValueError: gizmo {rank} is odd"]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
    found = diagnose_logs([tmp_path])
    assert (found.first_rank, found.reason) == (41, "uncaught exception: ValueError: gizmo 41 is odd")


def test_an_exception_caused_by_another_rank_is_not_the_headline(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("RuntimeError: Connection closed by peer [127.0.0.1]:46806\n")
    (tmp_path / "rank_1.log").write_text("ValueError: odd\n")
    found = diagnose_logs([tmp_path])
    assert (found.first_rank, found.reason) == (1, "uncaught exception: ValueError: odd")


def test_megatron_names_the_rank_that_had_the_value(tmp_path: Path) -> None:
    line = (
        "[rank0]: ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank 3 at iteration #3 "
        "invocation #2 (message='found NaN in local grad norm for bucket #0 in backward pass')"
    )
    (tmp_path / "a.log").write_text(line + "\n")
    found = diagnose_logs([tmp_path / "a.log"])
    assert found.cause and found.cause.signature == "not-finite" and found.first_rank == 3


def test_the_rank_of_an_unknown_exception_is_that_of_its_line(tmp_path: Path) -> None:
    lines = ["Traceback (most recent call last):", '  File "my.py", line 3, in <module>', "    f()", "Odd: no words"]
    (tmp_path / "all.log").write_text("\n".join(f"[rank9]: {line}" for line in lines) + "\n")
    assert diagnose_logs([tmp_path / "all.log"]).first_rank == 9


def test_one_step_with_a_finite_loss_and_no_finite_gradient_is_no_failure(tmp_path: Path) -> None:
    step = " iteration    12125/   36000 | lm loss: 2.352391E+00 | loss scale: 1.0 | grad norm: nan |"
    (tmp_path / "a.log").write_text(step + "\n")
    assert diagnose_logs([tmp_path / "a.log"]).reason == ""
    (tmp_path / "a.log").write_text(step + "\n" + step.replace("12125", "12126") + "\n")
    found = diagnose_logs([tmp_path / "a.log"])
    assert found.cause and found.cause.signature == "gradient-not-finite"
