"""The last exception of a log, with its frames, whatever writes the lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.diagnosis.diagnose import diagnose_logs
from primus.diagnosis.python_exception import find_last_exception

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/srv/train.py", line 12, in main',
    "    model(batch)",
    '  File "/opt/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward',
    "    return F.linear(input)",
    "           ^^^^^^^^^^^^^^^",
    "KeyError: 'gizmo'",
]


@pytest.mark.parametrize(
    "prefix",
    ["", "[rank3]: ", "[default3]:[rank3]: ", " 3: ", "(TrainWorker pid=7, ip=10.0.0.1) ", "2026-01-10T12:00:00.1Z "],
)
def test_an_exception_has_its_frames_behind_any_prefix(prefix: str) -> None:
    noise = "[rank9]: ValueError" if "rank" in prefix else ""
    lines = [each for line in TRACEBACK for each in (f"{prefix}{line}", noise)][:-1]
    found = find_last_exception(lines)
    assert found and (found.type, found.message, found.origin) == ("KeyError", "'gizmo'", "library")
    place = "raised at torch/nn/modules/linear.py:125 in forward (library), called from /srv/train.py:12 in main"
    assert found.format_place() == place


@pytest.mark.parametrize(
    ("lines", "headline"),
    [
        (["AssertionError"], "AssertionError"),
        (
            [
                '  File "/srv/train.py", line 7, in check',
                "    assert loss > 0",
                "           ^^^^^^^^",
                "AssertionError",
            ],
            "AssertionError: assert loss > 0",
        ),
        (
            ['  File "/srv/train.py", line 7, in check', "    assert loss > 0, loss", "AssertionError: -1"],
            "AssertionError: -1",
        ),
        (["KeyError: ", "'state.model'"], "KeyError: 'state.model'"),
        (["E   KeyError: 'step'"], "KeyError: 'step'"),
        (["ValueError: first", "noise", "TypeError: last", "done"], "TypeError: last"),
        ([*TRACEBACK[:3], "queue.Empty"], "queue.Empty"),
        ([*TRACEBACK[:3], "acme.Frobnication: jammed"], "acme.Frobnication: jammed"),
        (
            ["KeyError: Caught KeyError in DataLoader worker process 0."],
            "KeyError: Caught KeyError in DataLoader worker process 0.",
        ),
        (["acme.Frobnication: jammed"], None),
        (["step 12  loss 9.81", "Errors: 0 in all", "no Error here"], None),
    ],
)
def test_a_line_that_names_an_exception_is_found(lines: list[str], headline: str | None) -> None:
    found = find_last_exception(lines)
    assert (found.format_headline() if found else None) == headline


def test_the_frames_of_an_earlier_exception_belong_to_that_one() -> None:
    found = find_last_exception([*TRACEBACK, "", "During handling of the above exception:", "", "ValueError: odd"])
    assert found and found.frames == ()


LAUNCHER_REPORT = [
    "Traceback (most recent call last):",
    '  File "/opt/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 263, in launch_agent',
    "    raise ChildFailedError(",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
]
IGNORED = [
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    "Traceback (most recent call last):",
    '  File "/srv/pool.py", line 26, in __del__',
    "    self._stop()",
    "AttributeError: 'Pool' object has no attribute '_stop'",
]


@pytest.mark.parametrize("end", [LAUNCHER_REPORT, IGNORED, [*IGNORED, *LAUNCHER_REPORT]])
def test_reports_of_the_launcher_and_ignored_exceptions_hide_no_exception(end: list[str]) -> None:
    found = find_last_exception([*TRACEBACK, *end])
    assert found and found.format_headline() == "KeyError: 'gizmo'"


def test_a_report_of_the_launcher_without_another_exception_is_found() -> None:
    found = find_last_exception([*IGNORED, *LAUNCHER_REPORT])
    assert found and found.type.endswith("ChildFailedError")
    assert find_last_exception(IGNORED) is None


def test_the_asserted_expression_comes_before_the_words_of_the_assertion(tmp_path: Path) -> None:
    lines = [TRACEBACK[0], '  File "/srv/train.py", line 1, in main', "    assert torch.cuda.is_available()"]
    (tmp_path / "a.log").write_text("\n".join([*lines, "AssertionError: no checkpoint without it"]) + "\n")
    cause = diagnose_logs([tmp_path / "a.log"]).cause
    assert cause and cause.signature == "no-gpu-visible"


def test_code_and_words_classify_what_no_pattern_matches(tmp_path: Path) -> None:
    log = tmp_path / "a.log"

    def diagnose(*lines: str) -> tuple[str, str]:
        log.write_text("\n".join(lines) + "\n")
        cause = diagnose_logs([log]).cause
        assert cause
        return cause.signature, cause.summary

    load = ['  File "/srv/train.py", line 1, in load_checkpoint', "    state['gizmo']"]
    signature, summary = diagnose(TRACEBACK[0], *load, "KeyError: 'gizmo'")
    assert signature == "checkpoint-not-loaded" and "probably" in summary and "KeyError: 'gizmo'" in summary
    assert diagnose("RuntimeError: the gizmo cannot save the checkpoint: access denied")[0] == "permission-denied"
    assert diagnose(*TRACEBACK)[0] == "uncaught-exception"
    log.write_text("gizmo: error: the worker of node 7 died\n")
    found = diagnose_logs([log])
    assert found.cause is None and found.reason == "gizmo: error: the worker of node 7 died"


def test_a_line_with_a_date_of_the_go_logger_is_no_comment(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("2026/01/10 12:00:00 open out.txt: permission denied\n")
    cause = diagnose_logs([log]).cause
    assert cause and cause.signature == "permission-denied"
    log.write_text("// open out.txt: permission denied\n")
    assert diagnose_logs([log]).cause is None


def test_words_of_an_error_before_later_steps_classify_nothing(tmp_path: Path) -> None:
    steps = [f"step: {number}  loss: 1.5  tps: 10,050" for number in range(1, 6)]
    (tmp_path / "a.log").write_text("\n".join(["gizmo: error: the worker died", *steps]) + "\n")
    assert diagnose_logs([tmp_path / "a.log"]).causes == ()


def test_of_two_equal_roots_the_first_in_the_log_is_the_cause(tmp_path: Path) -> None:
    first, second = "MemoryError", "RuntimeError: [enforce fail at x.cc:300] . unexpected pos 64 vs 60"
    (tmp_path / "a.log").write_text(f"{first}\n{second}\n")
    found = diagnose_logs([tmp_path / "a.log"])
    assert [cause.signature for cause in found.causes] == ["host-out-of-memory", "disk-full"]
    (tmp_path / "a.log").write_text(f"{second}\n{first}\n")
    assert diagnose_logs([tmp_path / "a.log"]).causes[0].signature == "disk-full"


HANDLED = "Exception in callback f()"
FIRST = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    f()", "ValueError: odd"]
CHAINED = ["", "During handling of the above exception, another exception occurred:", ""]
SECOND = ["Traceback (most recent call last):", '  File "a.py", line 9, in g', "    g()", "KeyError: 'b'"]


@pytest.mark.parametrize(
    ("lines", "headline"),
    [
        ([HANDLED, *FIRST], None),
        ([HANDLED, *FIRST, *CHAINED, *SECOND], None),  # one chain, which ends below the line that tells
        ([HANDLED, *FIRST, *SECOND], "KeyError: 'b'"),  # two
        ([HANDLED, "loading", *FIRST, *CHAINED, *SECOND], "KeyError: 'b'"),
        ([HANDLED, *FIRST[1:]], None),  # the log lost the head
        ([*FIRST, HANDLED, *SECOND], "ValueError: odd"),
        ([f"[rank1]: {HANDLED}", *(f"[rank2]: {line}" for line in FIRST)], "ValueError: odd"),
        (
            [f"[rank1]: {line}" for line in (HANDLED, *FIRST[:1])]
            + ["[rank2]: x"]
            + [f"[rank1]: {line}" for line in FIRST[1:]],
            None,
        ),
    ],
)
def test_an_exception_is_handled_if_the_line_before_its_chain_of_tracebacks_tells(
    lines: list[str], headline: str | None
) -> None:
    found = find_last_exception(lines)
    assert (found.format_headline() if found else None) == headline
