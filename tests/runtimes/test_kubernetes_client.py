"""Requests to the Kubernetes API against a local server that fails on purpose; a real one is in tests/cluster."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fakes import cli, terminal
from fakes.kubernetes_api import Api, Fault, serving
from primus.errors import PrimusError, UsageError
from primus.launch.jobs import submissions
from primus.runs.store import RunOutcome, list_workspace_runs
from primus.runtimes import kubernetes
from primus.runtimes.kubernetes import objects

pytest.importorskip("kubernetes")

EXPERIMENT = """\
exp_name: night
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets"
MAPS = "/api/v1/namespaces/ml/configmaps"
SECRETS = "/api/v1/namespaces/ml/secrets"
HASTY = """\
import primus.runtimes.kubernetes.client as client
from primus.web import retries
client.READ_S, retries.CLUSTER_PAUSES_S = 0.5, (0.05, 0.1, 0.2)
"""
CREATE = ("create", "--name", "job", "--image", "X", "--exp", "night.yaml")


@pytest.fixture
def api() -> Iterator[Api]:
    with serving() as api:
        yield api


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


def of_user(api: Api, workplace: Path) -> dict[str, str | None]:
    """Variables of somebody whose home is `workplace`."""
    state = str(workplace / "state")
    return {"KUBECONFIG": api.kubeconfig(workplace), "HOME": str(workplace), "XDG_STATE_HOME": state}


def k8s(
    api: Api, workplace: Path, *words: str, code: int = 0, before: str = HASTY, **env: str | None
) -> subprocess.CompletedProcess[str]:
    done = cli.run("k8s", *words, cwd=workplace, before=before, **{**of_user(api, workplace), **env})
    assert done.returncode == code, done.stdout + done.stderr
    assert "canary" not in done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "fault",
    [
        Fault(500, method="POST", path="jobsets"),
        Fault(503, method="POST", path="jobsets", retry_after="0"),
        Fault(429, method="POST", path="configmaps", text="too many"),
        Fault(method="POST", path="jobsets"),
        Fault(method="POST", path="jobsets", wait_s=1.0),
        Fault(504, method="POST", path="jobsets", after=True),
        Fault(method="POST", path="secrets", after=True),
        Fault(500, method="PATCH"),
    ],
    ids=["500", "503", "429", "closed", "slow", "answer lost", "connection lost", "patch"],
)
def test_a_request_is_tried_again_and_makes_one_job(api: Api, workplace: Path, fault: Fault) -> None:
    api.faults = [fault]
    k8s(api, workplace, *CREATE, HF_TOKEN="canary")
    assert sorted(api.objects) == [f"{JOBSETS}/job", f"{MAPS}/job-run", f"{SECRETS}/job-env"] or sorted(
        api.objects
    ) == [
        f"{MAPS}/job-run",
        f"{SECRETS}/job-env",
        f"{JOBSETS}/job",
    ]
    assert all(
        each["metadata"].get("ownerReferences") for path, each in api.objects.items() if path != f"{JOBSETS}/job"
    )
    assert set(api.headers) == {"Bearer canary-token"}


def test_a_server_that_stays_ill_is_given_up_and_nothing_is_left(api: Api, workplace: Path) -> None:
    api.faults = [Fault(500, method="POST", path="jobsets", text="etcdserver: leader changed")] * 4
    done = k8s(api, workplace, *CREATE, code=1, HF_TOKEN="canary")
    assert "500 etcdserver: leader changed" in done.stderr
    assert api.objects == {}
    moments = [moment for method, path, moment in api.requests if (method, path) == ("POST", JOBSETS)]
    assert len(moments) == 4
    waits = [later - before for before, later in itertools.pairwise(moments)]
    assert all(wait >= least for wait, least in zip(waits, (0.05, 0.1, 0.2), strict=True)), "each wait is longer"
    assert not list((workplace / "state").rglob("*.json"))
    assert not list_workspace_runs(workplace / "output"), "nor is a run that nothing will ever do"


