"""How jobs, pods and nodes are told, from objects as the API gives them."""

from __future__ import annotations

from typing import Any

import pytest

from primus.runtime import SchedulerState
from primus.runtimes.kubernetes import status


def job(told: Any = None, **spec: Any) -> Any:
    return {"metadata": {"name": "job", "labels": {"primus.run": "r"}}, "spec": spec, "status": told or {}}


def condition(kind: str, message: str = "") -> Any:
    return {"type": kind, "status": "True", "message": message}


def pod(rank: int, phase: str = "Running", name: str = "", **container: Any) -> Any:
    meta = {"name": name or f"p{rank}", "annotations": {"batch.kubernetes.io/job-completion-index": str(rank)}}
    own = {"name": "node", "restartCount": 0, "state": container}
    return {"metadata": meta, "spec": {"nodeName": f"n{rank}"}, "status": {"phase": phase, "containerStatuses": [own]}}


@pytest.mark.parametrize(
    ("given", "state", "raw", "code"),
    [
        (job(), "queued", "Pending", None),
        (job({"replicatedJobsStatus": [{"name": "node", "ready": 1}]}), "running", "Running", None),
        (job({"jobsStatus": [{"name": "node", "ready": 0, "active": 1}]}), "queued", "Pending", None),
        (job(suspend=True), "queued", "Suspended", None),
        (job({"conditions": [condition("Suspended", "no quota")]}), "queued", "Suspended", None),
        (job({"terminalState": "Completed", "conditions": [condition("Completed")]}), "done", "Completed", 0),
        (job({"conditions": [condition("Complete")]}), "done", "Complete", 0),
        (job({"terminalState": "Failed", "conditions": [condition("Failed", "why")]}), "failed", "Failed", 1),
        (job({"conditions": [{"type": "Failed", "status": "False"}]}), "queued", "Pending", None),
    ],
)
def test_the_state_of_a_job(given: Any, state: SchedulerState, raw: str, code: int | None) -> None:
    found = status.build_job_view(given, (), ()).state
    assert (found.state, found.raw, found.exit_code) == (state, raw, code)


def test_a_job_that_is_being_deleted_is_cancelled() -> None:
    given = job()
    given["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert status.build_job_view(given, (), ()).state.state == "cancelled"


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 1), 1), ((1, 93), 93), ((143, 7), 143), ((0, 0), 1), ((), 1), ((None, 5), 5)]
)
def test_the_exit_code_of_a_job_is_that_which_says_most(codes: tuple[int | None, ...], code: int) -> None:
    pods = [
        pod(rank, "Failed", terminated={"exitCode": each} if each is not None else {})
        for rank, each in enumerate(codes)
    ]
    assert status.build_job_view(job({"terminalState": "Failed"}), pods, ()).state.exit_code == code


def test_why_pods_wait() -> None:
    def why(each: Any) -> str:
        return status.build_pod_view(each).message

    pulls = {"reason": "ErrImagePull", "message": "toomanyrequests: rate limit"}
    assert why(pod(0, "Pending", waiting=pulls)) == "ErrImagePull: toomanyrequests: rate limit"
    assert why(pod(0, "Pending", waiting={"reason": "ContainerCreating"})) == ""
    assert why(pod(0, "Failed", terminated={"exitCode": 137, "reason": "OOMKilled"})) == "OOMKilled"
    assert why(pod(0, "Succeeded", terminated={"exitCode": 0, "reason": "Completed"})) == ""
    evicted = pod(0, "Failed")
    evicted["status"] |= {"reason": "Evicted", "message": "The node was low on resource: memory."}
    assert why(evicted) == "Evicted: The node was low on resource: memory."


def test_a_quota_is_told_where_there_are_no_pods() -> None:
    events = [
        {"lastTimestamp": "2026-01-02", "message": "exceeded quota: gpus"},
        {"lastTimestamp": "2026-01-01", "message": "older"},
    ]
    assert status.build_job_view(job(), (), events).message == "exceeded quota: gpus"


def test_the_pod_of_the_last_attempt_counts() -> None:
    views = status.build_job_view(job(), [pod(0, "Failed", "z"), pod(1), pod(0, "Running", "a")], ()).pods
    found = status.find_newest_pod(views, 0)
    assert found is not None and found.name == "a"
    assert status.find_newest_pod(views, 2) is None


def test_used_gpus_are_not_told_to_who_may_not_see_pods() -> None:
    node = {
        "metadata": {"name": "n", "labels": {"nvidia.com/gpu.product": "H100"}},
        "spec": {"unschedulable": True},
        "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [condition("Ready")]},
    }
    view = status.build_node_view(node, None)
    assert (view.gpus, view.gpus_used, view.model, view.is_ready) == (8, None, "H100", False)
    assert view.message == "cordoned: accepts no new pods"


def test_the_log_is_that_of_the_new_pod_while_the_old_one_terminates() -> None:
    old = pod(0, "Running", "old")
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    views = status.build_job_view(job(), [pod(0, "Running", "new"), old], ()).pods
    found = status.find_newest_pod(views, 0)
    assert found is not None and found.name == "new"
