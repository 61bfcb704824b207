"""Time, rank and host of a line, and how it is shown."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.diagnosis import log_line
from primus.redaction import MASK
from primus.redaction import redact_log_text as redacted

NEAR = time.mktime((2026, 3, 1, 0, 0, 0, -1, -1, -1))


def local(*parts: int) -> float:
    return time.mktime((*parts, -1, -1, -1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" [2025-05-27 15:23:07] iteration 1/ 24000 |", local(2025, 5, 27, 15, 23, 7)),
        ("[20251121 12:10:29][rank-31/32][INFO ]", local(2025, 11, 21, 12, 10, 29)),
        ("[rank0]:[titan] 2025-06-16 22:31:04,970 - root - INFO", local(2025, 6, 16, 22, 31, 4) + 0.97),
        ("2025-11-28T07:42:11.527Z libfabric", 1764315731.527),
        ("2024-08-18T01:19:27.141093+02:00 minipc kernel: amdgpu", 1723936767.141093),
        ("  time      : 2026-01-10_12:05:03", local(2026, 1, 10, 12, 5, 3)),
        ("[rank0]:[E1206 18:44:12.715298746 ProcessGroupNCCL.cpp:607]", local(2025, 12, 6, 18, 44, 12) + 0.715298746),
        ("[rank0]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607]", local(2025, 3, 21, 2, 7, 8) + 0.408),
        ("W0213 12:07:20.086000 870572 torch/distributed/x.py:1]", local(2026, 2, 13, 12, 7, 20) + 0.086),
        ("Jan  5 23:33:35 node7 kernel: NVRM", local(2026, 1, 5, 23, 33, 35)),
        ("[2025-02-31 10:00:00] no such day", None),
        ("step 12  loss 9.81", None),
        ("1:2026", None),
    ],
)
def test_the_time_of_a_line_in_each_form(text: str, expected: float | None) -> None:
    found = log_line.find_time(text, NEAR)
    assert found == (pytest.approx(expected, abs=1e-5) if expected is not None else None)


@pytest.mark.parametrize(
    ("text", "rank", "host"),
    [
        ("[rank7]: Traceback", 7, None),
        ("[default3]:Traceback", None, None),
        ("[20251121 12:10:29][rank-31/32][INFO ] x", 31, None),
        ("[E ProcessGroupNCCL.cpp:737] [Rank 5] Watchdog caught", 5, None),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 1] Exception", 1, None),
        ("29: [rank29]:   File", 29, None),
        ("srun: error: fn2: task 1: Exited with exit code 143", None, "fn2"),
        ("[2025-01-01 00:00:00] [NODE-3(gpu-17)] [INFO] x", None, "gpu-17"),
        ("kp-ddp-worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB", None, "kp-ddp-worker-0"),
        ("slurmstepd: error: *** STEP 440575.0 ON nid001277 CANCELLED AT 2023", None, "nid001277"),
        ("srun: error: Node failure on n3", None, "n3"),
        ("*** STEP 4711.0 ON node-1 CANCELLED AT 2026-05-27T16:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD", None, None),
        ("ann@n2: Permission denied (publickey,password).", None, "n2"),
        ("rank 3 was killed by SIGKILL", 3, None),
        ("GPU 7 has a total capacity", None, None),
    ],
)
def test_rank_and_host_of_a_line(text: str, rank: int | None, host: str | None) -> None:
    assert (log_line.find_rank(text), log_line.find_host(text)) == (rank, host)


def test_tasks_are_ranks_where_nothing_else_is_known() -> None:
    assert log_line.find_rank(" 7: boom", tasks_are_ranks=True) == 7
    assert log_line.find_rank("srun: error: fn2: task 1: Exited", tasks_are_ranks=True) == 1


SECRET = "s3cr3tValue/+x"


@pytest.mark.parametrize(
    "text",
    [
        f"HF_TOKEN={SECRET}",
        f"a.b.Error: WANDB_API_KEY='{SECRET}' failed",
        f"{{'password': '{SECRET}'}}",
        f'"api_key": "{SECRET}"',
        f"--hf-token {SECRET}",
        f"https://user:{SECRET.replace('/', '%2F')}@host/path",
        f"Authorization: Bearer {SECRET}",
        f"x=1 AWS_SECRET_ACCESS_KEY = {SECRET}",
        f"https://bucket.s3.amazonaws.com/o?X-Amz-Signature={SECRET}&x=1",
        f"AccountKey={SECRET};EndpointSuffix=x",
        f"curl -u user:{SECRET} https://x",
        f"Set-Cookie: session={SECRET}; Path=/",
    ],
)
def test_a_secret_is_masked_by_the_name_before_it(text: str) -> None:
    shown = redacted(text)
    assert SECRET[:11] not in shown and MASK in shown


@pytest.mark.parametrize(
    "token", ["hf_" + "aB3" * 9, "ghp_" + "x1" * 18, "glpat-" + "y" * 20, "sk-" + "z" * 40, "ASIA" + "Q7" * 8]
)
def test_a_token_is_masked_by_its_form(token: str) -> None:
    assert token not in redacted(f"tried {token}.")


@pytest.mark.parametrize(
    "text",
    [
        "tokens per GPU (tokens/s/GPU): 12130.4",
        "num_tokens=4096",
        "use_auth: None",
        "token: 5",
        "path=/a/b key",
        "OSError: x",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redacted(text) == text


@given(st.text(max_size=2000), st.integers(0, 2000))
def test_an_excerpt_is_short_and_redacting_twice_changes_nothing(text: str, around: int) -> None:
    shown = log_line.shorten_line(text, around)
    assert len(shown) <= log_line.LONGEST + 400
    assert redacted(redacted(text)) == redacted(text)


@given(st.integers(0, 1200))
def test_a_secret_is_masked_wherever_a_line_is_cut(before: int) -> None:
    text = "x " * before + f"HF_TOKEN={SECRET * 3} " + "boom " + "y " * 400
    assert SECRET not in log_line.shorten_line(text, text.index("boom"))


@given(st.binary(max_size=300))
def test_any_bytes_become_a_line(raw: bytes) -> None:
    text = log_line.decode_plain_text(raw)
    assert "\x1b" not in text and "\n" not in text.replace("\n", "") and isinstance(log_line.shorten_line(text), str)
    log_line.find_time(text, NEAR), log_line.find_rank(text, True), log_line.find_host(text)


def test_times_without_a_zone_are_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert log_line.find_time("2026-01-10 09:00:00", NEAR) == 1768003200.0
    finally:
        monkeypatch.undo()
        time.tzset()