def test_a_refusal_is_not_tried_again(api: Api, workplace: Path) -> None:
    api.faults = [Fault(403, method="POST", path="jobsets", text='{"message": "jobsets is forbidden: quota exceeded"}')]
    done = k8s(api, workplace, *CREATE, code=1)
    assert "403 jobsets is forbidden: quota exceeded" in done.stderr
    assert "more than the quota of the namespace has left" in done.stderr and "role" not in done.stderr
    assert [method for method, _, _ in api.requests if method != "GET"] == ["POST", "POST", "DELETE"]
    assert api.objects == {}


def test_what_was_made_without_an_answer_is_removed_as_well(api: Api, workplace: Path) -> None:
    api.faults = [Fault(500, method="POST", path="jobsets", after=True)] + [
        Fault(500, method="POST", path="jobsets")
    ] * 3
    k8s(api, workplace, *CREATE, code=1)
    assert api.objects == {}


def test_a_job_of_another_run_is_not_taken_for_ours(api: Api, workplace: Path) -> None:
    api.objects[f"{MAPS}/job-run"] = {"metadata": {"name": "job-run", "labels": {"primus.run": "other"}}}
    api.faults = [Fault(500, method="POST", path="configmaps")]
    assert '409 "job-run" already exists' in k8s(api, workplace, *CREATE, code=1).stderr
    assert list(api.objects) == [f"{MAPS}/job-run"], "what another run has made stays"


def test_a_job_that_cannot_own_its_parts_is_still_a_job(api: Api, workplace: Path) -> None:
    api.faults = [Fault(403, method="PATCH")]
    assert "are kept until `kubernetes delete`" in k8s(api, workplace, *CREATE).stdout
    k8s(api, workplace, "delete", "job")
    assert api.objects == {}


