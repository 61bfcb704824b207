"""`compare extract` prints what logs say, merges files of one run, and writes results that can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.comparison.results.result import load_result

LINE = (
    " [2025-05-27 15:{minute:02}:{second:02}] iteration {step:8}/     100 | consumed samples: {samples:12}"
    " | elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-04 | global batch size:    64"
    " | lm loss: {loss:.6E} | loss scale: 1.0"
    " | grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def format_lines(*steps: int, ms: float = 500.0) -> str:
    return "".join(
        LINE.format(minute=step // 60, second=step % 60, step=step, samples=64 * step, ms=ms, loss=10 / step)
        for step in steps
    )


def run_extract(words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    assert main(["direct", "--", "compare", "extract", *words.split()]) == code
    said = capsys.readouterr()
    return json.loads(said.out) if "--json" in words else said.out + said.err


def test_rates_follow_from_the_batch_the_length_and_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(format_lines(*range(1, 31)))
    assert "add --devices and --seq-length" in run_extract(str(log), capsys)
    (found,) = run_extract(f"{log} --devices 8 --seq-length 2048 --json", capsys)
    # 64 samples of 2048 tokens in half a second on 8 devices.
    assert found["summary"]["tokens_per_s_per_device"] == pytest.approx(64 * 2048 / 0.5 / 8)
    assert (found["format"], found["summary"]["num_steps"]) == ("megatron", 30)


def test_files_of_ranks_and_attempts_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt, steps, ms in ((0, range(1, 21), 500.0), (1, range(11, 31), 400.0)):
        for rank in (0, 1):
            file = tmp_path / f"job/attempt_{attempt}/rank_{rank}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            # The last rank prints, as in Megatron-LM.
            file.write_text(format_lines(*steps, ms=ms) if rank == 1 else "waiting\n")
    (tmp_path / "job/latest.log").symlink_to("attempt_1/rank_1.log")
    (tmp_path / "job/other.txt").write_text("nothing to see\n")
    found = run_extract(f"{tmp_path} --json", capsys)
    assert len(found) == 1
    assert [(each["first_step"], each["last_step"]) for each in found[0]["attempts"]] == [(1, 20), (11, 30)]
    assert found[0]["steps"]["step"] == list(range(1, 31))
    assert found[0]["steps"]["step_time_s"] == pytest.approx([0.5] * 10 + [0.4] * 20)


def test_a_result_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "  seq_length ........ 2048\n  world_size ........ 8\n" + format_lines(*range(1, 31)) + "iteration 31/"
    )
    words = f"{log} --output {tmp_path / 'results'} --model llama3.1_8B --json"
    assert "add --platform" in run_extract(words.removesuffix(" --json"), capsys, code=2)
    (found,) = run_extract(f"{words} --platform nvidia", capsys)
    result = load_result(Path(found["result"]))
    assert (result.platform, result.source, result.cell.framework) == ("nvd", "log", "megatron")
    assert result.steps.number == list(range(1, 31))
    assert result.performance_metrics.tokens_per_second_per_gpu == pytest.approx(64 * 2048 / 0.5 / 8)
    assert result.training_config.sequence_length == 2048
    assert any("within a line" in note for note in result.notes)


def test_what_cannot_be_read_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for words, expected in (
        ("", "needs WHAT"),
        ("missing.log", "no such file or folder"),
        (str(tmp_path / "empty"), "the folder has no logs"),
    ):
        assert expected in run_extract(words, capsys, code=2)


def test_a_run_folder_is_read_from_its_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "output/mine/20251010_101010-abcd"
    (run / "logs").mkdir(parents=True)
    (run / "metadata.json").write_text("{}")
    (run / "logs/rank_0.log").write_text(format_lines(1, 2))
    events: list[dict[str, object]] = [{"kind": "run_started", "seq_length": 64, "world_size": 2}]
    events += [{"kind": "step", "step": step, "loss": 5.0, "step_time_s": 0.25} for step in (1, 2, 3, 3, 4)]
    run.joinpath("events.jsonl").write_text("".join(f"{json.dumps({'time': 1.0, **event})}\n" for event in events))
    (found,) = run_extract(f"{tmp_path / 'output'} --json", capsys)
    assert (found["log"], found["trainer"]) == (str(run), "primus")
    assert found["steps"]["step"] == [1, 2, 3, 4]
    assert found["settings"]["seq_length"] == "64"
