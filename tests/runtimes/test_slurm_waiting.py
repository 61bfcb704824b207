"""Why a job waits in Slurm's queue, in words."""

from __future__ import annotations

import time

import pytest

from primus.launch.jobs.job_states import explain_state
from primus.runtime import JobState
from primus.runtimes.slurm.waiting import count_gpus_per_node, explain_reason, parse_time


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Priority", "jobs with a higher priority are ahead of it: sprio -j 7"),
        ("(Resources)", "it is next, and waits for nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "a node that it needs is down, drained or reserved: sinfo -R"),
        ("QOSMaxGRESPerUser", "the limit MaxGRESPerUser of its quality of service is reached"),
        ("AssocGrpNodeLimit", "the limit GrpNodeLimit of its account is reached"),
        ("QOSNotAllowed", "its account, quality of service or partition does not allow it"),
        ("SomethingOfASite", ""),
    ],
)
def test_a_reason_is_explained_with_the_next_step(reason: str, text: str) -> None:
    found = explain_reason("7", reason)
    assert found.startswith(text) and bool(found) == bool(text)


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ("gres:gpu:8", 8),
        ("gpu:mi300x:4", 4),
        ("gres/gpu:2(IDX:0-1),gres/nvme:1", 2),
        ("gres:gpu", 1),
        ("gpu:a100:1,gpu:h100:3", 4),
        ("N/A", None),
        ("gres:nvme:2", None),
    ],
)
def test_gpus_are_counted_in_what_a_node_gives(resources: str, count: int | None) -> None:
    assert count_gpus_per_node(resources) == count


def test_an_expected_start_is_a_time_of_this_machine() -> None:
    text = "2026-11-27T14:05:00"
    starts = parse_time(text)
    assert starts is not None and time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(starts)) == text
    assert parse_time("N/A") is None
    queued = JobState(state="queued", reason="Priority", advice="others are ahead", starts=starts)
    said = "queued (Priority): others are ahead; is expected to start at 2026-11-27 14:05"
    assert explain_state(queued) == said.replace("is expected", "expected")
    assert explain_state(JobState(state="running", starts=starts)) == "running"
