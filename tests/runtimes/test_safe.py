"""`kubernetes --url` against a server that enforces the contract of Primus-SaFE, also when it is not well."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fakes import cli
from fakes import safe as fake
from fakes.safe import Safe
from primus.errors import PrimusError, UsageError
from primus.runtimes.kubernetes import commands, safe_client, safe_payload
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.target import JobSpec
from primus.web import retries

EXPERIMENT = """\
exp_name: night
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
ENVIRON = {"PRIMUS_SAFE_TOKEN": fake.KEY}
RANKS = {"PET_NNODES": "2", "PET_NODE_RANK": "1"}


@pytest.fixture
def server() -> Iterator[Safe]:
    with fake.serving() as server:
        yield server


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (retries, safe_client):
        monkeypatch.setattr(module, "CLUSTER_PAUSES_S", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(commands, "POLL_S", 0.02)


def order(url: str = "http://safe", **changes: Any) -> JobSpec:
    options = {"url": url, "workspace": fake.WORKSPACE, "image": "rocm/primus:v26.5", "replica": 2, **changes}
    return JobSpec(
        options=Options(**options),
        name="night-20260101-000000-abcd",
        run_id="20260101_000000-abcd",
        directory="/here/night",
        inside="/shared/night",
        command=("primus-cli", "direct", "--", "train", "pretrain", "--run", "/shared/night"),
        files={"config/primus_config.yaml": "lr: 1\n", "metadata.json": "{}"},
        env={"NCCL_DEBUG": "INFO"},
        secrets={"HF_TOKEN": "canary-of-the-job"},
    )


def place_of(server: Safe, **options: Any) -> dict[str, str]:
    return safe_client.resolve_place(order(server.url, **options).options, ENVIRON)


def created(server: Safe, **changes: Any) -> dict[str, Any]:
    identity = safe_client.create_job(order(server.url, **changes), place_of(server, **changes), ENVIRON, print)
    return server.workloads[identity]


def test_master_and_workers_have_their_places_in_equally_long_lists(server: Safe) -> None:
    body = created(server, replica=4, gpu=8, memory="2Ti", shm="1Ti", nodelist=("a,b,c", "d"), priority=2)
    assert [each["replica"] for each in body["resources"]] == [1, 3]
    assert body["resources"][1] == {
        "replica": 3,
        "cpu": "96",
        "gpu": "8",
        "memory": "2Ti",
        "ephemeralStorage": "100Gi",
        "sharedMemory": "1Ti",
    }
    assert (body["specifiedNodes"], body["nodesAffinity"]) == (["a", "b", "c", "d"], "required")
    assert (body["priority"], body["env"]["HF_TOKEN"]) == (2, "canary-of-the-job")
    assert len(created(server, replica=1)["resources"]) == 1
    assert created(server, exclude=("x",))["excludedNodes"] == ["x"]


def test_an_old_server_gets_what_it_knows() -> None:
    with fake.serving(is_legacy=True) as server:
        environ = {"PRIMUS_USER": fake.USER}
        wanted = order(server.url, api="legacy", nodelist=("a",))
        place = safe_client.resolve_place(wanted.options, environ)
        body = server.workloads[safe_client.create_job(wanted, place, environ, print)]
        assert body["customerLabels"] == {"kubernetes.io/hostname": "a"}
        assert body["resource"]["replica"] == 2
        assert body["entryPoint"].startswith("echo ")
        with pytest.raises(PrimusError, match="unauthorised"):
            safe_client.list_jobs({**place, "user": "nobody"}, {})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"api": "legacy", "nodelist": ("a,b",)}, "--api legacy supports one node"),
        ({"workspace": None}, "needs --workspace"),
        ({"image": None}, "needs --image"),
        ({"secret": ("A=b/c",)}, "does not support --secret"),
        ({"grace": 60}, "does not support --grace"),
        ({"volume": ("claim:/data",)}, "the workspace mounts its volumes itself"),
        ({"priority": 3}, "use 0 to 2"),
        ({"url": "safe.example"}, "not the address"),
        ({"url": "http://[::1"}, "not the address"),
        ({"url": "https://safe:99999"}, "not the address"),
        ({"url": "https://me:canary@safe"}, "contains a user or password"),
    ],
)
def test_what_it_cannot_honour_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refusal:
        safe_client.check(structs.replace(order().options, **changes))
    assert "canary" not in str(refusal.value)


