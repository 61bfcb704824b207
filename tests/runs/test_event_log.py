"""Events survive a writer that is killed at any instant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.small_disk import fill_disk, mount_small_disk
from primus.runs import events
from primus.runs.events import EventLog


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "events.jsonl")
    log.append("run_started", attempt=0)
    log.append("step", step=1, loss=2.5, text="a\nb \u2028 é")
    log.close()
    found = list(events.read_events(tmp_path / "new" / "events.jsonl"))
    assert [event["kind"] for event in found] == ["run_started", "step"]
    assert found[1]["text"] == "a\nb \u2028 é"
    assert found[0]["time"] <= found[1]["time"]


def test_events_that_a_full_disk_does_not_take_are_written_when_it_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mount_small_disk(tmp_path / "disk", 1) as disk:
        log = EventLog(disk / "events.jsonl")
        log.append("step", step=1)
        ballast = fill_disk(disk)
        # The last page of the file still takes some of these, the last of them in part.
        for step in range(2, 202):
            log.append("step", step=step, text="x" * 50)
        ballast.unlink()
        log.append("step", step=202)
        log.close()
        assert [event["step"] for event in events.read_events(disk / "events.jsonl")] == list(range(1, 203))
        assert capfd.readouterr().err.count("events.jsonl cannot be written") == 1


def test_events_that_a_disk_takes_only_at_the_end_are_written_on_closing(tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", 1) as disk:
        log = EventLog(disk / "events.jsonl")
        ballast = fill_disk(disk)
        log.append("step", step=1)
        ballast.unlink()
        log.close()
        assert [event["step"] for event in events.read_events(disk / "events.jsonl")] == [1]


def test_there_are_no_events_where_there_is_no_file(tmp_path: Path) -> None:
    assert list(events.read_events(tmp_path / "none.jsonl")) == []
    assert events.read_steps(tmp_path / "none.jsonl") == []


def test_a_writer_after_a_killed_one_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "kind": "step", "step": 1}\n{"time": 2, "ki')
    log = EventLog(path)
    log.append("step", step=2)
    log.close()
    assert [event["step"] for event in events.read_events(path)] == [1, 2]


def test_two_writers_never_share_a_line(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path / "e") for _ in range(2)]
    for step in range(100):
        logs[step % 2].append("step", step=step)
    for log in logs:
        log.close()
    assert [event["step"] for event in events.read_events(tmp_path / "e")] == list(range(100))


def test_of_a_repeated_step_the_last_counts(tmp_path: Path) -> None:
    lines = [{"time": 1, "kind": "step", "step": step, "loss": loss} for step, loss in [(1, 5), (2, 4), (3, 9), (2, 3)]]
    lines += [{"time": 1, "kind": "eval", "step": 2, "loss": 7}]
    (tmp_path / "e").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(event["step"], event["loss"]) for event in events.read_steps(tmp_path / "e")] == [(1, 5), (2, 3), (3, 9)]


WHOLE = b'{"time":1.5,"kind":"step","step":7,"loss":1.0}\n'


@pytest.mark.parametrize("cut", range(1, len(WHOLE)))
def test_a_line_that_was_cut_anywhere_is_passed_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "e"
    path.write_bytes(WHOLE + WHOLE[:cut])
    assert len(events.read_steps(path)) == 1
    log = EventLog(path)
    log.append("step", step=8)
    log.close()
    assert [event["step"] for event in events.read_steps(path)] == [7, 8]


garbage = st.binary(max_size=30) | st.sampled_from(
    [
        b"1e999",
        b'{"time": 1, "kind": "step", "step": "x"}',
        b"[]",
        b"{}",
        b'{"kind": 3}',
        b'{"kind": "step"}',
        b'{"time": "x", "kind": "step"}',
        b"null",
        b'"step"',
        b"\n\n",
    ]
)


@given(st.lists(garbage))
def test_garbage_between_events_is_passed_over(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.jsonl"
    path.write_bytes(b"\n".join([*lines, WHOLE]))
    assert events.read_steps(path)[-1]["step"] == 7


def test_steps_that_a_rewind_has_undone_do_not_count_until_they_are_taken_again(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (1, 2, 3, 4):
        log.append("step", step=step, loss=float(step))
    log.append("rewind", to_step=2)
    log.append("step", step=3, loss=0.5)
    log.close()
    found = events.read_steps(tmp_path / "events.jsonl")
    assert [(step["step"], step["loss"]) for step in found] == [(1, 1.0), (2, 2.0), (3, 0.5)]
