"""What a terminal shows of a program that trains elsewhere, and what it gets where there is no terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fakes import cli, terminal
from frameworks.native.test_trainer import report
from primus.runs.step_line import format_evaluation_line, format_step_line

FOREGROUND = """\
import os, sys
from primus.launch.foreground import run_in_foreground
sys.exit(run_in_foreground([sys.executable, "-c", sys.argv[1]], os.environ))
"""
STEPS = [format_step_line([report(step)], 300, 0.0) for step in (7, 8)]


def words(program: str) -> list[str]:
    """The command of a launcher that runs a program of Python in the foreground."""
    return [sys.executable, "-c", FOREGROUND, program]


def show(program: str, tmp_path: Path) -> tuple[str, int]:
    """What a terminal shows of the program, without colours, and the exit code."""
    with terminal.opened(words(program), tmp_path, cli.environment()) as shown:
        code = shown.ended()
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.shown), code


def test_steps_are_short_lines_above_a_bar_that_is_gone_at_the_end(tmp_path: Path) -> None:
    lines = ["no step yet", STEPS[0], format_evaluation_line(7, 5.25, 190.566, 0.0), STEPS[1], "all done"]
    program = f"import sys; [print(line, flush=True) for line in {lines}]; print('late', end=''); sys.exit(7)"
    shown, code = show(program, tmp_path)
    assert code == 7
    assert "iteration" not in shown
    inked = [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))]
    printed = [line for line in inked if line and "━" not in line]
    rest = "  loss 8.2500  12,346 tokens/s/device  1 GiB  0:01:20 left"
    assert printed == [
        "no step yet",
        f"step   7/300{rest}",
        "validation loss at step 7: 5.2500, perplexity 190.6",
        f"step   8/300{rest.replace('20 left', '19 left')}",
        "all done",
        "late",
    ]
    assert re.search(r"━.* 8/300 .*loss 8.2500", shown), "the bar is at the last step"
    assert shown.rpartition("\x1b[2K")[2].strip() == "late", "and erased"


def test_a_display_that_does_not_end_its_line_is_shown_at_once(tmp_path: Path) -> None:
    program = "print('pulled 40 %', end='', flush=True); input()"
    with terminal.opened(words(program), tmp_path, cli.environment()) as shown:
        shown.wait_for("pulled 40 %")
        shown.type(b"\n")
        assert shown.ended() == 0


def test_the_bar_begins_anew_where_a_second_training_follows(tmp_path: Path) -> None:
    lines = [STEPS[0], format_step_line([report(1)], 20, 0.0)]
    shown, _ = show(f"[print(line, flush=True) for line in {lines}]", tmp_path)
    assert re.search(r"━ +7/300", shown) and re.search(r"━ +1/20", shown)


def test_without_a_terminal_lines_are_left_as_they_are(tmp_path: Path) -> None:
    done = subprocess.run(
        words(f"print({STEPS[0]!r})"), cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{STEPS[0]}\n"


def test_what_the_launcher_says_meanwhile_is_above_the_bar(tmp_path: Path) -> None:
    launcher = f"""\
import os, sys, time
from primus.launch import terminal_relay
with terminal_relay.open_relay(os.environ) as output:
    os.write(output, {STEPS[0]!r}.encode() + b"\\n")
    while not isinstance(sys.stderr, __import__("rich.file_proxy").file_proxy.FileProxy):
        time.sleep(0.01)
    print("told to stop", file=sys.stderr)
"""
    with terminal.opened([sys.executable, "-c", launcher], tmp_path, cli.environment()) as shown:
        assert shown.ended() == 0, shown.shown
    assert re.search(r"\x1b\[2Ktold to stop *\r\n", shown.shown), "its line is free of the bar"


def test_long_lines_are_shown_as_they_are_where_the_experiment_chooses_them(tmp_path: Path) -> None:
    launcher = FOREGROUND.replace("os.environ", 'os.environ | {"PRIMUS_LOG_FORMAT": "long"}')
    program = f"print({STEPS[0]!r})"
    with terminal.opened([sys.executable, "-c", launcher, program], tmp_path, cli.environment()) as shown:
        assert shown.ended() == 0
    assert shown.shown.splitlines() == [STEPS[0]]
