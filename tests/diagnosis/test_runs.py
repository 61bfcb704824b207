"""Attempts of many ranks: one root among cascades, in any order of lines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis import folders
from diagnosis.genuine import LINES
from primus.diagnosis.diagnose import diagnose_run
from primus.diagnosis.signature_files import get_signature_table
from primus.runs.store import Run

BY_NAME = get_signature_table().by_name

PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:46806."
WATCHDOG = (
    "[rank{rank}]:[E110 12:10:07.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds"
)
TOLD = "W0110 12:10:08.626000 81 torch/distributed/elastic/api.py:900] Sending process 8 closing signal SIGTERM"
ROOTS = [
    line
    for line in LINES
    if BY_NAME[line.signature].role == "root"
    and BY_NAME[line.signature].patterns
    and BY_NAME[line.signature].count == 1
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return folders.make(tmp_path)


@pytest.mark.parametrize("line", ROOTS, ids=lambda line: f"{line.signature}-{line.text[:20]}")
def test_one_root_is_found_among_the_cascades_of_all_other_ranks(run: Run, line: object) -> None:
    for number in range(8):
        folders.rank(run, number, WATCHDOG.format(rank=number), PEER)
    folders.rank(run, 5, line.text)  # type: ignore[attr-defined]
    folders.say(run, TOLD)
    found = diagnose_run(run, kernel=False)
    assert found.causes[0].signature == line.signature  # type: ignore[attr-defined]
    blamed = get_signature_table().by_name[line.signature].find_blamed_host(line.text)  # type: ignore[attr-defined]
    assert (found.first_rank, blamed) == (5, None) or (found.first_rank, found.first_host) == (None, blamed)
    assert {cause.role for cause in found.causes[1:]} <= {"symptom", "cascade"}
    actions = (BY_NAME[line.signature].action, BY_NAME[line.signature].first_action)  # type: ignore[attr-defined]
    assert found.action in (("retry",) if blamed else actions)
    evidence = found.causes[0].evidence[0]
    assert (evidence.file, evidence.line, evidence.rank) == ("logs/attempt_0/rank_5.log", 4, 5)


def test_the_first_of_two_roots_is_the_cause(run: Run) -> None:
    folders.rank(run, 1, "[2026-01-10 12:05:09] torch.OutOfMemoryError: HIP out of memory.")
    folders.rank(run, 2, "[2026-01-10 12:05:01] OSError: [Errno 28] No space left on device")
    assert folders.names(diagnose_run(run).causes) == ["disk-full", "gpu-out-of-memory"]


def test_the_rank_that_failed_first_by_its_error_is_the_one_that_counts(run: Run) -> None:
    for number in range(4):
        folders.rank(run, number, PEER)
        folders.error(run, number, f"RuntimeError: {PEER}", after_s=60 + number)
    folders.rank(run, 2, "Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory.")
    folders.error(run, 2, "OutOfMemoryError: CUDA out of memory.", after_s=70)
    found = diagnose_run(run)
    assert (found.first_rank, found.first_host, found.action) == (2, "node1", "stop")
    assert found.reason == "a GPU ran out of memory (rank 2 on node1)"
    assert found.causes[1].ranks == (0, 1, 3)


def test_a_kill_without_a_second_sign_is_not_taken_for_want_of_memory(run: Run) -> None:
    for number in range(2):
        folders.rank(run, number, PEER)
    folders.say(run, "E0110 12:05:00.0 7 api.py:988] failed (exitcode: -9) local_rank: 1 (pid: 1) of binary: python")
    found = diagnose_run(run, kernel=False)
    assert (found.causes[0].signature, found.first_rank, found.action) == ("killed", 1, "retry")


@pytest.mark.parametrize(
    "sign",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "[  12.5] Out of memory: Killed process 11570 (python3) total-vm:1048576kB",
    ],
)
def test_a_kill_with_a_second_sign_is_want_of_memory(run: Run, sign: str) -> None:
    folders.say(run, "E0110 12:05:00.0 7 api.py:988] failed (exitcode: -9) local_rank: 1 (pid: 1) of binary: python")
    folders.say(run, sign, log="slurm-17.out")
    found = diagnose_run(run, kernel=False)
    assert found.causes[0].signature == "host-out-of-memory"
    assert found.action == "retry"  # once


BLOCK = """\
============================================================
worker FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-10_12:05:04
  host      : fn2
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 10
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-10_12:05:03
  host      : fn7
  rank      : 3 (local_rank: 1)
  exitcode  : -11 (pid: 11)
  error_file: <N/A>
  traceback : Signal 11 (SIGSEGV) received by PID 11
