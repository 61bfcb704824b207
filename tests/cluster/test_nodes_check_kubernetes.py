"""`nodes check` on a real API server. No kubelet and no controller runs here: a thread of the test schedules the pod of
each job to the node of its affinity, runs the container's command as a process, and serves its log."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.test_kubernetes import (
    EXPERIMENT,
    HASTY,
    JOBSETS,
    MAPS,
    PODS,
    api,  # noqa: F401 - a fixture
    finish,
    k8s,
    kubelet,  # noqa: F401 - a fixture
    make_pod,
    running,
)
from fakes import cli
from fakes.kubelet import Api, Kubelet, start_container

pytestmark = [pytest.mark.cluster("kubernetes"), pytest.mark.slow]

AMOUNTS = {"amd.com/gpu": "8", "cpu": "96"}


class Nodes(threading.Thread):
    """The nodes' part: each new job gets its pod. One on a node in `unreachable` is never scheduled."""

    def __init__(self, server: Api, logs: Kubelet, folder: Path, unreachable: tuple[str, ...] = ()) -> None:
        super().__init__(daemon=True)
        self._api, self._kubelet, self._folder, self._unreachable = server, logs, folder, unreachable
        self.is_over = threading.Event()
        self.commands: dict[str, list[str]] = {}

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            for job in self._api.ask("GET", JOBSETS)["items"]:
                name = job["metadata"]["name"]
                if name not in self.commands:
                    self.commands[name] = []
                    self._run_pod(job)

    def _run_pod(self, job: Any) -> None:
        name, spec = job["metadata"]["name"], job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (terms,) = affinity["nodeSelectorTerms"]
        (node,) = next(each["values"] for each in terms["matchExpressions"] if each["operator"] == "In")
        if node in self._unreachable:
            return
        pod = make_pod(self._api, name, 0, running(), node=node)
        (self._folder / pod).mkdir()
        process = start_container(self._api, f"{PODS}/{pod}", self._folder / pod)
        lines = process.communicate(timeout=60)[0].splitlines(keepends=True)
        self._kubelet.logs[pod] = [f"2026-01-01T00:00:{number // 1000:02}.{number % 1000:09}Z {line}"
                                   for number, line in enumerate(lines)]  # fmt: skip
        self.commands[name] = process.args if isinstance(process.args, list) else []
        code = process.returncode
        self._api.set_status(f"{PODS}/{pod}", {**running(terminated={"exitCode": code}), "phase": "Succeeded"})
        finish(self._api, name, "Failed" if code else "Completed")


@contextmanager
def started(nodes: Nodes) -> Iterator[None]:
    nodes.start()
    try:
        yield
    finally:
        nodes.is_over.set()
        nodes.join(60)


@pytest.fixture
def site(api: Api, kubelet: Kubelet, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """Six nodes: two free, one in use, one cordoned, one not ready, and one without GPUs."""
    for name in ("g0", "g1", "g2", "g3", "g4", "head"):
        node: Any = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        node |= {"spec": {"unschedulable": True}} if name == "g3" else {}
        api.ask("POST", "/api/v1/nodes", node)
        ready = {"type": "Ready", "status": str(name != "g4"), "reason": "x", "message": "no contact"}
        amounts = AMOUNTS if name != "head" else {"cpu": "8"}
        where = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.port}},
        }
        status = {"conditions": [ready], "allocatable": amounts, "capacity": amounts, **where}
        api.set_status(f"/api/v1/nodes/{name}", status)
    limits = {"limits": {"amd.com/gpu": "4"}}
    pod: Any = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}}
    pod["spec"] = {"nodeName": "g2", "containers": [{"name": "x", "image": "X", "resources": limits}]}
    api.ask("POST", PODS, pod)
    program = tmp_path / "primus-cli"
    program.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'import sys; from primus.cli.main import main; sys.exit(main())' \"$@\""
    )
    program.chmod(0o755)
    yield tmp_path
    for each in api.ask("GET", PODS)["items"]:
        api.ask("DELETE", f"{PODS}/{each['metadata']['name']}", {"gracePeriodSeconds": 0})
    for name in ("g0", "g1", "g2", "g3", "g4", "head"):
        api.ask("DELETE", f"/api/v1/nodes/{name}")


def check(api: Api, site: Path, *words: str, code: int = 0, start: tuple[str, ...] = ("direct",)) -> str:  # noqa: F811
    environ = {"KUBECONFIG": str(api.kubeconfig), "HOME": str(site), "XDG_STATE_HOME": str(site / "state")}
    runtime = f"kubernetes --image X --entry {site}/primus-cli"
    words = (*start, "--", "nodes", "check", "--runtime", runtime, *words)
    done = cli.run(*words, cwd=site, before=HASTY, timeout_s=120, **environ)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def list_unfit(site: Path) -> list[str]:
    done = cli.run("--json", "direct", "--", "nodes", "list", cwd=site, XDG_STATE_HOME=str(site / "state"))
    return [each["node"] for each in json.loads(done.stdout)["nodes"] if each["is_unfit"]]