def test_jobs_are_found_again_where_they_were_submitted(
    api: Api, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    k8s(api, workplace, *CREATE)
    environ = {"XDG_STATE_HOME": str(workplace / "state")}
    submission = submissions.find_submission("job", environ)
    assert submission.place == {
        "target": "jobset",
        "kubeconfig": str(workplace / "kubeconfig"),
        "context": "here",
        "namespace": "ml",
    }
    assert "canary" not in "".join(path.read_text() for path in (workplace / "state").rglob("*.json"))
    assert kubernetes.find_states([submission])["job"].state == "queued"
    api.objects[f"{JOBSETS}/job"]["status"] = {"terminalState": "Completed", "conditions": []}
    assert kubernetes.find_states([submission])["job"].state == "done"
    again = k8s(api, workplace, "get", "job", "--json", KUBECONFIG=None)
    assert json.loads(again.stdout)["state"]["state"] == "done", "its place is remembered"
    kubernetes.cancel(submission)
    assert api.objects == {}
    assert kubernetes.find_states([submission])["job"].state == "gone"


def test_waiting_for_a_job_that_is_removed_fails(api: Api, workplace: Path) -> None:
    k8s(api, workplace, *CREATE)
    gone = Fault(404, method="GET", path="jobsets/job", text='{"message": "jobsets not found"}')
    api.faults = [Fault(500, method="GET", path="jobsets/job"), gone]
    assert "no JobSet 'job'" in k8s(api, workplace, "wait", "job", code=2).stderr
    hasty = HASTY + "import primus.runtimes.kubernetes.commands as m; m.POLL_S = 0.1\n"
    with cli.started("k8s", "wait", "job", cwd=workplace, before=hasty, **of_user(api, workplace)) as process:
        cli.wait_for(lambda: len(api.requests) > 8, "the job is looked at")
        api.objects.pop(f"{JOBSETS}/job")
        assert process.communicate(timeout=20)[1].count("was deleted while waiting for it") == 1
    assert process.returncode == 1


def test_waiting_outlasts_a_server_that_is_ill(api: Api, workplace: Path) -> None:
    k8s(api, workplace, *CREATE)
    hasty = HASTY + "import primus.runtimes.kubernetes.commands as m; m.POLL_S = 0.05\n"
    with cli.started("k8s", "wait", "job", cwd=workplace, before=hasty, **of_user(api, workplace)) as process:
        seen = len(api.requests)
        cli.wait_for(lambda: len(api.requests) > seen + 3, "the job is looked at")
        ill = (*[503] * 4, 200, *[0] * 4)
        api.faults = [Fault(status, method="GET", path="jobsets/job", text="<html>") for status in ill]
        cli.wait_for(lambda: not api.faults, "the server was ill")
        api.objects[f"{JOBSETS}/job"]["status"] = {"terminalState": "Completed"}
        said = process.communicate(timeout=20)[1]
    assert process.returncode == 0, said
    assert said.count("; retrying") == 3, said


@pytest.mark.parametrize("text", ["<html>log in</html>", "null", "[]", "{}", '{"items": [{}]}', '{"items": 3}', '"x"'])
def test_a_proxy_that_answers_instead_is_told_of(api: Api, workplace: Path, text: str) -> None:
    place = {"target": "jobset", "kubeconfig": api.kubeconfig(workplace), "context": "here", "namespace": "ml"}
    for ask in (
        lambda: objects.list_jobs(place, {}),
        lambda: objects.get_job(place, "job", {}),
        lambda: objects.list_nodes(place, {}),
    ):
        api.faults = [Fault(200, text=text)]
        with pytest.raises(PrimusError, match="not from a Kubernetes API server"):
            ask()


@pytest.mark.parametrize("token", ["canary\nof-two-lines", "canary-\u4e2d"])
def test_a_token_that_no_header_can_hold_is_not_shown(api: Api, workplace: Path, token: str) -> None:
    place = {"target": "jobset", "kubeconfig": api.kubeconfig(workplace, token), "context": "here", "namespace": "ml"}
    with pytest.raises(UsageError, match="log in again") as refusal:
        objects.list_jobs(place, {})
    assert "canary" not in str(refusal.value)


def test_a_program_may_log_in(api: Api, workplace: Path) -> None:
    login = workplace / "log in"
    status = (
        '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "canary-x"}}'
    )
    login.write_text(f"#!/bin/sh\necho '{status}'\n")
    login.chmod(0o755)
    config = json.loads(Path(api.kubeconfig(workplace)).read_text())
    wanted = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(login), "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": wanted}
    (workplace / "by-program").write_text(json.dumps(config))
    k8s(api, workplace, "list", "--kubeconfig", "by-program")
    assert set(api.headers) == {"Bearer canary-x"}
    login.write_text("#!/bin/sh\necho no ticket >&2\nexit 1\n")
    assert "no ticket" in k8s(api, workplace, "list", "--kubeconfig", "by-program").stderr
    assert api.headers[-1] == "", "and a server would refuse that"


def test_all_kinds_of_jobs_are_listed_and_found(api: Api, workplace: Path) -> None:
    k8s(api, workplace, *CREATE)
    k8s(api, workplace, "create", "--name", "other", "--image", "X", "--target", "trainjob", "--exp", "night.yaml")
    api.objects[f"{JOBSETS}/other"] = {  # as the trainer makes it
        "metadata": {"name": "other", "labels": {"app.kubernetes.io/managed-by": "primus"}, "ownerReferences": [{}]},
        "spec": {},
    }
    listed = json.loads(k8s(api, workplace, "--json", "list").stdout)
    assert sorted((each["id"], each["kind"]) for each in listed) == [("job", "JobSet"), ("other", "TrainJob")]
    assert "TrainJob" not in k8s(api, workplace, "list", "--target", "jobset").stdout
    del api.objects[f"{JOBSETS}/other"]
    nowhere = {"XDG_STATE_HOME": str(workplace / "another home")}  # nothing is remembered there
    assert "other" in k8s(api, workplace, "get", "other", **nowhere).stdout


