"""`upgrade-notes` prints the changes of the versions in between, from the changelog that is in the package."""

from __future__ import annotations

import json

import pytest

from primus import __version__, package_files
from primus.cli.main import main
from primus.tasks.upgrade_notes import UPGRADE, parse_changelog

TEXT = f"""# Changelog

Two lines that
explain it.

## Unreleased (0.3.0)

### {UPGRADE}

- A key is gone:
  use the other one.
- Another change.

### Data

- Data are data.

## 0.2.0 (2026-01-02)

### Data

- Older data.

## 0.1.0 (2026-01-01)

### {UPGRADE}

- The first.
"""


def read(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["upgrade-notes", *line.split()])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(autouse=True)
def changelog(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path_factory.mktemp("package") / "CHANGELOG.md"
    file.write_text(TEXT)
    monkeypatch.setattr(package_files, "CHANGELOG", file)


def test_the_changes_between_two_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = read("0.1.0 0.3.0", capsys)
    expected = (
        f"# 0.3.0\n\n## {UPGRADE}\n\n- A key is gone:\n  use the other one.\n- Another change.\n\n"
        "# 0.2.0\n\nnothing to change\n"
    )
    assert (code, text) == (0, expected)
    assert "- Data are data." in read("0.2.0 0.3.0 --all", capsys)[1]
    assert "The first." not in read("0.1.0 0.3.0 --all", capsys)[1]
    assert read("0.2.0 0.2.0", capsys) == (0, "no changes from 0.2.0 to 0.2.0\n")


def test_versions_are_read_from_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert [each["version"] for each in json.loads(read("0.0.1 0.2.0 --json", capsys)[1])] == ["0.2.0", "0.1.0"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0.1.0 0.4.0", "no version 0.4.0 in the changelog"),
        ("0.3.0 0.1.0", "0.3.0 is newer than 0.1.0"),
        ("main 0.3.0", "main: not a version"),
    ],
)
def test_what_is_no_version_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = read(line, capsys)
    assert code == 2 and message in text


def test_the_version_of_the_package_is_the_newest_of_the_changelog() -> None:
    text = (package_files.PACKAGE / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = parse_changelog(text)[0]
    assert newest.version == __version__
    assert sum(map(len, newest.areas.values())) == text.count("\n- "), "every line is a change"
