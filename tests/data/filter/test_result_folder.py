from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from primus.data.filter.job import FilterJob, FinishedElsewhere
from primus.data.filter.report import FilterReport
from primus.data.filter.result_folder import JobResult, ResultFolder
from primus.data.shards.inputs import Inputs, hash_contents, open_files
from primus.data.shards.shard_queue import BadItem
from primus.data.shards.workers import Show
from primus.errors import PrimusError, UsageError

Contents = tuple[FilterReport, dict[Path, Path]]
Run = Callable[[], Callable[[], Contents]]


@dataclass(frozen=True, kw_only=True)
class SmallJob(FilterJob[FilterReport]):
    """A job whose stages are a function of the test."""

    settings: str = "same"
    run: Run = lambda: pytest.fail("the stages must not run")

    def collect_settings(self) -> str:
        return self.settings

    def run_stages(self, source: Inputs, work: Path, identity: str, show: Show) -> Callable[[], Contents]:
        return self.run()


def result(
    output: Path, max_bad: int = 0, settings: str = "same", run: Run | None = None
) -> ResultFolder[FilterReport]:
    job = SmallJob(output=output, max_bad=max_bad, settings=settings, **({"run": run} if run else {}))
    return ResultFolder(job, source(output))


def find_or_make(folder: ResultFolder[FilterReport]) -> JobResult[FilterReport]:
    return folder.find_or_make(print, lambda progress: None)


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
    facts = made.source.collect_facts(list(map(hash_contents, made.source.shards)))
    return FilterReport(primus="1", identity=made.identity, inputs=facts, documents=1, kept=1, bad=items), {
        output: folder
    }


def make(output: Path, bad: int = 0) -> JobResult[FilterReport]:
    return find_or_make(result(output, bad, run=lambda: lambda: contents(output, bad)))


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

    done = find_or_make(result(tmp_path / "out", run=while_another_finishes))
    assert not done.made and done.report.identity == result(tmp_path / "out").identity


def test_a_result_that_lacks_more_documents_than_may_be_missing_is_another(tmp_path: Path) -> None:
    make(tmp_path / "out", bad=2)
    assert not find_or_make(result(tmp_path / "out", max_bad=2)).made
    with pytest.raises(UsageError, match="2 bad documents were skipped"):
        find_or_make(result(tmp_path / "out", max_bad=1))


def test_a_copy_of_the_input_gives_the_same_result_and_a_change_of_one_letter_another(tmp_path: Path) -> None:
    make(tmp_path / "out")
    file = tmp_path / "text" / "a.jsonl"
    os.utime(file, ns=(1, 1))
    assert not make(tmp_path / "out").made
    file.write_text('{"text": "a box"}\n')
    with pytest.raises(UsageError, match=r"exists and differs: .*a.jsonl is new, gone or changed"):
        make(tmp_path / "out")


def test_other_settings_and_a_lost_file_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with pytest.raises(UsageError, match="differs: it was made with other settings"):
        find_or_make(result(tmp_path / "out", settings="other"))
    report = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes())
    report["files"] = {"000000.jsonl": {"bytes": 1}}
    (tmp_path / "out" / "report.json").write_bytes(msgspec.json.encode(report))
    with pytest.raises(UsageError, match="one of its files is missing or damaged"):
        make(tmp_path / "out")


def test_a_result_of_no_document_is_none(tmp_path: Path) -> None:
    report, folders = contents(tmp_path / "out")
    with pytest.raises(UsageError, match=r"no text in .*a\.jsonl"):
        find_or_make(
            result(tmp_path / "out", run=lambda: lambda: (msgspec.structs.replace(report, documents=0), folders))
        )
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(("file", "kept"), [("000000.json", True), ("000000.claim", True), ("000000.tmp.9", False)])
def test_a_work_folder_stays_where_there_is_something_to_go_on_from(tmp_path: Path, file: str, kept: bool) -> None:
    def fail() -> Callable[[], Contents]:
        queue = result(tmp_path / "out").work / "board"
        queue.mkdir(parents=True)
        (queue / file).touch()
        raise PrimusError("a bad document")

    with pytest.raises(PrimusError, match="a bad document"):
        find_or_make(result(tmp_path / "out", run=fail))
    assert result(tmp_path / "out").work.exists() == kept
