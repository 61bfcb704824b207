"""Real trainings over gloo are watched, looked at and restarted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import cli

pytestmark = [pytest.mark.native, pytest.mark.slow]
EXPERIMENT = """
work_group: t
user_name: t
exp_name: small
workspace: out
modules:
  pre_trainer:
    framework: native
    config: pre_trainer.yaml
    model: llama_quickstart.yaml
    overrides: {
      mock_data: true, seq_length: 16, train_iters: 40, micro_batch_size: 1, global_batch_size: 2, bf16: false,
      num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 128,
      lr: 1.0e-3, save_interval: 10, eval_interval: null, log_interval: 50, deterministic: true}
"""
WORDS = ("--", "train", "pretrain", "--config", "small.yaml")
LONG_AFTER_SAVING = ("--save_interval", "40", "--train_iters", "80")


def latest(folder: Path) -> Path:
    return (folder / "out/small/latest").resolve()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    file = latest(folder) / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def pids(folder: Path, attempt: int = 0) -> list[int]:
    files = sorted((latest(folder) / f"logs/attempt_{attempt}").glob("rank_*.heartbeat.json"))
    return [json.loads(file.read_text())["pid"] for file in files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    return tmp_path


def any_step_after(folder: Path, number: int) -> bool:
    return any(event["step"] > number for event in events(folder, "step"))


def start_endless_training(folder: Path, *options: str) -> Any:
    return cli.started("direct", "--nproc", "2", *options, *WORDS, "--train_iters", "100000", cwd=folder)


def test_a_killed_rank_changes_no_loss(folder: Path) -> None:
    options = ("--max-restarts", "1", "--restart-delay", "0")
    with cli.started("direct", "--nproc", "2", *options, *WORDS, *LONG_AFTER_SAVING, cwd=folder) as process:
        cli.wait_for(lambda: (folder / "out").exists() and any_step_after(folder, 43), "steps after a checkpoint", 60)
        killed_at = time.time()
        os.kill(pids(folder)[1], signal.SIGKILL)
        out, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert "attempt 0 failed: rank 1 was killed by SIGKILL\n" in out
    assert events(folder, "restart")[0]["time"] - killed_at < 5
    assert events(folder, "failure")[0]["rank"] == 1, "not the one that lost its connection"
    losses = Counter((event["step"], event["loss"]) for event in events(folder, "step"))
    assert sorted(step for step, _ in losses) == list(range(1, 81)), "a step that ran twice had the same loss"
    # The first step after the checkpoint needs its weights, the next ones the moments of the optimizer.
    assert {(step, count) for (step, _), count in losses.items()} >= {(41, 2), (42, 2), (43, 2), (40, 1), (80, 1)}


def test_a_stopped_rank_is_named_and_both_stacks_are_there(folder: Path) -> None:
    with start_endless_training(folder, "--hang-timeout", "10") as process:  # loading PyTorch may take a while
        cli.wait_for(lambda: (folder / "out").exists() and len(events(folder, "step")) > 20, "steps", 60)
        found = pids(folder)
        os.kill(found[1], signal.SIGSTOP)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "run failed: rank 1 hangs: no progress for" in errors
    (hang,) = events(folder, "hang")
    standings = {each["rank"]: each for each in hang["standings"]}
    assert standings[0]["waits"] is True
    assert standings[1]["state"] == "T"
    for rank in (0, 1):
        assert "MainThread" in (latest(folder) / f"logs/attempt_0/rank_{rank}.stacks.txt").read_text()
    cli.wait_for(lambda: not any(map(psutil.pid_exists, found)), "the end of both", 5)


def test_no_rank_outlives_an_agent_that_is_killed(folder: Path) -> None:
    with start_endless_training(folder) as process:
        cli.wait_for(lambda: (folder / "out").exists() and len(events(folder, "step")) > 5, "steps", 60)
        found = pids(folder)
        os.kill(found[1], signal.SIGSTOP)  # this one cannot even see that its agent is gone
        os.kill(psutil.Process(found[0]).ppid(), signal.SIGKILL)
        process.communicate(timeout=30)
        cli.wait_for(lambda: not any(map(psutil.pid_exists, found)), "the end of both ranks", 5)
    assert process.returncode == 137
