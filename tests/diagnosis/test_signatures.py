"""All signatures against lines that real programs wrote."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnosis.genuine import HARMLESS, LINES, Line
from primus.diagnosis import log_line
from primus.diagnosis.diagnose import diagnose_logs
from primus.diagnosis.finding import Diagnosis
from primus.diagnosis.logs import LogContent, LogFile, LogWindow
from primus.diagnosis.python_exception import is_exception
from primus.diagnosis.scan import LogScanner
from primus.diagnosis.signature import SYSTEMS, UNCAUGHT_EXCEPTION, Signature
from primus.diagnosis.signature_files import get_signature_table

SIGNATURES = get_signature_table().signatures
BY_NAME = get_signature_table().by_name
SCANNER = LogScanner()
NUM_ROWS = 48


def shown(data: str | bytes) -> list[str]:
    """Signatures that lines show, in their order."""
    raw = data.encode() if isinstance(data, str) else data
    return [
        hit.signature.name for hit in SCANNER.scan_log(LogFile(name="x"), LogContent(windows=(LogWindow(raw),))).hits
    ]


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.signature}-{line.text[:30]}")
def test_a_genuine_line_shows_its_signature_and_no_other(line: Line) -> None:
    assert shown(line.text) == [line.signature]


@pytest.mark.parametrize("text", HARMLESS, ids=lambda text: text[:40])
def test_advice_and_the_lines_of_healthy_runs_show_nothing(text: str) -> None:
    assert shown(text) == []


@pytest.mark.parametrize("line", LINES[::20], ids=lambda line: line.signature)
def test_a_patch_that_a_worker_reports_is_not_evidence_of_what_it_prevents(line: Line) -> None:
    assert shown(f"[rank3]: patch megatron_core_cpu: megatron-core 0.16.1rc0: avoids {line.text}") == []


def test_every_signature_has_a_genuine_line_and_every_known_row_is_there() -> None:
    assert {line.signature for line in LINES} == set(BY_NAME) - {UNCAUGHT_EXCEPTION}
    assert {line.row for line in LINES} - {0} == set(range(1, NUM_ROWS + 1))


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)
def test_a_signature_is_complete_and_its_patterns_can_be_found(signature: Signature) -> None:
    assert signature.patterns or signature.exit_codes or signature.name == UNCAUGHT_EXCEPTION
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", signature.name)
    assert signature.source and not signature.cause.endswith(".") and not signature.fix.endswith(".")
    assert set(signature.systems) <= set(SYSTEMS)
    for pattern in signature.patterns:
        re.compile(pattern.regex)
        assert re.sub(r"\d", "", pattern.text).strip()  # lines are compared without their digits


def test_names_and_exit_codes_are_unique() -> None:
    codes = [code for signature in SIGNATURES for code in signature.exit_codes]
    assert len(BY_NAME) == len(SIGNATURES) and len(set(codes)) == len(codes)


PREFIXES = (
    "",
    "[default0]:",
    "[rank7]: ",
    "7: ",
    " 7: [rank7]: ",
    "2026-01-10 12:00:00,123 ",
    "[2026-01-10 12:00:00.1] ",
)
COLOURS = ("\x1b[31m{}\x1b[0m", "\x1b[1;31m{}\x1b[0m\x1b[K", "{}\r", "10%|#  |\r20%|## |\r{}", "\x1b]0;title\x07{}")


@given(st.sampled_from(LINES), st.sampled_from(PREFIXES), st.sampled_from(COLOURS))
def test_prefixes_colours_and_progress_bars_hide_nothing(line: Line, prefix: str, colour: str) -> None:
    anchored = line.text.startswith((" ", ":"))
    assert shown(colour.format((prefix if not anchored else "") + line.text)) == [line.signature]


@given(st.sampled_from(LINES), st.data())
def test_a_line_that_is_cut_anywhere_shows_its_signature_or_an_ending_like_it_or_nothing(
    line: Line, data: st.DataObject
) -> None:
    raw = line.text.encode()
    cut = data.draw(st.integers(0, len(raw)))
    for part in (raw[:cut], raw[cut:]):
        found = shown(part)
        assert len(set(found)) <= 2 and all(name in BY_NAME for name in found)
    assert shown(raw[:cut] + b"\n" + line.text.encode())[-1] == line.signature


@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=8), st.randoms())
def test_what_is_shown_does_not_depend_on_the_order_of_lines(lines: list[Line], random: object) -> None:
    texts = [line.text for line in lines]
    before = shown("\n".join(texts))
    random.shuffle(texts)  # type: ignore[attr-defined]
    assert sorted(shown("\n".join(texts))) == sorted(before) == sorted(line.signature for line in lines)


@given(st.binary(max_size=400), st.sampled_from(LINES))
def test_any_bytes_can_be_scanned_and_hide_no_line_of_their_own(noise: bytes, line: Line) -> None:
    shown(noise)
    assert line.signature in shown(noise.replace(b"\x1b", b"") + b"\n\n\n\n\n" + line.text.encode() + b"\n" + noise)


def test_interleaved_halves_of_two_lines_raise_nothing() -> None:
    first, second = (line.text.encode() for line in (LINES[0], LINES[11]))
    for cut in range(min(len(first), len(second))):
        shown(first[:cut] + second[:cut] + b"\n" + first[cut:] + second[cut:])


def test_a_source_line_of_a_traceback_matches_no_signature() -> None:
    frames = ['  File "x.py", line 3, in f', "    raise RendezvousClosedError()", "ValueError: other"]
    assert shown("\n".join(frames)) == []
    assert shown("\n".join(f"[rank7]: {text}" for text in frames)) == []
    assert shown("\n".join([frames[0], "7: noise", frames[1]])) == []


def test_a_line_without_an_end_of_megabytes_is_searched() -> None:
    filler = "".join(f"{number}%|#####|\r" for number in range(200_000))
    assert shown(filler + LINES[0].text) == ["gpu-out-of-memory"]


def test_patterns_are_found_after_bytes_that_are_not_text() -> None:
    assert shown(b"\xff\xfe\x80 torch.OutOfMemoryError: HIP out of memory.") == ["gpu-out-of-memory"]


def test_a_flood_of_one_line_is_counted_within_bounds(tmp_path: object) -> None:
    (tmp_path / "a.log").write_text((LINES[11].text + "\n") * 20_000)  # type: ignore[operator]
    cause = diagnose_logs([tmp_path / "a.log"]).causes[0]  # type: ignore[operator]
    assert cause.signature == "collective-timeout" and 1000 < cause.count <= 20_000


STEP = "[rank{rank}]:[titan] 2026-01-10 12:00:00,1 - root - INFO - step:  {step}  loss:  7.62585  tps: 10,050"
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: HIP out of memory."


def of_console(tmp_path: Path, *lines: str) -> Diagnosis:
    (tmp_path / "console.log").write_text("\n".join(lines) + "\n")
    return diagnose_logs([tmp_path / "console.log"])


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in LINES
        if BY_NAME[line.signature].role == "root"
        and (BY_NAME[line.signature].shows_end or is_exception(log_line.strip_rank_prefix(line.text)))
        and not log_line.is_warning(line.text)
    ],
    ids=lambda line: line.text[:30],
)
def test_steps_that_others_print_after_a_failure_do_not_hide_it(tmp_path: Path, line: Line) -> None:
    before = [STEP.format(rank=rank, step=1) for rank in range(8)]
    after = [STEP.format(rank=rank, step=step) for step in (2, 3) for rank in range(8)]
    cause = of_console(tmp_path, *before, *[line.text] * BY_NAME[line.signature].count, *after).cause
    assert cause and cause.signature == line.signature


def test_an_error_before_many_steps_is_not_a_cause(tmp_path: Path) -> None:
    found = of_console(tmp_path, OUT_OF_MEMORY, *(STEP.format(rank=1, step=step) for step in range(2, 6)))
    assert found.cause is None and found.causes[0].survived


def test_of_two_roots_the_one_without_later_steps_is_the_cause(tmp_path: Path) -> None:
    warning = "ModuleNotFoundError: No module named 'apex'"
    found = of_console(tmp_path, warning, STEP.format(rank=1, step=1), OUT_OF_MEMORY)
    assert [cause.signature for cause in found.causes] == ["gpu-out-of-memory", "software-mismatch"]


def test_unlike_lines_are_searched_fast() -> None:
    words = "abcdefghijklmnopqrstuvwxyz"
    lines = [
        " ".join(words[n * k % 26] * (1 + n * k % 7) for k in range(1, 15)) + chr(97 + n % 26) for n in range(20_000)
    ]
    unlike = "\n".join(f"{line} {'x' * (n % 97)}{'y' * (n // 97)}" for n, line in enumerate(lines))
    began = time.process_time()
    assert shown(unlike + "\n" + LINES[0].text) == ["gpu-out-of-memory"]
    assert time.process_time() - began < 6
