"""What a terminal shows of a training run: short lines, the bar and the time left, as wide as the terminal is."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pytest

from frameworks.native.test_trainer import report
from primus.callback import StepReport
from primus.launch.progress_bar import ProgressBar
from primus.runs.step_line import format_evaluation_line, format_step_line, shorten_line


class Screen:
    """The leader of a pseudo-terminal, which reads what its follower is sent."""

    def __init__(self, leader: int, path: str) -> None:
        self._leader, self.path = leader, path

    def close(self) -> None:
        """Hang up, unless it was done."""
        with suppress(OSError):
            os.close(self._leader)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, pattern: str) -> str:
        """The last line that matches `pattern`, of what is sent from now on, without escape sequences."""
        shown, deadline = b"", time.monotonic() + 10
        while time.monotonic() < deadline and select.select([self._leader], [], [], 10)[0]:
            shown += os.read(self._leader, 65536)
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace"))
            if found := [line for line in re.split(r"[\r\n]+", text) if re.search(pattern, line)]:
                return found[-1]
        raise AssertionError(f"{pattern} was not shown: {shown[-1_000:]!r}")


@pytest.fixture
def screen() -> Iterator[Screen]:
    leader, follower = pty.openpty()
    with os.fdopen(follower):
        opened = Screen(leader, os.ttyname(follower))
        yield opened
        opened.close()


def test_the_line_of_a_step_and_the_bar_fit_a_terminal_that_changes_its_width(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # of the shell that launched, before the window was made smaller
    screen.resize(80)
    with closing(ProgressBar(screen.path, 1_000, 0)) as bar:
        for step, width in enumerate((80, 50, 130), start=2):
            screen.resize(width)
            bar.print(shorten_line(format_step_line([report(step)], 1_000, 0.0), bar.width))
            assert len(screen.read_until("^step")) <= width
            bar.update(step, "loss 8.250  24,690 tokens/s")
            drawn = screen.read_until(rf"\b{step}/1000 [0-9:-]+ {'loss' if width > 60 else ''}")
            assert width - 1 <= len(drawn) <= width, "the bar takes the width that the terminal has now"


def test_the_bar_shows_the_time_left_of_steps_that_take_minutes(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    screen.resize(80)
    with closing(ProgressBar(screen.path, 1_000, 0)) as bar:
        for step in (1, 2, 3):
            now += 600 if step == 1 else 90  # the first step compiles
            bar.update(step, "loss 8.250")
        assert screen.read_until(r"\b3/1000").split()[2] == "24:55:30", "997 steps of 90 s"


def test_a_terminal_that_is_closed_does_not_end_the_run(screen: Screen) -> None:
    with closing(ProgressBar(screen.path, 1_000, 0)) as bar:
        screen.close()
        bar.update(1, "loss 8.250")
        bar.print("a line")


def shorten(reports: Sequence[StepReport], width: int) -> str:
    """What a terminal shows of the steps, which are the last ones of 300."""
    return shorten_line(format_step_line(reports, 300, 0.0), width)


def test_a_narrow_terminal_gets_the_most_important_values() -> None:
    wide = shorten([report(7)], 400)
    assert wide == (
        "step   7/300  loss 8.2500  12,346 tokens/s/device  1 GiB  0:01:20 left  0.272 s/step  grad norm 5.96"
        "  lr 0.00015  0.24 TFLOP/s/device"
    )
    for width in range(30, 120):
        line = shorten([report(7)], width)
        assert wide.startswith(line) and len(line) <= width
        assert line == wide or len(wide[: width + 1].rpartition("  ")[0]) <= len(line), "another value has room"


def test_the_short_line_tells_of_skipped_steps_and_means() -> None:
    assert "loss 8.2500  1 skipped" in shorten([report(skipped=True)], 400), "all were skipped"
    fast = report(1, step_time_s=1.0, tokens_per_s_per_device=8192.0, loss=2.0, mfu=0.8)
    slow = report(2, step_time_s=3.0, tokens_per_s_per_device=8192 / 3, loss=4.0, mfu=0.8 / 3, skipped=True)
    line = shorten([fast, slow], 400)
    assert (
        "loss 2.0000  1 skipped  4,096 tokens/s/device  1 GiB  0:09:56 left  2 s/step" in line and "MFU 40.0%" in line
    )
    assert "loss nan" in shorten([report(loss=math.nan)], 400)


def test_an_evaluation_is_shortened_and_other_lines_are_not() -> None:
    line = format_evaluation_line(20, 5.25, 190.566, 0.0)
    assert shorten_line(line, 80) == "validation loss at step 20: 5.2500, perplexity 190.6"
    for other in (" [x] iteration 1/2 is slow |", "iteration 1/2", line[1:], f"0:{format_step_line([report()], 3, 0)}"):
        assert shorten_line(other, 20) == other
