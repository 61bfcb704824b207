"""Which of several causes is the first, and whose failure it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnosis import folders
from primus.diagnosis.diagnose import diagnose_logs, diagnose_run
from primus.runs.store import Run

DISK = "OSError: [Errno 28] No space left on device"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
DENIED = "PermissionError: [Errno 13] Permission denied: '/data/index.npy'"
TORCHRUN = """
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-10_12:00:09
  host      : node7
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return folders.make(tmp_path)


def test_an_error_that_training_survived_ranks_after_the_cause(run: Run) -> None:
    steps = [folders.PROGRESS.format(step=step) for step in (4, 5, 6)]
    folders.rank(run, 0, DISK, *steps, MEMORY)
    found = diagnose_run(run, kernel=False)
    assert [(cause.signature, cause.survived) for cause in found.causes] == [
        ("gpu-out-of-memory", False),
        ("disk-full", True),
    ]
    assert found.cause is not None and found.first_rank == 0


def test_what_training_survived_once_is_fatal_where_the_rank_reports_it(run: Run) -> None:
    steps = [folders.PROGRESS.format(step=step) for step in (4, 5, 6)]
    folders.rank(run, 0, DISK, *steps, DISK)
    folders.error(run, 0, DISK, after_s=9.0)
    cause = diagnose_run(run, kernel=False).cause
    assert cause is not None and (cause.signature, cause.survived) == ("disk-full", False)


def test_what_training_survived_once_is_fatal_below_the_last_step_of_its_log(run: Run) -> None:
    steps = [folders.PROGRESS.format(step=step) for step in (4, 5, 6)]
    folders.rank(run, 0, DISK, *steps, DISK)
    folders.rank(run, 1, DISK, *steps)
    cause = diagnose_run(run, kernel=False).cause
    assert cause is not None and (cause.signature, cause.survived, cause.evidence[0].rank) == ("disk-full", False, 0)


@pytest.mark.parametrize(("clock", "survived"), [("12:00:05", True), ("12:00:06", True), ("12:00:07", False)])
def test_on_a_rank_without_steps_an_error_is_survived_until_the_last_step_of_the_others(
    run: Run, clock: str, survived: bool
) -> None:
    steps = [f"2026-01-10 12:00:0{at} {folders.PROGRESS.format(step=at)}" for at in (4, 5, 6)]
    folders.rank(run, 0, f"2026-01-10 12:00:03 {DISK}", *steps)
    folders.rank(run, 1, f"2026-01-10 {clock} {DISK}", steps=0)
    assert [cause.survived for cause in diagnose_run(run, kernel=False).causes] == [survived]


def test_between_equal_causes_the_rank_that_failed_first_has_its_own(run: Run) -> None:
    folders.rank(run, 0, MEMORY)
    folders.rank(run, 3, DISK)
    folders.error(run, 3, "killed by exit code 1", after_s=5.0)
    folders.error(run, 0, "killed by exit code 1", after_s=9.0)
    found = diagnose_run(run, kernel=False)
    assert (found.first_rank, folders.names(found.causes)) == (3, ["disk-full", "gpu-out-of-memory"])


@pytest.mark.parametrize(("before", "first"), [(True, (None, None)), (False, (5, "node7"))])
def test_only_lines_below_the_report_of_torchrun_belong_to_its_rank(
    tmp_path: Path, before: bool, first: object
) -> None:
    path = tmp_path / "console.log"
    path.write_text("\n".join([DISK, TORCHRUN] if before else [TORCHRUN.replace("error_file: <N/A>", DISK)]))
    evidence = diagnose_logs([path]).causes[0].evidence[0]
    assert (evidence.rank, evidence.host) == first


def test_of_ranks_without_a_report_the_first_that_fell_silent_is_blamed(run: Run) -> None:
    for number, silent_since in enumerate((50.0, 20.0, 30.0)):
        folders.beat(run, number, "train", silent_since)
    folders.beat(run, 3, "exit", 1.0)
    found = diagnose_run(run, kernel=False)
    assert (found.first_rank, found.first_host) == (1, "node0")


def test_where_no_rank_exited_no_silent_rank_is_blamed(run: Run) -> None:
    for number in range(3):
        folders.beat(run, number, "train", 10.0 + number)
    assert diagnose_run(run, kernel=False).first_rank is None


def test_an_error_of_the_system_far_from_an_operation_is_not_its_reason(tmp_path: Path) -> None:
    operation = "slurmstepd: error: pyxis: failed to import docker image"
    for distance, first in ((60, "permission-denied"), (61, "image-not-pulled")):
        path = tmp_path / f"{distance}.log"
        path.write_text("\n".join([DENIED, *["-"] * (distance - 1), operation]) + "\n")
        assert diagnose_logs([path]).causes[0].signature == first


