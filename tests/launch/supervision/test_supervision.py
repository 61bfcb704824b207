"""A launcher restarts failed workers, blames the rank that hangs, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import psutil
import pytest

from fakes import cli

PLUGINS = str(cli.PLUGINS.parent / "shifts")


def shift(
    folder: Path, *options: str, acts: str = "none", task: tuple[str, ...] = (), **env: str
) -> CompletedProcess[str]:
    words = ("direct", *options, "--", "shift", acts, *task)
    return cli.run(*words, cwd=folder, PRIMUS_PLUGINS=PLUGINS, **env)


def started_shift(
    folder: Path, *options: str, acts: str = "none", task: tuple[str, ...] = (), before: str = ""
) -> AbstractContextManager[Popen[str]]:
    words = ("direct", *options, "--", "shift", acts, *task)
    return cli.started(*words, cwd=folder, PRIMUS_PLUGINS=PLUGINS, before=before)


def latest(folder: Path) -> Path:
    return (folder / "out/shift/latest").resolve()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    file = latest(folder) / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def heartbeats(folder: Path, attempt: int = 0) -> list[dict[str, Any]]:
    files = sorted((latest(folder) / f"logs/attempt_{attempt}").glob("rank_*.heartbeat.json"))
    return [json.loads(file.read_text()) for file in files]


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def steps(folder: Path) -> list[int]:
    return [event["step"] for event in events(folder, "step")]


def test_a_killed_worker_resumes_from_its_checkpoint_in_the_same_run(tmp_path: Path) -> None:
    done = shift(tmp_path, "--max-restarts", "1", "--restart-delay", "0.2", acts="kill@4")
    assert done.returncode == 0, done.stderr
    assert "attempt 0 failed: rank 0 was killed by SIGKILL\nattempt 1 starts in 0.2 s (restart 1 of 1)\n" in done.stdout
    assert steps(tmp_path) == [1, 2, 3, 3, 4, 5, 6]
    (failure,) = events(tmp_path, "failure")
    assert (failure["attempt"], failure["rank"], failure["how"]) == (0, 0, "failed")
    (restart,) = events(tmp_path, "restart")
    assert (restart["attempt"], restart["delay_s"]) == (1, 0.2)
    assert restart["time"] - events(tmp_path, "step")[2]["time"] < 5
    ends = events(tmp_path, "attempt_ended")
    assert [(end["attempt"], end["end"], end["step"]) for end in ends] == [(0, "failed", 2), (1, "done", 6)]
    assert [event["attempt"] for event in events(tmp_path, "run_ended")] == [1]
    metadata = json.loads((latest(tmp_path) / "metadata.json").read_text())
    assert (metadata["attempts"], metadata["outcome"]["state"]) == (2, "done")
    assert os.readlink(latest(tmp_path) / "logs/rank_0.log") == "attempt_1/rank_0.log"
    assert (latest(tmp_path) / "logs/launch.log").read_text().count("] attempt ") == 2


@pytest.mark.parametrize(("acts", "ran"), [("raise@4", ["before", "after"]), ("refuse@2", ["before", "failure"])])
def test_hooks_run_once_however_often_workers_are_started(tmp_path: Path, acts: str, ran: list[str]) -> None:
    for stage in ("before", "after", "failure"):
        hook = tmp_path / "hooks" / stage / "01_note.sh"
        hook.parent.mkdir(parents=True)
        hook.write_text(f"echo {stage} >>'{tmp_path}/ran'\n")
    shift(tmp_path, "--max-restarts", "2", "--restart-delay", "0", acts=acts)
    assert (tmp_path / "ran").read_text().split() == ran


def test_restarts_stop_after_three_failures_without_progress(tmp_path: Path) -> None:
    done = shift(tmp_path, "--max-restarts", "50", "--restart-delay", "0", acts=",".join(["raise@1"] * 20))
    assert done.returncode == 1
    assert "no restart: no progress: 3 attempts in a row wrote no newer checkpoint\n" in done.stdout
    assert done.stderr.startswith("primus-cli: run failed: three is not four\n")
    assert len(events(tmp_path, "attempt_ended")) == 3


def test_progress_resets_the_restarts_of_a_run(tmp_path: Path) -> None:
    done = shift(tmp_path, "--max-restarts", "1", "--restart-delay", "0", acts="raise@3,raise@5,kill@6")
    assert done.returncode == 137
    assert "no restart: the only restart is used\n" in done.stdout
    assert [event["reason"] for event in events(tmp_path, "restart")] == ["restart 1 of 1"] * 2


def test_a_configuration_error_is_not_retried_and_the_scheduler_gets_its_exit_code(tmp_path: Path) -> None:
    done = shift(tmp_path, "--max-restarts", "5", acts="refuse@2", PRIMUS_NO_RESTART_CODE="93")
    assert done.returncode == 93
    assert "no restart: it would fail in the same way again\n" in done.stdout
    assert "run failed: nobody can do that" in done.stderr
    assert shift(tmp_path, "--max-restarts", "5", acts="refuse@2").returncode == 2
    retried = shift(tmp_path, acts="raise@2", PRIMUS_NO_RESTART_CODE="93")
    assert retried.returncode == 1, "the scheduler may restart this one"


def test_missing_progress_counts_over_the_restarts_of_a_scheduler(tmp_path: Path) -> None:
    acts = ",".join(["raise@1"] * 5)
    codes = [shift(tmp_path, acts=acts, PRIMUS_NO_RESTART_CODE="93").returncode]
    for _ in range(2):
        again = cli.run(
            "direct", "--", "shift", "--run", "out/shift/latest",
            cwd=tmp_path, PRIMUS_PLUGINS=PLUGINS, PRIMUS_NO_RESTART_CODE="93",
        )  # fmt: skip
        codes.append(again.returncode)
    assert codes == [1, 1, 93]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_ends_the_wait_for_a_restart(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with started_shift(tmp_path, "--max-restarts", "1", "--restart-delay", "60", acts="raise@1") as process:
        cli.wait_for(lambda: events(tmp_path, "restart") if (tmp_path / "out").exists() else [], "the wait")
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == code
    assert f"run interrupted: {number.name}, before the next attempt; the last one failed: three is not four" in errors


def test_sigusr1_lets_the_workers_save_and_counts_as_preemption(tmp_path: Path) -> None:
    with started_shift(tmp_path, "--max-restarts", "3", task=("--steps", "1000")) as process:
        cli.wait_for(lambda: (tmp_path / "out").exists() and len(steps(tmp_path)) > 2, "some steps")
        for each in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
            os.kill(each, signal.SIGUSR1)  # as a step's signal reaches the whole tree
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=15)
    (end,) = events(tmp_path, "attempt_ended")
    assert (process.returncode, end["end"]) == (138, "preempted")
    assert errors == f"primus-cli: run interrupted: SIGUSR1; saved at step {end['step']}\n"
    assert end["step"] > 1


def test_a_worker_that_gets_sigusr1_itself_saves(tmp_path: Path) -> None:
    done = shift(tmp_path, acts="usr1@4")
    assert (done.returncode, done.stderr) == (
        138,
        "primus-cli: run interrupted: SIGUSR1 to the workers; saved at step 3\n",
    )
    assert events(tmp_path, "attempt_ended")[0]["end"] == "preempted"


def test_sigusr1_sets_no_time_limit_for_saving(tmp_path: Path) -> None:
    before = "from primus.launch.supervision import attempt_monitor; attempt_monitor.GRACE_S = 0.3"
    with started_shift(tmp_path, task=("--steps", "1000", "--step-s", "1.5"), before=before) as process:
        cli.wait_for(lambda: (tmp_path / "out").exists() and len(steps(tmp_path)) > 0, "a step")
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 138
    assert "saved at step" in errors


@pytest.mark.parametrize(("act", "state"), [("stop", "its process is stopped"), ("sleep", "in phase train after step")])
def test_a_hanging_worker_is_inspected_before_it_is_killed(tmp_path: Path, act: str, state: str) -> None:
    done = shift(tmp_path, "--hang-timeout", "1.5", acts=f"{act}@4", task=("--step-s", "0.5"))
    assert done.returncode == 1
    assert "primus-cli: run failed: rank 0 hangs: no progress for" in done.stderr
    assert state in done.stderr
    (hang,) = events(tmp_path, "hang")
    assert (hang["rank"], hang["phase"]) == (0, "train")
    assert (
        json.loads((latest(tmp_path) / "logs/attempt_0/hang.json").read_text())["standings"][0]["pid"]
        == heartbeats(tmp_path)[0]["pid"]
    )
    assert events(tmp_path, "attempt_ended")[0]["end"] == "hang"
    stacks = latest(tmp_path) / "logs/attempt_0/rank_0.stacks.txt"
    assert "_meet" in stacks.read_text()
    assert stacks.stat().st_mtime <= events(tmp_path, "failure")[0]["time"]
    assert has_ended(heartbeats(tmp_path)[0]["pid"])


def test_without_py_spy_a_worker_writes_its_own_stacks(tmp_path: Path) -> None:
    before = "from primus.launch.supervision import stacks; stacks._dump_stacks = lambda pid, environ: ''"
    with started_shift(tmp_path, "--hang-timeout", "1.5", acts="sleep@4", before=before) as process:
        process.communicate(timeout=30)
    assert "in _meet" in (latest(tmp_path) / "logs/attempt_0/rank_0.stacks.txt").read_text()
    assert events(tmp_path, "hang")[0]["standings"][0]["frame"].startswith("_meet (")


def test_a_hang_is_retried_and_timeout_0_disables_the_detection(tmp_path: Path) -> None:
    options = ("--hang-timeout", "1.5", "--max-restarts", "1", "--restart-delay", "0")
    done = shift(tmp_path, *options, acts="stop@4")
    assert done.returncode == 0, done.stderr
    with started_shift(tmp_path, "--hang-timeout", "0", acts="sleep@1") as process:
        time.sleep(3.5)  # nothing happens: that is what is shown here
        assert process.poll() is None
        process.kill()


def test_a_full_disk_is_reported_in_one_message_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    small = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none out && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    script = "import sys; from primus.cli.main import main; sys.exit(main())"
    words = ["direct", "--max-restarts", "1", "--restart-delay", "0", "--", "shift", "fill@4"]
    done = subprocess.run(
        [*small, sys.executable, "-c", script, *words],
        cwd=tmp_path, env=cli.environment(PRIMUS_PLUGINS=PLUGINS), capture_output=True, text=True, timeout=40,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.native
@pytest.mark.slow
def test_a_rank_that_computes_longer_is_reported_once(tmp_path: Path) -> None:
    before = "from primus.launch.supervision import straggler_detection; straggler_detection.WINDOW_S = 1.0"
    task = ("--rank", "1", "--steps", "90", "--step-s", "0.1")
    with started_shift(tmp_path, "--nproc", "2", acts="slow", task=task, before=before) as process:
        out, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors
    (found,) = events(tmp_path, "straggler")
    assert (found["rank"], found["local_rank"], found["host"]) == (1, 1, os.uname().nodename)
    assert found["ratio"] == pytest.approx(4 / 3, abs=0.01)
    assert out.count("straggler: rank 1 (local rank 1 on ") == 1