def test_a_cluster_without_a_kind_lists_the_other(api: Api, workplace: Path) -> None:
    k8s(api, workplace, *CREATE)
    missing = '{"message": "the server could not find the requested resource"}'
    api.faults = [Fault(404, method="GET", path="trainjobs", text=missing)]
    assert "job  JobSet" in k8s(api, workplace, "list").stdout
    api.faults = [Fault(404, method="GET", path=kind, text=missing) for kind in ("jobsets", "trainjobs")]
    assert "404" in k8s(api, workplace, "list", code=1).stderr


@pytest.mark.parametrize("words", [("k8s", "delete", "job"), ("direct", "--", "jobs", "cancel", "job"), ()])
def test_the_run_of_a_deleted_job_waits_no_more(api: Api, workplace: Path, words: tuple[str, ...]) -> None:
    """Deleted by us, or by somebody else, which is found when its job is asked for."""
    k8s(api, workplace, *CREATE)
    (run,) = list_workspace_runs(workplace / "output")
    assert run.read_metadata().outcome.state == "planned"
    if not words:
        del api.objects[f"{JOBSETS}/job"]
    old = HASTY + "import primus.launch.jobs.job_states as j; j.GONE_AFTER_S = 0\n"
    done = cli.run(*(words or ("direct", "--", "jobs", "list")), cwd=workplace, before=old, **of_user(api, workplace))
    assert done.returncode == 0, done.stderr
    outcome = run.read_metadata().outcome
    assert outcome.state == "interrupted"
    assert "deleted" in outcome.reason


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_waits_for_a_job_can_leave_it_running(api: Api, workplace: Path, number: int, code: int) -> None:
    k8s(api, workplace, *CREATE)
    path = f"{JOBSETS}/job"
    words = [sys.executable, "-m", "primus.cli.main", "k8s", "wait", "job"]
    environ = cli.environment(**of_user(api, workplace))
    with terminal.opened(words, workplace, environ) as one:
        cli.wait_for(lambda: any(asked == path for method, asked, _ in api.requests if method == "GET"), "a question")
        one.wait_for("job: ")
        one.tell(signal.Signals(number))
        assert one.ended() == code, one.shown
    assert "job job keeps running; cancel it: primus-cli kubernetes delete job" in one.shown
    assert path in api.objects


def test_waiting_ends_with_the_runs_own_code_and_reason(api: Api, workplace: Path) -> None:
    """As far as the run folder here is that of the pods."""
    k8s(api, workplace, *CREATE)
    (run,) = list_workspace_runs(workplace / "output")
    reason = "rank 3 was killed by SIGSEGV"
    run.update_metadata(ended=time.time(), outcome=RunOutcome(state="failed", exit_code=139, reason=reason))
    conditions = [{"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "jobset failed"}]
    api.objects[f"{JOBSETS}/job"]["status"] = {"conditions": conditions, "terminalState": "Failed"}
    assert f"primus-cli: run failed: {reason}" in k8s(api, workplace, "wait", "job", code=139).stderr


def test_a_dry_run_of_a_command_asks_nobody(api: Api, workplace: Path) -> None:
    assert "would send to the Kubernetes API: delete job" in k8s(api, workplace, "--dry-run", "delete", "job").stdout
    k8s(api, workplace, "--dry-run", *CREATE)
    assert api.requests == []


def test_the_command_may_stand_behind_its_options(api: Api, workplace: Path) -> None:
    assert k8s(api, workplace, "--namespace", "other", "list").stdout == "no jobs in other\n"
    assert k8s(api, workplace, "-n", "ml", "list", "--json").stdout == "[]\n"


def test_no_cluster_and_no_client_are_said(api: Api, workplace: Path) -> None:
    none = k8s(api, workplace, "list", code=2, KUBECONFIG=None)
    assert f"no Kubernetes cluster is configured: {workplace}/.kube/config does not exist" in none.stderr
    missing = "import sys; sys.modules['kubernetes'] = None"
    assert "pip install 'primus[kubernetes]'" in k8s(api, workplace, "list", code=3, before=missing).stderr
    k8s(api, workplace, "--dry-run", *CREATE, before=missing, KUBECONFIG=None)
    (workplace / "kubeconfig.bad").write_text("contexts:\n- name: [x\n")
    bad = k8s(api, workplace, "list", "--kubeconfig", "kubeconfig.bad", code=2)
    assert "kubeconfig.bad:3 is not a valid kubeconfig: " in bad.stderr and "ParserError" not in bad.stderr


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("https://127.0.0.1:9", "Connection refused"),
        ("no address", "Host 'no address' contains invalid character"),
    ],
)
def test_a_server_that_is_not_there_is_named(server: str, reason: str, api: Api, workplace: Path) -> None:
    given = yaml.safe_load(Path(api.kubeconfig(workplace)).read_text())
    given["clusters"][0]["cluster"] = {"server": server}
    (workplace / "other").write_text(yaml.safe_dump(given))
    done = k8s(api, workplace, "list", "--kubeconfig", "other", code=1)
    assert f"primus-cli: {server} cannot be reached: {reason}" in done.stderr


