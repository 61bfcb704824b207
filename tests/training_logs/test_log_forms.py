"""Logs as launchers, containers and terminals leave them: prefixes, encodings, progress bars, steps of resumed runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frameworks.native.test_trainer import report
from primus.comparison.results.log_result import LogFacts, list_notes, summarize_log
from primus.errors import UsageError
from primus.runs.step_line import format_evaluation_line, format_step_line, shorten_line
from primus.training_logs.find_logs import find_logs
from primus.training_logs.read_log import TrainingLog, read_log

STEPS = (11, 12, 13)


def read_lines(tmp_path: Path, lines: list[str], encoding: str = "utf-8") -> TrainingLog:
    file = tmp_path / "job.log"
    file.write_text("".join(f"{line}\n" for line in lines), encoding)
    log = read_log(file)
    assert (log.num_unread, len(log.attempts)) == (0, 1)
    return log


def list_steps(log: TrainingLog) -> list[float]:
    return list(log.steps.columns["step"])


def format_megatron(step: int) -> str:
    return (
        f" iteration {step:8d}/     900 | consumed samples: {8 * step:12d} | elapsed time per iteration (ms): 5{step}.5"
        f" | learning rate: 2.000E-05 | lm loss: 3.{step}0000E+00 | grad norm: 1.{step} | skipped: 0 |"
    )


def format_titan(step: int) -> str:
    return (
        f"[titan] 2026-03-04 05:06:{step},500 - root - INFO - \x1b[31mstep: {step}  \x1b[32mloss:  3.{step}000 "
        " \x1b[33mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 7,131\x1b[39m"
    )


@pytest.mark.parametrize(
    "form",
    [
        "wandb: {line}",
        "2026-03-04T05:06:{step}.123456789Z {line}",
        "2026-03-04T05:06:{step}.123456789Z stdout F {line}",
        "trainer-0-1  | {line}",
        "15: {line}",
        "node-a12: [default7]:{line}",
        "Mar 04 05:06:{step} node7 train[4321]: {line}",
        "(RayTrainWorker pid=1234, ip=10.0.0.1) {line}",
        "\x1b[36m{line}\x1b[0m\r",
        '{{"log":"{line}\\n","stream":"stdout","time":"2026-03-04T05:06:{step}.5Z"}}',
    ],
)
def test_prefixes_of_launchers_and_containers_change_no_value(form: str, tmp_path: Path) -> None:
    for format_line, name in ((format_megatron, "megatron"), (format_titan, "torchtitan")):
        log = read_lines(tmp_path, [form.format(line=format_line(step), step=step) for step in STEPS])
        assert (log.format, list_steps(log)) == (name, [11, 12, 13])
        assert log.steps.columns["loss"][-1] == 3.13


def test_numbers_with_a_decimal_comma_are_refused_instead_of_read_as_thousands(tmp_path: Path) -> None:
    lines = [format_megatron(step) for step in STEPS]
    lines[1] = lines[1].replace("3.120000E+00", "3,120000E+00")
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in lines))
    log = read_log(tmp_path / "job.log")
    assert list_steps(log) == [11, 13] and log.num_unread == 1
    assert "a decimal comma" in log.unread[0].problem
    # No line can be read, and a record of Python has no separator of thousands.
    for text in ("".join(f"{line.replace('.', ',')}\n" for line in lines), "{'loss': 2,345, 'epoch': 0,1}\n"):
        (tmp_path / "job.log").write_text(text)
        with pytest.raises(UsageError, match=r"no line of .* can be read: .*: a decimal comma"):
            read_log(tmp_path / "job.log")


@pytest.mark.parametrize(("before", "after"), [("02-28", "03-01"), ("01-31", "02-01"), ("12-30", "12-31")])
def test_a_step_may_end_on_the_next_day(before: str, after: str, tmp_path: Path) -> None:
    clocks = [f"2026-{before} 23:59:54", f"2026-{before} 23:59:58", f"2026-{after} 00:00:02"]
    lines = [
        f"{clock},500 - root - INFO - step: {step}  loss:  3.5000  grad_norm:  1.0000"
        for step, clock in enumerate(clocks, 1)
    ]
    assert list(read_lines(tmp_path, lines).steps.columns["step_time_s"][1:]) == [4.0, 4.0]


def test_a_device_is_not_called_missing() -> None:
    with pytest.raises(UsageError, match="/dev/null: neither a file nor a folder"):
        find_logs(["/dev/null"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_files_of_windows_are_read(encoding: str, tmp_path: Path) -> None:
    lines = [format_megatron(step) for step in range(1, 2000)]
    log = read_lines(tmp_path, lines, encoding)
    assert (list_steps(log), log.num_lines) == (list(range(1, 2000)), 1999)


@pytest.mark.parametrize(
    ("first", "interval", "lag"), [(0, 10, 0), (0, 10, 1), (100, 10, 1), (100, 1, 0), (0, 1, 0), (2500, 500, 3)]
)
def test_records_of_a_resumed_trainer_have_the_steps_of_its_bar(
    first: int, interval: int, lag: int, tmp_path: Path
) -> None:
    lines = []
    for record in (1, 2, 3):
        step = first + interval * record
        lines += [f"\r  8%|##  | {step - lag}/9000 [0{record}:00<20:27,  3.33s/it]"]
        lines += [f"{{'loss': 1.{record}, 'grad_norm': 0.5, 'learning_rate': 2.7e-05, 'epoch': 0.{record}}}    "]
        lines += [f"{{'eval_loss': 2.{record}, 'eval_runtime': 3.5, 'epoch': 0.{record}}}"]
    log = read_lines(tmp_path, lines)
    steps = [first + interval * record for record in (1, 2, 3)]
    assert list_steps(log) == steps
    assert [each.values["step"] for each in log.evaluations] == steps
    assert (log.attempts[0].first_step, log.attempts[0].last_step) == (steps[0], steps[-1])


@pytest.mark.parametrize(
    ("missing", "digits", "expected", "note"),
    [
        (0, 2, 0, "counted, from 1"),
        (0, 4, 0, "counted, from 1"),
        (40, 4, 40, "by its epochs 40 before the first one are missing"),
        (300, 2, 300, "by its epochs about 300 before the first one are missing"),
    ],
)
def test_records_without_steps_and_bar_are_placed_by_their_epochs(
    missing: int, digits: int, expected: int, note: str, tmp_path: Path
) -> None:
    numbers = range(missing + 1, missing + 81)
    lines = [f"{{'loss': {9 - n / 999:.4f}, 'grad_norm': 0.5, 'epoch': {n / 150:.{digits}f}}}" for n in numbers]
    log = read_lines(tmp_path, lines)
    assert abs(list_steps(log)[0] - (expected + 1)) <= (8 if "about" in note else 0)
    assert len(list_steps(log)) == 80
    assert note in log.step_note or ("about" in note and "about" in log.step_note)
    lines[5:5] = ["\r  8%|##  | 600/9000 [01:00<20:27,  3.33s/it]"]
    assert read_lines(tmp_path, lines).step_note == "", "the bar shows the steps"


def test_records_with_steps_and_elapsed_time_are_not_counted(tmp_path: Path) -> None:
    swift = "{{'loss': 0.{}, 'memory(GiB)': 63.16, 'global_step/max_steps': '{}/176', 'elapsed_time': '{}'}}"
    log = read_lines(tmp_path, [swift.format(1, 55, "59m 38s"), swift.format(2, 60, "1h 1m 8s")])
    assert (list_steps(log), log.steps.columns["memory_gib"][0]) == ([55, 60], 63.16)
    assert log.steps.columns["step_time_s"][-1] == pytest.approx(18)
    records = [
        {"current_steps": step, "total_steps": 176, "loss": loss, "epoch": 0.6, "elapsed_time": elapsed}
        for step, loss, elapsed in ((55, 0.1, "23:59:58"), (60, 0.2, "1 day, 0:00:03"), (176, None, "1 day, 1:00:03"))
    ]
    log = read_lines(tmp_path, [json.dumps(record) for record in records])
    assert (log.format, list_steps(log)) == ("huggingface", [55, 60])
    assert log.steps.columns["step_time_s"][-1] == pytest.approx(1)


def test_losses_of_mlperf_may_have_lines_of_their_own(tmp_path: Path) -> None:
    def format_event(key: str, value: float, **metadata: float) -> str:
        event = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": key, "value": value}
        return f"[default0]::::MLLOG {json.dumps(event | {'metadata': metadata})}"

    lines = [format_event("global_batch_size", 8), format_event("train_loss", 11.5)]
    lines += [format_event("train_loss", 3 - 0.5 * step, samples_count=8 * step, lr=4e-4) for step in (1, 2)]
    log = read_lines(tmp_path, lines)
    assert (log.format, list_steps(log)) == ("mlperf", [1, 2])
    assert (log.steps.columns["loss"][-1], log.steps.columns["learning_rate"][-1]) == (2.0, 4e-4)


@pytest.mark.parametrize("callback_first", [True, False])
def test_a_record_that_llama_factory_prints_twice_counts_once(callback_first: bool, tmp_path: Path) -> None:
    lines = []
    for number in range(1, 5):
        prefix = f"[INFO|2026-02-03 04:05:{10 * number}] llamafactory.train.callbacks:143 >> "
        pair = [
            prefix + f"{{'loss': {number}.2500, 'learning_rate': 4.9e-05, 'epoch': 0.0{number}, 'throughput': 2.67}}",
            f"{{'loss': {number}.25003, 'grad_norm': 0.75, 'learning_rate': 4.9e-05, 'epoch': 0.0{number}}}",
        ]
        lines += pair if callback_first else reversed(pair)
    log = read_lines(tmp_path, lines)
    assert list_steps(log) == [1, 2, 3, 4]
    # The callback's own log has no other records, and a time stamp in each.
    log = read_lines(tmp_path, [line for line in lines if "throughput" in line])
    assert (list_steps(log), log.steps.columns["step_time_s"][-1]) == ([1, 2, 3, 4], 10.0)


def test_two_equal_records_of_one_trainer_are_two_steps(tmp_path: Path) -> None:
    log = read_lines(tmp_path, ["{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 0.1}"] * 2)
    assert list_steps(log) == [1, 2]


def test_bars_of_torchtune_give_steps_and_times_and_do_not_repeat_its_lines(tmp_path: Path) -> None:
    bars = [
        f"{1 + step // 3}|{step}|Loss: 2.{step}: {step}0%|##   | {step}/9 [00:{4 * step:02}<00:30,  4.00s/it]"
        for step in (1, 2, 2, 3, 4)
    ]
    log = read_lines(tmp_path, bars)
    assert (list_steps(log), log.num_repeated) == ([1, 2, 3, 4], 0)
    assert list(log.steps.columns["loss"]) == [2.1, 2.2, 2.3, 2.4]
    assert log.steps.columns["step_time_s"][1:].tolist() == [4.0, 4.0, 4.0]
    both = [text for bar in bars for text in (bar, f"Step {bar.split('|')[1]} | loss:2.{bar.split('|')[1]}11 lr:1e-05")]
    del both[4:6]  # the line of a step is printed once
    log = read_lines(tmp_path, both)
    assert (list_steps(log), log.num_ranks, log.num_repeated) == ([1, 2, 3, 4], 1, 0)
    assert (log.steps.columns["loss"][-1], log.steps.columns["step_time_s"][-1]) == (2.411, 4.0)


def test_iterations_of_litgpt_between_two_steps_are_part_of_the_next_step(tmp_path: Path) -> None:
    lines = [
        f"Epoch 1 | iter {number} step {number // 3} | loss train: 4.{number}, val: n/a | iter time: "
        f"{100 * number}.00 ms{' (step)' if number % 3 == 0 else ''} remaining time: 0:10:00"
        for number in range(1, 10)
    ]
    log = read_lines(tmp_path, lines)
    assert list_steps(log) == [1, 2, 3]
    assert list(log.steps.columns["loss"]) == [4.3, 4.6, 4.9]
    assert list(log.steps.columns["step_time_s"]) == pytest.approx([0.6, 1.5, 2.4])


def test_validation_of_automodel_is_an_evaluation_of_its_step(tmp_path: Path) -> None:
    step = "2026-05-06 07:08:09 | INFO | root | step 4 | epoch 0 | loss 0.5 | grad_norm 1.0 | lr 1.00e-05 | mem 2.0 GiB"
    name = '2026-05-06 07:08:19 | INFO | root | [val] name "held out" | step 4 | epoch 0 | loss 0.75 | lr 1.00e-05'
    plain = "2026-05-06 07:08:29 | INFO | root | [val] step 4 | epoch 0 | loss 0.8 | lr 1.00e-05 | num_label_tokens 7"
    log = read_lines(tmp_path, [step, name, plain])
    assert (list_steps(log), list(log.steps.columns["loss"])) == ([5], [0.5])
    assert [each.values for each in log.evaluations] == [{"step": 5, "loss": 0.75}, {"step": 5, "loss": 0.8}]


def test_losses_of_routers_are_columns_and_not_part_of_the_loss(tmp_path: Path) -> None:
    megatron = format_megatron(11).replace(
        "| grad norm", "| load_balancing_loss: 1.02E+00 | z_loss: 3.0E-02 | grad norm"
    )
    values = read_lines(tmp_path, [megatron]).steps.columns
    assert (values["loss"][0], values["load_balancing_loss"][0], values["router_z_loss"][0]) == (3.11, 1.02, 0.03)
    maxtext = (
        "completed step: 3, seconds: 1.5, TFLOP/s/device: 90.1, Tokens/s/device: 800.5, total_weights: 4096, "
        "loss: 8.520, lm_loss: 8.500, perplexity: 4914.769, moe_lb_loss: 0.020"
    )
    values = read_lines(tmp_path, [maxtext]).steps.columns
    assert (values["loss"][0], values["load_balancing_loss"][0]) == (8.5, 0.02)


@pytest.mark.parametrize(("status", "note"), [("success", "time to train: 10.25 min"), ("aborted", "status aborted")])
def test_the_time_to_train_of_mlperf_is_that_of_a_run_that_reached_its_target(
    status: str, note: str, tmp_path: Path
) -> None:
    def write(key: str, time_ms: int, **fields: object) -> str:
        return ":::MLLOG " + json.dumps({"key": key, "time_ms": time_ms, **fields})

    log = read_lines(
        tmp_path,
        [
            write("run_start", 1_000_000, event_type="INTERVAL_START"),
            write("train_loss", 1_500_000, value=3.25, metadata={"samples_count": 1536}),
            write("run_stop", 1_615_000, event_type="INTERVAL_END", metadata={"status": status}),
        ],
    )
    assert summarize_log(log, LogFacts()).time_to_train_s == (615.0 if status == "success" else None)
    assert any(note in each for each in list_notes(log, {}))


def test_short_lines_of_primus_have_the_values_of_the_long_ones(tmp_path: Path) -> None:
    reports = [report(step, loss=9.0 - step, mfu=0.25, step_time_s=0.25) for step in STEPS]
    long_lines = [format_step_line([each], 1_000, 0.0) for each in reports]
    long_lines.append(format_evaluation_line(13, 5.25, 190.566, 0.0))
    short_lines = [shorten_line(line, 200) for line in long_lines]
    long, short = (read_lines(tmp_path, lines) for lines in (long_lines, short_lines))
    assert (long.format, short.format) == ("megatron", "short")
    names = "step loss tokens_per_s_per_device memory_gib step_time_s grad_norm learning_rate tflops_per_device"
    for name in names.split():
        assert list(short.steps.columns[name]) == pytest.approx(list(long.steps.columns[name]), rel=1e-3), name
    assert list(short.steps.columns["mfu"]) == [0.25] * 3
    assert [each.values for each in short.evaluations] == [each.values for each in long.evaluations]
    assert list_steps(read_lines(tmp_path, [f"3: {shorten_line(line)}" for line in long_lines])) == list(STEPS)
