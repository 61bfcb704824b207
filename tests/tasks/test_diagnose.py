"""`diagnose`: runs, jobs and logs as people name them, and what is said of each."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diagnosis import folders
from diagnosis.genuine import LINES
from primus.cli.main import main
from primus.diagnosis import logs
from primus.launch.jobs import submissions
from primus.runs.store import Run
from primus.runtime import Submission
from primus.tasks.diagnose import EXIT_UNKNOWN

OOM = "[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB."


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    run = folders.make(tmp_path / "output")
    folders.rank(run, 3, OOM)
    folders.rank(run, 0, "RuntimeError: [x] Connection closed by peer [127.0.0.1]:46806.")
    folders.error(run, 3, "OutOfMemoryError: HIP out of memory.", after_s=5)
    return run


def diagnose(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["direct", "--", "diagnose", *words]) == code
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(diagnose(capsys, *words, "--json", code=code))


def test_a_failed_run_is_explained(failed: Run, capsys: pytest.CaptureFixture[str], golden: Any) -> None:
    golden("diagnose.txt", diagnose(capsys, "night"))


@pytest.mark.parametrize("name", ["night", "20260110", "output/night/20260110_120000-abcd", "output/night"])
def test_a_run_is_found_by_any_of_its_names(failed: Run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    answer = as_json(capsys, name)
    assert (answer["run"], answer["attempt"], answer["is_known"]) == (failed.id, 0, True)
    assert answer["diagnosis"]["causes"][0]["signature"] == "gpu-out-of-memory"


def test_the_names_of_the_answer_as_data_are_kept(failed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    answer = as_json(capsys, "night")
    assert list(answer) == ["what", "run", "attempt", "state", "is_known", "diagnosis"]
    found = answer["diagnosis"]
    assert (
        " ".join(found) == "causes first_rank first_host first_local_rank action reason tail tail_file notes num_logs"
    )
    cause = found["causes"][0]
    assert " ".join(cause) == "signature summary role action fix evidence ranks count survived is_proven source"
    assert " ".join(cause["evidence"][0]) == "file line text rank local_rank host time"


def test_a_job_is_found_by_its_id_with_logs_outside_the_run_folder(
    failed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train_17.log").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=17.0.\n")
    logs = (str(tmp_path / "train_*.log"), "logs/**/*.log")
    submission = Submission(
        runtime="slurm", id="17", name="night", directory=str(failed.directory), submitted=1.0, logs=logs
    )
    submissions.remember_submission(submission, os.environ, print)
    found = {cause["signature"]: cause for cause in as_json(capsys, "17")["diagnosis"]["causes"]}
    assert found["host-out-of-memory"]["evidence"][0]["file"].endswith("train_17.log")
    assert found["gpu-out-of-memory"]["count"] == 2


def test_a_run_whose_launcher_was_killed_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.make(tmp_path, state="running")
    folders.rank(run, 0, "begins to read the data")
    said = diagnose(capsys, str(run.directory), code=4)
    assert "died" in said and "the launcher exited without a report" in said and "begins to read the data" in said


def test_a_run_that_is_done_has_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.make(tmp_path, state="done", attempts=2)
    folders.rank(run, 0, OOM)
    assert "nothing failed; attempt 0 failed: --attempt 0" in diagnose(capsys, str(run.directory))
    assert as_json(capsys, str(run.directory), "--attempt", "0")["diagnosis"]["action"] == "stop"


def test_a_running_run_is_diagnosed_by_its_logs_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.make(tmp_path, state="running")
    folders.rank(run, 0)
    with run.hold_lock() as is_ours:
        assert is_ours
        assert "the run is active, and nothing has failed so far" in diagnose(capsys, str(run.directory))
        folders.rank(run, 0, OOM)
        assert "gpu-out-of-memory" in diagnose(capsys, str(run.directory))
    assert ": died" in diagnose(capsys, str(run.directory))


def test_a_stopped_run_is_reported_as_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.make(tmp_path, state="interrupted")
    assert "the run was stopped: bang" in diagnose(capsys, str(run.directory))


def test_an_unknown_failure_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.make(tmp_path)
    folders.rank(run, 0, "2026-01-10 12:00:00 FATAL the gizmo is jammed")
    text = diagnose(capsys, str(run.directory), code=EXIT_UNKNOWN)
    assert "unknown: " in text and "FATAL the gizmo is jammed" in text and "restarts, up to" in text


def test_an_exception_without_a_signature_is_the_cause_with_its_place_and_the_end_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folders.make(tmp_path)
    frames = ('  File "/srv/train.py", line 12, in main', "    jam(gizmo)")
    folders.rank(run, 0, "Traceback (most recent call last):", *frames, "acme.Frobnication: the gizmo is jammed")
    text = diagnose(capsys, str(run.directory))
    place = "raised at /srv/train.py:12 in main (user code)"
    assert f"uncaught exception: acme.Frobnication: the gizmo is jammed; {place} [uncaught-exception]" in text
    assert "rank_0.log:7" in text and "    jam(gizmo)" in text


def test_a_folder_of_logs_and_several_logs_need_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        folder = tmp_path / "torchelastic" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("ncclRemoteError: A call failed possibly due to a network error\n")
    (folder / "stderr.log").write_text("OSError: [Errno 28] No space left on device\n")
    (tmp_path / "torchelastic" / "core.bin").write_bytes(bytes(range(256)))
    answer = as_json(capsys, str(tmp_path / "torchelastic"))["diagnosis"]
    assert (answer["first_rank"], answer["causes"][0]["signature"]) == (3, "disk-full")
    assert answer["causes"][1]["ranks"] == [0, 1, 2] and answer["num_logs"] == 4
    files = [str(path) for path in sorted(tmp_path.rglob("stderr.log"))]
    assert as_json(capsys, *files)["diagnosis"]["first_rank"] == 3


def test_one_log_of_all_tasks_tells_their_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{rank:2}: RuntimeError: [x] Connection closed by peer [127.0.0.1]:1" for rank in range(12)]
    lines[7] = " 7: torch.OutOfMemoryError: HIP out of memory."
    (tmp_path / "slurm-5.out").write_text("\n".join(lines))
    answer = as_json(capsys, str(tmp_path / "slurm-5.out"))["diagnosis"]
    assert answer["first_rank"] == 7 and len(answer["causes"][1]["ranks"]) == 11


def test_compressed_logs_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ("step\n" * 100_000 + LINES[0].text + "\n").encode()
    packers: dict[str, Any] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    try:
        import zstandard

        packers[".zst"] = zstandard.compress
    except ImportError:
        pass
    for suffix, pack in packers.items():
        path = tmp_path / f"a.log{suffix}"
        path.write_bytes(pack(data))
        evidence = as_json(capsys, str(path))["diagnosis"]["causes"][0]["evidence"][0]
        assert evidence["line"] == 100_001, suffix
    path = tmp_path / "bad.log.gz"
    path.write_bytes(b"no gzip at all")
    assert main(["direct", "--", "diagnose", str(path)]) == 1
    assert "bad.log.gz: cannot be" in capsys.readouterr().err


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_a_compressed_log_that_is_cut_off_is_read_as_far_as_it_goes(
    suffix: str, pack: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = random.Random(1).randbytes(1_500_000).hex().encode()
    packed = pack(LINES[0].text.encode() + b"\n" + b"\n".join(noise[i : i + 100] for i in range(0, len(noise), 100)))
    path = tmp_path / f"a.log{suffix}"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    answer = as_json(capsys, str(path))
    assert answer["diagnosis"]["causes"][0]["evidence"][0]["line"] == 1
    assert any("is truncated" in note for note in answer["diagnosis"]["notes"])
    path.write_bytes(packed[:8])
    assert main(["direct", "--", "diagnose", str(path)]) == 1
    assert f"a.log{suffix}: cannot be unpacked" in capsys.readouterr().err


def test_of_a_huge_log_head_and_tail_are_read_and_lines_keep_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "huge.log"
    filler = b"a line that says nothing\n" * 10_000
    with path.open("wb") as file:
        file.write(b"OSError: [Errno 24] Too many open files\n")
        for _ in range(400):
            file.write(filler)
        file.write(OOM.encode() + b"\n")
    answer = as_json(capsys, str(path))["diagnosis"]
    lines = {cause["signature"]: cause["evidence"][0]["line"] for cause in answer["causes"]}
    assert lines == {"too-many-open-files": 1, "gpu-out-of-memory": 4_000_002}
    assert "of 95.4 MiB the first 8.0 MiB and the last 56.0 MiB were read" in answer["notes"][0]


def test_standard_input_is_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(b"x\n" + OOM.encode())

    monkeypatch.setattr("sys.stdin", Input)
    assert "standard input:2" in diagnose(capsys, "-")


def test_of_a_huge_stream_lines_keep_their_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LARGEST", 1 << 16)
    monkeypatch.setattr(logs, "CHUNK", 1000)
    content = b"a line of no interest\n" * 9999 + OOM.encode() + b"\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert "standard input:10000:" in diagnose(capsys, "-")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "standard input is empty"),
        (bytes(range(256)) * 40, "standard input: is not text"),
        (gzip.compress(OOM.encode(), mtime=0), "unpack it before: zcat"),
        (None, "standard input is closed"),
    ],
)
def test_what_comes_as_no_text_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes | None, problem: str
) -> None:
    given = None if content is None else io.TextIOWrapper(io.BytesIO(content))
    monkeypatch.setattr("sys.stdin", given)
    assert main(["direct", "--", "diagnose", "-"]) in (1, 2)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "is empty"), (bytes(range(256)) * 40, "is not text"), (None, "no such file")]
)
def test_what_is_no_log_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, problem: str
) -> None:
    path = tmp_path / "x.log"
    if content is not None:
        path.write_bytes(content)
    assert main(["direct", "--", "diagnose", str(path)]) in (1, 2)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "task 'diagnose' needs WHAT"),
        (["no-such-run"], "no run 'no-such-run'"),
        (["."], "no logs in"),
        (["night", "--attempt", "4"], "--attempt 4: the run has attempts 0 to 0"),
        (["output/night/latest", "more"], "one run, or logs"),
    ],
)
def test_wrong_words_get_a_hint(
    failed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    words = ["empty"] if words == ["."] else words
    assert main(["direct", "--", "diagnose", *words]) in (1, 2)
    assert problem in capsys.readouterr().err


def test_all_shows_every_line(failed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Connection closed by peer [127.0.0.1]:46806" not in diagnose(capsys, "night")
    assert "Connection closed by peer [127.0.0.1]:46806" in diagnose(capsys, "night", "--all")


def test_the_kernels_log_is_read_where_it_can_be(
    failed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in (("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1"),):
        (tools / name).write_text(f"#!/bin/sh\n{words}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    text = diagnose(capsys, "night", "--kernel-log")
    assert "note: the kernel log could not be read: dmesg: read kernel buffer failed" in text
    (tools / "dmesg").write_text("#!/bin/sh\necho 'NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.'\n")
    answer = as_json(capsys, "night", "--kernel-log")["diagnosis"]
    assert answer["causes"][0]["signature"] == "gpu-lost" and answer["action"] == "exclude"
