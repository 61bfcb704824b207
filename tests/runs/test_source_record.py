"""A run records the commit of its checkout, the differences from it, and the files of plug-ins."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from primus import registry
from primus.runs import replay, source_record
from primus.runs.store import Run

SECRET = "hf_abcdefghijklmnopqrst"


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True, timeout=20)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    (root / "src/primus").mkdir(parents=True)
    (root / "src/primus/a.py").write_text("A = 1\n")
    (root / "docs.md").write_text("text\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    monkeypatch.setattr(registry, "PACKAGE", root / "src/primus")
    return root


def record(tmp_path: Path, *folders: Path) -> Run:
    run = Run(tmp_path / "run")
    source_record.record_sources(run, folders)
    return run


def test_the_differences_make_the_checkout_of_the_run_from_its_commit(checkout: Path, tmp_path: Path) -> None:
    (checkout / "src/primus/a.py").write_text("A = 2\n")
    (checkout / "src/primus/new.py").write_text("B = 1\n")
    (checkout / "src/primus/large.txt").write_bytes(b"x" * (source_record.LARGEST_FILE + 1))
    run = record(tmp_path)
    found = source_record.read_source_record(run)
    assert found and found.differences_sha256 and not found.is_masked
    assert found.omitted == ["src/primus/large.txt"]
    git(tmp_path, "clone", "-q", str(checkout), "second")
    git(tmp_path / "second", "apply", str(run.directory / source_record.DIFFERENCES_FILE))
    assert (tmp_path / "second/src/primus/a.py").read_text() == "A = 2\n"
    assert (tmp_path / "second/src/primus/new.py").read_text() == "B = 1\n"


def test_a_commit_that_leaves_the_package_as_it_is_makes_no_difference(checkout: Path, tmp_path: Path) -> None:
    run = record(tmp_path)
    assert not (run.directory / source_record.DIFFERENCES_FILE).exists()
    (checkout / "docs.md").write_text("other text\n")
    git(checkout, "commit", "-qam", "docs")
    assert replay.source_differences(run, []) == []
    (checkout / "src/primus/a.py").write_text("A = 3\n")
    (found,) = replay.source_differences(run, [])
    assert (found.what, found.changes_numbers) == ("sources of primus", False)
    assert "may change the losses if it touches what computes them" in str(found)


def test_secrets_are_removed_from_differences_and_of_plug_ins_only_hashes_are_kept(
    checkout: Path, tmp_path: Path
) -> None:
    (checkout / "src/primus/a.py").write_text(f"TOKEN = '{SECRET}'\n")
    plug_ins = tmp_path / "plug-ins"
    (plug_ins / "callbacks/__pycache__").mkdir(parents=True)
    (plug_ins / "callbacks/stop.py").write_text("STOP = 'canary'\n")
    (plug_ins / "callbacks/__pycache__/stop.pyc").write_bytes(b"x")
    run = record(tmp_path, plug_ins)
    source = source_record.read_source_record(run)
    assert source and source.is_masked
    assert [file.name for file in source_record.read_plug_in_records(run)] == ["0/callbacks/stop.py"]
    written = [path.read_text() for path in run.directory.rglob("*") if path.is_file()]
    assert len(written) == 3 and not any(SECRET in text or "canary" in text for text in written)
    assert {found.what for found in replay.source_differences(run, [plug_ins])} == set()
    (plug_ins / "callbacks/stop.py").write_text("STOP = 2\n")
    (found,) = replay.source_differences(run, [plug_ins])
    assert found.what == "plug-in callbacks/stop.py" and found.changes_numbers


def test_a_package_without_a_checkout_is_known_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PACKAGE", tmp_path / "site-packages/primus")
    (tmp_path / "site-packages/primus").mkdir(parents=True)
    found = source_record.read_source_record(record(tmp_path))
    assert found and found.revision == "" and str(found) == f"package {found.package_sha256[:12]}"
