"""Jobs on a real Kubernetes API server without controllers: the test says in their place how jobs and pods stand."""

from __future__ import annotations

import base64
import http.server
import importlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fakes import cli
from fakes.kubelet import Api, Kubelet, serving, start_container
from primus import registry
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.errors import PrimusError
from primus.machine.placement.topology_file import read_topology_file
from primus.runs.run_progress import RunProgress
from primus.runs.store import list_workspace_runs
from primus.runtime import PLACE_RUNTIMES, PROGRESS_RUNTIMES, PROGRESS_VARIABLE, PostRefused

pytest.importorskip("kubernetes")
pytest.importorskip("kubeflow_trainer_api")
crds = importlib.import_module("fakes.crds")
pytestmark = pytest.mark.cluster("kubernetes")

EXPERIMENT = """\
exp_name: night
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"
RUNTIMES = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainingruntimes"
PODS = "/api/v1/namespaces/default/pods"
MAPS = "/api/v1/namespaces/default/configmaps"
SECRETS = "/api/v1/namespaces/default/secrets"
SCRIPT = Path(__file__).parent / "kubernetes.sh"
HASTY = "import primus.runtimes.kubernetes.client as c; c.DELAYS_S = (0.05, 0.05)\n"
HASTY += "import primus.runtimes.kubernetes.commands as m; m.POLL_S = 0.1\n"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("kubernetes")
    try:
        subprocess.run(["bash", str(SCRIPT), "up", str(folder)], check=True, timeout=120)
        found = Api(folder)
        for kind in crds.KINDS:
            found.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crds.definition(kind))
        cli.wait_for(lambda: _serves(found), "the kinds of JobSet and Kubeflow")
        yield found
    finally:
        subprocess.run(["bash", str(SCRIPT), "down", str(folder)], check=True, timeout=60)


def _serves(api: Api) -> bool:
    try:
        return all(api.ask("GET", path)["items"] == [] for path in (JOBSETS, TRAINJOBS, RUNTIMES))
    except AssertionError:
        return False


@pytest.fixture
def kubelet(api: Api) -> Iterator[Kubelet]:
    with serving(api.kubeconfig.parent) as kubelet:
        yield kubelet


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


def k8s(api: Api, workplace: Path, *words: str, code: int = 0, **env: str | None) -> subprocess.CompletedProcess[str]:
    where = {"KUBECONFIG": str(api.kubeconfig), "HOME": str(workplace), "XDG_STATE_HOME": str(workplace / "state")}
    done = cli.run("k8s", *words, cwd=workplace, before=HASTY, **{**where, **env})
    assert done.returncode == code, done.stdout + done.stderr
    assert "canary" not in done.stdout + done.stderr
    return done


def create(api: Api, workplace: Path, name: str, *words: str, **env: str | None) -> Any:
    k8s(api, workplace, "create", "--name", name, "--image", "X", "--exp", "night.yaml", *words, **env)
    return api.ask("GET", f"{TRAINJOBS if 'trainjob' in words else JOBSETS}/{name}")


def make_pod(api: Api, job: str, rank: int, status: Any, suffix: str = "abcde", node: str = "") -> str:
    """A pod of a job, as the controllers of JobSet and Job make it, from the job's own template."""
    jobset = api.ask("GET", f"{JOBSETS}/{job}")
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    name = f"{job}-node-0-{rank}-{suffix}"
    meta = {
        "name": name,
        "labels": {**template["metadata"]["labels"], "jobset.sigs.k8s.io/jobset-name": job},
        "annotations": {
            "batch.kubernetes.io/job-completion-index": str(rank),
            "jobset.sigs.k8s.io/coordinator": f"{job}-node-0-0.{job}",
        },
    }
    spec = {**template["spec"], **({"nodeName": node} if node else {})}
    api.ask("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    api.set_status(f"{PODS}/{name}", status)
    return name


def running(**state: Any) -> Any:
    return {
        "phase": "Running",
        "containerStatuses": [
            {
                "name": "node",
                "image": "X",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": state or {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }
        ],
    }


def ended(code: int) -> Any:
    return {**running(terminated={"exitCode": code, "reason": "Error"}), "phase": "Failed"}


def finish(api: Api, job: str, kind: str) -> None:
    moment = "2026-01-01T00:00:00Z"
    condition = {
        "type": kind,
        "status": "True",
        "reason": "Ended",
        "message": f"jobset {kind}",
        "lastTransitionTime": moment,
    }
    api.set_status(f"{JOBSETS}/{job}", {"terminalState": kind, "conditions": [condition], "restarts": 1})


def holds(stored: Any, sent: Any) -> bool:
    """Whether the server keeps all that was sent; it adds defaults, and drops what it does not know."""
    if isinstance(sent, dict):
        return isinstance(stored, dict) and all(
            key in stored and holds(stored[key], each) for key, each in sent.items()
        )
    if isinstance(sent, list):
        return len(stored) == len(sent) and all(map(holds, stored, sent))
    return bool(stored == sent)


HOSTILE = "a b\"c'd$(E)`f`\ng,h=i;*\\ü😀\t$$(X)$${Y}$ -- #: {[|>&!%@"
FULL = (
    *("--replica", "2", "--volume", "runs:/runs", "--nodelist", "n1,n2", "--rdma", "rdma/hca=8", "--queue", "q"),
    *("--memory", "1Ti", "--shm", "1Gi", "--env", f"VALUE={HOSTILE}", "--secret", "OTHER_KEY=other/key", "--ttl", "60"),
)


def test_a_job_is_made_with_all_that_belongs_to_it_and_goes_with_it(api: Api, workplace: Path) -> None:
    stored = create(api, workplace, "whole", *FULL, HF_TOKEN="canary-token")
    run = list_workspace_runs(workplace / "output")[0]
    sent = {
        each["kind"]: each for each in yaml.safe_load_all((run.directory / "kubernetes/job.txt").read_text()) if each
    }
    assert holds(stored, sent["JobSet"])
    secret = api.ask("GET", f"{SECRETS}/whole-env")
    assert base64.b64decode(secret["data"]["HF_TOKEN"]) == b"canary-token"
    config_map = api.ask("GET", f"{MAPS}/whole-run")
    assert holds(config_map, sent["ConfigMap"])
    for name, key in (("config/primus_config.yaml", "config.primus_config.yaml"), ("metadata.json", "metadata.json")):
        assert config_map["data"][key] == (run.directory / name).read_text()
    assert "launch.json" not in config_map["data"], "what is about this machine stays here"
    for each in (secret, config_map):
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("JobSet", "whole", stored["metadata"]["uid"])
    kept = [path for path in workplace.rglob("*") if path.is_file()]
    assert kept and not any("canary" in path.read_text(errors="replace") for path in kept)

    k8s(api, workplace, "delete", "whole")
    for path in (f"{JOBSETS}/whole", f"{SECRETS}/whole-env", f"{MAPS}/whole-run"):
        with pytest.raises(AssertionError, match="404"):
            api.ask("GET", path)
    assert "no job 'whole'" in k8s(api, workplace, "delete", "whole", code=2).stderr


def test_what_a_dry_run_prints_is_what_the_server_takes(api: Api, workplace: Path) -> None:
    printed = k8s(
        api, workplace, "--dry-run", "create", "--image", "X", "--exp", "night.yaml", *FULL, HF_TOKEN="canary"
    )
    for each in yaml.safe_load_all(printed.stdout):
        if each:
            path = {"ConfigMap": MAPS, "JobSet": JOBSETS}[each["kind"]]
            assert holds(api.ask("POST", path, each), each)
            api.ask("DELETE", f"{path}/{each['metadata']['name']}")


def test_a_train_job_is_made_with_a_runtime_of_its_own_where_it_needs_one(api: Api, workplace: Path) -> None:
    own = ("--target", "trainjob", "--host-network", "--max-restarts", "2")
    stored = create(api, workplace, "train", *own)
    assert stored["spec"]["runtimeRef"]["name"] == "train-runtime"
    runtime = api.ask("GET", f"{RUNTIMES}/train-runtime")
    assert runtime["metadata"]["ownerReferences"][0]["kind"] == "TrainJob"
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 2
    plain = create(api, workplace, "plain", "--target", "trainjob")
    assert plain["spec"]["runtimeRef"]["name"] == "torch-distributed"
    condition = {
        "type": "Complete",
        "status": "True",
        "reason": "x",
        "message": "ok",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    api.set_status(f"{TRAINJOBS}/plain", {"conditions": [condition]})
    assert json.loads(k8s(api, workplace, "get", "plain", "--json").stdout)["state"]["state"] == "done"
    listed = json.loads(k8s(api, workplace, "list", "--target", "trainjob", "--json").stdout)
    # Both may have been made within one second, the unit of the API server's times.
    assert sorted(each["id"] for each in listed if each["id"] in ("train", "plain")) == ["plain", "train"]
    for name in ("train", "plain"):
        k8s(api, workplace, "delete", name)
    assert api.ask("GET", RUNTIMES)["items"] == []


def test_get_list_and_wait_say_how_a_job_stands(api: Api, workplace: Path) -> None:
    create(api, workplace, "stands", "--replica", "2")
    assert json.loads(k8s(api, workplace, "get", "stands", "--json").stdout)["state"]["state"] == "queued"
    reason = "0/3 nodes are available: 3 Insufficient amd.com/gpu."
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": reason}
    first = make_pod(api, "stands", 0, {"phase": "Pending", "conditions": [refused]})
    pulls = {"reason": "ImagePullBackOff", "message": "Back-off pulling image X"}
    second = make_pod(api, "stands", 1, {**running(waiting=pulls), "phase": "Pending"})
    told = k8s(api, workplace, "get", "stands").stdout
    assert f"message:  {first}: {reason}" in told
    assert f"{second}  Pending  -     -     ImagePullBackOff: Back-off pulling image X" in told
    assert "124" not in told
    late = k8s(api, workplace, "wait", "stands", "--timeout", "0.3", code=124)
    assert "still Pending" in late.stderr

    for pod in (first, second):
        api.set_status(f"{PODS}/{pod}", running())
    assert json.loads(k8s(api, workplace, "get", "stands", "--json").stdout)["state"]["state"] == "running"
    api.set_status(f"{PODS}/{first}", ended(1))
    api.set_status(f"{PODS}/{second}", ended(93))
    finish(api, "stands", "Failed")
    view = json.loads(k8s(api, workplace, "get", "--workload-id", "stands", "--json").stdout)
    assert (view["state"]["state"], view["state"]["exit_code"], view["state"]["restarts"]) == ("failed", 93, 1)
    assert [(pod["rank"], pod["exit_code"]) for pod in view["pods"]] == [(0, 1), (1, 93)]
    k8s(api, workplace, "wait", "stands", code=93)
    # Columns are as wide as the jobs of other tests need.
    rows = [line.split() for line in k8s(api, workplace, "list").stdout.splitlines()]
    assert ["stands", "JobSet", "failed", "Failed", "2", "1"] in [row[:6] for row in rows]
    k8s(api, workplace, "delete", "stands", "--yes")


def stamped(*texts: str) -> list[str]:
    """Lines with the times that a kubelet gives; two are of one moment."""
    return [f"2026-01-01T00:00:0{number // 2}.5Z {text}\n" for number, text in enumerate(texts)]


def test_logs_are_followed_over_lost_connections_and_restarts(api: Api, workplace: Path, kubelet: Kubelet) -> None:
    create(api, workplace, "logs", "--replica", "2")
    make_node(api, kubelet)
    pod = make_pod(api, "logs", 0, running(), node="n1")
    other = make_pod(api, "logs", 1, running(), node="n1")
    lines = ["step 1", "the same", "the same", "step 2 ü", "last"]
    kubelet.logs = {pod: stamped(*lines), other: stamped("other")}
    whole = "".join(f"{line}\n" for line in lines)
    assert k8s(api, workplace, "logs", "logs").stdout == whole
    assert k8s(api, workplace, "logs", "logs", "--tail", "2").stdout == "step 2 ü\nlast\n"
    assert k8s(api, workplace, "logs", "logs", "--rank", "1").stdout == "other\n"
    assert "no node 2" in k8s(api, workplace, "logs", "logs", "--rank", "2", code=2).stderr

    kubelet.cut_after = 3
    where = {"KUBECONFIG": str(api.kubeconfig), "HOME": str(workplace), "XDG_STATE_HOME": str(workplace / "state")}
    with cli.started("k8s", "logs", "logs", "--follow", cwd=workplace, before=HASTY, **where) as process:
        cli.wait_for(lambda: len([each for each in kubelet.requests if "sinceTime" in each]) > 1, "a second connection")
        kubelet.logs[pod] += ["2026-01-01T00:00:09Z after\n"]
        api.set_status(f"{PODS}/{pod}", ended(1))
        again = make_pod(api, "logs", 0, running(), suffix="vwxyz", node="n1")
        kubelet.logs[again] = stamped("begun again")
        cli.wait_for(lambda: any(again in each for each in kubelet.requests), "the log of the next attempt")
        finish(api, "logs", "Completed")
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert out == f"{whole}after\nbegun again\n"
    k8s(api, workplace, "delete", "logs")
    for name in (pod, other, again):
        api.ask("DELETE", f"{PODS}/{name}", {"gracePeriodSeconds": 0})
    api.ask("DELETE", "/api/v1/nodes/n1")


def make_node(api: Api, kubelet: Kubelet) -> None:
    api.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
    address = [{"type": "InternalIP", "address": "127.0.0.1"}]
    endpoint = {"kubeletEndpoint": {"Port": kubelet.port}}
    api.set_status("/api/v1/nodes/n1", {"addresses": address, "daemonEndpoints": endpoint})


def test_the_pods_of_a_job_measure_collectives_together(api: Api, workplace: Path, kubelet: Kubelet) -> None:
    pytest.importorskip("torch")
    program, volume = workplace / "primus-cli", workplace / "claim"
    program.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'import sys; from primus.cli.main import main; sys.exit(main())' \"$@\""
    )
    program.chmod(0o755)
    volume.mkdir()
    words = ("collectives", "--op", "all_reduce", "--sizes", "64K", "--iters", "10", "--device", "cpu", "--quick")
    where = ("--entry", str(program), "--volume", f"claim:{volume}", "--gpu", "0", "--image", "X", "--replica", "2")
    task = ("--", "benchmark", *words, "--workspace", str(volume))
    k8s(api, workplace, "create", "--name", "two", *where, *task)
    make_node(api, kubelet)
    pods = [make_pod(api, "two", rank, running(), node="n1") for rank in (0, 1)]
    with socket.socket() as server:
        server.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    processes = []
    for pod in pods:
        (workplace / pod).mkdir()
        processes.append(start_container(api, f"{PODS}/{pod}", workplace / pod, **place))
    for pod, process in zip(pods, processes, strict=True):
        lines = process.communicate(timeout=240)[0].splitlines()
        kubelet.logs[pod] = [f"2026-01-01T00:00:00.{number:09d}Z {line}\n" for number, line in enumerate(lines)]
        assert process.returncode == 0, lines
        api.set_status(f"{PODS}/{pod}", {**ended(0), "phase": "Succeeded"})
    finish(api, "two", "Completed")
    k8s(api, workplace, "wait", "two")
    shown = k8s(api, workplace, "logs", "two").stdout
    assert "collectives op=all_reduce" in shown and "busbw" in shown
    (file,) = volume.glob("benchmark-collectives/2*/report/benchmark.json")
    result = json.loads(file.read_text())
    (row,) = [row for rank in result["ranks"] for row in rank["rows"]]
    assert (result["world_size"], row["case"]["ranks"], row["wrong"]) == (2, 2, 0)
    k8s(api, workplace, "delete", "two")
    for pod in pods:
        api.ask("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})
    api.ask("DELETE", "/api/v1/nodes/n1")


WORKLOADS = "/apis/kueue.x-k8s.io/v1beta1/namespaces/default/workloads"


def define_kueue_kind(api: Api, kind: str, plural: str, scope: str, path: str) -> None:
    """A kind of Kueue, without its schema: Kueue itself is not installed."""
    version = {"name": "v1beta1", "served": True, "storage": True, "subresources": {"status": {}}}
    version["schema"] = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    spec = {"group": "kueue.x-k8s.io", "scope": scope, "versions": [version]}
    spec["names"] = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    meta = {"name": f"{plural}.kueue.x-k8s.io"}
    made = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": meta, "spec": spec}
    api.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", made)

    def serves() -> bool:
        try:
            return api.ask("GET", path)["items"] == []
        except AssertionError:
            return False

    cli.wait_for(serves, "the kind of Kueue")


def test_a_job_that_waits_says_why(api: Api, workplace: Path) -> None:
    where = {"KUBECONFIG": str(api.kubeconfig), "HOME": str(workplace), "XDG_STATE_HOME": str(workplace / "state")}
    create(api, workplace, "waits", "--replica", "2", "--gpu", "8", "--queue", "team")

    def show(*words: str) -> str:
        done = cli.run("direct", "--", "jobs", *(words or ("show", "waits")), cwd=workplace, **where)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "GPUs:          16" in show()
    define_kueue_kind(api, "Workload", "workloads", "Namespaced", WORKLOADS)
    uid = api.ask("GET", f"{JOBSETS}/waits")["metadata"]["uid"]
    owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "waits", "uid": uid}
    meta = {"name": "jobset-waits", "ownerReferences": [owner]}
    api.ask("POST", WORKLOADS, {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "metadata": meta})
    message = 'couldn\'t assign flavors to pod set node: topology "rack" allows to fit only 1 out of 2 pod(s)'
    refused = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    api.set_status(f"{WORKLOADS}/jobset-waits", {"conditions": [refused]})
    shown = show()
    assert f"queued (Kueue: {message})" in shown
    assert "no domain of this topology level has room for all pods" in shown
    listed = show("list").splitlines()[1]
    assert "waits" in listed and " 16  " in listed
    waited = k8s(api, workplace, "wait", "waits", "--timeout", "0", code=124).stderr
    assert message in waited and "ask for a wider level" in waited
    api.ask("DELETE", f"{WORKLOADS}/jobset-waits")
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "rpc error: X: not found"}}
    pods = [make_pod(api, "waits", rank, {**running(**waiting), "phase": "Pending"}) for rank in (0, 1)]
    shown = show()
    assert "ErrImagePull: rpc error: X: not found" in shown and "check --image; a private registry" in shown
    k8s(api, workplace, "delete", "waits")
    for pod in pods:
        api.ask("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})


def test_a_pod_annotates_its_job_with_the_progress_where_it_may(
    api: Api, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(api, workplace, "posts")
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    (value,) = [each["value"] for each in container["env"] if each["name"] == PROGRESS_VARIABLE]
    name, _, target = value.partition(":")
    account, environ = give_account(api, workplace, monkeypatch)
    post = registry.load_plug_in(PROGRESS_RUNTIMES, name).post_progress
    progress = RunProgress(step=120, total=1000, loss=2.5, remaining_s=3600)
    (account / "token").write_text("poor-token")
    with pytest.raises(PostRefused, match=r'403 .*User "poor" cannot patch resource "jobsets"'):
        post(progress, target, environ)
    (account / "token").write_text("admin-token")
    post(progress, target, environ)
    wanted = "step 120/1000 (12 %), loss 2.5, 1:00:00 left"
    assert api.ask("GET", f"{JOBSETS}/posts")["metadata"]["annotations"]["primus.progress"] == wanted
    assert f"message:  {wanted}" in k8s(api, workplace, "get", "posts").stdout
    k8s(api, workplace, "delete", "posts")


def give_account(api: Api, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """The folder with the account of a pod, in which the token is missing, and the variables of the pod."""
    account = workplace / "account"
    account.mkdir()
    (account / "namespace").write_text("default")
    (account / "ca.crt").write_text((api.kubeconfig.parent / "certs/apiserver.crt").read_text())
    monkeypatch.setattr("primus.runtimes.kubernetes.pod_account.ACCOUNT", account)
    port = api.url.rpartition(":")[2]
    return account, {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}


def test_a_pod_posts_the_status_of_its_train_job(api: Api, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow's status server writes what a pod sends into the status subresource; here a handler does."""
    create(api, workplace, "reports", "--target", "trainjob", "--gpu", "0")

    class StatusHandler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            api.set_status(self.path.removesuffix("/status"), body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    account, environ = give_account(api, workplace, monkeypatch)
    (account / "token").write_text("admin-token")
    post = registry.load_plug_in(PROGRESS_RUNTIMES, "kubernetes").post_progress
    progress = RunProgress(step=120, total=1000, loss=2.5, remaining_s=3600)
    target = f"{TRAINJOBS.replace('default', '{}')}/reports"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StatusHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}{TRAINJOBS}/reports/status"
        there = {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(account / "token")}
        post(progress, target, environ | there)
        server.shutdown()
    kept = api.ask("GET", f"{TRAINJOBS}/reports")["status"]["trainerStatus"]  # fields outside of the schema are dropped
    assert kept.pop("lastUpdatedTime").endswith("Z")
    metrics = [{"name": "step", "value": "120"}, {"name": "loss", "value": "2.5"}]
    assert kept == {"progressPercentage": 12, "estimatedRemainingSeconds": 3600, "metrics": metrics}
    post(progress, target, environ)  # a Trainer without that feature: the job is annotated
    wanted = "step 120/1000 (12 %), loss 2.5, 1:00:00 left"
    assert api.ask("GET", f"{TRAINJOBS}/reports")["metadata"]["annotations"]["primus.progress"] == wanted
    k8s(api, workplace, "delete", "reports", "--target", "trainjob")


def test_nodes_stand_where_their_labels_say(api: Api, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = [{"topology.kubernetes.io/zone": "z", "cloud.provider.com/topology-rack": f"r{i % 2}"} for i in range(4)]
    for number, each in enumerate(labels):
        meta = {"name": f"g{number}", "labels": each}
        api.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})
    made = create(api, workplace, "placed", "--replica", "4")
    (container,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    (file,) = [each["value"] for each in container["env"] if each["name"] == "PRIMUS_TOPOLOGY_FILE"]
    sent = api.ask("GET", f"{MAPS}/placed-run")["data"]
    written = workplace / "topology.csv"
    written.write_text(sent["config.topology.csv"])
    assert file.endswith("/config/topology.csv")
    assert read_topology_file(written) == {f"g{i}": ("z", f"r{i % 2}") for i in range(4)}
    # A pod of a job that was made without them asks for those of its own node.
    account, environ = give_account(api, workplace, monkeypatch)
    find = registry.load_plug_in(PLACE_RUNTIMES, "kubernetes").find_own_place
    (account / "token").write_text("admin-token")
    assert find(environ | {"PRIMUS_NODE_NAME": "g3"}) == ("z", "r1")
    (account / "token").write_text("poor-token")
    with pytest.raises(PrimusError, match=r'403 .*User "poor" cannot get resource "nodes"'):
        find(environ | {"PRIMUS_NODE_NAME": "g3"})
    k8s(api, workplace, "delete", "placed")
    for number in range(4):
        api.ask("DELETE", f"/api/v1/nodes/g{number}")


TOPOLOGIES = "/apis/kueue.x-k8s.io/v1beta1/topologies"


def test_a_level_that_the_cluster_does_not_have_is_refused_with_those_that_it_has(api: Api, workplace: Path) -> None:
    labels = {
        "topology.kubernetes.io/zone": "z",
        "cloud.provider.com/topology-rack": "r",
        "kubernetes.io/hostname": "h",
    }
    meta = {"name": "g0", "labels": labels}
    api.ask("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": meta})

    def refuse(label: str, *words: str) -> str:
        wanted = ("--name", "level", "--image", "X", "--exp", "night.yaml", "--replica", "2", "--placement", label)
        done = k8s(api, workplace, "create", *wanted, *words, code=2)
        assert not [each for each in api.ask("GET", MAPS)["items"] if each["metadata"]["name"] == "level-run"]
        return done.stderr

    said = refuse("cloud.provider.com/topology-rak")
    assert "--placement cloud.provider.com/topology-rak: no node of the cluster has this label" in said
    assert "did you mean cloud.provider.com/topology-rack?" in said
    said = refuse("example.com/hall", "--queue", "team")
    assert "use one of topology.kubernetes.io/zone, cloud.provider.com/topology-rack" in said
    create(api, workplace, "level", "--replica", "2", "--placement", "cloud.provider.com/topology-rack")
    k8s(api, workplace, "delete", "level")
    # With a queue Kueue knows the levels, and a label of the nodes that it does not use is none.
    define_kueue_kind(api, "Topology", "topologies", "Cluster", TOPOLOGIES)
    levels = [{"nodeLabel": "example.com/hall"}, {"nodeLabel": "kubernetes.io/hostname"}]
    topology = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Topology", "metadata": {"name": "default"}}
    api.ask("POST", TOPOLOGIES, {**topology, "spec": {"levels": levels}})
    said = refuse("cloud.provider.com/topology-rack", "--queue", "team")
    assert "no Topology of Kueue has this level\n  use one of example.com/hall" in said
    create(api, workplace, "level", "--replica", "2", "--queue", "team", "--placement", "example.com/hall")
    k8s(api, workplace, "delete", "level")
    api.ask("DELETE", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/topologies.kueue.x-k8s.io")
    api.ask("DELETE", "/api/v1/nodes/g0")


def test_labels_that_the_user_may_not_read_are_named_in_one_line(api: Api, workplace: Path) -> None:
    """`user` may create jobs in the namespace, and see no node."""
    rights = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
    group, version = "rbac.authorization.k8s.io", "rbac.authorization.k8s.io/v1"
    path = f"/apis/{version}/namespaces/default"
    role = {"apiVersion": version, "kind": "Role", "metadata": {"name": "jobs"}, "rules": rights}
    binding = {
        "apiVersion": version,
        "kind": "RoleBinding",
        "metadata": {"name": "jobs"},
        "subjects": [{"kind": "User", "name": "poor", "apiGroup": group}],
        "roleRef": {"kind": "Role", "name": "jobs", "apiGroup": group},
    }
    api.ask("POST", f"{path}/roles", role)
    api.ask("POST", f"{path}/rolebindings", binding)
    words = ("--name", "hidden", "--image", "X", "--exp", "night.yaml", "--replica", "4", "--context", "poor")
    done = k8s(api, workplace, "create", *words)
    (line,) = [each for each in done.stderr.splitlines() + done.stdout.splitlines() if "do not order the ranks" in each]
    assert 'User "poor" cannot list resource "nodes"' in line
    assert "config.topology.csv" not in api.ask("GET", f"{MAPS}/hidden-run")["data"]
    k8s(api, workplace, "delete", "hidden")
    done = k8s(api, workplace, "create", *words, "--placement", "example.com/rack")
    (line,) = [each for each in done.stderr.splitlines() + done.stdout.splitlines() if "of the nodes" in each]
    assert "--placement example.com/rack is not checked, and labels of the nodes do not order the ranks" in line
    k8s(api, workplace, "delete", "hidden")
    for kind in ("rolebindings", "roles"):
        api.ask("DELETE", f"{path}/{kind}/jobs")


@pytest.mark.parametrize(("data", "code"), [("here", 0), ("wrong", 2)])
def test_data_of_a_claim_are_checked_in_the_pod(data: str, code: int, api: Api, workplace: Path) -> None:
    """The claim is a folder that this machine gets only when the pod starts."""
    program, claim, job = workplace / "primus-cli", workplace / "claim", f"claim-{data}"
    program.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -c 'import sys; from primus.cli.main import main; sys.exit(main())' \"$@\""
    )
    program.chmod(0o755)
    where = ("--entry", str(program), "--volume", f"claim:{claim}", "--gpu", "0", "--image", "X")
    words = ("--mock_data", "false", "--train_data_path", f"{claim}/{data}", "--train_iters", "2")
    task = ("--", "train", "pretrain", "--config", "night.yaml", *words)
    created = k8s(api, workplace, "create", "--name", job, *where, *task)
    assert f"no such data: {claim}/{data}.idx on this machine" in created.stdout + created.stderr
    claim.mkdir()
    with IndexedWriter(claim / "here", np.dtype(np.uint16)) as tokens:
        for number in range(20):
            tokens.add_document(np.full(32, number, np.uint16))
        tokens.commit()
    pod = make_pod(api, job, 0, running())
    with socket.socket() as server:
        server.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    (workplace / pod).mkdir()
    process = start_container(api, f"{PODS}/{pod}", workplace / pod, **place)
    log = process.communicate(timeout=200)[0]
    assert process.returncode == code, log
    last = ended(code)["containerStatuses"][0]["state"]["terminated"] | {"message": log[-2048:]}  # as the kubelet says
    api.set_status(f"{PODS}/{pod}", {**running(terminated=last), "phase": "Failed" if code else "Succeeded"})
    finish(api, job, "Failed" if code else "Completed")
    environ = {"KUBECONFIG": str(api.kubeconfig), "HOME": str(workplace), "XDG_STATE_HOME": str(workplace / "state")}
    waited = cli.run("direct", "--", "jobs", "wait", job, cwd=workplace, **environ)
    assert waited.returncode == code, waited.stdout + waited.stderr
    if code:
        (reason,) = [line for line in waited.stderr.splitlines() if line.startswith("primus-cli: run failed: ")]
        assert "node 0: Error: primus-cli: " in reason and f"no such data: {claim}/wrong.idx" in reason
    k8s(api, workplace, "delete", job)
    api.ask("DELETE", f"{PODS}/{pod}", {"gracePeriodSeconds": 0})


def test_nodes_are_listed_with_their_gpus(api: Api, workplace: Path) -> None:
    for number, ready in enumerate(("True", "False")):
        labels = {"amd.com/gpu.product-name": "MI300X"} if number == 0 else {}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"g{number}", "labels": labels}}
        api.ask("POST", "/api/v1/nodes", node)
        said = {"type": "Ready", "status": ready, "reason": "x", "message": "no contact"}
        amounts = {"amd.com/gpu": "8", "cpu": "96"}
        api.set_status(f"/api/v1/nodes/g{number}", {"conditions": [said], "allocatable": amounts, "capacity": amounts})
    create(api, workplace, "gpus")
    make_pod(api, "gpus", 0, running(), node="g0")
    found = json.loads(k8s(api, workplace, "nodes", "--json").stdout)
    assert [(each["name"], each["is_ready"], each["gpus"], each["gpus_used"], each["model"]) for each in found] == [
        ("g0", True, 8, 8, "MI300X"),
        ("g1", False, 8, 0, ""),
    ]
    assert "no contact" in k8s(api, workplace, "nodes").stdout
    k8s(api, workplace, "delete", "gpus")
    for name in ("g0", "g1"):
        api.ask("DELETE", f"/api/v1/nodes/{name}")


def test_a_name_that_is_taken_is_refused_and_nothing_is_left(api: Api, workplace: Path) -> None:
    api.ask(
        "POST",
        JOBSETS,
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "taken"}, "spec": {}},
    )
    words = ("create", "--name", "taken", "--image", "X", "--exp", "night.yaml")
    refused = k8s(api, workplace, *words, code=1, HF_TOKEN="canary")
    assert "409" in refused.stderr
    assert '"taken" already exists' in refused.stderr
    assert "--name" in refused.stderr
    left = [each["metadata"]["name"] for path in (MAPS, SECRETS) for each in api.ask("GET", path)["items"]]
    assert not [name for name in left if name.startswith("taken")]
    assert api.ask("GET", f"{JOBSETS}/taken")["metadata"]["name"] == "taken", "what others made stays"
    api.ask("DELETE", f"{JOBSETS}/taken")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--context", "late"), 1, ("401", "log in again (late of ")),
        (("--context", "poor"), 1, ("403", 'User "poor" cannot create resource', "ask for a role")),
        (("-n", "nowhere"), 1, ("404", 'namespaces "nowhere" not found', "choose another one with --namespace")),
        (("--context", "absent"), 2, ("no context 'absent'", "--context admin|poor|late")),
        (
            ("--kubeconfig", "absent"),
            2,
            ("no Kubernetes cluster is configured: absent does not exist", "--dry-run needs no cluster"),
        ),
    ],
)
def test_a_refusal_says_what_to_do(
    api: Api, workplace: Path, words: tuple[str, ...], code: int, said: tuple[str, ...]
) -> None:
    done = k8s(api, workplace, "create", "--image", "X", "--exp", "night.yaml", *words, code=code)
    for text in said:
        assert text in done.stderr
    assert [each["metadata"]["name"] for each in api.ask("GET", JOBSETS)["items"]] == []
    assert [each for each in api.ask("GET", MAPS)["items"] if each["metadata"]["name"] != "kube-root-ca.crt"] == []
    assert not list((workplace / "state").rglob("*.json")), "what was refused is no job"


