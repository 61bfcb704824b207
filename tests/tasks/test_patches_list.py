"""`patches list` shows the patches of upstream packages, the files of --patch, and those of a run."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from fakes import cli
from primus.cli.main import main

PATCH = """\
from datetime import date
from primus.patch import Patch
PATCH = Patch(
    target="msgspec", versions="{versions}", reason="slow", link="https://example.org", expires=date(2100, 1, 1)
)
def apply(): ...
"""


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMUS_PLUGINS", f"{tmp_path}/plug-ins:{cli.PLUGINS}")
    folder = tmp_path / "plug-ins/patches"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(PATCH.format(versions=">=0.1"))
    (folder / "past.py").write_text(PATCH.format(versions="<0.1"))
    (tmp_path / "fix.sh").write_text("touch ran\nexit 2\n")


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words.split()) == 0
    return capsys.readouterr().out


def test_both_kinds_are_shown_and_neither_is_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = shown("direct --patch fix.sh -- patches list", capsys)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["mine"][1:5] == ["msgspec", version("msgspec"), ">=0.1", "applies"]
    assert rows["past"][4:7] == ["out", "of", "range"]
    assert rows["mine"][-2:] == ["slow", "(https://example.org)"]
    assert rows["fix.sh"][1] == hashlib.sha256(b"touch ran\nexit 2\n").hexdigest()[:12]
    assert not (tmp_path / "ran").exists()


def test_what_the_user_switched_off_is_shown_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMUS_PATCHES", "none")
    assert "switched off" in shown("direct -- patches list", capsys)
    values = json.loads(shown("--json direct -- patches list", capsys))
    mine = next(each for each in values["patches"] if each["choice"]["name"] == "mine")
    assert (mine["wanted"], mine["choice"]["state"]) == (False, "applies")


def test_the_patches_of_a_run_are_those_that_it_recorded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = cli.run(
        "direct", "--patch", "fix.sh", "--", "tiny", cwd=tmp_path, PRIMUS_PLUGINS=f"{tmp_path}/plug-ins:{cli.PLUGINS}"
    )
    assert done.returncode == 0, done.stderr
    out = shown("direct -- patches list --run out/tiny/latest", capsys)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["mine"] == ["mine", "msgspec", version("msgspec"), "applies"]
    assert (rows["fix.sh"][1], rows["fix.sh"][3:]) == ("0", ["skipped", "2"])
    values = json.loads(shown("--json direct -- patches list --run out/tiny/latest", capsys))
    assert [(each["node"], each["file"], each["state"]) for each in values["files"]] == [(0, "fix.sh", "skipped")]
    without = cli.run("direct", "--", "tiny", cwd=tmp_path, PRIMUS_PATCHES="none")
    assert without.returncode == 0
    assert shown("direct -- patches list --run out/tiny/latest", capsys) == (
        "no patches of upstream packages\n\nno patch files\n"
    )