def entry_of(body: dict[str, Any]) -> str:
    return base64.b64decode(body["entryPoints"][-1]).decode("utf-8", "surrogateescape")


words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=3)


@settings(max_examples=20, deadline=None)
@given(words=words, text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_script_makes_the_run_folder_and_starts_its_node(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], text: str
) -> None:
    folder = tmp_path_factory.mktemp("pod")
    inside = folder / "a run's $(folder)"
    show = ("sh", "-c", 'printf "%s\\0" "$PET_NODE_RANK" "$@"', "show", *words)
    wanted = structs.replace(
        order(), inside=str(inside), command=show, files={"metadata.json": "{}", "config/a.yaml": text}
    )
    script = entry_of(safe_payload.build_workload_request(wanted))
    done = subprocess.run(["sh", "-c", script], env={**os.environ, **RANKS}, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"\0".join(word.encode() for word in ("1", *words, ""))
    assert (inside / "config/a.yaml").read_bytes() == text.encode()


def test_a_script_that_is_too_large_is_refused() -> None:
    large = structs.replace(order(), files={"config/a.txt": base64.b64encode(os.urandom(120_000)).decode()})
    with pytest.raises(UsageError, match="the limit is 131071"):
        safe_payload.build_workload_request(large)


def unpacked(text: str) -> str:
    """`text` without the packed files and the size that they give it; how they are packed depends on zlib."""
    text = re.sub(r"(?m)^H4sI[A-Za-z0-9+/=\n]*\n(?=PRIMUS_END)", "(packed files)\n", text)
    return re.sub(r"below, \d+ bytes", "below, N bytes", text) + "\n"


def test_what_is_shown_has_no_secret(golden: Callable[[str, str], None]) -> None:
    text = safe_client.format_job(order("https://safe.example.org"), as_json=False)
    assert "canary" not in text + safe_client.format_job(order("https://safe.example.org"), as_json=True)
    golden("kubernetes-safe/create.txt", unpacked(text))
    legacy = safe_client.format_job(order("https://safe.example.org", api="legacy"), as_json=False)
    golden("kubernetes-safe/create-legacy.txt", unpacked(legacy))


@pytest.mark.parametrize("trouble", ["drop after", "504 after"])
def test_a_job_whose_answer_was_lost_is_found_and_not_made_twice(server: Safe, trouble: str) -> None:
    server.trouble = [("POST", trouble)]
    assert created(server)["displayName"] == "night-20260101-000000-abcd"
    assert len(server.workloads) == 1
    assert [line.split("?")[0] for line in server.requests] == ["POST /api/v1/workloads", "GET /api/v1/workloads"]


@pytest.mark.parametrize("trouble", ["drop before", "503", "429"])
def test_a_job_that_was_not_made_is_made_at_the_next_attempt(server: Safe, trouble: str) -> None:
    server.trouble = [("POST", trouble)]
    created(server)
    assert len(server.workloads) == 1
    assert sum(line.startswith("POST") for line in server.requests) == 2


def test_a_job_that_may_be_there_is_named(server: Safe) -> None:
    server.trouble = [("POST", "503")] * 9
    with pytest.raises(PrimusError, match="look for night-20260101-000000-abcd"):
        created(server)


@pytest.mark.parametrize("trouble", ["503", "429", "drop before", "502"])
def test_a_question_is_asked_again(server: Safe, trouble: str) -> None:
    server.trouble = [("GET", trouble)] * 3
    assert safe_client.list_jobs(place_of(server), ENVIRON) == []
    server.trouble = [("GET", trouble)] * 9
    with pytest.raises(PrimusError, match=r"not well|closed|reset"):
        safe_client.list_jobs(place_of(server), ENVIRON)


@pytest.mark.parametrize(
    ("trouble", "problem"),
    [
        ("200 <html>", "is not JSON"),
        ("200 null", "is not a JSON object"),
        ("200 []", "is not a JSON object"),
        ("200 {}", "is not a list"),
        ('200 {"items": "x"}', "is not a list"),
        ('200 {"items": [{}]}', "is not a list of workloads"),
        ("302", "redirects to /elsewhere"),
        ("500", "not well"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(server: Safe, trouble: str, problem: str) -> None:
    server.trouble = [("GET", trouble)]
    with pytest.raises(PrimusError, match=problem):
        safe_client.list_jobs(place_of(server), ENVIRON)
    assert len(server.requests) == 1


def test_what_is_no_workload_is_an_error(server: Safe) -> None:
    server.trouble = [("GET", "200 {}")]
    with pytest.raises(PrimusError, match="is not a workload"):
        safe_client.get_job(place_of(server), "wl-0", ENVIRON)


@pytest.mark.parametrize("key", ["ak-canary\nof-two-lines", "ak-canary-\u4e2d", "ak-canary two"])
def test_a_key_that_no_header_can_hold_is_not_shown(server: Safe, key: str) -> None:
    with pytest.raises(UsageError, match="PRIMUS_SAFE_TOKEN does not contain exactly one API key") as refusal:
        safe_client.list_jobs(place_of(server), {"PRIMUS_SAFE_TOKEN": key})
    assert "canary" not in str(refusal.value)


def test_no_server_is_an_error() -> None:
    place = {"target": "safe", "url": "http://127.0.0.1:9", "api": "current"}
    with pytest.raises(PrimusError, match="Connection refused"):
        safe_client.list_jobs(place, ENVIRON)
    with pytest.raises(PrimusError, match="Connection refused"):
        safe_client.create_job(order(place["url"]), place, ENVIRON, print)


def test_refusals_tell_neither_key_nor_variables(server: Safe) -> None:
    with pytest.raises(PrimusError, match="unauthorised: Bearer <secret>") as refusal:
        safe_client.list_jobs(place_of(server), {"PRIMUS_SAFE_TOKEN": "ak-canary-old"})
    assert refusal.value.exit_code == 1
    with pytest.raises(PrimusError, match=r"workspace other not found.*Primus.02001") as refusal:
        created(server, workspace="other")
    assert "canary" not in str(refusal.value)
    with pytest.raises(UsageError, match="needs an API key"):
        safe_client.list_jobs(place_of(server), {})


def test_the_key_may_be_in_a_file(server: Safe, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{fake.KEY}\n")
    assert safe_client.list_jobs(place_of(server, token_file=str(tmp_path / "key")), {}) == []
    (tmp_path / "key").write_text("two words")
    with pytest.raises(UsageError, match="does not contain exactly one API key"):
        safe_client.list_jobs(place_of(server, token_file=str(tmp_path / "key")), {})


POD = {"podId": "night-worker-0", "phase": "Failed", "hostIP": "10.0.0.7", "rank": 1}


def test_jobs_tell_phase_queue_pods_and_nodes(server: Safe) -> None:
    created(server)
    waiting = server.add(phase="Pending", queuePosition=3)
    failed = server.add(
        phase="Failed", dispatchCount=3, pods=[{**POD, "containers": [{"exitCode": 9, "message": "Error"}]}]
    )
    views = safe_client.list_jobs(place_of(server), ENVIRON)
    assert [view.id for view in views] == ["wl-0", waiting, failed]
    assert (views[0].run, views[0].replicas) == ("20260101_000000-abcd", 2)
    assert (views[1].state.state, views[1].state.reason) == ("queued", "position 3 in the queue")
    view = safe_client.get_job(place_of(server), failed, ENVIRON)
    assert (view.state.state, view.state.exit_code, view.state.restarts) == ("failed", 9, 2)
    assert (view.pods[0].node, view.pods[0].rank, view.pods[0].message) == ("10.0.0.7", 1, "Error")
    assert safe_client.find_states(place_of(server), [waiting, "gone"], ENVIRON)["gone"].state == "gone"
    with pytest.raises(UsageError, match="no job 'none'"):
        safe_client.get_job(place_of(server), "none", ENVIRON)
    with pytest.raises(UsageError, match="no job"):
        safe_client.get_job(place_of(server), "../nodes", ENVIRON)


def test_long_lists_are_read_to_their_end(server: Safe) -> None:
    for _ in range(205):
        server.add()
    assert len(safe_client.list_jobs(place_of(server), ENVIRON)) == 205


def test_logs_are_followed_without_lines_twice(server: Safe, monkeypatch: pytest.MonkeyPatch) -> None:
    job = server.add(phase="Running", pods=[{"podId": "p0", "rank": 0, "phase": "Running"}])
    lines = server.logs[job, "p0"] = ["a", "a", "b"]
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if text == "b\n":
            lines.extend(["a", "a", "b2"])
        if text == "b2\n":
            server.workloads[job]["phase"] = "Succeeded"

    monkeypatch.setattr(commands, "_write_to_stdout", write)
    target, place = commands.load_target("safe"), place_of(server)
    commands.write_log(target, place, job, ENVIRON, commands.LogRequest(0, True, None))
    assert written == ["a\n", "a\n", "b\n", "a\n", "a\n", "b2\n"]
    commands.write_log(target, place, job, ENVIRON, commands.LogRequest(0, False, 1))
    assert written[6:] == ["b2\n"]
    with pytest.raises(UsageError, match="node 5 of"):
        commands.write_log(target, place, job, ENVIRON, commands.LogRequest(5, False, None))


def test_a_job_that_is_gone_at_the_second_attempt_is_deleted(server: Safe) -> None:
    job = server.add()
    server.trouble = [("DELETE", "drop after")]
    safe_client.delete_job(place_of(server), job, ENVIRON)
    assert not server.workloads
    with pytest.raises(UsageError, match="no job"):
        safe_client.delete_job(place_of(server), job, ENVIRON)


def test_nodes_tell_what_is_free(server: Safe) -> None:
    gpus = {"totalResources": {"amd.com/gpu": 8, "cpu": 96}, "availResources": {"amd.com/gpu": 2}}
    server.nodes = [
        {"nodeId": "n2", "nodeName": "n2", "available": False, "message": "being repaired", **gpus},
        {"nodeId": "n1", "nodeName": "n1", "available": True, **gpus},
    ]
    views = safe_client.list_nodes(place_of(server), ENVIRON)
    assert [(view.name, view.is_ready, view.gpus, view.gpus_used) for view in views] == [
        ("n1", True, 8, 6),
        ("n2", False, 8, 6),
    ]
    assert views[1].message == "being repaired"


def test_the_words_of_the_existing_system_start_a_job(server: Safe, workplace: Path) -> None:
    typed = ["--replica", "2", "--gpu", "8", "--exp", "night.yaml", "--image", "rocm/primus:v26.5", "--workspace", "ws"]
    typed += ["--url", server.url, "--hf_token", "canary-typed", "--nodelist", "a,b"]
    done = cli.run("k8s", "create", *typed, cwd=workplace, **ENVIRON)
    assert done.returncode == 0, done.stderr
    body = server.workloads["wl-0"]
    assert body["env"]["HF_TOKEN"] == "canary-typed"
    assert body["specifiedNodes"] == ["a", "b"]
    assert "exp_name: night" not in entry_of(body), "files are packed"
    said = done.stdout + done.stderr
    for command in (["list"], ["get", "wl-0"], ["nodes"], ["delete", "wl-0", "--yes"]):
        done = cli.run("k8s", *command, "--url", server.url, "--workspace", "ws", cwd=workplace, **ENVIRON)
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    assert "wl-0" in said
    files = [path for path in workplace.rglob("*") if path.is_file()]
    assert "canary" not in said + "".join(path.read_text(errors="replace") for path in files)
    done = cli.run("k8s", "get", "wl-0", "--url", server.url, cwd=workplace, **ENVIRON)
    assert (done.returncode, done.stdout) == (2, "")


def test_waiting_gives_the_exit_code_of_the_job(server: Safe, workplace: Path) -> None:
    job = server.add(phase="Failed", pods=[{**POD, "containers": [{"exitCode": 9}]}])
    done = cli.run("k8s", "wait", job, "--url", server.url, cwd=workplace, **ENVIRON)
    assert done.returncode == 9, done.stderr
    stopped = server.add(phase="Stopped")
    assert cli.run("k8s", "wait", stopped, "--url", server.url, cwd=workplace, **ENVIRON).returncode == 130
    done = cli.run("--json", "k8s", "list", "--url", server.url, cwd=workplace, **ENVIRON)
    assert json.loads(done.stdout)[0]["state"]["raw"] == "Failed"