def test_a_server_that_is_not_there_is_an_error(api: Api, workplace: Path) -> None:
    elsewhere = workplace / "elsewhere"
    elsewhere.write_text(api.kubeconfig.read_text().replace(api.url, "https://127.0.0.1:9"))
    done = k8s(api, workplace, "list", "--kubeconfig", "elsewhere", code=1)
    assert "https://127.0.0.1:9 cannot be reached: " in done.stderr
    assert "Connection refused" in done.stderr
    assert "context admin of" in done.stderr
    untrusted = json.dumps(yaml.safe_load(api.kubeconfig.read_text())).replace("certificate-authority", "ignored")
    elsewhere.write_text(untrusted)
    assert "certificate verify failed" in k8s(api, workplace, "list", "--kubeconfig", "elsewhere", code=1).stderr


def test_a_cluster_without_the_controller_says_what_it_lacks(api: Api, workplace: Path) -> None:
    name = "trainingruntimes.trainer.kubeflow.org"
    api.ask("DELETE", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
    cli.wait_for(lambda: _is_gone(api), "the kind is gone")
    words = ("create", "--target", "trainjob", "--host-network", "--image", "X", "--exp", "night.yaml")
    assert "Kubeflow Trainer 2 is not installed in this cluster" in k8s(api, workplace, *words, code=1).stderr
    assert [each for each in api.ask("GET", MAPS)["items"] if each["metadata"]["name"] != "kube-root-ca.crt"] == []


def _is_gone(api: Api) -> bool:
    try:
        api.ask("GET", RUNTIMES)
    except AssertionError:
        return True
    return False
