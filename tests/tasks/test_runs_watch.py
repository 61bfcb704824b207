"""`runs watch` as a page, line by line and as JSON; of runs in any state."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import cli, terminal
from primus.run_report.watch import WatchedRun, draw_curve, format_change, format_view, read_last_lines
from primus.runs.events import EventLog
from primus.runs.store import Run, RunMetadata, RunOutcome, create_run

WORDS = ("direct", "--", "runs", "watch")


class WatchedFolder:
    """A run folder that is being written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.log = EventLog(run.events)
        self.log.append("run_started", train_iters=100, step=0)

    def step(self, number: int, loss: float | None = 5.0) -> None:
        self.log.append("step", step=number, loss=loss, tokens_per_s=1234.5, step_time_s=0.25, memory_gib=1.5, mfu=None)

    def end(self, state: Any, reason: str = "", code: int = 0) -> None:
        self.log.append("run_ended", state=state)
        self.run.update_metadata(ended=2.0, outcome=RunOutcome(state=state, exit_code=code, reason=reason))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[WatchedFolder]:
    outcome = RunOutcome(state="running")
    metadata = RunMetadata(
        id="20260101_120000-ab12", name="night", task="train pretrain", created=1.0, started=1.0, outcome=outcome
    )
    found = WatchedFolder(create_run(tmp_path / "output/night" / metadata.id, metadata))
    yield found
    found.log.close()


def test_lines_follow_a_run_until_it_is_done(folder: WatchedFolder, tmp_path: Path) -> None:
    folder.step(1)
    with folder.run.hold_lock(), cli.started(*WORDS, "night", "--interval", "0.05", cwd=tmp_path) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first == "night 20260101_120000-ab12: step 1/100 (1 %), loss 5, 1,234 tokens/s\n"
        assert process.stdout.readline().endswith(": running\n")
        folder.step(2, 4.5)
        assert "step 2/100 (2 %), loss 4.5" in process.stdout.readline()
        folder.log.append("hang", problem="rank 1 hangs")
        folder.log.append("restart", attempt=1, reason="rank 1 hangs")
        assert [process.stdout.readline().partition(": ")[2] for _ in range(2)] == [
            "hang: rank 1 hangs\n",
            "restart 1: rank 1 hangs\n",
        ]
        folder.end("done")
        assert process.stdout.readline().endswith(": done\n")
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(("state", "code", "expected"), [("done", 0, 0), ("failed", 3, 3), ("running", 0, 1)])
def test_a_run_that_has_ended_is_shown_once_and_gives_its_exit_code(
    state: str, code: int, expected: int, folder: WatchedFolder, tmp_path: Path
) -> None:
    folder.step(1)
    if state != "running":  # else its launcher was killed
        folder.end(state, "out of memory\x1b[31m" * bool(code), code)
    done = cli.run(*WORDS, cwd=tmp_path)
    assert done.returncode == expected
    last = done.stdout.splitlines()[-1].partition(": ")[2]
    assert last == {"failed": "failed: out of memory\\x1b[31m", "running": "died"}.get(state, state)


def test_ctrl_c_leaves_the_page_and_the_cursor_and_the_run(folder: WatchedFolder, tmp_path: Path) -> None:
    for number in range(1, 21):
        folder.step(number, 8 - number / 10)
    (folder.run.directory / "logs").mkdir(exist_ok=True)
    (folder.run.directory / "logs/rank_0.log").write_text("one\ntwo\nthree\nfour\nhalf a li")
    argv = ["-m", "primus", *WORDS, "night", "--interval", "0.1"]

    with folder.run.hold_lock(), terminal.opened([sys.executable, *argv], tmp_path, cli.environment()) as shown:
        shown.wait_for("Ctrl-C leaves")
        folder.step(21)
        shown.wait_for("step 21/100")
        shown.type(terminal.CTRL_C)
        assert shown.ended() == 0
    assert shown.shown.rfind("\x1b[?25h") > shown.shown.rfind("\x1b[?25l") >= 0, "the cursor is back"
    assert "the run goes on" in shown.shown and "Traceback" not in shown.shown
    page = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.shown)
    assert "  | four" in page and "half a li" not in page and "  | one" not in page
    assert "\u2588" in page and "1,234 tokens/s  0.25 s/step  1.5 GiB" in page


def test_json_and_once_look_once(folder: WatchedFolder, tmp_path: Path) -> None:
    folder.step(1)
    folder.log.append("eval", step=1, loss=4.75)
    with folder.run.hold_lock():
        (view,) = json.loads(cli.run(*WORDS, "night", "--json", cwd=tmp_path).stdout)
        text = cli.run(*WORDS, "night", "--once", cwd=tmp_path).stdout
    assert (view["state"], view["progress"]["step"], view["validation_loss"]) == ("running", 1, 4.75)
    assert text.splitlines()[0] == "night 20260101_120000-ab12  running"


def test_a_workspace_without_runs_is_an_error(tmp_path: Path) -> None:
    done = cli.run(*WORDS, cwd=tmp_path)
    assert done.returncode == 2 and "no runs in ./output" in done.stderr


def test_a_folder_that_vanishes_is_damaged_and_ends_the_watch(folder: WatchedFolder, tmp_path: Path) -> None:
    with folder.run.hold_lock(), cli.started(*WORDS, "night", "--interval", "0.05", cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(": running\n")
        (folder.run.directory / "metadata.json").unlink()
        assert ": damaged: " in process.stdout.readline()
        assert process.wait(timeout=60) == 1


def test_a_page_fits_its_width_and_half_an_event_waits_for_its_rest(folder: WatchedFolder) -> None:
    watched = WatchedRun(folder.run)
    with folder.run.events.open("ab") as file:
        file.write(b'{"time": 5.0, "kind": "step", "step": 7, "lo')
        file.flush()
        assert watched.look().progress is None
        file.write(b'ss": 4.0, "tokens_per_s": 99.0}\n')
    view = watched.look()
    assert view.progress is not None and view.progress.step == 7
    folder.log.append("failure", problem="x" * 300)
    for width in (40, 80):
        assert max(map(len, format_view(watched.look(), width))) <= width
    assert format_change(view, watched.look())[0].endswith("failure: " + "x" * 300)


def test_a_curve_has_the_lowest_and_the_highest_block_and_no_more_than_its_values() -> None:
    assert draw_curve([3.0, 2.0, 1.0], 40) == "\u2588\u2585\u2581"
    assert draw_curve([1.0] * 100, 5) == "\u2581" * 5
    assert len(draw_curve(range(1000), 40)) == 40


def test_many_losses_are_thinned_out(folder: WatchedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus.run_report.watch.NUM_LOSSES", 8)
    watched = WatchedRun(folder.run)
    for number in range(1, 41):
        folder.step(number, float(number))
    losses = watched.look().losses
    assert 4 <= len(losses) <= 8 and losses == sorted(losses) and losses[-1] >= 32


def test_last_lines_are_whole_and_those_of_a_progress_display_are_its_newest(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert read_last_lines(file) == []
    file.write_bytes(b"a" * 10_000 + b"\n10 %\r20 %\n\nlast \xff\nhalf")
    assert read_last_lines(file)[-2:] == ["20 %", "last \ufffd"]
