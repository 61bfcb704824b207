"""What follows a step of a batch job, decided from the run folder, the warning signal and the nodes that respond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.slurm import FakeSlurm
from primus.launch.supervision import attempt_history
from primus.launch.supervision.restart_policy import AttemptResult
from primus.plan import RestartPolicy
from primus.runs.events import EventLog
from primus.runs.store import Run, RunMetadata, RunOutcome, create_run
from primus.runtimes.slurm import queries
from primus.runtimes.slurm.restart_decision import SlurmStepResult, StepDecision, decide_after_step


class StepOfJob:
    """A job whose step has ended."""

    def __init__(self, folder: Path) -> None:
        self.slurm = FakeSlurm(folder / "bin")
        self.environ = dict(self.slurm.environ)
        self.run = create_run(folder / "out" / "r", RunMetadata(id="r", name="night", task="t", created=1))

    def record(self, *past: AttemptResult, attempts: int = 1) -> None:
        """Record an attempt as its nodes do."""
        self.run.update_metadata(attempts=attempts, outcome=RunOutcome(state="running"))
        for end in past:
            if end.step is not None:
                record_checkpoint(self.run, end.step)
            attempt_history.record_attempt_result(self.run, end)

    def decide(self, code: int, *, restarts: int = 0, delay_s: float = 30, **step: Any) -> StepDecision:
        policy = RestartPolicy(max_restarts=restarts, backoff_s=delay_s)
        result = SlurmStepResult(exit_code=code, policy=policy, **({"num_nodes": 1} | step))
        decision = decide_after_step(self.run, result, self.environ)
        assert decision.reason
        return decision

    def attempt_result(self) -> AttemptResult:
        """The first attempt, as recorded."""
        return attempt_history.read_attempt_results(self.run)[0]


@pytest.fixture
def job(tmp_path: Path) -> StepOfJob:
    return StepOfJob(tmp_path)


def record_checkpoint(run: Run, step: int) -> None:
    log = EventLog(run.events)
    log.append("checkpoint_saved", step=step)
    log.close()


def summary(decision: StepDecision) -> tuple[Any, ...]:
    """The action, and what belongs to it."""
    if decision.action == "restart":
        return ("restart", decision.delay_s, *decision.exclude)
    return ("stop", decision.exit_code) if decision.action == "stop" else (decision.action,)


RESPONDING = "for n in $(echo $RESPONDING); do echo primus:$n; done"


@pytest.mark.parametrize(
    ("end", "code", "step", "expected"),
    [
        ("done", 0, {}, ("finish",)),
        ("done", 0, {"is_warned": True, "can_requeue": True}, ("finish",)),
        ("failed", 7, {}, ("stop", 7)),
        ("failed", 7, {"restarts": 1, "delay_s": 5}, ("restart", 5)),
        ("failed-for-good", 7, {"restarts": 1}, ("stop", 7)),
        ("interrupted", 143, {"restarts": 1, "can_requeue": True}, ("stop", 143)),
        ("preempted", 0, {"can_requeue": True}, ("requeue",)),
        ("preempted", 0, {}, ("stop", 1)),
        ("failed", 7, {"is_warned": True, "can_requeue": True}, ("requeue",)),
        (None, 9, {"is_warned": True, "can_requeue": True}, ("requeue",)),
        (None, 0, {}, ("finish",)),
        (None, 9, {"restarts": 1}, ("restart", 30)),
    ],
)
def test_a_step_is_followed_by_what_its_end_asks_for(
    job: StepOfJob, end: Any, code: int, step: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    action = "stop" if end == "failed-for-good" else "retry"
    job.record(*([AttemptResult(attempt=0, kind=end.partition("-")[0], action=action)] if end else []))
    assert summary(job.decide(code, **step)) == expected


def test_a_lost_node_is_replaced_by_a_spare_one(job: StepOfJob) -> None:
    job.record(AttemptResult(attempt=0, kind="failed", step=4))
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-3]", "RESPONDING": "n1 n3"}
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(1, num_nodes=2, restarts=2, delay_s=0)) == ("restart", 0, "n2")
    assert "--nodelist=n1,n2,n3" in job.slurm.argv("srun")
    (end,) = attempt_history.read_attempt_results(job.run)
    assert (end.kind, end.hosts, end.step) == ("lost node", ("n2",), 4)

    job.record(AttemptResult(attempt=1, kind="failed", step=6), attempts=2)
    job.environ["RESPONDING"] = "n1"
    step = {"num_nodes": 2, "restarts": 2, "excluded": ("n2",)}
    assert summary(job.decide(1, **step)) == ("stop", 1), "no other spare node"
    assert summary(job.decide(1, **step, can_requeue=True)) == ("requeue",)


def test_a_node_that_slurm_lists_as_down_is_lost(job: StepOfJob) -> None:
    job.record()
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-3]", "RESPONDING": "n1 n3"}
    (job.slurm.folder / "sinfo").write_text("#!/bin/sh\necho 'n2|down*'\necho 'n1|allocated'\n")
    (job.slurm.folder / "sinfo").chmod(0o755)
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(1, num_nodes=2, restarts=2, delay_s=0)) == ("restart", 0, "n2")
    assert "--nodelist=n1,n3" in job.slurm.argv("srun"), "no step waits for a node that is known to be down"


def test_a_lost_node_without_a_spare_one_needs_a_requeue(job: StepOfJob) -> None:
    job.record()
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-2]", "RESPONDING": "n1"}
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(1, num_nodes=2, restarts=1)) == ("stop", 1)
    assert summary(job.decide(1, num_nodes=2, restarts=1, can_requeue=True)) == ("requeue",)
    assert job.run.read_metadata().outcome.reason == "lost n2"


def test_a_node_that_responds_is_not_lost_with_its_launcher(job: StepOfJob) -> None:
    job.record(AttemptResult(attempt=0, kind="lost node", hosts=("n2",), reason="n2 was lost"))
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-2]", "RESPONDING": "n1 n2"}
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(1, num_nodes=2, restarts=1)) == ("restart", 30)
    assert job.attempt_result().reason == "n2 was lost; the node responds"


def test_a_node_that_lost_its_launcher_is_replaced_without_a_query(job: StepOfJob) -> None:
    job.record(AttemptResult(attempt=0, kind="lost node", hosts=("n2.cluster.local",)))
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-3]"}
    assert summary(job.decide(1, num_nodes=2, restarts=1)) == ("restart", 30, "n2")
    assert not job.slurm.calls("srun")


def test_no_node_is_lost_where_none_responds(job: StepOfJob) -> None:
    job.record()
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-2]", "RESPONDING": ""}
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(5, num_nodes=2)) == ("stop", 5)
    assert job.attempt_result().kind == "failed"


def test_a_step_that_started_no_attempt_is_not_restarted(job: StepOfJob) -> None:
    assert summary(job.decide(127, restarts=5)) == ("stop", 127)
    outcome = job.run.read_metadata().outcome
    assert (outcome.state, outcome.exit_code) == ("failed", 127)
    assert outcome.reason == "srun exited with code 127 before an attempt started"


def test_a_restart_that_started_no_attempt_does_not_count_as_the_previous_attempt(job: StepOfJob) -> None:
    job.record(AttemptResult(attempt=0, kind="failed"))
    assert summary(job.decide(7, restarts=9)) == ("restart", 30)
    assert summary(job.decide(127, restarts=9)) == ("stop", 127)


def test_a_task_without_workers_is_done_when_its_step_is(job: StepOfJob) -> None:
    assert summary(job.decide(0)) == ("finish",)
    assert job.run.read_metadata().outcome.state == "done"


def test_checkpoints_count_for_attempts_that_their_nodes_could_not_record(job: StepOfJob) -> None:
    job.record()
    record_checkpoint(job.run, 30)
    assert summary(job.decide(9, restarts=1)) == ("restart", 30)
    assert job.attempt_result().step == 30
    job.run.update_metadata(attempts=2)
    record_checkpoint(job.run, 60)
    assert summary(job.decide(9, restarts=1)) == ("restart", 30), "a newer checkpoint resets the count"


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("gpu[07-09,11],cpu1", ["gpu07", "gpu08", "gpu09", "gpu11", "cpu1"]),
        ("r[1-2]n[3-4].x", ["r1n3.x", "r1n4.x", "r2n3.x", "r2n4.x"]),
    ],
)
def test_a_list_of_nodes_is_read_in_its_order(nodes: str, names: list[str]) -> None:
    assert queries.expand_node_list(nodes) == names


@given(st.lists(st.integers(0, 2000), min_size=1, unique=True), st.integers(1, 4))
def test_numbers_of_nodes_keep_their_width(numbers: list[int], width: int) -> None:
    written = [str(number).zfill(width) for number in numbers]
    assert queries.expand_node_list(f"n[{','.join(written)}]") == [f"n{number}" for number in written]


def test_a_lost_node_does_not_requeue_a_job_that_makes_no_progress(job: StepOfJob) -> None:
    job.record()
    for attempt in range(3):  # the first counts as the start, and three more write nothing
        attempt_history.record_attempt_result(job.run, AttemptResult(attempt=attempt, kind="failed"))
    job.run.update_metadata(attempts=4)
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-2]", "RESPONDING": "n1"}
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(1, num_nodes=2, restarts=9, can_requeue=True)) == ("stop", 1)


def test_more_lost_nodes_than_spare_ones_queue_the_job_again(job: StepOfJob) -> None:
    job.record()
    job.environ |= {"SLURM_JOB_NODELIST": "n[1-4]", "RESPONDING": "n1 n4"}
    job.slurm.answers(srun=RESPONDING)
    assert summary(job.decide(1, num_nodes=3, restarts=2, can_requeue=True)) == ("requeue",)


def test_a_job_that_stops_has_the_exit_code_of_its_run_and_not_that_of_a_killed_task(job: StepOfJob) -> None:
    job.record(AttemptResult(attempt=0, kind="failed"))
    job.run.update_metadata(ended=2e9, outcome=RunOutcome(state="failed", exit_code=9, reason="rank 3"))
    assert summary(job.decide(143)) == ("stop", 9)


@pytest.mark.parametrize(("is_warned", "state"), [(True, "interrupted"), (False, "failed")])
def test_a_run_whose_nodes_recorded_no_end_is_interrupted_by_a_preemption_and_else_failed(
    job: StepOfJob, is_warned: bool, state: str
) -> None:
    job.record()
    job.decide(9, is_warned=is_warned)
    assert job.run.read_metadata().outcome.state == state


@pytest.mark.parametrize("state", ["allocated*", "idle*", "down", "down$", "fail"])
def test_a_node_that_does_not_respond_or_is_down_is_found(job: StepOfJob, state: str) -> None:
    (job.slurm.folder / "sinfo").write_text(f"#!/bin/sh\necho 'n1|allocated'\necho 'n2|{state}'\necho 'n3|mixed'\n")
    (job.slurm.folder / "sinfo").chmod(0o755)
    assert queries.find_down_nodes(["n1", "n2", "n3"], job.environ) == {"n2"}
