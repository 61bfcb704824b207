"""A launch starts real workers, says who failed first, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import cli


def latest(folder: Path, name: str = "tiny") -> Path:
    return (folder / "out" / name / "latest").resolve()


def metadata(folder: Path) -> dict[str, Any]:
    return json.loads((latest(folder) / "metadata.json").read_text())


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (latest(folder) / "events.jsonl").read_text().splitlines()]


def begun(folder: Path, ranks: int = 1) -> bool:
    """Whether every worker of the newest run is at work."""
    beats = list((folder / "out").glob("tiny/latest/logs/attempt_*/rank_*.heartbeat.json"))
    return len(beats) == ranks and all('"phase": "train"' in beat.read_text() for beat in beats)


def worker_pids(folder: Path) -> list[int]:
    beats = (latest(folder) / "logs/attempt_0").glob("rank_*.heartbeat.json")
    return [json.loads(beat.read_text())["pid"] for beat in beats]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_run_that_is_done_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    done = cli.run("direct", "--", "tiny", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    run = latest(tmp_path)
    assert done.stdout == f"run out/tiny/{run.name}\nrank 0 of 1 does end\n"
    found = {str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir()}
    # In a checkout that has changed, the differences.
    assert found - {"env/checkout.diff"} == {
        ".lock",
        "config/tiny.json",
        "env/gpu_model.txt",
        "env/packages.txt",
        "env/plug-ins.json",
        "env/primus_env_dump.txt",
        "env/sources.json",
        "env/system_info.json",
        "events.jsonl",
        "logs/attempt_0/rank_0.heartbeat.json",
        "logs/attempt_0/rank_0.log",
        "logs/launch.log",
        "logs/rank_0.log",
        "metadata.json",
        "plan.json",
        "request.json",
    } | ({"env/cuda_version.txt"} & found) | ({"env/rocm_version.txt"} & found)
    told = metadata(tmp_path)
    assert (told["task"], told["runtimes"], told["attempts"]) == ("tiny", ["direct"], 1)
    assert told["outcome"] == {"state": "done", "exit_code": 0, "reason": "", "first_failure": None}
    assert told["created"] <= told["started"] <= told["ended"]
    kinds = [event["kind"] for event in events(tmp_path)]
    assert kinds == ["run_started", "step", "machine_load", "attempt_ended", "run_ended"]
    assert (run / "logs/rank_0.log").read_text().startswith("rank 0 of 1 does end\n")
    beat = json.loads((run / "logs/attempt_0/rank_0.heartbeat.json").read_text())
    assert (beat["phase"], beat["step"]) == ("exit", 1)
    assert not list(run.rglob("*.tmp.*"))


@pytest.mark.parametrize(
    ("act", "code", "problem", "hint"),
    [
        ("raise", 1, "ValueError: three is not four", ""),
        ("refuse", 1, "the data is gone", "bring it back"),
        ("exit", 1, "rank 0 exited with code 7 and no message", ""),
        ("kill", 137, "rank 0 was killed by SIGKILL", "the memory of the job"),
    ],
)
def test_a_failing_worker_is_one_message(tmp_path: Path, act: str, code: int, problem: str, hint: str) -> None:
    done = cli.run("direct", "--", "tiny", act, cwd=tmp_path)
    log = latest(tmp_path) / "logs/attempt_0/rank_0.log"
    assert done.returncode == code
    assert done.stderr.startswith(f"primus-cli: run failed: {problem}\n")
    assert hint in done.stderr
    assert f"first: rank 0 on {os.uname().nodename}; log: {log}" in done.stderr
    assert done.stderr.count(problem) == 1 and "Traceback" not in done.stderr
    outcome = metadata(tmp_path)["outcome"]
    assert (outcome["state"], outcome["exit_code"], outcome["reason"]) == ("failed", code, problem)
    assert (outcome["first_failure"]["rank"], outcome["first_failure"]["problem"]) == (0, problem)
    assert outcome["first_failure"]["log"] == "logs/attempt_0/rank_0.log"
    assert events(tmp_path)[-1]["kind"] == "run_ended"
    assert ("Traceback" in log.read_text()) == (act == "raise"), "the log has it where it helps"


def test_the_outcome_is_json_where_that_is_wanted(tmp_path: Path) -> None:
    done = cli.run("--json", "direct", "--", "tiny", "refuse", cwd=tmp_path)
    lines = done.stdout.partition("\n")[2] if done.stdout.startswith("rank") else done.stdout
    value = json.loads(lines)
    assert value["run"] == str(latest(tmp_path))
    assert value["outcome"]["reason"] == "the data is gone"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_workers_and_the_exit_code_tells(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with cli.started("direct", "--", "tiny", "wait", cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path), "a worker")
        pids = worker_pids(tmp_path)
        process.send_signal(number)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == code
    assert errors == f"primus-cli: run interrupted: {number.name}; nothing was saved\n"
    assert all(gone(pid) for pid in pids)
    outcome = metadata(tmp_path)["outcome"]
    assert (outcome["state"], outcome["exit_code"]) == ("interrupted", code)


def test_a_worker_that_saves_first_is_waited_for(tmp_path: Path) -> None:
    with cli.started("direct", "--", "tiny", "save", cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path), "a worker")
        process.terminate()
        _, errors = process.communicate(timeout=15)
    assert (process.returncode, errors) == (143, "primus-cli: run interrupted: SIGTERM; saved at step 3\n")


def test_a_signal_to_the_worker_alone_is_an_interruption_too(tmp_path: Path) -> None:
    with cli.started("direct", "--", "tiny", "save", cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path), "a worker")
        os.kill(worker_pids(tmp_path)[0], signal.SIGTERM)
        process.communicate(timeout=15)
    assert process.returncode == 143
    assert metadata(tmp_path)["outcome"]["state"] == "interrupted"


def test_a_signal_that_comes_again_later_ends_a_worker_that_does_not_listen(tmp_path: Path) -> None:
    with cli.started("direct", "--", "tiny", "ignore", cwd=tmp_path) as process:
        cli.wait_for(lambda: (tmp_path / "out/tiny/latest/logs/attempt_0/deaf").exists(), "a deaf worker")
        pids = worker_pids(tmp_path)
        process.send_signal(signal.SIGINT)
        for number in (signal.SIGINT, signal.SIGTERM):  # as a scheduler and a launcher around us do
            process.send_signal(number)
        time.sleep(1.2)  # the first signals change nothing: that is what is shown here
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=15)
    assert process.returncode == 130, "the first signal tells"
    assert all(gone(pid) for pid in pids)


def test_a_worker_that_does_not_listen_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    before = "from primus.launch.supervision import attempt_monitor; attempt_monitor.GRACE_S = 0.5"
    with cli.started("direct", "--", "tiny", "ignore", cwd=tmp_path, before=before) as process:
        cli.wait_for(lambda: (tmp_path / "out/tiny/latest/logs/attempt_0/deaf").exists(), "a deaf worker")
        process.terminate()
        process.communicate(timeout=15)
    assert process.returncode == 143
    assert all(gone(pid) for pid in worker_pids(tmp_path))


@pytest.mark.parametrize("act", ["wait", "ignore"])
def test_no_worker_outlives_a_launcher_that_is_killed(tmp_path: Path, act: str) -> None:
    with cli.started("direct", "--", "tiny", act, cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path), "a worker")
        pids = worker_pids(tmp_path)
        process.kill()
        process.communicate(timeout=15)
    cli.wait_for(lambda: all(gone(pid) for pid in pids), "the end of the workers", timeout_s=3)
    listed = cli.run("direct", "--", "runs", "list", "--workspace", "out", cwd=tmp_path)
    assert re.search(r"tiny +died", listed.stdout)


def test_a_hangup_that_nohup_ignores_is_ignored(tmp_path: Path) -> None:
    before = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with cli.started("direct", "--", "tiny", "save", cwd=tmp_path, before=before) as process:
        cli.wait_for(lambda: begun(tmp_path), "a worker")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)  # nothing happens: that is what is shown here
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=15)
    assert process.returncode == 143


def test_a_run_is_executed_by_one_launcher_at_a_time(tmp_path: Path) -> None:
    with cli.started("direct", "--", "tiny", "wait", cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path), "a worker")
        plan = (latest(tmp_path) / "plan.json").read_text()
        second = cli.run(
            "direct", "--nproc", "1", "--env", "A=1", "--", "tiny", "--run", "out/tiny/latest", cwd=tmp_path
        )
        process.terminate()
        process.communicate(timeout=15)
    assert second.returncode == 1
    assert "is being executed by another process" in second.stderr
    assert (latest(tmp_path) / "plan.json").read_text() == plan
    assert metadata(tmp_path)["attempts"] == 1


def test_each_attempt_has_its_own_logs(tmp_path: Path) -> None:
    assert cli.run("direct", "--", "tiny", "raise", cwd=tmp_path).returncode == 1
    with (latest(tmp_path) / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "kind": "st')
    again = cli.run("direct", "--", "tiny", "--run", "out/tiny/latest", cwd=tmp_path)
    assert again.returncode == 1, "the configuration is the run's own"
    run = latest(tmp_path)
    assert again.stdout.startswith(f"continuing out/tiny/{run.name}\n")
    assert metadata(tmp_path)["attempts"] == 2
    assert os.readlink(run / "logs/rank_0.log") == "attempt_1/rank_0.log"
    assert "Traceback" in (run / "logs/attempt_0/rank_0.log").read_text()
    assert (run / "logs/launch.log").read_text().count("] attempt ") == 2
    lines = (run / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines if line.endswith("}")][-1] == "run_ended"
    assert '{"time": 1, "kind": "st' in lines, "the half line stays alone"


def test_latest_points_to_the_newest_run(tmp_path: Path) -> None:
    for _ in range(2):
        cli.run("direct", "--", "tiny", cwd=tmp_path)
        created = [json.loads(path.read_text())["created"] for path in (tmp_path / "out/tiny").glob("2*/metadata.json")]
        assert metadata(tmp_path)["created"] == max(created)
    assert os.readlink(tmp_path / "out/tiny/latest") == latest(tmp_path).name


def test_variables_reach_the_workers_by_their_precedence(tmp_path: Path) -> None:
    (tmp_path / "vars").write_text("# mine\nexport SHOWN='from a file'\n\nOTHER=1\n")
    words = ["tiny", "--variable", "SHOWN=experiment"]

    def seen(*options: str, **env: str) -> str:
        cli.run("direct", *options, "--", *words, cwd=tmp_path, **env)
        return (latest(tmp_path) / "logs/rank_0.log").read_text().splitlines()[1]

    assert seen() == "variable experiment"
    assert seen(SHOWN="shell") == "variable shell"
    assert seen("--env", "SHOWN=typed", SHOWN="shell") == "variable typed"
    assert seen("--env", "vars") == "variable from a file"
    assert seen("--env", "vars", "--env", "SHOWN=") == "variable "
    dump = (latest(tmp_path) / "env/primus_env_dump.txt").read_text()
    assert "SHOWN=  # --env\n" in dump
    assert "OTHER=1  # --env vars:4\n" in dump
    assert re.search(r"^PATH=.*  # shell$", dump, re.MULTILINE)


def test_a_workspace_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    done = cli.run("direct", "--", "tiny", cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r"primus-cli: .*/out/tiny/\S+: cannot be created: Not a directory\n  choose another --workspace\n", done.stderr
    )


def test_a_task_that_cannot_be_found_by_the_worker_is_one_message(tmp_path: Path) -> None:
    done = cli.run("direct", "--env", "PRIMUS_PLUGINS=", "--", "tiny", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("primus-cli: run failed: no task 'tiny'\n")


# -- several processes --


def test_of_two_processes_the_one_that_failed_is_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = cli.run("direct", "--nproc", "2", "--", "tiny", "kill", "--rank", "1", cwd=tmp_path)
    assert done.returncode == 137
    assert done.stderr.startswith("primus-cli: run failed: rank 1 was killed by SIGKILL\n")
    assert "log: " + str(latest(tmp_path) / "logs/attempt_0/rank_1.log") in done.stderr
    assert metadata(tmp_path)["outcome"]["first_failure"]["rank"] == 1
    assert all(gone(pid) for pid in worker_pids(tmp_path))
    assert "rank 0 of 2" in (latest(tmp_path) / "logs/rank_0.log").read_text()
    assert "rank 1 of 2" in (latest(tmp_path) / "logs/rank_1.log").read_text()


def test_a_signal_ends_two_processes_and_their_agent(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with cli.started("direct", "--nproc", "2", "--", "tiny", "save", cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path, ranks=2), "two workers", timeout_s=30)
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) >= 3
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (143, "primus-cli: run interrupted: SIGTERM; saved at step 3\n")
    assert all(gone(pid) for pid in pids)


def test_no_process_outlives_a_killed_launcher_of_two(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with cli.started("direct", "--nproc", "2", "--", "tiny", "ignore", cwd=tmp_path) as process:
        cli.wait_for(lambda: begun(tmp_path, ranks=2), "two workers", timeout_s=30)
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.communicate(timeout=15)
    cli.wait_for(lambda: all(gone(pid) for pid in pids), "the end of all processes", timeout_s=5)


def test_a_run_keeps_what_was_found_out_about_its_machine(tmp_path: Path) -> None:
    assert cli.run("direct", "--", "tiny", cwd=tmp_path).returncode == 0
    system = json.loads((latest(tmp_path) / "env/system_info.json").read_text())
    facts = system["facts"]
    assert facts["host"] == system["host"] == socket.gethostname()
    assert facts["cpu"]["model"] == system["cpu_model"]
    assert facts["software"]["kernel"] == os.uname().release
    assert "lo" in {interface["name"] for interface in facts["interfaces"]}
