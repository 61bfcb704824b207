"""Logs of all trainers are recognized and read without loss; ranks, restarts and damage are told apart."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
import os
import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primus.comparison.results.log_result import LogFacts, list_notes, summarize_log
from primus.errors import UsageError
from primus.frameworks.megatron.logs import MegatronReader
from primus.training_logs.log_stream import BLOCK
from primus.training_logs.read_log import TrainingLog, list_readers, read_log

GENUINE: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "genuine_lines.yaml").read_text())


def read_text(tmp_path: Path, text: str, name: str = "auto") -> TrainingLog:
    file = tmp_path / "job.log"
    file.write_bytes(text.encode())
    return read_log(file, name)


def list_steps(log: TrainingLog) -> list[float]:
    return list(log.steps.columns["step"])


@pytest.mark.parametrize("entry", GENUINE, ids=[f"{i}-{each['format']}" for i, each in enumerate(GENUINE)])
def test_genuine_lines_are_recognized_and_read_without_loss(entry: dict[str, Any], tmp_path: Path) -> None:
    log = read_text(tmp_path, entry["lines"])
    assert (log.format, log.num_unread) == (entry["format"], 0)
    assert list_steps(log) == entry["steps"]
    last = {name: log.steps.columns[name][-1] for name in entry["last"]}
    assert last == pytest.approx(entry["last"], rel=1e-5, nan_ok=True)
    for name, value in entry.get("others", {}).items():
        assert getattr(log, name) == value, name
    assert len(log.attempts) == 1


def test_every_format_has_a_genuine_line() -> None:
    assert {each["format"] for each in GENUINE} == {reader.NAME for reader in list_readers()}


def format_line(step: int, *, prefix: str = "", time_ms: float = 500.0, loss: str = "2.5E+00") -> str:
    """A line of Megatron-LM."""
    loss_segment = f" lm loss: {loss} |" if loss else ""
    return (
        f"{prefix} iteration {step:8d}/     100 | consumed samples: {8 * step:12d} | elapsed time per iteration (ms):"
        f" {time_ms:.1f} | learning rate: 1.000000E-04 | global batch size:     8 |{loss_segment} loss scale: 1.0 |"
        " grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def join_lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_restart_discards_the_steps_that_are_repeated(tmp_path: Path) -> None:
    first = [format_line(step, loss=f"{step}.0E+00") for step in (1, 2, 3, 4, 5)]
    again = [format_line(step, loss=f"{step}.5E+00", time_ms=700) for step in (3, 4, 5, 6)]
    log = read_text(tmp_path, join_lines(*first, "Traceback (most recent call last):", *again))
    assert list_steps(log) == [1, 2, 3, 4, 5, 6]
    assert list(log.steps.columns["loss"]) == [1, 2, 3.5, 4.5, 5.5, 6.5]
    assert [(each.first_step, each.last_step, each.num_steps) for each in log.attempts] == [(1, 5, 5), (3, 6, 4)]
    assert log.num_ranks == 1


def test_a_long_log_with_restarts_and_odd_lines_equals_one_that_is_read_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [format_line(step, time_ms=500 + step % 7) for step in range(1, 3000)]
    lines[1500:1500] = [" validation loss at iteration 1500 on validation set | lm loss value: 2.000000E+00 |"]
    lines[700] = format_line(701, loss="")
    lines += ["restarted", *(format_line(step, time_ms=600) for step in range(2501, 4001))]
    fast = read_text(tmp_path, join_lines(*lines))
    assert_equal_logs(fast, read_line_by_line(tmp_path, join_lines(*lines), monkeypatch))
    assert list_steps(fast) == list(range(1, 4001))
    assert (len(fast.attempts), len(fast.evaluations), fast.num_nonfinite_losses) == (2, 1, 1)
    assert math.isnan(fast.steps.columns["loss"][700])


def test_interleaved_ranks_become_one_series_of_the_last_rank(tmp_path: Path) -> None:
    lines = [
        format_line(step, prefix=f"[default{rank}]:[2025-05-27 15:23:{step:02}]", loss="" if rank < 3 else "1.5E+00")
        for step in (1, 2, 3)
        for rank in (0, 3, 1)
    ]
    lines[2], lines[4] = lines[4], lines[2]  # the last rank prints step 2 before rank 1 has printed step 1
    log = read_text(tmp_path, join_lines(*lines))
    assert list_steps(log) == [1, 2, 3]
    assert list(log.steps.columns["loss"]) == [1.5, 1.5, 1.5]
    assert (log.num_ranks, len(log.attempts), log.num_repeated) == (3, 1, 6)


@pytest.mark.parametrize("delay", [1, 50, 63])
def test_a_rank_that_prints_late_belongs_to_the_same_attempt(delay: int, tmp_path: Path) -> None:
    lines = []
    for step in range(1, 201 + delay):
        lines += [format_line(step, prefix="[rank1]:", loss="1.5E+00")] if step <= 200 else []
        lines += [format_line(step - delay, prefix="[rank0]:", loss="")] if step > delay else []
    log = read_text(tmp_path, join_lines(*lines))
    assert list_steps(log) == list(range(1, 201))
    assert (log.num_ranks, len(log.attempts), log.num_repeated) == (2, 1, 200)
    assert set(log.steps.columns["loss"]) == {1.5}


def test_restart_of_several_ranks_is_one_attempt(tmp_path: Path) -> None:
    lines = [format_line(step, prefix=f"[rank{rank}]:") for step in (1, 2, 3) for rank in (0, 1)]
    lines += [format_line(step, prefix=f"[rank{rank}]:", time_ms=900) for step in (2, 3, 4) for rank in (1, 0)]
    log = read_text(tmp_path, join_lines(*lines))
    assert list_steps(log) == [1, 2, 3, 4]
    assert [(each.first_step, each.last_step) for each in log.attempts] == [(1, 3), (2, 4)]


def test_two_ranks_in_one_line_are_two_steps(tmp_path: Path) -> None:
    log = read_text(tmp_path, join_lines(format_line(1) + format_line(2), format_line(3)))
    assert (list_steps(log), log.num_unread) == ([1, 2, 3], 0)


def test_a_line_that_is_printed_twice_counts_once(tmp_path: Path) -> None:
    log = read_text(
        tmp_path,
        join_lines(*(format_line(step, loss=loss) for step, loss in ((1, ""), (1, ""), (2, "3.0"), (2, "3.0")))),
    )
    assert (list_steps(log), log.num_repeated, len(log.attempts)) == ([1, 2], 2, 1)


def test_a_cut_line_is_counted_and_shown(tmp_path: Path) -> None:
    whole = [format_line(step) for step in (1, 2, 3)]
    log = read_text(tmp_path, join_lines(whole[0], whole[1][:60], whole[2]))
    assert list_steps(log) == [1, 3]
    assert log.num_unread == 1
    assert (log.unread[0].number, log.unread[0].text) == (2, whole[1][:60].strip())


def test_the_end_of_a_log_that_is_cut_off_is_not_a_value(tmp_path: Path) -> None:
    last = format_line(3, loss="2.504220E+00")
    log = read_text(tmp_path, join_lines(format_line(1), format_line(2)) + last[: last.index("04220E")])
    assert list_steps(log) == [1, 2], "2.5 would be a loss that the run never had"
    assert log.is_cut_off and log.num_unread == 0
    whole = read_text(tmp_path, join_lines(format_line(1), format_line(2)) + last)
    assert list_steps(whole) == [1, 2, 3] and not whole.is_cut_off


@pytest.mark.parametrize("newline", ["\r\n", "\x1b[0m\n", "\r"])
def test_newlines_and_colors_of_terminals_are_no_part_of_values(newline: str, tmp_path: Path) -> None:
    entry = next(each for each in GENUINE if each["format"] == "torchtitan")
    text = entry["lines"].replace("\n", newline).replace("loss:", "\x1b[32mloss:").replace("tps:", "\x1b[39mtps:")
    log = read_text(tmp_path, text)
    assert list_steps(log) == entry["steps"]
    assert log.steps.columns["tokens_per_s_per_device"][-1] == 5593
    assert log.steps.columns["step_time_s"][-1] == pytest.approx(1.4648)
    assert log.has_derived_times


def test_lines_longer_than_a_block_and_compressed_logs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "job.log.gz"
    lines = [format_line(1), "x" * (2 * BLOCK), format_line(2), *(format_line(step) for step in range(3, 2000))]
    file.write_bytes(gzip.compress(join_lines(*lines).encode()))
    log = read_log(file)
    assert (list_steps(log), log.num_lines) == (list(range(1, 2000)), 2000)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress])
def test_a_compressed_log_is_read_as_far_as_it_goes(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    whole = compress(join_lines(*(format_line(step, loss=f"{2 + 1 / step:.6E}") for step in range(1, 9000))).encode())
    file = tmp_path / "job.log"
    file.write_bytes(whole)
    assert len(read_log(file).steps) == 8999 and not read_log(file).damage
    file.write_bytes(whole[: len(whole) * 3 // 4])
    log = read_log(file)
    assert list_steps(log) == list(range(1, len(log.steps) + 1)) and 100 < len(log.steps) < 8999
    assert any("damaged or cut off" in note for note in list_notes(log, {}))
    for place in (3, 40):
        file.write_bytes(whole[:place] + bytes(200) + whole[200 + place :])
        with pytest.raises(UsageError, match=r"job\.log"):
            read_log(file)
    file.write_bytes(b"\x28\xb5\x2f\xfd" + whole)
    with pytest.raises(UsageError, match="compressed by zstd"):
        read_log(file)


def test_steps_of_hugging_face_are_those_of_the_progress_bar(tmp_path: Path) -> None:
    lines = []
    for record in (1, 2, 3, 4):
        lines += [f"\r {record}%|##  | {10 * record}/100 [00:{20 * record:02}<03:20,  2.00s/it]"]
        lines += [f"\r{{'loss': '{5 - record}', 'grad_norm': '1.5', 'epoch': '{record / 10}'}}\n"]
    log = read_text(tmp_path, "".join(lines) + "{'train_runtime': '80.5', 'train_loss': '2.5', 'epoch': '0.4'}\n")
    assert list_steps(log) == [10, 20, 30, 40]
    assert list(log.steps.columns["loss"]) == [4, 3, 2, 1]
    assert log.steps.columns["step_time_s"][-1] == pytest.approx(2.0)
    assert log.settings["train_runtime"] == "80.5"


def test_the_state_of_a_hugging_face_trainer_has_all_records(tmp_path: Path) -> None:
    records = [{"epoch": 0.1 * i, "loss": 3.0 - i, "learning_rate": 1e-4, "step": 10 * i} for i in (1, 2)]
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": [*records, {"eval_loss": 2.0, "step": 20}]}, indent=2))
    log = read_log(file)
    assert (log.format, list_steps(log), len(log.evaluations)) == ("huggingface", [10, 20], 1)
    file.write_text("{}")
    with pytest.raises(UsageError, match="not the state of a trainer"):
        read_log(file)


def test_settings_are_those_that_the_log_prints(tmp_path: Path) -> None:
    table = ["---- arguments ----", "  global_batch_size ............................... 8", "  seq_length ... 4096"]
    log = read_text(tmp_path, join_lines(*table, format_line(1)))
    assert log.settings == {"global_batch_size": "8", "seq_length": "4096"}


def test_memory_is_bounded_and_the_thinned_steps_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus.training_logs.step_table.StepTable.__init__.__defaults__", (1000,))
    log = read_text(tmp_path, join_lines(*(format_line(step) for step in range(1, 5001))))
    assert log.steps.stride == 8
    assert list_steps(log) == list(range(1, 5001, 8))
    assert log.attempts[0].num_steps == 5000 and summarize_log(log, LogFacts()).last_step == 5000


def test_torchtitan_losses_of_other_pipeline_stages_do_not_count(tmp_path: Path) -> None:
    line = (
        "[rank{}]:[titan] 2026-02-24 19:46:1{},508 - root - INFO - step:  {}  loss: {}  memory:  {}GiB(1.00%)  tps: 9\n"
    )
    text = "".join(
        line.format(rank, step, step, loss, memory)
        for step in (1, 2)
        for rank, loss, memory in ((0, "-1.00000", "9.00"), (1, " 7.50000", "8.00"))
    )
    log = read_text(tmp_path, text)
    assert list(log.steps.columns["loss"]) == [7.5, 7.5]
    assert list(log.steps.columns["memory_gib"]) == [9, 9]


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("", "no steps of any known format in 0 lines", "the file is empty"),
        ("hello\nworld\n", "no steps of any known format in", "the first line is: hello"),
        ('{"results": [1, 2]}\n', "no steps of any known format", '{"results"'),
        ("\x00\xff" * 100, "no steps of any known format", "the file is binary"),
    ],
)
def test_a_file_without_steps_is_one_message_with_its_first_line(
    text: str, problem: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as failure:
        read_text(tmp_path, text)
    assert problem in failure.value.problem
    assert hint in failure.value.hint


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown format") as failure:
        read_text(tmp_path, "", "megatorn")
    assert "megatron" in failure.value.hint


def test_the_wrong_format_says_which_line_it_saw(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no steps of MaxText"):
        read_text(tmp_path, format_line(1), "maxtext")


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_lines_are_counted_and_nothing_else_happens(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    data = bytearray("".join(rng.choice(GENUINE)["lines"] for _ in range(3)).encode())
    for _ in range(rng.randint(1, 12)):
        place = rng.randrange(len(data))
        if rng.random() < 0.5:
            del data[place : place + rng.randint(1, 40)]
        data[place:place] = rng.choice([b"nan", b"\n", b"|", b"1e999", b"-", b"9" * 30, b"{", b'"', b"\xff", b"\0"])
    file = tmp_path / "job.log"
    file.write_bytes(data)
    try:
        log = read_log(file)
    except UsageError:
        return
    steps = list_steps(log)
    assert steps == sorted(set(steps)) and all(map(math.isfinite, steps))
    assert all(len(column) == len(steps) for column in log.steps.columns.values())


def list_rank_lines(ranks: int, prefix: str, *, twice: bool = False) -> list[str]:
    """Lines of all ranks in an order that changes, with a restart, a NaN loss, and steps of other widths."""
    rng = random.Random(ranks)
    lines = []
    for attempt, steps in enumerate((range(1, 700), range(500, 1300))):
        for step in steps:
            clock = f"{attempt}{step // 3600}:{step // 60 % 60:02}:{step % 60:02}"
            group = []
            for rank in rng.sample(range(ranks), ranks):
                # Primus prints memory; the first ranks print no loss.
                loss = "" if rank < ranks - 2 else "nan" if step % 97 == 0 else f"{9 / step + attempt:.6E}"
                line = format_line(
                    step, prefix=prefix.format(rank=rank, clock=clock), time_ms=900 + step % 201, loss=loss
                )
                group += [f"{line} hip mem usage/free/total/usage_ratio: {rank}.25GB/1.0GB/2.0GB/50% |"] * (1 + twice)
            lines += group
    return lines


@pytest.mark.parametrize(
    ("ranks", "prefix", "twice"),
    [
        (1, "[2025-05-27 {clock}]", False),
        (2, "[2025-05-27 {clock}.123456]", False),
        (2, "[20251121 {clock}][rank-{rank}/2][INFO ] :", True),
        (12, "[default{rank}]:[2025-05-27 {clock}]", False),
        (12, "[rank{rank}]:", False),
    ],
)
def test_many_lines_of_ranks_equal_those_that_are_read_line_by_line(
    ranks: int, prefix: str, twice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = join_lines(*list_rank_lines(ranks, prefix, twice=twice))
    fast = read_text(tmp_path, text)
    slow = read_line_by_line(tmp_path, text, monkeypatch)
    assert list_steps(fast) == list(range(1, 1300))
    assert_equal_logs(fast, slow)
    assert (len(fast.attempts), fast.num_ranks) == (2, 2 * ranks if twice else ranks)


def test_most_lines_of_a_long_log_are_read_as_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what makes a log of a million lines quick to read; the values would be the same."""
    reader, num_lines = MegatronReader.read_line, 0

    def count_line(self: MegatronReader, line: bytes) -> Any:
        nonlocal num_lines
        num_lines += 1
        return reader(self, line)

    monkeypatch.setattr(MegatronReader, "read_line", count_line)
    log = read_text(tmp_path, join_lines(*(format_line(step, loss=f"{step}.5E+00") for step in range(1, 2001))))
    assert list_steps(log) == list(range(1, 2001))
    assert num_lines < 500  # the first lines of each layout: numbers grow by a digit