============================================================"""


def test_the_root_cause_of_torchrun_names_rank_host_and_code(run: Run) -> None:
    folders.say(run, *BLOCK.splitlines())
    found = diagnose_run(run, kernel=False)
    assert (found.causes[0].signature, found.first_rank, found.first_host) == ("segmentation-fault", 3, "fn7")
    assert {"terminated", "worker-group-failed"} <= set(folders.names(found.causes[1:]))


def test_the_host_is_what_the_ranks_call_it_not_localhost(run: Run) -> None:
    folders.say(run, *BLOCK.replace("fn7", "localhost").splitlines())
    folders.error(run, 3, "rank 3 was killed by SIGSEGV", after_s=5, exit_code=139)
    found = diagnose_run(run, kernel=False)
    assert (found.first_rank, found.first_host) == (3, "node1")


def test_what_a_rank_says_of_itself_is_no_second_evidence(run: Run) -> None:
    problem = "steps 4 to 8: the loss or the gradient is not finite (loss nan, grad norm nan)"
    folders.rank(run, 0, problem)
    folders.error(run, 0, problem, after_s=5)
    cause = diagnose_run(run).causes[0]
    assert [each.file for each in cause.evidence] == ["logs/attempt_0/rank_0.log"]


def test_clocks_that_differ_do_not_make_a_victim_the_first(run: Run) -> None:
    for number in (0, 1):
        folders.error(run, number, f"RuntimeError: {PEER}", after_s=50)  # this node's clock is ten seconds late
    folders.rank(run, 3, "acme.FrobnicationError: the gizmo is jammed")
    folders.error(run, 3, "FrobnicationError: the gizmo is jammed", after_s=60)
    assert (diagnose_run(run).first_rank, diagnose_run(run).reason) == (
        3,
        "FrobnicationError: the gizmo is jammed (rank 3 on node1)",
    )


def test_local_ranks_of_further_nodes_are_counted_on(run: Run) -> None:
    (run.directory / "plan.json").write_text(json.dumps({"layout": {"nproc": 4}}))
    text = "E0110 12:05:00.0 7 api.py:988] failed (exitcode: -11) local_rank: 1 (pid: 1) of binary: python"
    folders.say(run, "[2026-01-10 12:00:00] attempt 0 on node2", text, log="launch.node_2.log")
    assert diagnose_run(run, kernel=False).first_rank == 9


def test_what_srun_says_names_the_host(run: Run) -> None:
    folders.say(run, "srun: error: fn2: task 1: Exited with exit code 17", log="slurm-17.out")
    folders.say(run, "srun: error: fn1: task 0: Exited with exit code 143", log="slurm-17.out")
    found = diagnose_run(run)
    assert (found.causes[0].signature, found.first_host, found.action) == ("failed-validation", "fn2", "exclude")


def test_a_root_that_training_survived_gives_way(run: Run) -> None:
    log = run.attempt_folder(0) / "rank_0.log"
    folders.rank(run, 0, "OSError: [Errno 28] No space left on device")
    log.write_text(log.read_text() + folders.PROGRESS.format(step=9) + "\ntorch.OutOfMemoryError: HIP out of memory.\n")
    found = diagnose_run(run)
    assert folders.names(found.causes) == ["gpu-out-of-memory", "disk-full"]
    assert found.causes[1].survived and not found.causes[0].survived


def test_a_verdict_of_the_launcher_counts_where_no_log_says_more(run: Run) -> None:
    for number in range(4):
        folders.rank(run, number, TOLD)
    verdict = {"ranks": [2], "hosts": ["node1"], "phase": "train", "step": 7, "seconds": 612.0}
    (run.attempt_folder(0) / "hang.json").write_text(json.dumps(verdict))
    stacks = 'Process 1: python\nThread 1 (idle): "MainThread"\n    read_shard (data.py:12)\n    main (train.py:3)\n'
    (run.attempt_folder(0) / "rank_2.stacks.txt").write_text(stacks)
    found = diagnose_run(run)
    assert (found.causes[0].signature, found.first_rank, found.first_host) == ("hang", 2, "node1")
    text = found.causes[0].evidence[0].text
    assert text == "no progress for 612.0 s in phase train after step 7; in read_shard (data.py:12)"
    folders.rank(run, 2, "OSError: [Errno 28] No space left on device")
    assert diagnose_run(run).causes[0].signature == "disk-full"


@pytest.mark.parametrize(
    "form", ["", "[]", "{}", '{"ranks": 3}', '{"ranks": [{"rank": 1}]}', '{"ranks": null, "x": 1}', "{"]
)
def test_verdicts_and_errors_of_another_form_raise_nothing(run: Run, form: str) -> None:
    (run.attempt_folder(0) / "hang.json").write_text(form)
    (run.attempt_folder(0) / "rank_0.error.json").write_text(form)
    (run.attempt_folder(0) / "rank_0.heartbeat.json").write_text(form)
    (run.attempt_folder(0) / "rank_x.heartbeat.json").write_text('{"host": "a"}')
    (run.directory / "plan.json").write_text(form)
    assert diagnose_run(run, kernel=False).first_rank is None or form.startswith('{"ranks"')


def test_a_node_whose_heartbeats_end_early_was_lost(run: Run) -> None:
    for number in range(4):
        folders.rank(run, number, PEER)
        folders.beat(run, number, "train" if number >= 2 else "exit", 100.0 if number >= 2 else 190.0)
    found = diagnose_run(run)
    assert (found.causes[0].signature, found.first_host, found.action) == ("node-lost", "node1", "exclude")
    assert "90 s before" in found.causes[0].evidence[0].text


def test_what_an_earlier_attempt_wrote_is_not_held_against_a_later_one(tmp_path: Path) -> None:
    run = folders.make(tmp_path, attempts=2)
    log = run.directory / "logs" / "launch.log"
    first, second = log.read_text().split("[2026-01-10 12:10:00]")
    disk = "OSError: [Errno 28] No space left on device\n"
    log.write_text(f"{first}{disk}[2026-01-10 12:10:00]{second}Fatal Python error: Segmentation fault\n")
    folders.say(run, "2026-01-10 12:03:00 OSError: [Errno 24] Too many open files", log="slurm-17.out")
    folders.rank(run, 0, PEER, attempt=1)
    assert folders.names(diagnose_run(run, 0).causes) == ["disk-full", "too-many-open-files"]
    assert folders.names(diagnose_run(run).causes) == ["segmentation-fault", "peer-closed"]


def test_what_may_be_tried_once_is_not_tried_twice(tmp_path: Path) -> None:
    run = folders.make(tmp_path, attempts=2)
    for number in range(2):
        folders.rank(run, 0, "Memory access fault by GPU node-3 (Agent handle: 0x5) on address 0x7.", attempt=number)
    assert (diagnose_run(run, 0).action, diagnose_run(run, 1).action) == ("retry", "stop")


def test_an_unknown_failure_shows_the_end_of_the_first_failing_ranks_log(run: Run) -> None:
    folders.rank(run, 0, PEER)
    folders.rank(run, 1, "Traceback (most recent call last):", "acme.FrobnicationError: the gizmo is jammed")
    folders.error(run, 1, "FrobnicationError: the gizmo is jammed", after_s=5)
    folders.error(run, 0, PEER, after_s=6)
    found = diagnose_run(run)
    assert found.cause and (found.cause.signature, found.cause.ranks) == ("uncaught-exception", (1,))
    assert found.cause.summary == "uncaught exception: acme.FrobnicationError: the gizmo is jammed"
    assert (found.first_rank, found.first_host, found.action) == (1, "node0", "retry")
    assert found.tail[-1] == "acme.FrobnicationError: the gizmo is jammed"
    assert found.tail_file == "logs/attempt_0/rank_1.log"
    assert "FrobnicationError" in found.reason


def test_a_failure_that_would_come_again_is_not_tried_again(run: Run) -> None:
    folders.error(run, 0, "the gizmo is jammed", after_s=5, action="stop")
    found = diagnose_run(run)
    assert (found.cause, found.action, found.first_host) == (None, "stop", "node0")


def test_consequences_alone_are_reported_as_consequences(run: Run) -> None:
    folders.rank(run, 0, PEER)
    found = diagnose_run(run)
    assert found.cause is None and found.action == "retry"
    assert found.reason.startswith("the logs show only consequences")


def test_secrets_do_not_come_out_with_the_evidence(run: Run) -> None:
    token, password = "hf_" + "a1B2" * 8, "opensesame"
    line = (
        f"401 Client Error: https://u:{password}@hub.example/x HF_TOKEN={token} Authorization: Bearer {token} {token}"
    )
    folders.rank(run, 0, line, f"huggingface_hub.errors.GatedRepoError: WANDB_API_KEY='{password}'")
    folders.error(run, 0, f"failed with --token {password} password: {password}", after_s=1)
    text = repr(diagnose_run(run))
    assert token not in text and password not in text and "GatedRepoError" in text


def test_a_run_without_any_log_is_no_error(tmp_path: Path) -> None:
    run = folders.make(tmp_path)
    (run.directory / "logs" / "launch.log").unlink()
    found = diagnose_run(run)
    assert (found.causes, found.reason, found.tail) == ((), "bang", ())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.binary(max_size=200))
def test_no_bytes_raise_anything(tmp_path_factory: pytest.TempPathFactory, logs: list[bytes], launcher: bytes) -> None:
    run = folders.make(tmp_path_factory.mktemp("any"))
    for number, data in enumerate(logs):
        (run.attempt_folder(0) / f"rank_{number}.log").write_bytes(data)
        (run.attempt_folder(0) / f"rank_{number}.error.json").write_bytes(data)
    (run.directory / "logs" / "launch.log").write_bytes(launcher)
    (run.directory / "logs" / "slurm-1.out").write_bytes(launcher + b"\n".join(logs))
    diagnose_run(run, kernel=False)


@settings(max_examples=30, deadline=None)
@given(st.randoms())
def test_the_order_of_lines_does_not_change_the_root(tmp_path_factory: pytest.TempPathFactory, random: object) -> None:
    run = folders.make(tmp_path_factory.mktemp("order"))
    lines = [
        WATCHDOG.format(rank=1),
        PEER,
        TOLD,
        "torch.OutOfMemoryError: HIP out of memory.",
        "exitcode  : -9 (pid: 1)",
    ]
    random.shuffle(lines)  # type: ignore[attr-defined]
    folders.rank(run, 1, *lines, steps=0)
    assert diagnose_run(run, kernel=False).causes[0].signature == "gpu-out-of-memory"


ADDITIONS = compile("total = 0\nfor number in range(10**6): total += number", "<additions>", "exec")
ADDITIONS_S = 0.05
"""Processor time of 10^6 additions at the top level of a module, by definition: it removes the machine's speed."""


