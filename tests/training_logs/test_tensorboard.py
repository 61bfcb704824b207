"""Event files of TensorBoard are read without tensorboard, whatever wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.errors import UsageError
from primus.training_logs.read_log import read_log


def write_events(folder: Path, rows: list[tuple[int, dict[str, float]]]) -> Path:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, scalars in rows:
        for tag, value in scalars.items():  # an event for each, as torch's writer does
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=1.7e9 + 2 * step, step=step, summary=summary))
    writer.close()
    return next(folder.glob("*.tfevents.*"))


def test_scalars_of_a_step_are_one_row(tmp_path: Path) -> None:
    rows = [(step, {"lm loss": 9.5 - step, "grad-norm": 0.5, "params": 1.0}) for step in range(1, 200)]
    log = read_log(write_events(tmp_path, rows))
    assert (log.format, len(log.steps)) == ("tensorboard", 199)
    assert log.steps.columns["loss"][-1] == 9.5 - 199
    assert set(log.steps.columns) == {"step", "loss", "grad_norm", "step_time_s"}
    assert log.has_derived_times and log.steps.columns["step_time_s"][-1] == 2.0


def test_values_of_torchtitan_are_read_in_our_units(tmp_path: Path) -> None:
    row = {
        "loss_metrics/global_avg_loss": 5.25, "mfu(%)": 42.0, "throughput(tps)": 512.0, "tflops": 8.0,
        "time_metrics/end_to_end(s)": 0.5, "memory/max_reserved(GiB)": 3.0, "lr": 0.125, "grad_norm": 2.0,
    }  # fmt: skip
    log = read_log(write_events(tmp_path, [(1, row), (2, row)]))
    assert {name: values[-1] for name, values in log.steps.columns.items()} == {
        "step": 2, "loss": 5.25, "mfu": pytest.approx(0.42), "tokens_per_s_per_device": 512.0, "tflops_per_device": 8.0,
        "step_time_s": 0.5, "memory_gib": 3.0, "learning_rate": 0.125, "grad_norm": 2.0,
    }  # fmt: skip


def test_an_event_file_that_is_cut_off_ends_at_the_last_whole_event(tmp_path: Path) -> None:
    file = write_events(tmp_path, [(step, {"train/loss": 1.0}) for step in range(1, 50)])
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert 10 < len(read_log(file).steps) < 40


def test_another_file_of_that_name_is_one_message(tmp_path: Path) -> None:
    file = tmp_path / "events.out.tfevents.1.host"
    file.write_bytes(b"hello, world, this is text\n" * 10)
    with pytest.raises(UsageError, match="not an event file"):
        read_log(file)
