"""Commands work if this user may not enter the folder in HOME, as in a container that is started with --user."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.users import as_another_user
from primus.cli.main import main

EXPERIMENT = "modules: {pre_trainer: {framework: native, model: tiny, overrides: {mock_data: true, seq_length: 8}}}\n"


@pytest.mark.parametrize(
    "line",
    [
        "direct -- jobs list",
        "direct -- hooks list",
        "direct -- config show --config e.yaml",
        "--dry-run direct -- train pretrain --config e.yaml",
    ],
)
def test_a_home_folder_that_cannot_be_entered_holds_nothing(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0)
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # relative paths need no permission on the folders above
    assert main(line.split()) == 0  # imports everything: another user may not be able to read this interpreter
    capsys.readouterr()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "PRIMUS_LAUNCHER_FILE", "PRIMUS_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    with as_another_user():
        code = main(line.split())
    assert (code, capsys.readouterr().err) == (0, "")
