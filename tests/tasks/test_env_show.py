"""`env show`: what each model gets, kept as golden files, and how it is told."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primus import registry
from primus.cli.main import main
from primus.errors import UsageError
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import Gid, Interface, MachineFacts, RdmaDevice, RdmaPort
from primus.machine.workload import JobWorkload
from primus.runs.files import to_json
from primus.task import TASKS, TaskContext

show = registry.load_plug_in(TASKS, "env show")

MODELS = (
    "mi210",
    "mi250x",
    "mi300a",
    "mi300x",
    "mi308x",
    "mi325x",
    "mi350x",
    "mi355x",
    "a100",
    "h100",
    "h200",
    "b200",
    "cpu",
)


def shown(capsys: pytest.CaptureFixture[str], environ: dict[str, str] | None = None, **options: object) -> str:
    """What people see."""
    show.run(show.Options(**options), TaskContext(environ=environ or {}))
    return capsys.readouterr().out


@pytest.mark.parametrize("model", MODELS)
def test_what_each_model_gets(model: str, golden: Callable[[str, str], None]) -> None:
    facts = build_assumed_machine(model)
    workload = JobWorkload(framework="megatron", tensor=2)
    report = show.build_environment_report(
        facts, ClusterLayout(nproc=max(1, len(facts.partitions)), nnodes=2), {}, {}, workload=workload
    )
    golden(f"env/{model}.json", to_json(report) + "\n")


def test_people_see_each_variable_below_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"NCCL_DEBUG": "INFO", "HSA_NO_SCRATCH_RECLAIM": "1"}
    lines = shown(capsys, environ, assume="mi300a:4", framework="megatron").splitlines()
    assert lines[0] == "4 x MI300A (gfx942, 1 node, assumed)"
    assert lines[2].split() == ["variable", "value", "from", "instead", "of"]
    sections = [line for line in lines if line and not line.startswith(" ") and line[0] != "4"]
    assert sections == ["communication", "attention, fp8 and kernels", "GPU runtime", "warnings"]
    rows = {line.split()[0]: line for line in lines[: lines.index("warnings")] if line.startswith("  ")}
    assert "user: environment" in rows["NCCL_DEBUG"]
    assert rows["HSA_NO_SCRATCH_RECLAIM"].split()[1:4] == ["1", "user:", "environment"]
    assert rows["HSA_NO_SCRATCH_RECLAIM"].endswith("0 (mi300a), 1 (amd)")
    assert lines.index("communication") < lines.index(rows["TORCH_NCCL_HIGH_PRIORITY"]) < lines.index("GPU runtime")
    assert lines[-1].startswith("  HSA_NO_SCRATCH_RECLAIM: keeping the value of user; mi300a recommends 0: ")


def test_a_variable_that_is_left_unset_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    row = next(line for line in shown(capsys, assume="mi210", framework="megatron").splitlines() if "MXFP8" in line)
    assert row.split()[1] == "(unset)"
    assert row.endswith("1 (amd)")
    text = shown(capsys, {"NCCL_ALGO": ""}, assume="mi210")
    assert next(line for line in text.splitlines() if "NCCL_ALGO" in line).split()[1] == '""'


def test_a_machine_without_gpus_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, assume="cpu") == "no GPUs (1 node, assumed)\n\nno variables\n"


def test_json_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"RCCL_WARP_SPEED_AUTO": "1"}
    show.run(show.Options(assume="mi355x:8"), TaskContext(environ=environ, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["models"] == {"MI355X": 8}
    item = next(item for item in report["variables"] if item["name"] == "RCCL_WARP_SPEED_AUTO")
    assert item == {
        "name": "RCCL_WARP_SPEED_AUTO",
        "value": "1",
        "layer": "user",
        "reason": "set in the shell",
        "source": "environment",
        "overrode": [{"layer": "gfx950", "value": "0", "reason": "else the loss becomes NaN"}],
    }
    assert "else the loss becomes NaN" in report["warnings"][0]
    assert report["network"]["excluded"] == []


def test_a_node_among_several_is_told_its_ways(capsys: pytest.CaptureFixture[str]) -> None:
    gid = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")
    port = RdmaPort(state="ACTIVE", physical_state="LinkUp", rate_gbps=400, link_layer="Ethernet", gids=(gid,))
    down = RdmaPort(state="DOWN", physical_state="Polling", rate_gbps=40, link_layer="Ethernet")
    facts = MachineFacts(
        host="node0",
        devices=build_assumed_machine("mi300x").devices,
        interfaces=(Interface(name="eth0", state="up", addresses=("10.0.0.1",)),),
        master_interface="eth0",
        rdma=(
            RdmaDevice(name="mlx5_1", kind="mellanox", ports=(down,)),
            RdmaDevice(name="mlx5_0", kind="mellanox", ports=(port,)),
        ),
    )
    show.run(show.Options(nnodes=2), TaskContext(environ={}, facts=lambda: facts, json=True))
    report = json.loads(capsys.readouterr().out)
    values = {item["name"]: (item["value"], item["layer"]) for item in report["variables"]}
    assert values["NCCL_SOCKET_IFNAME"] == values["GLOO_SOCKET_IFNAME"] == ("eth0", "network")
    assert values["NCCL_IB_HCA"] == ("=mlx5_0:1", "network")
    assert values["NCCL_IB_GID_INDEX"] == ("3", "network")
    assert [name for name, _ in report["network"]["excluded"]] == ["mlx5_1:1"]


def test_secrets_are_masked_wherever_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"NCCL_API_KEY": "canary-1", "TORCH_HUB_TOKEN": "canary-2", "NCCL_NET": "http://me:canary-3@host"}
    for as_json in (False, True):
        show.run(show.Options(assume="h100"), TaskContext(environ=environ, json=as_json))
        out = capsys.readouterr().out
        assert "canary" not in out
        assert out.count("<secret>") == 3


def test_the_users_other_variables_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "EDITOR" not in shown(capsys, {"EDITOR": "vi", "HOME": "/root"}, assume="h100")


@pytest.mark.parametrize("nnodes", [0, -1])
def test_a_wrong_number_of_nodes_is_refused(nnodes: int) -> None:
    with pytest.raises(UsageError, match="is not a number of nodes"):
        show.run(show.Options(assume="h100", nnodes=nnodes), TaskContext(environ={}))


def test_the_command_names_the_nearest_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["direct", "--", "env", "show", "--assume", "mi355"]) == 2
    err = capsys.readouterr().err
    assert "--assume: unknown GPU model 'mi355'" in err
    assert "did you mean 'mi355x'?" in err


def test_the_experiment_and_typed_values_are_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(
        "env: {GPU_MAX_HW_QUEUES: '4', HSA_ENABLE_SDMA: '0', HF_TOKEN: canary}\n"
        "modules: {pre_trainer: {model: llama3.1_8B, overrides: {mock_data: true}}}\n"
    )
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "8")
    words = ["--json", "direct", "--env", "HSA_ENABLE_SDMA=1", "A=2", "--", "env", "show", "--assume", "mi300x"]
    assert main([*words, "--config", str(file)]) == 0
    out = capsys.readouterr().out
    found = {each["name"]: each for each in json.loads(out)["variables"]}
    assert (found["GPU_MAX_HW_QUEUES"]["value"], found["GPU_MAX_HW_QUEUES"]["layer"]) == ("8", "user")
    assert [lost["value"] for lost in found["GPU_MAX_HW_QUEUES"]["overrode"]] == ["4", "2"]
    assert (found["HSA_ENABLE_SDMA"]["value"], found["HSA_ENABLE_SDMA"]["layer"]) == ("1", "--env")
    assert found["A"]["source"] == "--env"
    assert found["HF_TOKEN"]["source"] == f"{file}:1"
    assert "canary" not in out


@pytest.mark.parametrize("words", [(), ("--assume", "mi355x:8")])
def test_it_takes_at_most_250_ms_of_cpu_in_all(words: tuple[str, ...], tmp_path: Path) -> None:
    assert min(_cpu_s(words, tmp_path) for _ in range(3)) <= 0.25


def _cpu_s(words: tuple[str, ...], folder: Path) -> float:
    """CPU time of the whole command, Python's start included."""
    argv = [sys.executable, "-m", "primus.cli.main", "direct", "--", "env", "show", *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_what_the_shell_had_is_shown_beside_the_value_typed_for_this_launch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert main(["direct", "--env", "NCCL_DEBUG=INFO", "--", "env", "show", "--assume", "mi300x"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "NCCL_DEBUG" in line]
    assert line.split() == ["NCCL_DEBUG", "INFO", "--env", "WARN", "(user)"]


def test_the_layout_of_an_experiment_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in shown(capsys, assume="h100")
    assert "backend:megatron" in shown(capsys, assume="h100", framework="megatron")
    with pytest.raises(UsageError, match="unknown framework 'megatronn'"):
        shown(capsys, assume="h100", framework="megatronn")


@pytest.mark.parametrize("kind", ["ainic", "slingshot"])
def test_adapters_of_an_assumed_machine_get_their_settings(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert f"nic:{kind}" in shown(capsys, assume="mi300x", assume_nic=kind, nnodes=2)
    with pytest.raises(UsageError, match="describes an assumed machine"):
        shown(capsys, assume_nic=kind)