def test_a_dry_run_prints_the_manifest_of_each_free_node(api: Api, site: Path) -> None:  # noqa: F811
    said = check(api, site, "--idle", "--storage", start=("--dry-run", "direct"))
    assert said.count("kind: JobSet") == 2
    for text in ("g0: idle", "g2: busy (4 of 8 GPUs in use)", "g3: drained (cordoned", "g4: down (no contact)"):
        assert text in said
    assert "head" not in said and "amd.com/gpu: '8'" in said.replace('"', "'")
    assert api.ask("GET", JOBSETS)["items"] == []


def test_free_nodes_are_checked_and_nothing_is_left(api: Api, kubelet: Kubelet, site: Path) -> None:  # noqa: F811
    nodes = Nodes(api, kubelet, site, unreachable=("g1",))
    with started(nodes):
        said = check(api, site, "--idle", "--start-limit", "6", "--storage", start=("--json", "direct"), code=3)
    values = json.loads(said)
    assert {each["node"]: each["state"] for each in values["nodes"]} == {
        "g0": "fit", "g1": "no answer", "g2": "busy", "g3": "drained", "g4": "down",
    }  # fmt: skip
    (why,) = next(each["reasons"] for each in values["nodes"] if each["node"] == "g1")
    assert why.startswith("not scheduled within 6 s")
    (command,) = [command for command in nodes.commands.values() if command]
    assert command[-3:] == ["preflight", "--no-record-unfit", "--storage"]
    assert api.ask("GET", JOBSETS)["items"] == []
    assert not [each for each in api.ask("GET", MAPS)["items"] if each["metadata"]["name"].startswith("check-")]


def test_a_node_is_found_unfit_and_cleared_by_its_check(api: Api, kubelet: Kubelet, site: Path) -> None:  # noqa: F811
    with started(Nodes(api, kubelet, site)):
        said = check(api, site, "g0", "--gpu", "--expected-gpus", "8", "--skip-dmesg", code=3)
        assert "g0 is unfit" in said and "gpu.count" in said
        assert list_unfit(site) == ["g0"]
        assert "g0 is fit, and not in the list any more" in check(api, site, "g0", "--storage")
    assert list_unfit(site) == [] and api.ask("GET", JOBSETS)["items"] == []


def test_a_check_that_is_stopped_deletes_its_jobs_and_no_others(api: Api, site: Path) -> None:  # noqa: F811
    mine = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "mine"}, "spec": {}}
    api.ask("POST", JOBSETS, mine)
    environ = {"KUBECONFIG": str(api.kubeconfig), "HOME": str(site), "XDG_STATE_HOME": str(site / "state")}
    words = ("direct", "--", "nodes", "check", "--idle", "--runtime", "kubernetes --image X", "--storage")
    with cli.started(*words, cwd=site, before=HASTY, **environ) as process:
        cli.wait_for(lambda: len(api.ask("GET", JOBSETS)["items"]) == 3, "a job on each free node")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "2 not checked" in out
    assert [each["metadata"]["name"] for each in api.ask("GET", JOBSETS)["items"]] == ["mine"]
    api.ask("DELETE", f"{JOBSETS}/mine")


def test_jobs_avoid_unfit_nodes_as_long_as_enough_are_left(api: Api, site: Path) -> None:  # noqa: F811
    (site / "night.yaml").write_text(EXPERIMENT)
    environ = {"XDG_STATE_HOME": str(site / "state")}
    added = cli.run("direct", "--", "nodes", "add", "g1", "--reason", "GPU 5", cwd=site, **environ)
    assert added.returncode == 0
    for number, is_avoided in (("2", True), ("3", False)):  # three nodes are ready, g1 among them
        name = f"avoids-{number}"
        words = ("create", "--name", name, "--image", "X", "--exp", "night.yaml", "--replica", number)
        said = k8s(api, site, *words)
        (replicated,) = api.ask("GET", f"{JOBSETS}/{name}")["spec"]["replicatedJobs"]
        affinity = replicated["template"]["spec"]["template"]["spec"]["affinity"]
        wanted = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["g1"]}]}]
        required = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
        assert required.get("nodeSelectorTerms") == (wanted if is_avoided else None), said.stdout + said.stderr
        expected = "avoids g1, which is unfit: GPU 5" if is_avoided else "g1 may be used although it is unfit"
        assert expected in said.stdout + said.stderr
        k8s(api, site, "delete", name)