@pytest.mark.parametrize("name", ["../../secrets/x", "a?b", "a/b", "ü", "a b", ".", "", "a-", "A"])
def test_a_job_is_no_path(api: Api, workplace: Path, name: str) -> None:
    place = {"target": "jobset", "kubeconfig": api.kubeconfig(workplace), "context": "here", "namespace": "ml"}
    for ask in (objects.get_job, objects.delete_job):
        with pytest.raises(UsageError, match="is not the name of a job"):
            ask(place, name, {})
    assert api.requests == []


INTERRUPTED = (
    HASTY
    + """
import primus.runtimes.kubernetes.objects as o
create, count = o.KubernetesClient.create_object, []
def create_object(self, *arguments):
    count.append(1)
    create(self, *arguments)
    if len(count) == 2:
        raise KeyboardInterrupt
o.KubernetesClient.create_object = create_object
"""
)


def test_an_interrupt_between_two_objects_leaves_none(api: Api, workplace: Path) -> None:
    k8s(api, workplace, *CREATE, code=130, before=INTERRUPTED, HF_TOKEN="canary")
    posted = [path for method, path, _ in api.requests if method == "POST"]
    assert len(posted) == 2
    assert api.objects == {}


def test_a_login_that_expires_while_waiting_ends_the_wait_and_not_the_job(api: Api, workplace: Path) -> None:
    k8s(api, workplace, *CREATE)
    api.faults = [Fault(401, method="GET", path="jobsets/job", text='{"message": "Unauthorized"}')]
    done = k8s(api, workplace, "wait", "job", code=1)
    assert "401 Unauthorized" in done.stderr and "expired: log in again (here of " in done.stderr
    assert f"{JOBSETS}/job" in api.objects
    api.objects[f"{JOBSETS}/job"]["status"] = {"terminalState": "Completed"}
    k8s(api, workplace, "wait", "job")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_creation_that_is_killed_leaves_nothing_or_what_delete_removes(
    number: signal.Signals, api: Api, workplace: Path
) -> None:
    api.faults = [Fault(503, method="POST", path="jobsets", wait_s=3.0)]
    environ = {**of_user(api, workplace), "HF_TOKEN": "canary"}
    with cli.started("k8s", *CREATE, cwd=workplace, before=HASTY, **environ) as process:
        cli.wait_for(lambda: any(path == JOBSETS for method, path, _ in api.requests if method == "POST"), "a request")
        process.send_signal(number)
        said = "".join(process.communicate(timeout=60))
    assert process.returncode in (-number, 128 + number) and "Traceback" not in said, said
    if number == signal.SIGKILL:
        assert sorted(api.objects) == [f"{MAPS}/job-run", f"{SECRETS}/job-env"]
        k8s(api, workplace, "delete", "job")
    assert api.objects == {}
    (run,) = list_workspace_runs(workplace / "output")
    assert run.read_metadata().outcome.state == ("interrupted" if number == signal.SIGTERM else "planned")