def test_eight_ranks_are_diagnosed_while_a_job_waits(run: Run) -> None:
    steps = "".join(folders.PROGRESS.format(step=step % 1000) + "\n" for step in range(20_000))
    for number in range(8):
        (run.attempt_folder(0) / f"rank_{number}.log").write_text(steps + WATCHDOG.format(rank=number) + "\n")
    diagnose_run(run, kernel=False)
    rounds = [(_seconds(lambda: diagnose_run(run, kernel=False)), _seconds(lambda: exec(ADDITIONS, {}))) for _ in "abc"]
    diagnosis_s, additions_s = (min(times) for times in zip(*rounds, strict=True))
    assert diagnosis_s / additions_s * ADDITIONS_S < 0.3


def _seconds(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def test_what_the_launcher_quotes_and_says_of_an_attempt_is_not_held_against_the_next(tmp_path: Path) -> None:
    run = folders.make(tmp_path, attempts=2)
    said = (
        "cause: a GPU ran out of memory (gpu-out-of-memory)",
        "  logs/attempt_0/rank_3.log:120: torch.OutOfMemoryError: HIP out of memory.",
        "attempt 0 failed: OutOfMemoryError: HIP out of memory.",
        "attempt 1 begins in 30 s (1 restart is left)",
        "  logs/attempt_0/rank_3.log:120: torch.OutOfMemoryError: HIP out of memory.",
        "Fatal Python error: Segmentation fault",
    )
    folders.say(run, *said, log="slurm-17.out")
    assert folders.names(diagnose_run(run).causes) == ["segmentation-fault"]
    found = diagnose_run(run, 0)
    assert (folders.names(found.causes), found.causes[0].count) == (["gpu-out-of-memory"], 1)


def test_a_warning_that_one_rank_survived_is_not_the_cause_on_the_others(run: Run) -> None:
    log = run.attempt_folder(0) / "rank_0.log"
    for number in range(4):
        folders.rank(run, number, f"[rank{number}]: ModuleNotFoundError: No module named 'apex'", steps=0)
    log.write_text(log.read_text() + folders.PROGRESS.format(step=9) + "\n")
    folders.error(run, 2, "FrobnicationError: the gizmo is jammed", after_s=5)
    found = diagnose_run(run)
    assert (found.cause, found.first_rank, found.action) == (None, 2, "retry")
    assert found.reason == "FrobnicationError: the gizmo is jammed (rank 2 on node1)"
    assert [cause.ranks for cause in found.causes] == [(0, 1, 2, 3)]


def test_what_the_kernel_wrote_before_the_attempt_is_of_something_else(run: Run) -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 48, pid=1234, An uncorrectable double bit error"
    path = run.attempt_folder(0) / "kernel.node_0.txt"
    path.write_text(f"[  10.5] {xid}\n[ 99000.0] eth0: link up\n")
    os.utime(path, (folders.BEGAN + 300, folders.BEGAN + 300))
    folders.rank(run, 0, PEER)
    assert diagnose_run(run, kernel=False).cause is None
    path.write_text(f"[98990.5] {xid}\n[ 99000.0] eth0: link up\n")
    os.utime(path, (folders.BEGAN + 300, folders.BEGAN + 300))
    found = diagnose_run(run, kernel=False)
    assert (found.causes[0].signature, found.action) == ("kernel-xid", "exclude")


def test_many_notes_are_shortened(tmp_path: Path) -> None:
    run = folders.make(tmp_path)
    for number in range(9):
        folders.rank(run, number, *["x" * 100] * 3000)
    notes = diagnose_run(run, budget_bytes=1).notes
    assert len(notes) == 3 and notes[-1] == "7 more logs were read in part"
