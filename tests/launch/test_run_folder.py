"""The revision that a run records where git is missing, as in most images."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from primus.launch.run_folder import read_head


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_revision_of_a_checkout_is_read_from_its_files(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "below").mkdir(parents=True)
    assert read_head(tmp_path) is None
    git(checkout, "init", "-q", "-b", "work/one")
    assert read_head(checkout) is None, "no commit yet"
    git(checkout, "commit", "-q", "--allow-empty", "-m", "first")
    revision = git(checkout, "rev-parse", "HEAD")
    assert read_head(checkout / "below") == revision
    git(checkout, "pack-refs", "--all")
    assert read_head(checkout) == revision
    git(checkout, "checkout", "-q", "--detach")
    assert read_head(checkout) == revision


@pytest.mark.parametrize("text", ["", "ref: refs/heads/gone\n"])
def test_a_damaged_checkout_has_no_revision(text: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").write_text(text)
    assert read_head(tmp_path) is None
