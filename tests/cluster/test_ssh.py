"""`ssh` with OpenSSH's own server: two hosts on loopback addresses, real signals, real deaths."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import psutil
import pytest

from components import WHERE
from fakes import cli, terminal
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.runs import events

pytestmark = [pytest.mark.cluster("sshd"), pytest.mark.native, pytest.mark.slow]

EXPERIMENT = """\
exp_name: two
modules:
  pre_trainer:
    framework: {framework}
    model: tiny
    overrides:
      mock_data: true
      seq_length: 16
      train_iters: {iters}
      micro_batch_size: 1
      global_batch_size: 2
      bf16: false
      compile: false
      vocab_size: 64
"""


def write_tokens(prefix: Path) -> None:
    """A token file of 20 documents."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as tokens:
        for number in range(20):
            tokens.add_document(np.full(32, number, np.uint16))
        tokens.commit()


LONG = EXPERIMENT.format(iters=1000000, framework="bigram")
"""Most tests are about hosts and signals: they train without a tensor library, which takes seconds to import."""


def write_experiment(folder: Path, iters: int, framework: str = "bigram") -> None:
    (folder / "two.yaml").write_text(EXPERIMENT.format(iters=iters, framework=framework))


class Server:
    """An SSH server of our own, with its keys below a folder of the test.

    Args:
        folder: New folder for its files.
        prefix: Command that starts it, such as in namespaces of its own.
    """

    def __init__(self, folder: Path, prefix: tuple[str, ...] = ()) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        for name in ("host_key", "user_key", "stranger_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self.port = _free_port()
        lines = [
            *(f"ListenAddress {address}:{self.port}" for address in ("127.0.0.2", "127.0.0.3")),
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            f"PidFile {folder}/pid",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
        ]
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        key = (folder / "host_key.pub").read_text()
        known = [f"[{address}]:{self.port} {key}" for address in ("127.0.0.2", "127.0.0.3")]
        (folder / "known_hosts").write_text("".join(known))
        Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd", path=WHERE)
        assert sshd
        self.process = subprocess.Popen(
            [*prefix, sshd, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL
        )
        cli.wait_for(self._answers, "an SSH server")

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.3", self.port)) == 0

    def words(self, hosts: str = "127.0.0.2,127.0.0.3", key: str = "user_key") -> list[str]:
        options = [
            f"IdentityFile={self.folder}/{key}",
            "IdentitiesOnly=yes",
            f"UserKnownHostsFile={self.folder}/known_hosts",
            "GlobalKnownHostsFile=/dev/null",
        ]
        return [
            *("ssh", "--hosts", hosts, "--port", str(self.port), "--user", getpass.getuser()),
            *("--python", sys.executable, "--env", "PYTHONPATH", "PRIMUS_PLUGINS", "--option", *options),
        ]

    def stop(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.2", 0))
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ssh") / "server")
    yield server
    server.stop()


def test_both_hosts_train_together(server: Server, tmp_path: Path) -> None:
    write_experiment(tmp_path, 3, "native")
    done = cli.run(*server.words(), "--", "train", "pretrain", "--config", "two.yaml", cwd=tmp_path, timeout_s=90)
    assert done.returncode == 0, done.stderr
    folder = next((tmp_path / "output" / "two").glob("2*"))
    assert [event["step"] for event in events.read_steps(folder / "events.jsonl")] == [1, 2, 3]
    assert "rank 1" not in done.stdout
    assert (folder / "logs/ssh").is_dir()
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "done"
    assert (folder / "logs/attempt_0/rank_1.log").is_file()


def test_a_drill_on_two_hosts_recovers_from_a_killed_and_a_stopped_rank(server: Server, tmp_path: Path) -> None:
    write_experiment(tmp_path, 1000000)
    drill = ("drill", "--minutes", "8", "--steps", "60", "--faults", "kill-rank", "hang", "--output", "drilled")
    line = (*server.words(), "--", *drill, "--", "train", "pretrain", "--config", "two.yaml")
    done = cli.run(*line, cwd=tmp_path, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "drilled/drill.json").read_text())["cases"]
    found = [(case["fault"], case["state"], case["rank"], case["is_blame_right"]) for case in cases]
    assert found == [("kill-rank", "recovered", 1, True), ("hang", "recovered", 0, True)]
    assert all(case["losses"]["num_after"] == case["losses"]["num_equal_after"] > 0 for case in cases)


def test_a_host_whose_python_lacks_packages_is_named_with_the_way_out(server: Server, tmp_path: Path) -> None:
    write_experiment(tmp_path, 3)
    choose = f'case "$SSH_CONNECTION" in *" 127.0.0.3 "*) exec {sys.executable} -S "$@" ;; esac'  # without packages
    (tmp_path / "python").write_text(f'#!/bin/sh\n{choose}\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    words = [str(tmp_path / "python") if word == sys.executable else word for word in server.words()]
    done = cli.run(*words, "--", "train", "pretrain", "--config", "two.yaml", cwd=tmp_path, timeout_s=100)
    assert done.returncode == 3
    assert f"node 1 (127.0.0.3:{server.port}) failed" in done.stderr
    assert f"primus-cli: {sys.executable}" in done.stderr and "has no package msgspec" in done.stderr
    assert "name another Python, or install it there" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("data", "code"), [("here", 0), ("wrong", 2)])
def test_data_that_only_the_hosts_have_are_checked_there(data: str, code: int, tmp_path: Path) -> None:
    """Where the hosts mount the data, this machine has an empty folder."""
    stored, mounted = tmp_path / "stored", tmp_path / "mounted"
    mounted.mkdir()
    stored.mkdir()
    write_tokens(stored / "here")
    write_experiment(tmp_path, 2)
    mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    prefix = ("unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", str(stored), str(mounted))
    server = Server(tmp_path / "server", prefix)
    try:
        task = ("train", "pretrain", "--config", "two.yaml", "--mock_data", "false", "--eval_iters", "0")
        words = (*server.words(), "--", *task, "--train_data_path", f"{mounted}/{data}")
        planned = cli.run("--dry-run", *words, cwd=tmp_path).stdout
        assert "checked on the nodes: " in planned and f"no such data: {mounted}/{data}.idx on this machine" in planned
        done = cli.run(*words, cwd=tmp_path, timeout_s=120)
    finally:
        server.stop()
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        outcome = json.loads(next(tmp_path.glob("output/two/2*/metadata.json")).read_text())["outcome"]
        assert f"no such data: {mounted}/wrong.idx" in outcome["reason"]
        assert any(outcome["reason"] in line for line in done.stderr.splitlines()), "in one line"
        assert not list(tmp_path.glob("output/two/2*/logs/attempt_0/rank_*.log")), "no worker started"


def test_both_hosts_measure_collectives_and_products(server: Server, tmp_path: Path) -> None:
    more = ("--device", "cpu", "--json", "--duration", "0.1")
    words = ("collectives", "--op", "all_reduce", "all_gather", "--sizes", "64K", "--iters", "20", *more)
    done = cli.run(*server.words(), "--", "benchmark", *words, "--cluster", "two", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["result"]
    assert (result["world_size"], [rank["rank"] for rank in result["ranks"]]) == (2, [0, 1])
    rows = [row for rank in result["ranks"] for row in rank["rows"]]
    assert {row["case"]["op"] for row in rows} == {"all_reduce", "all_gather"}
    assert all(row["value"] > 0 and row["wrong"] == 0 and row["case"]["ranks"] == 2 for row in rows)
    words = ("gemm", "-M", "64", "-N", "64", "-K", "64", "--dtype", "fp32", "--output-file", "g.markdown", *more)
    done = cli.run(*server.words(), "--", "benchmark", *words, cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert [len(rank["rows"]) for rank in json.loads(done.stdout)["result"]["ranks"]] == [1, 1]
    assert "TFLOP/s" in (tmp_path / "g.markdown").read_text()


def started_training(server: Server, workplace: Path, **env: str) -> AbstractContextManager[subprocess.Popen[str]]:
    write_experiment(workplace, 100000)
    words = [*server.words(), "--", "train", "pretrain", "--config", "two.yaml"]
    return cli.started(*words, cwd=workplace, **env)


def folder_of(workplace: Path, process: subprocess.Popen[str]) -> Path:
    """The run folder, once both nodes have made steps."""
    latest = workplace / "output" / "two" / "latest"
    cli.wait_for(lambda: "step" in _events(latest) or process.poll() is not None, "a step", timeout_s=60)
    assert process.poll() is None, process.communicate()
    return latest.resolve()


def _events(folder: Path) -> dict[str, dict[str, object]]:
    """The newest event of each kind."""
    return {event["kind"]: event for event in events.read_events(folder / "events.jsonl")}


def those_of(folder: Path) -> list[psutil.Process]:
    """All processes that name the run folder, on whatever host: launchers, torchrun, workers."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(folder) in (each.info["cmdline"] or [])]


def launcher(folder: Path, rank: int) -> psutil.Process:
    """The launcher of a node."""
    found = [
        process
        for process in those_of(folder)
        if "--run" in process.cmdline() and process.environ().get("NODE_RANK") == str(rank)
    ]
    return found[0]


def assert_nobody_lingers(folder: Path) -> None:
    cli.wait_for(lambda: not those_of(folder), "the end of all processes of the run", timeout_s=30)


def test_an_interrupt_saves_on_all_hosts(server: Server, tmp_path: Path) -> None:
    with started_training(server, tmp_path) as process:
        folder = folder_of(tmp_path, process)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "saved at step" in err
    assert _events(folder)["checkpoint_saved"]["step"] == _events(folder)["interrupted"]["step"]
    outcome = json.loads((folder / "metadata.json").read_text())["outcome"]
    assert (outcome["state"], outcome["exit_code"]) == ("interrupted", 130)
    assert_nobody_lingers(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_launcher_is_named_and_ends_the_others(server: Server, tmp_path: Path, rank: int) -> None:
    with started_training(server, tmp_path) as process:
        folder = folder_of(tmp_path, process)
        launcher(folder, rank).kill()
        killed_at = time.monotonic()
        _, err = process.communicate(timeout=90)
        assert time.monotonic() - killed_at < 40
    assert process.returncode == (1 if rank else 137), "node 0 records how the run ends, unless it is the one"
    assert f"node {rank} (127.0.0.{2 + rank}:{server.port}): its launcher was killed" in err
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "failed"
    assert_nobody_lingers(folder)


def test_hosts_save_when_whoever_started_them_is_gone(server: Server, tmp_path: Path) -> None:
    with started_training(server, tmp_path) as process:
        folder = folder_of(tmp_path, process)
        process.kill()
        process.wait()
        cli.wait_for(lambda: "run_ended" in _events(folder), "the end of the run", timeout_s=60)
    assert "checkpoint_saved" in _events(folder)
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "interrupted"
    assert_nobody_lingers(folder)


def test_a_silent_host_counts_as_lost_and_ends_its_task_once_it_notices(server: Server, tmp_path: Path) -> None:
    write_experiment(tmp_path, 100000)
    words = [*server.words("127.0.0.2"), "--option", "ServerAliveInterval=1", "ServerAliveCountMax=2"]
    with cli.started(*words, "--", "train", "pretrain", "--config", "two.yaml", cwd=tmp_path) as process:
        folder = folder_of(tmp_path, process)
        session = launcher(folder, 0).parent()
        assert session and "sshd" in session.name()
        session.suspend()
        try:
            _, err = process.communicate(timeout=30)
        finally:
            session.resume()
    assert process.returncode == 1, err
    assert f"node 0 (127.0.0.2:{server.port}): the connection was lost" in err
    assert_nobody_lingers(folder)
    assert "checkpoint_saved" in _events(folder)


def test_secrets_reach_the_hosts_and_no_command_line(server: Server, tmp_path: Path) -> None:
    words = server.words()
    words += ["--env", "HF_TOKEN", "GH_TOKEN=canary-typed", 'HARMLESS=it\'s "$(id)" `id`\n, = é']
    write_experiment(tmp_path, 100000)
    task = ["train", "pretrain", "--config", "two.yaml"]
    with cli.started(*words, "--", *task, cwd=tmp_path, HF_TOKEN="canary-shell") as process:
        folder = folder_of(tmp_path, process)
        for rank in (0, 1):
            seen = launcher(folder, rank).environ()
            assert (seen["HF_TOKEN"], seen["GH_TOKEN"]) == ("canary-shell", "canary-typed")
            assert seen["HARMLESS"] == 'it\'s "$(id)" `id`\n, = é'
        own = process.pid
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]) if each.pid != own]
        assert "canary-shell" not in "".join(lines)
        assert "canary-typed" not in "".join(lines)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert "canary" not in out + err
    for file in folder.rglob("*"):
        assert not file.is_file() or b"canary" not in file.read_bytes(), file
    assert_nobody_lingers(folder)


def test_a_host_that_refuses_us_is_named(server: Server, tmp_path: Path) -> None:
    done = cli.run(*server.words(key="stranger_key"), "--", "runs", "list", cwd=tmp_path)
    assert done.returncode == 3
    first = r"node (0 \(127\.0\.0\.2|1 \(127\.0\.0\.3):\d+\): login denied: publickey"  # whoever is quicker
    assert re.search(first, done.stderr)


def test_a_host_with_another_key_is_named(server: Server, tmp_path: Path) -> None:
    done = cli.run(*server.words(hosts="127.0.0.2,localhost"), "--", "runs", "list", cwd=tmp_path)
    assert done.returncode == 3
    assert f"node 1 (localhost:{server.port})" in done.stderr


def test_a_host_that_is_down_ends_the_others_at_once(server: Server, tmp_path: Path) -> None:
    write_experiment(tmp_path, 3)
    words = server.words(hosts=f"127.0.0.2,127.0.0.3:{_free_port()}")
    done = cli.run(*words, "--", "train", "pretrain", "--config", "two.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert "cannot be reached: Connection refused" in done.stderr
    folder = (tmp_path / "output" / "two" / "latest").resolve()
    outcome = json.loads((folder / "metadata.json").read_text())["outcome"]
    assert outcome["state"] in ("failed", "interrupted")
    assert_nobody_lingers(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_in_a_terminal_saves_and_ends(number: signal.Signals, server: Server, tmp_path: Path) -> None:
    with terminal.training(*server.words(), cwd=tmp_path, experiment=LONG) as shown:
        shown.tell(number)
        terminal.check_saved(shown, tmp_path, number)


def test_a_failure_hook_of_host_0_is_done_though_the_other_host_has_failed(server: Server, tmp_path: Path) -> None:
    hooks = tmp_path / "own-hooks" / "failure"
    hooks.mkdir(parents=True)
    (hooks / "01.once.sh").write_text(f"sleep 3; echo done >{tmp_path}/said\n")
    environ = {"PRIMUS_HOOKS": str(hooks.parent)}
    with terminal.training(*server.words(), cwd=tmp_path, experiment=LONG, **environ) as shown:
        folder = next(tmp_path.glob("output/two/2*/metadata.json")).parent
        beat = json.loads((folder / "logs/attempt_0/rank_1.heartbeat.json").read_text())
        os.kill(beat["pid"], signal.SIGKILL)
        assert shown.ended() == 137
    assert (tmp_path / "said").read_text() == "done\n"
    assert shown.shown.count("run failed: rank 1 was killed by SIGKILL") == 1


def test_a_spare_host_takes_the_place_of_an_unfit_one_and_hosts_are_checked(server: Server, tmp_path: Path) -> None:
    write_experiment(tmp_path, 3)
    environ = {"PRIMUS_UNFIT_NODES": str(tmp_path / "site")}
    added = cli.run("direct", "--", "nodes", "add", "127.0.0.2", "--reason", "GPU 5", cwd=tmp_path, **environ)
    assert added.returncode == 0, added.stderr
    task = ("--", "train", "pretrain", "--config", "two.yaml")
    done = cli.run(*server.words(), "--spare-nodes", "1", *task, cwd=tmp_path, timeout_s=90, **environ)
    assert done.returncode == 0, done.stderr
    assert "avoids 127.0.0.2, which is unfit: GPU 5" in done.stdout + done.stderr
    (folder,) = (tmp_path / "output/two").glob("2*")
    plan = json.loads((folder / "launch.ssh.json").read_text())
    assert plan["argv"][-2].endswith("127.0.0.3") or "127.0.0.3" in " ".join(plan["argv"])
    runtime = shlex.join(server.words())
    check = ("direct", "--", "nodes", "check", "--runtime", runtime)
    every = cli.run(*check, "--idle", "--storage", cwd=tmp_path, timeout_s=90, **environ)
    assert "fit\n  127.0.0.[2-3]" in every.stdout, every.stdout + every.stderr
    assert "fit, but in the list of unfit nodes: 127.0.0.2" in every.stdout
    one = cli.run(*check, "127.0.0.2", "--storage", cwd=tmp_path, timeout_s=90, **environ)
    assert "127.0.0.2 is fit, and not in the list any more" in one.stdout, one.stdout + one.stderr
