from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from primus.data.filter.job import TextJob, TextReport
from primus.data.filter.result_folder import FinishedElsewhere, JobResult, ResultFolder
from primus.data.shards.inputs import Inputs, open_files
from primus.data.shards.shard_queue import BadItem
from primus.errors import PrimusError, UsageError

Contents = tuple[TextReport, dict[Path, Path]]


def result(output: Path, max_bad: int = 0, settings: str = "same") -> ResultFolder[TextReport]:
    return ResultFolder(
        job=TextJob(output=output, max_bad=max_bad),
        source=source(output),
        settings=settings,
        report_name="report.json",
        report_type=TextReport,
        difference=lambda report: None,
        pages=lambda report: {"md": "for people", "html": "<p>for people"},
    )


def source(output: Path) -> Inputs:
    file = output.parent / "text" / "a.jsonl"
    if not file.exists():
        file.parent.mkdir()
        file.write_text('{"text": "a fox"}\n')
    return open_files([str(file)])


def contents(output: Path, bad: int = 0) -> Contents:
    made = result(output)
    folder = made.work / "final"
    folder.mkdir(parents=True)
    items = [BadItem(f"a.jsonl:{number}", "no JSON") for number in range(bad)]
    facts = made.source.read_facts()
    return TextReport(primus="1", identity=made.identity, inputs=facts, documents=1, bad=items), {output: folder}


def make(output: Path, bad: int = 0) -> JobResult[TextReport]:
    return result(output, bad).get(lambda: lambda: contents(output, bad), print)


def test_a_result_is_made_once_and_its_pages_are_made_again_where_they_are_missing(tmp_path: Path) -> None:
    assert make(tmp_path / "out").made
    (tmp_path / "out.report.html").unlink()
    assert not make(tmp_path / "out").made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.report.html", "out.report.md", "text"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_another_process_has_finished_meanwhile_is_the_result(tmp_path: Path, fails: bool) -> None:
    def while_another_finishes() -> Callable[[], Contents]:
        make(tmp_path / "out")
        if fails:
            raise FinishedElsewhere
        return lambda: pytest.fail("it is there already")

    done = result(tmp_path / "out").get(while_another_finishes, print)
    assert not done.made and done.report.identity == result(tmp_path / "out").identity


def test_a_result_that_lacks_more_documents_than_may_be_missing_is_another(tmp_path: Path) -> None:
    make(tmp_path / "out", bad=2)
    assert not result(tmp_path / "out", max_bad=2).get(lambda: pytest.fail("it is there"), print).made
    with pytest.raises(UsageError, match="2 bad documents were left out"):
        result(tmp_path / "out", max_bad=1).get(lambda: pytest.fail("it is there"), print)


def test_a_copy_of_the_input_gives_the_same_result_and_a_change_of_one_letter_another(tmp_path: Path) -> None:
    make(tmp_path / "out")
    file = tmp_path / "text" / "a.jsonl"
    os.utime(file, ns=(1, 1))
    assert not make(tmp_path / "out").made
    file.write_text('{"text": "a box"}\n')
    with pytest.raises(UsageError, match=r"was made otherwise: .*a.jsonl is new, gone or changed"):
        make(tmp_path / "out")


def test_other_settings_and_a_lost_file_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with pytest.raises(UsageError, match="made otherwise: with other settings"):
        result(tmp_path / "out", settings="other").get(lambda: pytest.fail("it is refused"), print)
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    report["files"] = {"000000.jsonl": {"bytes": 1}}
    (tmp_path / "out" / "report.json").write_bytes(msgspec.json.encode(report))
    with pytest.raises(UsageError, match="a file of it is missing or damaged"):
        make(tmp_path / "out")


def test_a_result_of_no_document_is_none(tmp_path: Path) -> None:
    report, folders = contents(tmp_path / "out")
    with pytest.raises(UsageError, match=r"no text in .*a\.jsonl"):
        result(tmp_path / "out").get(lambda: lambda: (msgspec.structs.replace(report, documents=0), folders), print)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(("file", "kept"), [("000000.json", True), ("000000.claim", True), ("000000.tmp.9", False)])
def test_a_work_folder_stays_where_there_is_something_to_go_on_from(tmp_path: Path, file: str, kept: bool) -> None:
    def fail() -> Callable[[], Contents]:
        board = result(tmp_path / "out").work / "board"
        board.mkdir(parents=True)
        (board / file).touch()
        raise PrimusError("a bad document")

    with pytest.raises(PrimusError, match="a bad document"):
        result(tmp_path / "out").get(fail, print)
    assert result(tmp_path / "out").work.exists() == kept