def test_of_several_peers_the_one_that_most_lines_blame_is_first_and_no_node_is_excluded(tmp_path: Path) -> None:
    peers = ("10.0.0.3", "10.0.0.7", "10.0.0.7")
    line = (
        "n{n}:91:123 [0] net_ib.cc:881 NCCL WARN NET/IB : Got completion from peer {peer}<49577> with error 12, len 0"
    )
    path = tmp_path / "console.log"
    path.write_text("\n".join(line.format(n=number, peer=peer) for number, peer in enumerate(peers)))
    found = diagnose_logs([path])
    assert (found.first_rank, found.first_host, found.action) == (None, "10.0.0.7", "retry")
    assert found.causes[0].action == "exclude"


def test_a_host_that_srun_reports_is_the_place_of_a_cause_that_has_none(tmp_path: Path) -> None:
    path = tmp_path / "slurm-17.out"
    path.write_text(f"{MEMORY}\nsrun: error: node17: tasks 8-15: Exited with exit code 1\n")
    found = diagnose_logs([path])
    assert (found.first_host, found.causes[0].signature) == ("node17", "gpu-out-of-memory")


def test_a_rank_missing_among_those_that_report_is_the_gap_in_a_merged_log(tmp_path: Path) -> None:
    caught = (
        "[rank{rank}]:[E1206 18:44:12.1 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=88, OpType=ALLGATHER, NumelIn=64) ran for 600061 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'"
    )
    path = tmp_path / "console.log"
    path.write_text("\n".join(caught.format(rank=rank) for rank in (0, 1, 2, 4, 5, 7, 8)))
    found = diagnose_logs([path])
    assert found.lead is not None and found.lead.signature == "collective-timeout"
    assert found.first_rank == 3 and "ranks 3, 6 did not report it, 7 others did" in found.reason


def test_a_traceback_that_the_log_cuts_off_is_told_with_its_last_frame(tmp_path: Path) -> None:
    path = tmp_path / "rank_2.log"
    path.write_text('Traceback (most recent call last):\n  File "/work/train.py", line 7, in main\n    model.step(\n')
    found = diagnose_logs([path])
    assert found.cause is not None and found.cause.signature == "uncaught-exception"
    assert "cut at /work/train.py:7 in main (user code)" in found.reason


@pytest.mark.parametrize(("steps", "loss", "survived"), [(2, "2.1", False), (3, "2.1", True), (3, "nan", False)])
def test_three_steps_with_a_finite_loss_show_that_an_error_of_a_shared_log_did_no_harm(
    tmp_path: Path, steps: int, loss: str, survived: bool
) -> None:
    path = tmp_path / "console.log"
    done = [f" iteration {step}/100 | lm loss: {loss} | learning rate: 1e-4 |" for step in range(steps)]
    path.write_text("\n".join([DISK, *done]) + "\n")
    causes = {cause.signature: cause for cause in diagnose_logs([path]).causes}
    assert causes["disk-full"].survived is survived


