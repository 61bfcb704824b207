"""What counts as a sign that a process ended: an exception, a report of a launcher or scheduler, the last line."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main
from primus.diagnosis.diagnose import diagnose_logs
from primus.diagnosis.finding import Diagnosis
from primus.diagnosis.scan import ENDING_MESSAGES

WARNING = "node3:411:502 [1] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No such device"
TRACEBACK = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 7, in <module>', "    main()"]
MISSING = [*TRACEBACK, "ModuleNotFoundError: No module named 'apex'"]
OWN = [*TRACEBACK, "ValueError: the plan has no stage 4"]
MESSAGES = [f"loading part {n} of the vocabulary" for n in range(ENDING_MESSAGES + 1)]


def diagnose(tmp_path: Path, *lines: str) -> Diagnosis:
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return diagnose_logs([tmp_path / "a.log"])


def get_lead(tmp_path: Path, *lines: str) -> str:
    lead = diagnose(tmp_path, *lines).lead
    return lead.signature if lead else ""


def test_a_report_of_a_library_is_a_cause_only_if_the_log_ends_with_it_or_shows_an_end(tmp_path: Path) -> None:
    assert get_lead(tmp_path, *MESSAGES, WARNING) == "rdma-connection"
    assert get_lead(tmp_path, WARNING, *MESSAGES) == ""
    assert get_lead(tmp_path, WARNING, *MESSAGES, "srun: error: node3: task 1: Exited with exit code 1") != ""


@pytest.mark.parametrize("error", [MISSING, OWN], ids=["signature", "uncaught"])
def test_an_exception_that_many_messages_follow_was_handled(tmp_path: Path, error: list[str]) -> None:
    found = diagnose(tmp_path, *error, *MESSAGES)
    assert (found.lead, found.reason) == (None, "")
    assert diagnose(tmp_path, *error, *MESSAGES[2:]).cause is not None


def test_frames_of_stacks_and_traces_of_nccl_are_no_messages(tmp_path: Path) -> None:
    frames = [f"frame #{n}: c10::Error::Error + 0x{n}" for n in range(80)]
    traces = [f"node3:411:502 [1] NCCL INFO Channel {n:02} : 0 1" for n in range(80)]
    assert get_lead(tmp_path, *MISSING, *frames, *traces) == "software-mismatch"


def test_the_exception_that_ends_a_log_outranks_what_no_line_proves(tmp_path: Path) -> None:
    note = "UserWarning: Failed to initialize NumPy: No module named 'numpy'"
    far = [f"epoch {n} begins" for n in range(70)]
    found = diagnose(tmp_path, "git: Permission denied: /data/.git", note, *far, *OWN)
    assert found.cause and found.cause.summary.startswith("uncaught exception: ValueError: the plan has no stage 4")


def test_a_definite_report_beside_an_exception_explains_it(tmp_path: Path) -> None:
    report = "THCudaCheck FAIL file=THCStream.cpp line=40 error=46 : all CUDA-capable devices are busy or unavailable"
    assert get_lead(tmp_path, report, *OWN) == "gpu-busy"
    assert get_lead(tmp_path, report, *[f"epoch {n} begins" for n in range(70)], *OWN) == "uncaught-exception"


def test_an_exception_that_python_ignores_and_one_of_an_orphan_are_no_signs(tmp_path: Path) -> None:
    gone = "FileNotFoundError: [Errno 2] No such file or directory: '/home/u/.triton/autotune/matmul.tmp'"
    at_exit = ["Exception ignored in atexit callback: <function put at 0x7f14>", *TRACEBACK, gone]
    assert get_lead(tmp_path, "0: Iteration 29: loss=8.2018", *at_exit) == ""
    assert get_lead(tmp_path, "0: Iteration 29: loss=8.2018", *TRACEBACK, gone) == "file-not-found"
    orphan = [TRACEBACK[0], '  File "/usr/lib/python3.10/multiprocessing/spawn.py", line 126, in _main']
    orphan += ["    self = reduction.pickle.load(from_parent)", "_pickle.UnpicklingError: pickle data was truncated"]
    assert get_lead(tmp_path, "Terminated", *orphan) != "checkpoint-damaged"


@pytest.mark.parametrize(
    "head",
    [
        "ERROR:    Exception in ASGI application",
        "Exception in callback Timer.expire(<Future>)",
        "Task exception was never retrieved",
        "--- Logging error ---",
        "2025-12-05 05:10:30 ERROR wandb-Manager:31 [manager.py:183] Uncaught exception in run_soon callback.",
    ],
)
def test_an_exception_that_a_loop_of_the_program_reports_is_no_sign_nor_is_one_that_it_led_to(
    tmp_path: Path, head: str
) -> None:
    chain = ["", "During handling of the above exception, another exception occurred:", ""]
    assert get_lead(tmp_path, head, *OWN, "INFO: waiting for requests") == ""
    assert get_lead(tmp_path, head, *MISSING, *chain, *MISSING, "INFO: waiting for requests") == ""
    assert get_lead(tmp_path, "ERROR: the program ends", *MISSING, *chain, *MISSING) == "software-mismatch"
    assert get_lead(tmp_path, head, *OWN, "INFO: waiting for requests", *MISSING) == "software-mismatch"


def test_a_warning_is_no_cause_where_an_exception_shows_one(tmp_path: Path) -> None:
    warning = "a.py:32: UserWarning: peft>=0.17.0 is required for a normal functioning of this module, but found 0.13.2"
    assert get_lead(tmp_path, warning, "srun: error: node3: task 1: Exited with exit code 1") == "interface-changed"
    error = [*TRACEBACK, "TypeError: __init__() got an unexpected keyword argument 'num_heads'"]
    both = diagnose(tmp_path, warning, *error)
    assert both.lead and [each.line for each in both.lead.evidence] == [5], "the warning is no evidence"
    assert get_lead(tmp_path, warning, *MISSING) == "software-mismatch"
    assert get_lead(tmp_path, warning, *TRACEBACK, "KeyboardInterrupt") == "interrupted-by-user"
    survived = [MISSING[-1], *(f"Iteration {n}: loss=7.99" for n in range(5))]
    assert get_lead(tmp_path, *survived, warning, "srun: error: node3: task 1: Exited with exit code 1") == (
        "interface-changed"
    ), "an exception that training survived shows no cause"


@pytest.mark.parametrize(
    ("file", "error", "cause"),
    [
        ("/home/u/train.py", "AttributeError: 'Reader' object has no attribute 'folds'", "uncaught-exception"),
        ("/home/u/train.py", "TypeError: 'torch.dtype' object is not callable", "uncaught-exception"),
        ("/home/u/train.py", "AttributeError: module 'numpy' has no attribute 'float'", "interface-changed"),
        ("/opt/site-packages/peft/a.py", "AttributeError: 'Reader' object has no attribute 'f'", "interface-changed"),
    ],
)
def test_an_object_that_the_program_itself_misuses_shows_no_other_version(
    tmp_path: Path, file: str, error: str, cause: str
) -> None:
    assert get_lead(tmp_path, TRACEBACK[0], f'  File "{file}", line 7, in main', "    run()", error) == cause


def test_an_exception_that_a_launcher_raises_itself_is_no_report(tmp_path: Path) -> None:
    frame = '  File "/opt/site-packages/torch/distributed/run.py", line 7, in determine_local_world_size'
    assert get_lead(tmp_path, TRACEBACK[0], frame, "    raise", "ValueError: too few of them") == "uncaught-exception"
    assert get_lead(tmp_path, TRACEBACK[0], frame, "    raise") == "worker-group-failed"


def test_what_an_interrupt_causes_is_a_consequence_and_what_precedes_it_is_not(tmp_path: Path) -> None:
    interrupt = [*TRACEBACK, "KeyboardInterrupt"]
    damaged = [*TRACEBACK, "RuntimeError: PytorchStreamReader failed reading zip archive: invalid header"]
    assert get_lead(tmp_path, *interrupt, *damaged) == "interrupted-by-user"
    assert get_lead(tmp_path, *damaged, *interrupt) == "checkpoint-damaged"
    later = [f"step note {n}" for n in range(200)]
    assert get_lead(tmp_path, *interrupt, *later, *damaged) == "checkpoint-damaged"


def test_of_runs_that_begin_alike_in_one_log_the_last_that_ended_counts(tmp_path: Path) -> None:
    start = "Loaded module: python3/3.7.5"
    shapes = [*TRACEBACK, "RuntimeError: The size of tensor a (13) must match the size of tensor b (12)"]
    assert get_lead(tmp_path, start, *shapes, start, *MISSING) == "software-mismatch"
    assert get_lead(tmp_path, start, *MISSING, start, *shapes) == "shapes-do-not-fit"
    assert get_lead(tmp_path, start, *MISSING, start, *shapes, start) == "shapes-do-not-fit"
    assert get_lead(tmp_path, "start", *shapes, "start", *OWN) == "shapes-do-not-fit", "too short to be recognized"


def test_a_last_run_without_an_exception_counts_once_it_goes_on(tmp_path: Path) -> None:
    start = "2025-05-0{} 22:50:22,912 - __main__ - INFO - Loading CSM model"
    goes_on = [f"2025-05-08 21:53:4{n},126 - __main__ - INFO - Transcribed a file" for n in range(9)]
    assert get_lead(tmp_path, start.format(7), *MISSING, start.format(8), *goes_on[:4]) == "software-mismatch"
    assert get_lead(tmp_path, start.format(7), *MISSING, start.format(8), *goes_on) == ""


def test_a_process_of_ray_that_writes_on_has_not_ended(tmp_path: Path) -> None:
    error = [f"(Worker pid=57) {line}" for line in MISSING]
    others = [f"(Worker pid=58) reading plan {n}" for n in range(12)]
    goes_on = [f"(Worker pid=57) reading plan {n}" for n in range(9)]
    assert get_lead(tmp_path, *error, *others) == "software-mismatch"
    assert get_lead(tmp_path, *error, *goes_on[:8]) == "software-mismatch"
    assert get_lead(tmp_path, *error, *goes_on) == ""
    assert get_lead(tmp_path, *[f"(Worker pid=57) {line}" for line in OWN], *goes_on) == ""


def test_a_line_of_a_level_below_warning_shows_no_cause(tmp_path: Path) -> None:
    debug = "[1579244744.255074] [cgpu12:56309:0] sock.c:32 UCX  {} ioctl(ib2) failed: Cannot assign requested address"
    assert get_lead(tmp_path, debug.format("DEBUG")) == ""
    assert get_lead(tmp_path, debug.format("ERROR")) == "no-route"


def test_agents_that_close_their_rendezvous_show_no_failure(tmp_path: Path) -> None:
    closing = (
        "W0403 16:15:06.176000 538977 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1331] The node "
        "'n1_538977_0' has failed to {} due to an error of type Rendezvous{}Error."
    )
    for what in ("send a keep-alive heartbeat to the rendezvous '1365'", "shutdown the rendezvous '1365'"):
        for kind in ("Timeout", "Connection"):
            assert get_lead(tmp_path, "=== Summary over 20 iterations ===", closing.format(what, kind)) == ""
    joining = closing.format("join the rendezvous '1365'", "Timeout")
    assert get_lead(tmp_path, joining) == "connect-timeout"


def test_a_warning_ends_only_a_log_without_steps(tmp_path: Path) -> None:
    retry = (
        "[W socket.cpp:663] [c10d] The client socket has timed out after 60s while trying to connect to (n1, 29500)."
    )
    assert get_lead(tmp_path, "joining the job", retry) == "connect-timeout"
    assert get_lead(tmp_path, *(f"Iteration {n}: loss=7.99" for n in range(5)), retry) == ""


@pytest.mark.parametrize(
    "line",
    [
        "[ERROR] Background srun 'worker-1' died (pid=12).",
        "2026-01-02 10:11:12 - ERROR - the reader stopped",
        "CRITICAL:__main__:the reader stopped",
        "error: no budget for account physics",
        "reader: error: no budget for account physics",
        'time="2026-01-02T10:11:12Z" level=error msg="no replica"',
        "[2026-01-05 00:14:52,747 E 236279 236279] core_worker.cc:179: no worker was registered",
        "E0105 00:14:52.747 236279 registry.cc:12] no worker was registered",
        "INSERT failed: the table is closed",
        "Error from server: the pod is unknown",
        "the parser has met a wrong token, aborting",
    ],
)
def test_an_error_that_ends_a_log_is_quoted_without_a_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (tmp_path / "a.log").write_text(f"the job begins\n{line}\n+ exit 1\n", encoding="utf-8")
    assert main(["direct", "--", "diagnose", str(tmp_path / "a.log")]) == 4
    cause = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("cause:"))
    assert cause.split()[1] == "unknown:" and cause.endswith(line[-18:])


@pytest.mark.parametrize(
    "line",
    [
        "error: 0.0312",
        "slurmstepd: error: task/cgroup: plugin not compiled with hwloc support",
        "The call to cuIpcCloseMemHandle failed. This is a warning and the program continues.",
        "samples failed: 3",
        "the prompt was 'ERROR 42'",
    ],
)
def test_a_number_a_warning_and_a_quotation_do_not_end_a_log_with_an_error(tmp_path: Path, line: str) -> None:
    found = diagnose(tmp_path, "the job begins", line)
    assert (found.lead, found.reason) == (None, "")


def test_an_error_before_the_last_line_is_not_quoted(tmp_path: Path) -> None:
    assert diagnose(tmp_path, "ERROR: the cache is cold", "the job goes on").reason == ""


def test_a_log_with_a_hole_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"nohup: ignoring input\n" + bytes(54_503) + "\n".join(MISSING).encode())
    assert diagnose_logs([tmp_path / "a.log"]).cause
