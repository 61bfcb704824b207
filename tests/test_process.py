"""A program that is asked for something ends within its limit, and so does everything that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fakes.tools import is_gone, tool
from primus.process import read_output, run_command


def test_an_answer_has_the_output_and_the_time(tmp_path: Path) -> None:
    answer = run_command(["speak"], tool(tmp_path / "bin", "speak", "echo yes"))
    assert (answer.state, answer.text, answer.problem) == ("ok", "yes\n", "")
    assert 0 < answer.duration_s < 5


def test_a_tool_that_is_not_installed_is_missing(tmp_path: Path) -> None:
    assert run_command(["no-such-tool"], {"PATH": str(tmp_path)}).state == "missing"


def test_a_failure_tells_the_last_line_of_the_complaint(tmp_path: Path) -> None:
    answer = run_command(
        ["broken"], tool(tmp_path / "bin", "broken", "echo half; echo one >&2; echo no driver >&2; exit 3")
    )
    assert (answer.state, answer.text, answer.problem) == ("failed", "half\n", "no driver")


def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environ = tool(tmp_path / "bin", "hang", f"sleep 300 & echo $! $$ > {pids}; wait")
    began = time.monotonic()
    answer = run_command(["hang"], environ, limit_s=0.5)
    assert time.monotonic() - began < 3
    assert answer.state == "slow" and "0.5 s" in answer.problem
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


def test_a_child_that_outlives_its_tool_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    environ = tool(tmp_path / "bin", "fork", f"sleep 300 >/dev/null 2>&1 & echo $! > {pids}; echo done")
    assert run_command(["fork"], environ).text == "done\n"
    assert is_gone(int(pids.read_text()))


def test_output_is_none_unless_the_command_succeeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = tool(tmp_path / "bin", "slow", "sleep 300")
    monkeypatch.setenv("PATH", f"{environ['PATH']}:{os.environ['PATH']}")
    assert read_output(["printf", "a\n\n"]) == "a"
    assert read_output(["false"]) is None
    assert read_output(["slow"], timeout_s=0.2) is None
    assert read_output(["pwd"], cwd=tmp_path) == os.path.realpath(tmp_path)


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_that_ends_without_finalization_keeps_its_code_output_and_exit_functions(code: int) -> None:
    program = f"""
import atexit, sys
from primus.process import run_until_end
class Late:
    def __del__(self):
        print("finalized", file=sys.__stderr__)
late = Late()
def main():
    atexit.register(print, "registered")
    print("main")
    return {code}
run_until_end(main)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "main\nregistered\n", "")


def test_a_process_whose_work_raises_ends_with_1_and_the_traceback() -> None:
    ended = _ended_with("1 // 0")
    assert ended.returncode == 1 and "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize(("value", "code", "said"), [("7", 7, ""), ("None", 0, ""), ("'why'", 1, "why\n")])
def test_a_process_that_a_library_ends_has_that_code(value: str, code: int, said: str) -> None:
    ended = _ended_with(f"sys.exit({value})")
    assert (ended.returncode, ended.stderr) == (code, said)


def _ended_with(work: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; from primus.process import run_until_end; run_until_end(lambda: {work})"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