def test_the_host_of_a_cause_is_that_of_another_line_of_its_rank(tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    abort = "12: MPICH ERROR [Rank 12] [job id 7.0] [Fri] [nid0042] - Abort(1): application called MPI_Abort"
    path.write_text(f"{abort.replace('12', '11').replace('0042', '0041')}\n12: {MEMORY}\n{abort}\n")
    found = diagnose_logs([path])
    assert (found.first_rank, found.first_host) == (12, "nid0042")


@pytest.mark.parametrize(("name", "host"), [("node9", "node9"), ("localhost", None)])
def test_each_field_of_a_report_that_is_cut_has_its_rank_and_host(tmp_path: Path, name: str, host: str | None) -> None:
    path = tmp_path / "console.log"
    head = f"  time      : 2026-01-10_12:00:09\n  host      : {name}\n  rank      : 5 (local_rank: 1)\n"
    path.write_text(f"{head}  exitcode  : -11 (pid: 4711)\n")
    found = diagnose_logs([path])
    assert (found.first_rank, found.first_host) == (5, host)


def test_the_second_half_of_a_sentence_is_no_error_line(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    sentence = "The session ends when the servers are not reachable, which is either a failure of the network"
    for tail, is_known in (("connection or an internal failure", False), ("Error: the connection failed", True)):
        path.write_text(f"{sentence}\n{tail}\n")
        assert (diagnose_logs([path]).lead is not None) is is_known


def test_the_address_in_the_report_of_torchrun_is_no_server_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text(
        "  exitcode  : 1 (pid: 47)\n  traceback : To enable traceback see: https://pytorch.org/errors.html\n"
    )
    assert "hub-unreachable" not in folders.names(diagnose_logs([path]).causes)


@pytest.mark.parametrize(("report", "cause"), [("", None), (TORCHRUN, "disk-full")])
def test_a_warning_counts_where_a_launcher_reports_a_failure(tmp_path: Path, report: str, cause: str | None) -> None:
    path = tmp_path / "console.log"
    path.write_text("\n".join([f"WARNING: {DISK}", *["working"] * 20, report]))
    found = diagnose_logs([path]).cause
    assert (found.signature if found else None) == cause


def test_a_warning_counts_where_a_rank_reports_its_failure(run: Run) -> None:
    folders.rank(run, 0, f"WARNING: {DISK}", *["working"] * 20)
    folders.error(run, 0, "a gizmo is jammed", after_s=5.0)
    cause = diagnose_run(run, kernel=False).cause
    assert cause is not None and cause.signature == "disk-full"


def test_what_training_survived_is_the_reason_of_no_later_line(run: Run) -> None:
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLGATHER)"
    steps = [folders.PROGRESS.format(step=step) for step in (4, 5, 6)]
    for lines, role in ((steps, "symptom"), ([], "cascade")):
        folders.rank(run, 0, timeout, *lines, "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)")
        causes = {cause.signature: cause.role for cause in diagnose_run(run, kernel=False).causes}
        assert causes["collective-setup"] == role


def test_an_error_of_the_system_in_another_log_is_not_the_reason_of_an_operation(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(f"{DENIED}\n")
    (tmp_path / "b.log").write_text("slurmstepd: error: pyxis: failed to import docker image\n")
    found = diagnose_logs([tmp_path])
    assert folders.names(found.causes) == ["image-not-pulled", "permission-denied"]


def test_a_rank_without_steps_survives_only_what_others_survived(run: Run) -> None:
    folders.rank(run, 0, DISK, *[folders.PROGRESS.format(step=step) for step in (4, 5, 6)])
    folders.rank(run, 1, MEMORY, steps=0)
    causes = {cause.signature: cause.survived for cause in diagnose_run(run, kernel=False).causes}
    assert causes == {"gpu-out-of-memory": False, "disk-full": True}


def test_a_report_that_repeats_a_line_is_its_time_and_one_of_another_line_is_further_evidence(run: Run) -> None:
    other = "OSError: [Errno 122] Disk quota exceeded"
    for problem, shown in ((DISK, [DISK]), (other, [other, DISK])):
        folders.rank(run, 0, DISK)
        folders.error(run, 0, problem, after_s=5.0)
        evidence = diagnose_run(run, kernel=False).causes[0].evidence
        assert sorted(each.text for each in evidence) == sorted(shown) and evidence[0].time is not None


def test_evidence_has_the_number_of_its_line_and_the_reason_its_place(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text(TORCHRUN.replace("error_file: <N/A>", DISK))
    found = diagnose_logs([path])
    assert found.causes[0].evidence[0].line == path.read_text().splitlines().index(f"  {DISK}") + 1
    assert found.reason.endswith("(rank 5 on node7)")


def test_consequences_that_training_survived_are_no_reason(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    timeout = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLGATHER)"
    path.write_text("\n".join([timeout, folders.PROGRESS.format(step=4), ""]))
    found = diagnose_logs([path])
    assert (found.reason, folders.names(found.causes)) == ("", ["collective-timeout"])


def test_in_a_log_without_times_the_first_line_is_the_first_failure(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text(f"[rank7]: {MEMORY}\n[rank2]: {MEMORY}\n")
    assert diagnose_logs([path]).first_rank == 7


def test_of_ranks_that_fail_alike_the_one_that_torchrun_observed_first_is_first(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_text(f"[rank7]: {MEMORY}\n[rank5]: {MEMORY}\n{TORCHRUN}")
    found = diagnose_logs([path])
    assert (found.first_rank, found.first_host) == (5, "node7")


START = "torch/distributed/run.py:757] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"
JOB = "slurmstepd: error: *** JOB {job} ON node{job} CANCELLED AT 2026-01-10T12:00:00 ***"


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        ([DISK, TORCHRUN, START, MEMORY], False),
        ([START, DISK, TORCHRUN, MEMORY], True),
        ([START, DISK, START, MEMORY], True),
        ([DISK, JOB.format(job=1), MEMORY, JOB.format(job=2)], False),
        ([DISK, JOB.format(job=1), MEMORY, JOB.format(job=1)], True),
        ([DISK, JOB.format(job=1), MEMORY], True),
    ],
)
def test_of_several_runs_in_one_log_the_last_one_counts(tmp_path: Path, lines: list[str], counts: bool) -> None:
    path = tmp_path / "slurm.out"
    path.write_text("\n".join(lines) + "\n")
    causes = folders.names(diagnose_logs([path]).causes)
    assert "gpu-out-of-memory" in causes and ("disk-full" in causes) is counts


RETRY = "INFO - client - Server is not up yet. Retrying in 2.0 seconds..."


@pytest.mark.parametrize(("lines", "lead"), [([], "server-not-up"), (["working"] * 20, None)])
def test_a_server_that_is_not_up_counts_where_the_log_ends_with_it(
    tmp_path: Path, lines: list[str], lead: str | None
) -> None:
    path = tmp_path / "console.log"
    path.write_text("\n".join([RETRY] * 3 + lines))
    found = diagnose_logs([path]).lead
    assert (found.signature if found and not found.survived else None) == lead


def test_the_pod_of_an_event_is_that_of_its_description(tmp_path: Path) -> None:
    path = tmp_path / "describe.txt"
    killed = "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
    path.write_text(f"Name:         trainer-worker-3\nNamespace:    ml\nContainers:\n  main:\n{killed}")
    found = diagnose_logs([path])
    assert (found.first_host, found.causes[0].signature) == ("trainer-worker-3", "host-out-of-memory")
    path.write_text(f"Name:         trainer-worker-3\n{MEMORY}\n")
    assert diagnose_logs([path]).first_host is None


def test_evidence_is_the_part_of_a_line_behind_a_progress_bar(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(f" 50%|#####     | 5/10\r 60%|######    | 6/10\r{DISK}\n".encode())
    assert [each.text for each in diagnose_logs([path]).causes[0].evidence] == [DISK]


FULL = "cannot open ckpt/a.pt: No space left on device"
ODD = ["Traceback (most recent call last):", '  File "my.py", line 3, in <module>', "    f()", "Odd: no words"]
LATER = [f"loading part {number}" for number in range(20)]


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        ([FULL, *LATER], False),
        ([FULL, *LATER, *ODD], True),
        ([*ODD, FULL, *LATER], True),
        ([FULL, *LATER, "Exception ignored in: <function f>", *ODD], False),
        ([FULL, *ODD, *(f"loading part {number}" for number in range(70))], False),
        ([FULL, *ODD, *(folders.PROGRESS.format(step=step) for step in (4, 5, 6)), *LATER], False),
    ],
)
def test_an_early_error_counts_where_a_traceback_shows_that_the_process_ended(
    tmp_path: Path, lines: list[str], counts: bool
) -> None:
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    causes = diagnose_logs([tmp_path / "a.log"]).causes
    assert [(each.signature, each.survived) for each in causes if each.signature == "disk-full"] == [
        ("disk-full", not counts)
    ]


WARNED = "W0110 12:00:00.000 7 cache.py:5] cannot open cache/x: No space left on device"


@pytest.mark.parametrize(
    ("other", "survived"),
    [
        (MEMORY, True),  # the cause, and the end of a process
        ("KeyboardInterrupt", True),
        ("mkdir: cannot create directory '/x': Permission denied", False),  # no end of a process
        ("RuntimeError: Connection closed by peer [127.0.0.1]:46806", False),  # a consequence
        ("[docker][WARNING] - Error response from daemon: toomanyrequests: pull rate limit", False),  # a warning, too
    ],
)
def test_a_warning_is_no_cause_where_another_line_shows_one_that_ended_a_process(
    tmp_path: Path, other: str, survived: bool
) -> None:
    (tmp_path / "a.log").write_text(f"{WARNED}\n{other}\n{TORCHRUN}")
    causes = diagnose_logs([tmp_path / "a.log"]).causes
    assert len(causes) > 1 and [each.survived for each in causes if each.signature == "disk-full"] == [survived]


def test_an_abort_follows_a_connection_that_failed_but_not_one_that_training_survived(tmp_path: Path) -> None:
    refused = "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (n1, 29500)."
    abort = "Fatal Python error: Aborted"
    steps = [folders.PROGRESS.format(step=step) for step in (4, 5, 6)]
    (tmp_path / "a.log").write_text("\n".join([refused, abort]) + "\n")
    roles = {each.signature: each.role for each in diagnose_logs([tmp_path / "a.log"]).causes}
    assert roles["aborted"] == "cascade"
    (tmp_path / "a.log").write_text("\n".join([refused, *steps, abort]) + "\n")
    cause = diagnose_logs([tmp_path / "a.log"]).cause
    assert cause is not None and cause.signature == "aborted"