def read_line_by_line(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> TrainingLog:
    """Read a log as where NumPy is not installed."""
    with monkeypatch.context() as patch:
        patch.setattr("primus.frameworks.megatron.logs.MegatronReader.scan_block", lambda self, block: None)
        return read_text(tmp_path, text)


def assert_equal_logs(a: TrainingLog, b: TrainingLog) -> None:
    """Bit by bit, except for NaN, which has several bit patterns."""
    assert list(a.steps.columns) == list(b.steps.columns) or a.steps.columns.keys() == b.steps.columns.keys()
    for name, column in a.steps.columns.items():
        for ours, theirs in zip(column, b.steps.columns[name], strict=True):
            assert struct.pack("d", ours) == struct.pack("d", theirs) or (ours != ours and theirs != theirs), name
    for name in TrainingLog.__struct_fields__:
        if name != "steps":
            assert getattr(a, name) == getattr(b, name), name


@given(seed=st.integers(0, 10**9))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_equal_lines_in_logs_that_are_damaged_and_out_of_order(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    text = format_damaged_log(rng)
    for name, size in (("log_stream.FIRST_BLOCK", 4096), ("log_stream.BLOCK", 16384), ("read_log.MERGED_ROWS", 100)):
        monkeypatch.setattr(f"primus.training_logs.{name}", rng.randint(1, 4) * size)
    try:
        slow = read_line_by_line(tmp_path, text, monkeypatch)
    except UsageError:
        return
    assert_equal_logs(read_text(tmp_path, text), slow)


NUMBERS = (
    "{:.6E}",
    "{:.3f}",
    "{:.0f}",
    "{:.12f}",
    "{:.2e}",
    "-{:.4f}",
    "{:,.1f}",
    "{:.1f}/2.5",
    "{:.1f} (avg 2.5)",
    "nan",
    "inf",
)


def format_damaged_log(rng: random.Random) -> str:
    """Lines of steps of Megatron-LM with numbers of many forms, of several ranks, restarted, swapped, cut and mixed."""
    ranks, stamped = rng.choice([1, 1, 1, 2, 5]), rng.random() < 0.5
    prefix = rng.choice(["", "[default{rank}]:", "[rank{rank}]: ", "[20251121 {clock}][rank-{rank}/8][INFO ] :"])
    forms = [rng.choice(NUMBERS) for _ in range(3)]
    lines, step = [], rng.choice([1, 90, 99_990])
    for _ in range(rng.randint(100, 500)):
        if rng.random() < 0.01:
            step = max(1, step - rng.randint(0, 40))
        clock = f"{step // 3600 % 24:02}:{step // 60 % 60:02}:{step % 60:02}"
        for rank in rng.sample(range(ranks), ranks):
            value = rng.choice([rng.random(), 10 ** rng.uniform(-30, 20), 0.0]) if rng.random() < 0.1 else rng.random()
            stamp = f" [2025-05-27 {clock}]" if stamped else ""
            grad_norm, lr, loss = (form.format(value) for form in forms)
            lines.append(
                f"{prefix.format(rank=rank, clock=clock)}{stamp} iteration {step:8d}/ 1000000 | elapsed time per"
                f" iteration (ms): {1000 * value:.1f} | learning rate: {lr} |"
                + (f" lm loss: {loss} |" if rng.random() > 0.02 else "")
                + f" grad norm: {grad_norm} | number of skipped iterations: {int(rng.random() < 0.02):3d} |"
            )
        step += 1
    for _ in range(rng.randint(0, 12)):
        place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0:
            lines[place], lines[other] = lines[other], lines[place]
        elif kind == 1:
            lines.insert(place, lines[other])
        elif kind == 2:
            lines[place] = lines[place][: rng.randrange(len(lines[place]))]
        elif kind == 3:
            lines[place] += lines[other]
        elif kind == 4:
            lines.insert(place, rng.choice(["a line of a launcher", "  seq_length ... 4096", "iteration 7", "|"]))
        else:
            character = rng.randrange(max(1, len(lines[place])))
            lines[place] = lines[place][:character] + rng.choice("0|:x ") + lines[place][character + 1 :]
    return join_lines(*lines)


def test_a_pipe_is_read_once_and_may_be_compressed(tmp_path: Path) -> None:
    text = join_lines("a line of a launcher", *(format_line(step) for step in range(1, 900))).encode()
    for data in (text, gzip.compress(text)):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_bytes, args=(data,))
        writer.start()
        log = read_log(pipe)
        writer.join()
        pipe.unlink()
        assert (list_steps(log), log.num_lines, log.num_bytes) == (list(range(1, 900)), 900, len(text))


def test_a_line_of_many_megabytes_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    with file.open("wb") as log_file:
        log_file.write((format_line(1) + "\n").encode())
        log_file.seek(200_000_000, os.SEEK_CUR)
        log_file.write(("\n" + format_line(2) + "\n").encode())
    assert list_steps(read_log(file, "megatron")) == [1, 2]


def test_progress_bars_without_newlines_are_lines(tmp_path: Path) -> None:
    bars = "".join(f"\r{step}%|#  |" for step in range(2 * BLOCK // 10))
    log = read_text(tmp_path, f"{format_line(1)}\n{bars}\r{format_line(2)}\r\n", "megatron")
    assert list_steps(log) == [1, 2]
