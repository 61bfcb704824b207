"""`preflight` as it is typed: its exit codes, its JSON, several nodes, and what it does for `train`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from fakes import cli, tools

EXPERIMENT = """\
exp_name: night
modules:
  pre_trainer:
    framework: abacus
    model: tiny.yaml
    overrides: {mock_data: true, seq_length: 128, train_iters: 1}
"""


def preflight(*words: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return cli.run("direct", "--nproc", "1", "--", "preflight", *words, cwd=cwd, **more)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Status by check of the first node."""
    return {one["check"]: one["status"] for one in json.loads(done.stdout)["report"]["nodes"][0]["findings"]}


def test_the_chosen_groups_are_checked_and_json_is_complete(tmp_path: Path) -> None:
    done = preflight("check", "--host", "--network", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in findings(done)} == {"host", "network"}
    assert done.returncode == (0 if told["verdict"] == "pass" else 3), done.stdout
    for one in told["report"]["nodes"][0]["findings"]:
        assert one["measured"]
        assert one.get("advice") or one["status"] in ("ok", "info"), one


def test_a_check_that_fails_ends_in_3_and_names_it(tmp_path: Path) -> None:
    done = preflight("--gpu", "--expected-gpus", "8", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3, done.stderr
    assert "is unfit" in done.stdout.splitlines()[-1]


def test_a_tool_that_is_required_and_missing_is_overridden_by_name_only(tmp_path: Path) -> None:
    words = ("--software", "--require-tools", "no-such-program")
    assert preflight(*words, cwd=tmp_path).returncode == 3
    assert preflight(*words, "--ignore", "software.tool", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--tests", "gem"), "did you mean 'gemm'"),
        (("--perf", "--comm-sizes-mb", "1,x"), "sizes in MiB"),
        (("--perf", "--ring-p2p-sizes-mb", "-1"), "sizes in MiB"),
        (("--ignore", "memlock"), "a check has a group and a name"),
        (("--thresholds", "none.yaml"), "no such file"),
        (("--dmesg-minutes", "-1"), "expected float > 0.0"),
        (("--expected-nodes", "n[a-b]"), "is not a range of numbers"),
        (("--report", "r", "--report-file-name", ".."), "not a name"),
        (("sweep",), "did you mean|Invalid enum"),
    ],
)
def test_what_means_nothing_is_a_usage_error(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    done = preflight(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert any(part in done.stderr for part in problem.split("|")), done.stderr


def test_a_report_that_cannot_be_written_is_said_before_anything_takes_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = preflight("--host", "--report", "file/reports", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--report file/reports: Not a directory" in done.stderr


def test_a_management_tool_that_hangs_fails_the_node_within_its_limit(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}:{Path(shutil.which('sh') or '/bin/sh').parent}"
    from primus.machine.facts import Device, MachineFacts
    from primus.machine.tree import FileTree
    from primus.preflight import run_checks as check
    from primus.preflight.findings.node import PreflightNode
    from primus.preflight.findings.thresholds import Thresholds

    facts = MachineFacts(host="n", devices=(Device(index=0, vendor="nvidia"),))
    node = PreflightNode(facts=facts, tree=FileTree(), environ={"PATH": path}, limits=Thresholds(smi_limit_s=0.5))
    report = check.run(node, ("gpu",))
    assert [one.status for one in report.findings if one.check == "gpu.tool"] == ["fail"]
    assert report.duration_s < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_preflight_that_is_interrupted_leaves_no_program_behind(tmp_path: Path, number: signal.Signals) -> None:
    pid = tmp_path / "pid"
    path = tools.tool(tmp_path / "bin", "slow-tool", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60")["PATH"]
    words = ("direct", "--nproc", "1", "--", "preflight", "--software", "--require-tools", "slow-tool")
    with cli.started(*words, cwd=tmp_path, PATH=f"{path}:/usr/bin:/bin") as process:
        cli.wait_for(pid.exists, "the tool")
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert tools.is_gone(int(pid.read_text()))


def test_what_has_no_effect_is_said(tmp_path: Path) -> None:
    done = preflight("--software", "--disable-pdf", "--gemm-tflops-min", "600", "--json", cwd=tmp_path)
    assert "--disable-pdf has no effect: the report is" in done.stderr
    assert "--gemm-tflops-min has no effect: nothing is measured without --perf" in done.stderr


def test_node_smoke_takes_the_options_that_users_know(tmp_path: Path) -> None:
    words = "--skip-dmesg --ulimit-l-min-gb 1 --shm-min-gb 0 --rocm-smi-timeout-sec 3 --hbm-busy-threshold-gib 3"
    done = cli.run("direct", "--", "node-smoke", "--host", "--json", *words.split(), cwd=tmp_path)
    assert findings(done)["host.kernel_log"] == "info"
    assert findings(done)["host.shm"] == "ok"


def nodes(
    cwd: Path, count: int, *words: str, absent: int | None = None, meanwhile: Callable[[], object] = int
) -> list[subprocess.CompletedProcess[str]]:
    """One preflight over `count` nodes, all of them processes of this machine; `meanwhile` is called once they run."""
    with closing(socket.create_server(("", 0))) as listener:
        port = str(listener.getsockname()[1])
    with ExitStack() as stack:
        place = {"NNODES": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        started = [
            stack.enter_context(
                cli.started("direct", "--nproc", "1", "--", "preflight", *words, cwd=cwd, NODE_RANK=str(rank), **place)
            )
            for rank in reversed(range(count))
            if rank != absent
        ]
        meanwhile()
        outputs = [process.communicate(timeout=60) for process in started]
    found = [
        subprocess.CompletedProcess(words, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]
    return found[::-1]


def test_three_nodes_make_one_report_and_lists_for_srun(tmp_path: Path) -> None:
    done = nodes(tmp_path, 3, "--host", "--report", "reports", "--report-file-name", "night", "--ignore", "host.shm")
    assert [node.returncode for node in done] == [0, 0, 0], [node.stdout + node.stderr for node in done]
    assert [bool(node.stdout) for node in done] == [True, False, False]
    host = socket.gethostname().partition(".")[0]
    assert (tmp_path / "reports/night/passing_nodes.txt").read_text() == f"{host}-0\n{host}-1\n{host}-2\n"
    assert (tmp_path / "reports/night/report.html").is_file()


def test_a_node_that_never_comes_is_failing_and_the_others_learn_the_verdict(tmp_path: Path) -> None:
    words = (
        "--host",
        "--ignore",
        "host.shm",
        "--time-limit",
        "8",
        "--report",
        "reports",
        "--report-file-name",
        "night",
    )
    done = nodes(tmp_path, 3, *words, absent=1)
    assert [node.returncode for node in done] == [3, 0], [node.stdout + node.stderr for node in done]
    assert (tmp_path / "reports/night/failing_nodes.txt").read_text() == "node-1\n"


@pytest.mark.native
def test_a_worker_that_is_killed_while_it_measures_makes_its_node_unfit_and_the_report_is_written(
    tmp_path: Path,
) -> None:
    heartbeat = "output/preflight/latest/logs/attempt_0/rank_{}.heartbeat.json"

    def pid(rank: int) -> int:
        file = tmp_path / heartbeat.format(rank)
        return int(json.loads(file.read_text())["pid"])

    def kill() -> None:
        cli.wait_for(lambda: all((tmp_path / heartbeat.format(rank)).is_file() for rank in range(3)), "three workers")
        os.kill(pid(1), signal.SIGKILL)

    words = ("--host", "--ignore", "host.shm", "--report", "reports", "--time-limit", "30")
    words += ("--tests", "gemm,collectives")  # the last of which no rank can end without rank 1
    done = nodes(tmp_path, 3, *words, "--report-file-name", "night", meanwhile=kill)
    assert [node.returncode for node in done] == [3, 3, 3], [node.stdout + node.stderr for node in done]
    host = socket.gethostname().partition(".")[0]
    assert f"{host}-1 is unfit" in done[1].stderr
    assert "rank 1 was killed by SIGKILL" in done[1].stderr
    assert (tmp_path / "reports/night/failing_nodes.txt").read_text() == f"{host}-1\n"
    assert (tmp_path / "reports/night/passing_nodes.txt").read_text() == ""
    cli.wait_for(lambda: not any(Path(f"/proc/{pid(rank)}").exists() for rank in range(3)), "workers that are gone")


def train(cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    (cwd / "night.yaml").write_text(EXPERIMENT)
    return cli.run("direct", "--single", "--", "train", "pretrain", "--config", "night.yaml", *words, cwd=cwd, **env)


def test_training_starts_nothing_on_an_unfit_node_unless_the_check_is_overridden_by_name(tmp_path: Path) -> None:
    env = {"NCCL_SOCKET_IFNAME": "no-such-interface"}
    refused = train(tmp_path, "--preflight", "quick", **env)
    assert refused.returncode == 3, refused.stderr
    assert "network.interface" in refused.stderr
    assert "--preflight-ignore network.interface" in refused.stderr
    assert not list(tmp_path.glob("output/night/*/logs/attempt_0/rank_0.log"))
    started = train(tmp_path, "--preflight", "quick", "--preflight-ignore", "network.interface", **env)
    assert started.returncode == 0, started.stderr
    (log,) = tmp_path.glob("output/night/latest/logs/launch.log")
    assert "ignoring network.interface" in log.read_text()


def test_the_variable_asks_for_a_preflight_and_the_option_wins(tmp_path: Path) -> None:
    env = {"NCCL_SOCKET_IFNAME": "no-such-interface", "PRIMUS_PREFLIGHT": "quick"}
    assert train(tmp_path, **env).returncode == 3
    assert train(tmp_path, "--preflight", "off", **env).returncode == 0
    assert train(tmp_path, PRIMUS_PREFLIGHT="quik").returncode == 2


def test_a_launch_that_asks_for_no_preflight_does_not_import_it(tmp_path: Path) -> None:
    told = "import atexit; atexit.register(lambda: print('primus.preflight' in sys.modules, file=sys.stderr))"
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    words = ("--dry-run", "direct", "--nproc", "2", "--", "train", "pretrain", "--config", "night.yaml")
    without = cli.run(*words, cwd=tmp_path, before=told)
    with_one = cli.run(*words, "--preflight", "quick", cwd=tmp_path, before=told)
    assert (without.returncode, with_one.returncode) == (0, 0), without.stderr + with_one.stderr
    assert [done.stderr.splitlines()[-1] for done in (without, with_one)] == ["False", "True"]


@pytest.mark.native
def test_measuring_leaves_json_alone_on_standard_output(tmp_path: Path) -> None:
    words = ("--software", "--tests", "sanity,collectives", "--comm-sizes-mb", "0.1", "--quick", "--json")
    words += ("--intra-group-sizes", "2,all", "--ring-p2p-sizes-mb", "0.5")
    done = cli.run("direct", "--nproc", "3", "--", "preflight", *words, cwd=tmp_path, timeout_s=120)
    told = json.loads(done.stdout)
    assert "performance" in told["report"]["checks"]
    measured = {one["check"] for one in told["report"]["findings"]}
    assert any(name.startswith("performance.all_reduce") for name in measured), measured
    sums = [one for one in told["report"]["findings"] if one["check"] == "performance.all_reduce"]
    assert {one.get("subject", "") for one in sums} == {"", "ranks 0-1"}
    rings = [one["measured"] for one in told["report"]["findings"] if one["check"] == "performance.send_recv"]
    assert len(rings) == 2 and all(" at 512.0 KiB" in ring for ring in rings), "the ring has a size of its own"


@pytest.mark.native
def test_a_burn_in_that_is_interrupted_reports_what_it_found(tmp_path: Path) -> None:
    words = ("--software", "--tests", "quickstart,burn_in", "--minutes", "0.5", "--quick", "--json")
    parts = [tmp_path / f"output/preflight/latest/report/performance/rank_{rank}.json" for rank in range(2)]

    def is_loaded() -> bool:
        return all(part.is_file() and json.loads(part.read_text())["rank"].get("burn_in") for part in parts)

    with cli.started("direct", "--nproc", "2", "--", "preflight", *words, cwd=tmp_path) as process:
        cli.wait_for(is_loaded, "both ranks' first window", timeout_s=180)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    told = {one["check"]: one for one in json.loads(out)["report"]["findings"]}
    assert told["performance.quickstart"]["status"] == "ok"
    assert "products of the same bits" in told["performance.burn_in"]["measured"]
    assert told["performance.run"]["status"] in ("fail", "unknown"), "an interrupted measurement passes no node"


def test_minutes_without_a_burn_in_are_told_to_have_no_effect(tmp_path: Path) -> None:
    done = preflight("--software", "--minutes", "5", "--json", cwd=tmp_path)
    assert "--minutes has no effect" in done.stderr
    assert preflight("--level", "soak", "--minutes", "2000", cwd=tmp_path).returncode == 2


def test_what_a_node_measures_by_itself_starts_no_workers(tmp_path: Path) -> None:
    done = nodes(tmp_path, 2, "--software", "--tests", "rdma,storage", "--quick", "--json")
    assert [node.returncode for node in done] == [0, 0], [node.stdout + node.stderr for node in done]
    found = json.loads(done[0].stdout)["report"]["findings"]
    hosts = {one["host"] for one in found if one["check"] == "performance.storage"}
    host = socket.gethostname().partition(".")[0]
    assert hosts == {f"{host}-0", f"{host}-1"}, "each node's own figures are in the report of node 0"
    assert any("not measured on" in one["measured"] for one in found if one["check"] == "performance.rdma_bandwidth")
    assert not list(tmp_path.glob("output/preflight/*"))
