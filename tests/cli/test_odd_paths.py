"""Paths and files that no user means, in the commands that read them: one message, no internal error."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("config check --config ring.yaml", 2, "ring.yaml: cannot be read: Too many levels of symbolic links"),
        ("config import /dev/zero", 2, "/dev/zero: a device, not a file"),
        ("compare report /dev/zero", 2, "/dev/zero: no such file or folder"),
        ("runs list --name /no/such", 0, ""),
        ("data inspect ~nobody-here/x", 2, "no such data: ~nobody-here/x.idx"),
        ("checkpoint verify ~nobody-here/x", 2, "no folder ~nobody-here/x"),
        (
            "data encode --input a.txt --tokenizer ~nobody-here/x --output o",
            2,
            "~nobody-here/x: neither a local path, nor a model on ",
        ),
        ("analyze trace deep.json", 2, "deep.json: the trace has neither kernels nor operators: it is cut off"),
    ],
)
def test_an_odd_path_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: int,
    message: str,
) -> None:
    (tmp_path / "ring.yaml").symlink_to("ring.yaml")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "a.txt").write_text("text\n")
    monkeypatch.chdir(tmp_path)
    assert main(["direct", "--", *words.split()]) == code
    error = capsys.readouterr().err
    assert message in error and "internal error" not in error


def test_a_folder_whose_name_is_too_long_is_judged_by_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["direct", "--", "node-smoke", "--workspace", "x" * 3000])
    assert "internal error" not in "".join(capsys.readouterr())
