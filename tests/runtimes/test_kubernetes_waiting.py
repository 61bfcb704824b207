"""Why a job of a cluster waits, in the words of Kueue, the scheduler and the kubelet, with the next step."""

from __future__ import annotations

from typing import Any

import pytest

from primus.runtime import JobState
from primus.runtimes.kubernetes.target import PodView
from primus.runtimes.kubernetes.waiting import CREATING, explain_wait

SUSPENDED = JobState(state="queued", raw="Suspended")


def workload(owner: str, **messages: str) -> Any:
    conditions = [{"type": kind, "status": "False", "message": text} for kind, text in messages.items()]
    return {"metadata": {"ownerReferences": [{"name": owner}]}, "status": {"conditions": conditions}}


def test_kueue_says_why_it_does_not_admit_a_job() -> None:
    text = 'couldn\'t assign flavors to pod set node: topology "rack" allows to fit only 4 out of 6 pod(s)'
    found = explain_wait(
        "j", SUSPENDED, (), ("older",), [workload("other", QuotaReserved="x"), workload("j", QuotaReserved=text)]
    )
    assert found.reason == f"Kueue: {text}"
    assert found.advice.startswith("no domain of this topology level has room for all pods")


def test_what_an_admitted_job_waits_for_are_its_pods() -> None:
    admitted = workload("j", QuotaReserved="old")
    admitted["status"]["conditions"].append({"type": "Admitted", "status": "True", "message": "ok"})
    pods = (
        PodView(name="a", phase="Running"),
        PodView(name="b", phase="Pending", message="ErrImagePull: rpc error:\n not found"),
    )
    found = explain_wait("j", JobState(state="queued", raw="Pending"), pods, ("older",), [admitted])
    assert found.reason == "b: ErrImagePull: rpc error: not found"
    assert found.advice == "check --image; a private registry needs --pull-secret"
    pulling = explain_wait("j", SUSPENDED, (PodView(name="a", phase="Pending", node="n1"),), (), [])
    assert (pulling.reason, pulling.advice) == (f"a: {CREATING}", "")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("0/4 nodes are available: 4 Insufficient amd.com/gpu.", "kubernetes nodes"),
        ("0/4 nodes are available: 4 Insufficient memory.", "--memory"),
        ('persistentvolumeclaim "runs" not found', "kubectl get pvc"),
        ("insufficient unused quota for amd.com/gpu in flavor mi300, 8 more needed", "the quota is used up"),
        ('pods "a" is forbidden: exceeded quota: compute', "the quota is used up"),
        ("LocalQueue team doesn't exist", "check --queue"),
        ("0/4 nodes are available: 4 node(s) had untolerated taint {a: b}", "check --vendor"),
        ("something else", ""),
    ],
)
def test_a_message_leads_to_the_next_step(message: str, advice: str) -> None:
    found = explain_wait("j", SUSPENDED, (), (message,), [])
    assert found.reason == message
    assert advice in found.advice and bool(advice) == bool(found.advice)
