"""What is not a whole run that has ended is not exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fakes import cli
from primus.cli.main import main
from primus.run_archive import compression
from primus.runs.store import Run


@pytest.fixture
def workplace(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(original, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("PRIMUS_PLUGINS", str(cli.PLUGINS))
    return tmp_path / "copy"


def export(capsys: pytest.CaptureFixture[str], *words: str, output: str = "x.tar.gz") -> tuple[int, str]:
    code = main(["direct", "--", "runs", "export", "night", "--output", output, *words])
    assert os.path.exists(output) == (code == 0)
    assert [name for name in os.listdir() if name.startswith(".")] == [], "nothing is left behind"
    return code, capsys.readouterr().err


def find_run(workplace: Path) -> Path:
    return (workplace / "output/night/latest").resolve()


def test_a_run_that_did_not_end_well_but_on_request(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = find_run(workplace) / "metadata.json"
    outcome = {"state": "failed", "exit_code": 1, "reason": "bang"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"outcome": outcome}))
    code, said = export(capsys)
    assert code == 2 and "is not complete: failed: bang" in said and "--unfinished" in said
    assert export(capsys, "--unfinished")[0] == 0
    assert main(["direct", "--", "runs", "export", "night", "--output", "x.tar.gz", "--unfinished"]) == 2
    assert "x.tar.gz exists" in capsys.readouterr().err


def test_a_run_that_is_executing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(find_run(workplace)).hold_lock():
        code, said = export(capsys)
    assert code == 2 and "is executing" in said


@pytest.mark.parametrize("name", ["events.jsonl", "plan.json", "config/primus_config.yaml", "env/packages.txt"])
def test_a_run_that_lacks_a_file(workplace: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (find_run(workplace) / name).unlink()
    code, said = export(capsys)
    assert code == 1 and f"damaged: {name} is missing" in said


def test_damaged_metadata(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (find_run(workplace) / "metadata.json").write_text("{ half")
    code, said = export(capsys)
    assert code == 1 and "metadata.json: damaged" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_of_another_user(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (find_run(workplace) / "plan.json").chmod(0)
    code, said = export(capsys)
    assert code == 1 and "it belongs to" in said and "who can export it" in said


def test_an_unknown_ending(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = export(capsys, output="x.zip")
    assert code == 2 and "ends in .tar.zst, .tar.gz or .tar.xz" in said


def test_zst_where_nothing_writes_it(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_has_package", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = export(capsys, output="x.tar.zst")
    assert code == 3 and "zstandard" in said and ".tar.gz" in said


def test_weights_and_data_that_are_not_there(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = export(capsys, "--with-checkpoint")
    assert code == 2 and "has no complete checkpoint" in said


def test_a_dry_run_writes_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--dry-run", "direct", "--", "runs", "export", "night", "--output", "x.tar.gz"])
    assert code == 0 and "archive of " in capsys.readouterr().out
    assert not Path("x.tar.gz").exists()
