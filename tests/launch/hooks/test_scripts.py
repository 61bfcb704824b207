"""A script is run for a limited time, leaves no process behind, and its output is read, masked and bounded."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from primus import redaction
from primus.launch.hooks import scripts
from primus.launch.hooks.scripts import ScriptResult

PATH = {"PATH": os.environ["PATH"]}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "script.log"


def run(
    log: Path, text: str, environ: dict[str, str] | None = None, timeout_s: float = 20, **options: Any
) -> ScriptResult:
    file = log.parents[1] / "script.sh"
    file.write_text(text)
    env = PATH | (environ or {})
    with redaction.scope():
        redaction.learn(env)
        return scripts.run(("bash", str(file), "a word"), env, timeout_s, log, **options)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_lines_of_standard_output_set_variables_and_settings(log: Path) -> None:
    ended = run(log, "echo env.A=1=2\necho env._b=\necho extra.model.lr=1e-4\necho 'env.A=3 '\necho got $1\n")
    assert (ended.exit_code, ended.problem) == (0, "")
    assert ended.env == {"A": "3 ", "_b": ""}
    assert ended.extra == {"model.lr": "1e-4"}
    assert ended.tail[-1] == "got a word"


@pytest.mark.parametrize("line", ["env.1A=x", "env.A-B=x", "env.A", "extra.a.=x", "extra.=x", "env.A=\\xff"])
def test_a_malformed_line_sets_nothing_and_is_told_in_the_log(log: Path, line: str) -> None:
    ended = run(log, f"printf '{line}\\n'\n")
    assert (ended.env, ended.extra) == ({}, {})
    assert "the line above sets nothing" in log.read_text()


def test_standard_error_and_indented_lines_set_nothing(log: Path) -> None:
    ended = run(log, "echo env.A=1 >&2\necho ' env.A=2'\n")
    assert ended.env == {}
    assert "the line above" not in log.read_text()


def test_a_windows_line_end_is_no_part_of_a_value(log: Path) -> None:
    assert run(log, "printf 'env.A=1\\r\\n'\n").env == {"A": "1"}


def test_a_last_line_without_an_end_counts(log: Path) -> None:
    assert run(log, "printf env.A=1\n").env == {"A": "1"}


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ("exit 3", 3, "exit code 3"),
        ("kill -SEGV $$", None, "killed by SIGSEGV"),
        ("read x || exit 5", 5, "exit code 5"),
    ],
)
def test_how_it_ended_is_told(log: Path, text: str, code: int | None, problem: str) -> None:
    ended = run(log, text)
    assert (ended.exit_code, ended.problem) == (code, problem)


def test_a_script_that_loops_is_ended_with_everything_that_it_started(log: Path) -> None:
    started = time.monotonic()
    text = (
        "echo $$\nsleep 300 & echo $!\ntimeout 300 sleep 300 & echo $!\nsetsid sleep 300 & echo $!\n"
        "while :; do sleep 1; done\n"
    )
    ended = run(log, text, timeout_s=0.5)
    assert (ended.exit_code, ended.problem) == (None, "it was not over after 0.5 s")
    assert time.monotonic() - started < 6
    pids = [int(line) for line in log.read_text().splitlines() if line.isdigit()]
    assert len(pids) == 4
    assert all(is_gone(pid) for pid in pids)


def test_a_script_that_hears_no_signal_is_killed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "GRACE_S", 0.2)
    ended = run(log, "trap '' TERM INT\necho $$\nwhile :; do sleep 0.1; done\n", timeout_s=0.3)
    assert ended.problem.startswith("it was not over")
    assert is_gone(int(ended.tail[0]))


def test_the_exit_code_of_a_script_that_was_ended_means_nothing(log: Path) -> None:
    ended = run(log, "trap 'exit 2' TERM\nsleep 300 & wait\n", timeout_s=0.3)
    assert (ended.exit_code, ended.problem) == (None, "it was not over after 0.3 s")


def test_what_it_left_in_the_background_ends_with_it(log: Path) -> None:
    started = time.monotonic()
    ended = run(log, "nohup sleep 300 & echo $!\nexit 0\n")
    assert ended.exit_code == 0
    assert is_gone(int(ended.tail[0]))
    assert time.monotonic() - started < 5


def test_who_leaves_the_session_and_keeps_the_output_open_is_not_waited_for(log: Path) -> None:
    started = time.monotonic()
    ended = run(log, "setsid sleep 30 & echo $!\nsleep 0.2\n")
    assert time.monotonic() - started < 5
    psutil.Process(int(ended.tail[0])).kill()


@pytest.mark.parametrize(("end", "lives"), [("exit 1", False), ("while :; do sleep 1; done", False), ("exit 0", True)])
def test_a_daemon_lives_on_only_where_the_script_has_succeeded(log: Path, end: str, lives: bool) -> None:
    ended = run(log, f"(setsid sleep 30 >/dev/null 2>&1 & echo $!)\nsleep 0.2\n{end}\n", timeout_s=1)
    pid = int(ended.tail[0])
    assert is_gone(pid) != lives
    if lives:
        psutil.Process(pid).kill()


def test_a_signal_to_the_launcher_ends_it(log: Path) -> None:
    ended = run(log, "sleep 300\n", interrupted=lambda: 15)
    assert (ended.signal, ended.problem) == (15, "interrupted by SIGTERM")


def test_secrets_are_masked_however_they_are_printed(log: Path) -> None:
    environ = {"HF_TOKEN": "canary-a", "MY_KEY": "canary-b\ncanary-c", "PROXY": "http://me:canary-d@host"}
    text = 'echo "x${HF_TOKEN}x $MY_KEY" >&2\nenv\necho env.NEW_TOKEN=canary-e\necho canary-e\necho "${PROXY##*me:}"\n'
    ended = run(log, text, environ)
    assert ended.env == {"NEW_TOKEN": "canary-e"}, "the value itself reaches the workers"
    assert "canary" not in log.read_text() + "".join(ended.tail)
    assert "x<secret>x <secret>" in log.read_text()


def test_what_a_traced_script_sets_is_masked(log: Path) -> None:
    run(log, "set -x\nexport HF_TOKEN=canary-traced PLAIN=seen\n")
    assert "canary" not in log.read_text()
    assert "PLAIN=seen" in log.read_text()


def test_no_secret_is_cut_in_two(log: Path) -> None:
    text = f"head -c {scripts.LINE_LIMIT_BYTES - 4} /dev/zero | tr '\\0' x\necho $A_TOKEN\n"
    run(log, text, {"A_TOKEN": "canary-canary"})
    assert "can" not in log.read_text()


def test_endless_output_is_read_and_only_its_beginning_kept(log: Path) -> None:
    text = (
        "head -c 100000000 /dev/zero | tr '\\0' x\necho\n"
        "yes a line like those that a build prints by the million | head -n 600000\n"
        "echo env.A=1\n"
    )
    ended = run(log, text, timeout_s=120)
    assert ended.env == {"A": "1"}, "what comes after all that still counts"
    assert log.stat().st_size < scripts.LOG_LIMIT_BYTES + 2 * scripts.LINE_LIMIT_BYTES
    assert log.read_text().count("[further output is not logged]") == 1


def test_bytes_that_are_no_text_stay_readable(log: Path) -> None:
    ended = run(log, "printf 'caf\\xe9 \\xc3\\xa9\\n'\n")
    assert ended.tail == ("caf\\xe9 \u00e9",)


def test_a_command_that_is_missing_is_a_problem_not_an_error(log: Path) -> None:
    ended = scripts.run(("no-such-shell", "x"), PATH, 5, log)
    assert ended.problem == "no-such-shell cannot be started: No such file or directory"


def test_its_log_grows_over_attempts(log: Path) -> None:
    run(log, "echo one")
    run(log, "echo two")
    assert [line for line in log.read_text().splitlines() if not line.startswith("[")] == ["one", "two"]
