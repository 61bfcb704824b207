from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from primus.data.pipeline.inputs import open_files
from primus.data.pipeline.result_folder import FinishedElsewhere, Made, ResultFolder
from primus.data.pipeline.text_job import TextJob, TextReport
from primus.data.pipeline.work import BadItem
from primus.errors import UsageError

Contents = tuple[TextReport, dict[Path, Path]]


def result(output: Path, max_bad: int = 0) -> ResultFolder[TextReport]:
    return ResultFolder(
        job=TextJob(inputs=("a.jsonl",), output=output, max_bad=max_bad),
        identity="same",
        report_name="report.json",
        report_type=TextReport,
        difference=lambda report: None,
        pages=lambda report: {"md": "for people", "html": "<p>for people"},
    )


def contents(output: Path, bad: int = 0) -> Contents:
    folder = result(output).work / "final"
    folder.mkdir(parents=True)
    items = [BadItem(f"a.jsonl:{number}", "no JSON") for number in range(bad)]
    return TextReport(primus="1", identity="same", inputs=["a.jsonl"], bad=items), {output: folder}


def make(output: Path, bad: int = 0) -> Made[TextReport]:
    return result(output, bad).get(lambda: lambda: contents(output, bad), print)


def test_a_result_is_made_once_and_its_pages_are_made_again_where_they_are_missing(tmp_path: Path) -> None:
    assert make(tmp_path / "out").made
    (tmp_path / "out.report.html").unlink()
    assert not make(tmp_path / "out").made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.report.html", "out.report.md"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_another_process_has_finished_meanwhile_is_the_result(tmp_path: Path, fails: bool) -> None:
    def while_another_finishes() -> Callable[[], Contents]:
        make(tmp_path / "out")
        if fails:
            raise FinishedElsewhere
        return lambda: pytest.fail("it is there already")

    done = result(tmp_path / "out").get(while_another_finishes, print)
    assert not done.made and done.report.identity == "same"


def test_a_result_that_lacks_more_documents_than_may_be_missing_is_another(tmp_path: Path) -> None:
    make(tmp_path / "out", bad=2)
    assert not result(tmp_path / "out", max_bad=2).get(lambda: pytest.fail("it is there"), print).made
    with pytest.raises(UsageError, match="2 bad documents were left out"):
        result(tmp_path / "out", max_bad=1).get(lambda: pytest.fail("it is there"), print)


def test_an_output_and_an_input_are_never_in_each_other_whatever_they_are_called(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("{}")
    (tmp_path / "link").symlink_to("text")
    for name in ("text", "link"):
        found = open_files([str(tmp_path / name)])
        found.check_outside(tmp_path / "texts")
        with pytest.raises(UsageError, match="it is in the input"):
            found.check_outside(tmp_path / "text" / "new" / "out")
    with pytest.raises(UsageError, match="this input is in the output"):
        open_files([str(tmp_path / "link" / "a.jsonl")]).check_outside(tmp_path / "text")
